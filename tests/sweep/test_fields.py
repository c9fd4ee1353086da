"""The figures of models: stored ones, and computed ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from zoo.registry import register_model
from zoo.sweep import fields
from zoo.sweep.fields import ModelFields, computed, fields_of, save_fields, stored
from zoo.sweep.rows import Failure, Task, failed

ROW = replace(
    failed(Task("resnet18", on="meta"), None),
    parameters=100,
    linears=2,
    swapped=1,
    input=(3, 8, 8),
    flops=1000,
    linear_flops=500,
    custom_flops=250,
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fields, "RESULTS", tmp_path / "results.jsonl")
    return tmp_path / "results.jsonl"


def test_saved_and_read_again(file: Path) -> None:
    assert stored() == {}
    other = replace(ROW, name="mlp", custom_flops=None, untested={"run": "not on meta"})
    assert save_fields([ROW, other]) == file
    assert list(stored()) == ["mlp", "resnet18"]
    found = fields_of("resnet18")
    assert found == ModelFields.of(ROW)
    assert (found.linear_share, found.swappable, found.reference) == (0.5, 0.25, "torchvision/resnet18")
    assert found.measured.startswith("zoo ") and "torchvision" in found.measured
    assert (stored()["mlp"].swappable, stored()["mlp"].why) == (None, "not on meta")
    assert len(file.read_text(encoding="utf-8").splitlines()) == 2


def test_what_others_saved_stays(file: Path) -> None:
    save_fields([ROW])
    save_fields([replace(ROW, name="resnet34"), replace(ROW, parameters=200)])
    assert {name: one.parameters for name, one in stored().items()} == {"resnet18": 200, "resnet34": 100}


def test_failed_and_small_ones_are_not_saved(file: Path) -> None:
    small = replace(ROW, name="mlp", asked=Task("mlp", small=True).asked())
    save_fields([replace(ROW, failure=Failure("run", "no")), small])
    assert stored() == {}


def test_computed_where_none_is_stored(file: Path) -> None:
    found = fields_of("mlp")
    assert found == computed("mlp")
    assert (found.parameters, found.linears, found.swapped, found.input) == (269_322, 3, 3, (784,))
    assert found.flops == found.custom_flops == 2 * (784 * 256 + 256 * 256 + 256 * 10)
    assert found.swappable == 1.0
    with pytest.raises(ValueError, match="unknown model 'mpl'"):
        fields_of("mpl")


def test_what_cannot_be_known_has_a_reason(file: Path) -> None:
    register_model("odd")(lambda: nn.Sequential(nn.ReLU()))
    found = computed("odd")
    assert (found.parameters, found.flops, found.swappable) == (None, None, None)
    assert "neither a convolution nor a Linear" in found.why


def test_the_stored_ones_are_of_models_that_exist() -> None:
    """The package's own file."""
    from zoo.registry import list_models

    figures = stored()
    assert set(figures) <= set(list_models())
    assert {"mlp", "resnet50", "torchvision/vit_b_16"} <= set(figures)
    vit = figures["torchvision/vit_b_16"]
    assert (vit.linears, vit.swapped, vit.input) == (37, 37, (3, 224, 224))
    assert vit.swappable == pytest.approx(0.953, abs=5e-4)
    for one in figures.values():
        assert one.why or (one.flops and one.custom_flops is not None and one.linear_flops is not None)
        assert one.custom_flops is None or one.custom_flops <= (one.linear_flops or 0) <= (one.flops or 0)
    lines = fields.RESULTS.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["name"] for line in lines] == list(figures)
