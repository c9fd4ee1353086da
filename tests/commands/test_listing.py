"""``zoo list`` with figures; plain lists are tested in tests/test_cli.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zoo.cli import app
from zoo.commands.listing import comparison, list_fields
from zoo.sweep import fields
from zoo.sweep.fields import ModelFields

ONE = ModelFields("resnet18", "torchvision/resnet18", (3, 8, 8), 11_000_000, 2, 2, 1000, 500, 400, "zoo 1")
FIGURES = {
    "resnet18": ONE,
    "resnet34": replace(ONE, name="resnet34", custom_flops=100),
    "resnet101": replace(ONE, name="resnet101", flops=None, linear_flops=None, custom_flops=None, why="not on meta"),
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["list", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models whose figures had to be computed."""
    names: list[str] = []

    def computed(name: str) -> ModelFields:
        names.append(name)
        return replace(ONE, name=name, custom_flops=1000)

    monkeypatch.setattr(fields, "stored", lambda: FIGURES)
    monkeypatch.setattr(fields, "computed", computed)
    return names


def test_what_is_stored_is_not_computed(asked: list[str]) -> None:
    found = list_fields("resnet*", source="zoo", swappable=None)
    assert asked == ["resnet50", "resnet152"]
    assert [one.name for one in found.models] == ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    assert found.unknown == {"resnet101": "not on meta"}
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    assert "resnet18 11.00 M 2 1e+03 50.0% 40.0% 3x8x8" in lines
    assert "resnet101 11.00 M 2 - - - 3x8x8" in lines
    assert lines[-1] == "resnet101: not known: not on meta"


def test_swappable_selects(asked: list[str]) -> None:
    result = run("--swappable", ">=40%", "--pattern", "resnet*", "--source", "zoo", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [(one["name"], one["swappable"], one["linear_share"]) for one in data["models"]] == [
        ("resnet18", 0.4, 0.5),
        ("resnet50", 1.0, 0.5),
        ("resnet152", 1.0, 0.5),
    ]
    assert data["unknown"] == {"resnet101": "not on meta"}  # said, not guessed
    text = run("resnet*", "--source", "zoo", "--swappable", "<0.4").stdout
    assert "resnet34" in text and "resnet18" not in text
    assert "resnet101: not known" in text
    assert "2 of 5 models have no stored figures" in result.stderr


def test_a_table_without_a_comparison(asked: list[str]) -> None:
    assert "swappable" in run("resnet18", "--fields").stdout
    assert run("--pattern", "resnet18").stdout == run("resnet18").stdout == "resnet18\n"
    assert "given twice" in run("resnet18", "--pattern", "mlp").stderr
    assert "no model matches" in run("resnet19", "--fields").stderr


def test_real_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "RESULTS", tmp_path / "results.jsonl")  # so that they are computed
    data = json.loads(run("mlp", "--swappable", "=1", "--json").stdout)
    assert [(one["name"], one["linears"], one["input"]) for one in data["models"]] == [("mlp", 3, [784])]


@pytest.mark.parametrize(
    ("text", "true", "false"),
    [
        (">0.9", 0.91, 0.9),
        (">=0.9", 0.9, 0.89),
        ("<50%", 0.49, 0.5),
        (" <= 12.5 % ".replace(" %", "%"), 0.125, 0.13),
        ("=1", 1.0, 0.99),
        (">.5", 0.51, 0.5),
    ],
)
def test_comparisons(text: str, true: float, false: float) -> None:
    test = comparison(text)
    assert (test(true), test(false)) == (True, False)


@pytest.mark.parametrize("text", ["", "0.9", ">", "> x", "=>1", ">1..", "!=1"])
def test_no_comparison(text: str) -> None:
    with pytest.raises(ValueError, match="expected a comparison with a share"):
        comparison(text)


def test_zoos_own_weights() -> None:
    result = run("--weights")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "mlp.digits mlp 97.22% " in text
    assert "mlp.fashion_mnist mlp 90.75% 1.08 MB MIT Fashion-MNIST: " in text
    data = json.loads(run("*.fashion*", "--weights", "--json").stdout)
    assert [(one["name"], one["metrics"]) for one in data["weights"]] == [("mlp.fashion_mnist", {"accuracy": 0.9075})]
    for arguments, message in (
        (("resnet*", "--weights"), "no weights of zoo's match"),
        (("--weights", "--layers"), "two"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 1 and message in refused.stderr
