"""The results that lie in examples/results, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.sweep import SweepReport
from zoo.sweep.fields import ModelFields, stored
from zoo.sweep.lines import read

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "examples" / "results"


def words(file: Path) -> str:
    return " ".join(file.read_text(encoding="utf-8").split())


def report(file: str) -> SweepReport:
    rows = read(RESULTS / file)
    assert len({row.name for row in rows}) == len(rows)
    return SweepReport(file, tuple(rows))


@pytest.mark.parametrize(("file", "on"), [("sweep_meta.jsonl", "meta"), ("sweep_data.jsonl", "data")])
def test_the_files_hold_whole_rows(file: str, on: str) -> None:
    found = report(file)
    assert {row.on for row in found.rows} == {on}
    for row in found.rows:
        assert row.ok, row
        assert row.swapped is not None and row.linears is not None
        assert row.swapped + sum(map(len, row.skipped.values())) == row.linears
        assert row.custom_flops is None or row.custom_flops <= (row.linear_flops or 0)
        if on == "data":
            assert row.parity is not None and row.parity.ok and row.parity.gradients > 0


def test_the_sweep_on_a_gpu() -> None:
    found = report("sweep_h200.jsonl")
    data = [row for row in found.rows if row.on == "data"]
    assert not found.failures
    assert found.share == 1.0 and sum(row.name.startswith("torchvision/") for row in data) == 80
    assert all(row.parameters is not None and row.parameters > 700_000_000 for row in found.rows if row.on != "data")
    for row in data:
        assert row.asked["device"] == "cuda"
        assert row.parity is not None and row.parity.ok and row.parity.gradients > 0


def test_what_is_said_of_the_sweep_on_a_gpu() -> None:
    found = report("sweep_h200.jsonl")
    data = [row for row in found.rows if row.on == "data"]
    holds = [row for row in data if row.ok and row.parity is not None]
    fresh = [row for row in data if row.batch_norms is None]
    loose = [row for row in holds if row.parity is not None and row.parity.limit > 1e-3]
    assert len(holds) == len(data)
    parity = f"parity holds for all {len(data)} of up to 700M parameters, of which {len(loose)} show little"
    assert parity in words(ROOT / "README.md")
    said = words(RESULTS / "README.md")
    assert f"H200s ({len(data)} models), the larger ones ({len(found.rows) - len(data)}) on the meta device" in said
    assert f"Parity holds for all {len(data)}" in said
    assert f"In {len(fresh)} rows on data the batch norms are" in said
    assert f"{len(loose)} of those that hold have a limit of over 1e-3" in said


def test_the_readme_says_what_the_files_say() -> None:
    readme = words(ROOT / "README.md")
    meta, data = report("sweep_meta.jsonl"), report("sweep_data.jsonl")
    assert meta.share is not None and meta.share_before is not None
    assert f"{len(meta.rows)} models on the meta device, none failed" in readme
    assert f"{meta.share_before:.1%} of their Linears' FLOPs reach `nn.Linear.forward` as built" in readme
    assert f"{meta.share:.2%} run through zoo once patched" in readme
    assert f"{len(data.rows)} on data, forward and backward on small images, none failed" in readme


def test_the_stored_figures_are_those_of_the_files() -> None:
    figures = stored()
    for row in report("sweep_meta.jsonl").rows:
        assert figures[row.name] == ModelFields.of(row)
