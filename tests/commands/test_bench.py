from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from zoo.bench import measuring
from zoo.cli import app
from zoo.commands import bench
from zoo.commands.bench import json_file


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.bench.measuring.cache_bytes", lambda device: 20_000)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments, "--device", "cpu"])


TINY = ("linear", "--case", "mnist/fc3", "--peer", "eager", "--repeats", "2")


def test_json_alone_on_stdout() -> None:
    for json_option in (["--json", "--seed", "3"], ["--seed", "3", "--json", "-"]):
        result = run(*TINY, *json_option, "--dtype", "f32,f64", "--pass", "forward")
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert (data["ok"], data["seed"]) == (True, 3)
        assert [(r["case"], r["dtype"], r["pass"], r["peer"]) for r in data["rows"]] == [
            ("mnist/fc3", dtype, "forward", "eager") for dtype in ("float32", "float64")
        ]


def test_files_hold_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = [*TINY, "--dtype", "f32", "--precision", "highest,high", "--json", str(file)]
    picture = tmp_path / "speed.png"
    if importlib.util.find_spec("matplotlib") is not None:
        arguments += ["--plot", str(picture)]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "4 rows, every output right"
    data = json.loads(file.read_text(encoding="utf-8"))
    assert (data["complete"], len(data["rows"])) == (True, 4)
    assert data["command"] == (
        "zoo bench linear --case mnist/fc3 --dtype f32 --precision highest,high --pass forward,forward+backward "
        "--peer eager --device cpu --repeats 2 --seed 0"
    )
    assert picture.exists() == ("--plot" in arguments)
    assert {path.name for path in tmp_path.iterdir()} <= {"results.json", "speed.png"}


def test_a_run_that_is_cut_off_leaves_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = measuring.race, []

    def race(*args: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **given)

    monkeypatch.setattr(measuring, "race", race)
    file = tmp_path / "results.json"
    assert run(*TINY, "--dtype", "f32", "--json", str(file)).exit_code == 130
    data = json.loads(file.read_text(encoding="utf-8"))
    assert (data["ok"], data["complete"], len(data["rows"])) == (False, False, 1)


def test_a_wrong_output_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measuring.eager(None)
    monkeypatch.setattr(measuring, "custom", lambda activation: lambda *args: right(*args) * 1.01)
    result = run(*TINY, "--dtype", "f32", "--json", "-")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["ok"] is False
    assert [row["ok"] for row in data["rows"]] == [False, False]


def test_model_takes_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    result = run(
        *("model", "mlp", "--mode", "fp32", "--phase", "infer", "--peer", "eager"), "--batch", "3", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert "1 rows, all outputs and losses agree" in result.stdout
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["command"] == (
        "zoo bench model mlp --mode fp32 --phase infer --peer eager --batch 3 --image 224 --device cpu --seed 0"
    )
    assert [(r["model"], r["batch"]) for r in data["rows"]] == [("mlp", 3)]


def test_model_has_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def fake(models: Any, **given: Any) -> Any:
        told.update(given, models=models)
        raise ValueError("enough")

    monkeypatch.setattr(bench, "bench_model", fake)
    assert run("model").exit_code == 1
    assert (told["models"], told["batch"], told["image"]) == (bench.MODELS, 64, 224)
    assert (told["modes"], told["phases"], told["peers"]) == (
        ["fp32", "bf16"],
        ["train", "infer"],
        ["eager", "compiled"],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear", "--case", "nothing"], "case 'nothing'"),
        (["linear", "--dtype", "f8"], "dtype 'f8'"),
        (["linear", "--json", "results.txt"], "json 'results.txt': expected a file named *.json"),
        (["linear", "--plot", "speed.bmp"], "plot 'speed.bmp'"),
        (["model", "--json", "resnet50"], "json 'resnet50'"),
        (["model", "resnet19"], "unknown model 'resnet19'"),
    ],
)
def test_what_cannot_be_is_1_and_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"zoo: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_usage() -> None:
    listed = CliRunner().invoke(app, ["bench", "--help"]).stdout
    assert " linear " in listed and " model " in listed
    assert run("linear", "--repeats", "1").exit_code == 2
    assert run("model", "--batch", "0").exit_code == 2


def test_json_file(tmp_path: Path) -> None:
    assert json_file(str(tmp_path / "a.json")) == tmp_path / "a.json"
    with pytest.raises(ValueError, match="there is no folder"):
        json_file(str(tmp_path / "none" / "a.json"))
