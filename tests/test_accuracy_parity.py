"""examples/accuracy_parity.py in small, and that its statistics find what is planted."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

EXAMPLE = Path(__file__).parent.parent / "examples" / "accuracy_parity.py"
QUICK = ("--data", "digits", "--model", "mlp", "--seeds", "2", "--epochs", "2", "--autocast", "none", "--device", "cpu")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert script == EXAMPLE.name
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def here(example: ModuleType, *arguments: str) -> Result:
    """The same in this process."""
    command = typer.Typer()
    command.command()(example.main)
    return CliRunner().invoke(command, list(arguments))


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy_parity", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy_parity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_in_small_and_again(example: ModuleType, tmp_path: Path) -> None:
    file, picture = tmp_path / "parity.json", tmp_path / "parity.png"
    pytest.importorskip("matplotlib")
    done = run("accuracy_parity.py", str(file), *QUICK, "--processes", "2", "--plot", str(picture))
    assert done.returncode in (0, 1), done.stderr  # two seeds may be too few to show anything
    assert done.stdout.startswith("6 runs in ")
    document = json.loads(file.read_text())
    assert [(r["layers"], r["autocast"], r["seed"]) for r in document["runs"]] == [
        (layers, "none", seed) for layers in ("custom", "exact", "stock") for seed in (0, 1)
    ]
    by_name = {(r["layers"], r["seed"]): r for r in document["runs"]}
    for seed in (0, 1):
        stock, custom, exact = (by_name[layers, seed] for layers in ("stock", "custom", "exact"))
        assert stock["steps"][:20] == custom["steps"][:20] == exact["steps"] == list(range(1, 21))
        assert stock["losses"][0] == pytest.approx(exact["losses"][0], rel=1e-6) and stock["losses"] != exact["losses"]
        assert stock["accuracy"] == stock["accuracies"][-1] > 0.7
    assert by_name["stock", 0]["losses"] != by_name["stock", 1]["losses"]
    (row,), (steps,) = document["accuracies"], document["first_steps"]
    assert row["stock_low"] <= row["stock"] <= row["stock_high"] and row["seeds"] == 2
    assert (steps["losses"], steps["ok"]) == (40, True) and 0 < steps["custom_error"] < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")

    kept = document["runs"][:-1]
    file.write_text(json.dumps({**document, "runs": kept}))
    again = here(example, str(file), *QUICK, "--processes", "1")
    assert again.stdout.startswith("1 runs in "), again.stderr
    finished = json.loads(file.read_text())
    strip = [{key: value for key, value in r.items() if key != "seconds"} for r in finished["runs"]]
    assert strip == [{key: value for key, value in r.items() if key != "seconds"} for r in document["runs"]]
    only = here(example, str(file), *QUICK)
    assert "runs in" not in only.stdout and only.exit_code == done.returncode
    other = here(example, str(file), *QUICK, "--epochs", "3")
    assert other.exit_code == 1 and "its runs have other settings: mlp" in str(other.exception)


def test_seeds_that_not_all_have_are_left_out(example: ModuleType) -> None:
    losses = torch.linspace(2.3, 1.5, 20, dtype=torch.float64)
    runs = [steps(layers, seed, losses + seed) for layers in ("stock", "custom", "exact") for seed in (2, 0, 1)]
    runs = [{**run, "accuracy": 0.9 + 0.001 * run["seed"]} for run in runs]
    del runs[0], runs[-1]  # stock's seed 2, and exact's 1
    (row,), (first,) = example.accuracies(runs), example.first_steps(runs)
    assert (row["seeds"], row["stock"], row["custom"]) == (2, pytest.approx(0.9005), pytest.approx(0.9005))
    assert first["losses"] == 20  # of seed 0
    assert example.accuracies(runs[:3]) == []


def test_a_file_grows_by_models(example: ModuleType, tmp_path: Path) -> None:
    file, recipe = tmp_path / "parity.json", {"epochs": 8}
    example.write({"settings": {"data": "digits", "recipes": {"mlp": recipe}}, "runs": [{"seed": 0}]}, file)
    settings = {"data": "digits", "recipes": {"resnet18": recipe}}
    assert example.begun(file, settings) == [{"seed": 0}]
    assert settings["recipes"] == {"mlp": recipe, "resnet18": recipe}
    with pytest.raises(ValueError, match="its runs have other settings: data digits, not fashion_mnist"):
        example.begun(file, {"data": "fashion_mnist", "recipes": {}})


def test_equivalence_finds_what_is_planted(example: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    shown = {}
    for gap in (0.0, 0.005, 0.01):
        pairs = 0.9 + 0.001 * torch.randn(200, 2, 5, generator=generator, dtype=torch.float64)
        pairs[:, 0] += gap
        shown[gap] = sum(example.equivalence(*pair.tolist()) < example.LEVEL for pair in pairs) / len(pairs)
    assert shown[0.0] > 0.95
    assert shown[0.005] <= 0.1  # at the margin itself it is wrongly said in 5% of the cases
    assert shown[0.01] == 0
    assert example.equivalence([0.9] * 5, [0.9] * 5) == 0 and example.equivalence([0.91] * 5, [0.9] * 5) == 1
    mean, low, high = example.mean_and_interval([0.90, 0.91, 0.92, 0.91, 0.90])
    assert (mean, low, high) == pytest.approx((0.908, 0.908 - 0.01039, 0.908 + 0.01039), abs=1e-5)


def steps(layers: str, seed: int, losses: torch.Tensor) -> dict[str, Any]:
    return {"model": "mlp", "layers": layers, "autocast": "none", "seed": seed, "losses": losses.tolist()}


@pytest.mark.parametrize(
    ("custom", "ok"), [(1.0, True), (1.5, True), (4.0, False), (math.nan, False), (math.inf, False)]
)
def test_the_first_steps_are_judged_beside_stocks_error(example: ModuleType, custom: float, ok: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    runs = []
    for seed in range(5):
        exact = torch.linspace(2.3, 1.5, 20, dtype=torch.float64) + 0.1 * seed
        for layers, size in (("stock", 1.0), ("custom", custom), ("exact", 0.0)):
            off = 1e-6 * size * torch.randn(20, generator=generator, dtype=torch.float64)
            runs.append(steps(layers, seed, exact + (off if size else 0.0)))
    (row,) = example.first_steps(runs)
    assert (row["ok"], row["losses"]) == (ok, 100)
    assert bool(row["reason"]) != ok


def test_a_table_for_whom_reads(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        {"model": "mlp", "layers": layers, "autocast": "bf16", "seed": seed, "accuracy": 0.9 + gap + 0.0001 * seed}
        for layers, gap in (("stock", 0.0), ("custom", 0.02))
        for seed in range(5)
    ]
    document = {"accuracies": example.accuracies(runs), "first_steps": []}
    (row,) = document["accuracies"]
    assert row["difference"] == pytest.approx(0.02) and not row["equivalent"]
    for table in example.tables(document):
        example.console(width=120).print(table)
    text = " ".join(capsys.readouterr().out.split())
    assert "90.02%" in text and "+2.00 points" in text and "NOT shown" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet19"], "unknown model 'resnet19'"),
        (["--autocast", "fp8"], "unknown autocast 'fp8'"),
        (["--data", "/nowhere"], "expected train-images-idx3-ubyte"),
    ],
)
def test_what_cannot_be_is_refused(example: ModuleType, tmp_path: Path, arguments: list[str], message: str) -> None:
    words = [str(tmp_path / "x.json"), *QUICK, "--processes", "1"]
    if "--model" in arguments:
        words = [word for word in words if word not in ("--model", "mlp")]
    done = here(example, *words, *arguments)
    assert done.exit_code == 1 and message in str(done.exception)
    assert not (tmp_path / "x.json").exists()


def test_a_file_of_something_else_is_left_alone(example: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    for text in ("[1]", "{}", "no json"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"other\.json: not what this command writes"):
            example.begun(file, {"data": "digits", "recipes": {}})
        assert file.read_text() == text


def test_the_committed_results_are_what_their_runs_say(example: ModuleType) -> None:
    results = EXAMPLE.parent / "results" / "h200-accuracy-parity.json"
    document = json.loads(results.read_text(encoding="utf-8"))
    trained = [run for run in document["runs"] if run["layers"] != "exact"]
    assert len(trained) == 60 and len(document["runs"]) == 75
    for key in ("accuracies", "first_steps"):
        for row, again in zip(document[key], getattr(example, key)(document["runs"]), strict=True):
            assert row.keys() == again.keys()
            for name, value in row.items():
                assert value == (pytest.approx(again[name], rel=1e-6) if isinstance(value, float) else again[name])
    assert len(document["accuracies"]) == 6 and all(row["equivalent"] for row in document["accuracies"])
    assert len(document["first_steps"]) == 3 and all(row["ok"] for row in document["first_steps"])
