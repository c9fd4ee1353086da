"""``zoo sweep`` as a user meets it, with the real worker in the first test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from zoo.cli import app
from zoo.commands import sweep as command
from zoo.commands.sweep import number_of
from zoo.sweep import SweepReport, fields
from zoo.sweep.lines import read
from zoo.sweep.rows import Failure, Task, failed


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments])


def test_models_are_swept_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "RESULTS", tmp_path / "results.jsonl")
    file = tmp_path / "out.jsonl"
    arguments = ("mlp", "--device", "cpu", "--out", str(file), "--save-fields", "--json")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["ok"], data["share"], data["resumed"]) == (True, 1.0, 0)
    assert data["command"] == "zoo sweep mlp --on data --device cpu --max-parameters 700M"
    (row,) = data["rows"]
    assert (row["name"], row["on"], row["swapped"], row["parity"]["ok"]) == ("mlp", "data", 3, True)
    assert [one.to_dict() for one in read(file)] == [row | {"seconds": read(file)[0].seconds}]
    assert fields.stored()["mlp"].swappable == 1.0
    again = json.loads(run(*arguments).stdout)
    assert (again["resumed"], again["rows"][0]["name"]) == (1, "mlp")
    assert len(file.read_text(encoding="utf-8").splitlines()) == 1


def test_its_arguments_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def fake(globs: Any, **options: Any) -> SweepReport:
        given.update(options, globs=list(globs))
        for under_way, done in ((("mlp", "resnet18"), 0), (("mlp",), 1), ((), 2)):
            options["watch"](under_way, done, 2)
        return SweepReport(options["command"], (failed(Task("mlp"), None),))

    monkeypatch.setattr(command, "sweep", fake)
    where = ("--on", "data", "--device", "cpu", "--shard", "3/8", "--out", "x.jsonl", "--fresh")
    how = ("--no-gradients", "--small", "--max-parameters", "1.5G", "--time-limit", "9", "--time-budget", "99")
    result = run("timm/vit*", "mlp", *where, *how, "--processes", "4")
    assert result.exit_code == 0, result.output
    given.pop("watch")
    assert given == {
        "globs": ["timm/vit*", "mlp"],
        "on": "data",
        "device": "cpu",
        "shard": "3/8",
        "processes": 4,
        "out": "x.jsonl",
        "resume": False,
        "gradients": False,
        "small": True,
        "max_parameters": 1_500_000_000,
        "time_limit": 9.0,
        "time_budget": 99.0,
        "command": "zoo sweep 'timm/vit*' mlp --on data --device cpu --max-parameters 1.5G --no-gradients --small "
        "--shard 3/8 --processes 4",
    }
    assert result.stdout.endswith("1 model, all well\n")
    run("--on", "meta")
    assert (given["globs"], given["on"], given["command"]) == (["*"], "meta", "zoo sweep --on meta")
    assert (given["resume"], given["gradients"], given["max_parameters"]) == (True, True, 700_000_000)


def test_a_failure_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SweepReport("zoo sweep", (failed(Task("mlp"), Failure("run", "no")),))
    monkeypatch.setattr(command, "sweep", lambda *_, **__: report)
    result = run("mlp")
    assert result.exit_code == 1
    assert "mlp: FAILED in run: no" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense*"], 1, "no model matches 'nonsense*'"),
        (["mlp", "--shard", "9/8"], 1, "expected k/n"),
        (["mlp", "--device", "tpu"], 1, "device 'tpu'"),
        (["mlp", "--max-parameters", "many"], 1, "number 'many'"),
        (["mlp", "--out", "x.json"], 1, "expected a file named *.jsonl"),
        (["mlp", "--on", "paper"], 2, "Usage"),
        (["mlp", "--time-limit", "0"], 2, "Usage"),
        (["mlp", "--time-budget", "0"], 2, "Usage"),
        (["mlp", "--processes", "0"], 2, "Usage"),
    ],
)
def test_arguments_of_the_wrong_form(arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_numbers() -> None:
    assert [number_of(text) for text in ("700M", "1.5G", "2b", "3k", "20000", " 7M ")] == [
        700_000_000,
        1_500_000_000,
        2_000_000_000,
        3_000,
        20_000,
        7_000_000,
    ]
    for wrong in ("", "M", "-1", "1 000", "7MM", "1e6"):
        with pytest.raises(ValueError, match="expected one such as 700M"):
            number_of(wrong)
