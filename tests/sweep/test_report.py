from __future__ import annotations

import json
from dataclasses import replace

from zoo.sweep.report import SweepReport
from zoo.sweep.rows import Failure, SweepRow, Task, failed

ONE = replace(
    failed(Task("timm/a"), None),
    linears=4,
    swapped=3,
    skipped={"for a reason": ("x",)},
    flops=1000,
    reached_flops=300,
    linear_flops=400,
    custom_flops=400,
    untested={"data": "too large"},
)
TWO = replace(ONE, name="torchvision/b", source="torchvision", linear_flops=600, reached_flops=200, custom_flops=500)
BAD = failed(Task("timm/c"), Failure("run", "went [bold]past[/bold]"))
NOT_RUN = replace(ONE, name="timm/d", custom_flops=None, flops=None, linear_flops=None, reached_flops=None)


def report(*rows: SweepRow, resumed: int = 0) -> SweepReport:
    return SweepReport("zoo sweep 'timm/*'", rows, resumed)


def test_shares_are_of_all_models_together() -> None:
    found = report(ONE, TWO, NOT_RUN)
    assert found.ok
    assert found.share == 900 / 1000
    assert found.share_before == 500 / 1000
    assert report(NOT_RUN).share is report().share is None
    assert report().ok


def test_its_text() -> None:
    text = str(report(ONE, TWO, NOT_RUN, resumed=2))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "zoo sweep 'timm/*'"
    assert "timm 2 2 2 8 6 1 75.00% 100.00%" in lines
    assert "torchvision 1 1 1 4 3 1 33.33% 83.33%" in lines
    assert "all 3 3 3 12 9 2 50.00% 90.00%" in lines
    assert "not tested in 3: data: too large" in lines  # one line, however many models
    assert "3 left alone: for a reason" in lines
    assert "2 of these rows were in the file already" in lines
    assert lines[-1] == "3 models, all well"


def test_a_failure_is_told() -> None:
    found = report(ONE, BAD)
    assert not found.ok
    assert found.failures == (BAD,)
    assert "timm/c: FAILED in run: went [bold]past[/bold]" in str(found)
    assert str(found).endswith("1 of 2 models FAILED")
    data = json.loads(found.to_json())
    assert (data["ok"], data["share"], [row["ok"] for row in data["rows"]]) == (False, 1.0, [True, False])
