from __future__ import annotations

import json
import math

import pytest
import torch

from zoo.sweep.rows import (
    SCHEMA,
    Failure,
    ParitySummary,
    SweepRow,
    Task,
    failed,
    reference_name,
    source_of,
    versions_of,
)

ROW = SweepRow(
    name="timm/x",
    source="timm",
    reference="timm/x",
    asked={"on": "meta"},
    versions={"zoo": "1", "torch": "2", "timm": "3"},
    on="meta",
    untested={"run": "no"},
    input=(3, 8, 8),
    parameters=10,
    linears=3,
    swapped=2,
    skipped={"because": ("a.b",)},
    idle=("c",),
    flops=1000,
    reached_flops=250,
    linear_flops=500,
    custom_flops=400,
    parity=ParitySummary(True, 1, 2, 0, "output", 1e-7, 2e-7),
    seconds={"build": 0.12345},
)


def test_a_line_holds_the_row() -> None:
    line = ROW.to_line()
    assert "\n" not in line
    data = json.loads(line)
    assert data["ok"] is True
    assert data["schema"] == SCHEMA
    assert data["shares"] == {"linear": 0.5, "before": 0.25, "after": 0.4}
    again = SweepRow.from_line(line)
    assert again.to_line() == line
    assert (again.parity, again.skipped, again.idle, again.input) == (ROW.parity, ROW.skipped, ROW.idle, ROW.input)


def test_a_failure() -> None:
    row = failed(Task("timm/x"), Failure("patch", "no"), {"in all": 1.0})
    again = SweepRow.from_line(row.to_line())
    assert again == row
    assert not again.ok
    assert str(again) == "timm/x: FAILED in patch: no"
    assert again.share(again.custom_flops) is None
    assert str(ROW) == "timm/x: ok, 2 of 3 Linears"


def test_numbers_that_json_lacks() -> None:
    row = SweepRow(**{**vars(ROW), "parity": ParitySummary(False, 1, 0, 0, "output", math.nan, math.inf)})
    assert json.loads(row.to_line())["parity"]["error"] == "nan"


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"schema": 0}', '{"schema": 1}', '{"schema": 1, "name": "x"', "3"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"schema|row of a sweep|Expecting"):
        SweepRow.from_line(line)


def test_what_rows_must_share() -> None:
    assert Task("a", on="meta", small=True).asked() == Task("b", on="meta", device="cuda").asked() == {"on": "meta"}
    asked = Task("a", device="cuda:1", gradients=False, max_parameters=5).asked()
    assert asked == {"on": "data", "device": "cuda", "gradients": False, "small": False, "max_parameters": 5}


def test_sources_and_references() -> None:
    assert (source_of("mlp"), source_of("timm/mlp")) == ("zoo", "timm")
    assert reference_name("timm/vit_tiny_patch16_224") == "timm/vit_tiny_patch16_224"
    assert reference_name("resnet18") == "torchvision/resnet18"
    assert reference_name("mlp") is None
    assert versions_of("timm/x").keys() == {"zoo", "torch", "timm"}
    assert versions_of("mlp").keys() == versions_of("torchvision/x").keys() == {"zoo", "torch", "torchvision"}
    assert versions_of("mlp")["torch"] == torch.__version__
