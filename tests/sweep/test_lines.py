"""The file of a sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zoo.sweep.lines import append, begin, read
from zoo.sweep.rows import SweepRow, Task, failed

TASKS = [Task("timm/a", on="meta"), Task("timm/b", on="meta")]
ROWS = [failed(task, None) for task in TASKS]


def names(rows: list[SweepRow]) -> list[str]:
    return [row.name for row in rows]


def test_rows_come_back(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    assert begin(file, TASKS, resume=True) == {}
    for row in ROWS:
        append(file, row)
    assert read(file) == ROWS
    assert begin(file, TASKS, resume=True) == {"timm/a": ROWS[0], "timm/b": ROWS[1]}
    assert begin(file, TASKS, resume=False) == {}
    assert read(file) == []


def test_a_line_that_was_cut_off_is_taken_off(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    append(file, ROWS[0])
    whole = file.read_bytes()
    file.write_bytes(whole + ROWS[1].to_line().encode()[:40])
    assert names(read(file)) == ["timm/a"]
    assert list(begin(file, TASKS, resume=True)) == ["timm/a"]
    assert file.read_bytes() == whole
    append(file, ROWS[1])
    assert names(read(file)) == ["timm/a", "timm/b"]


def test_other_versions_and_settings_are_said(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    append(file, replace(ROWS[0], versions={**ROWS[0].versions, "timm": "0.1"}))
    with pytest.raises(ValueError, match=r"timm/a is there with versions .*timm 0\.1, and this run has .*--fresh"):
        begin(file, TASKS, resume=True)
    assert len(begin(file, TASKS[1:], resume=True)) == 1  # another model is another matter
    begin(file, TASKS, resume=False)
    append(file, ROWS[0])
    with pytest.raises(ValueError, match=r"settings on meta, and this run has on data, device cpu"):
        begin(file, [Task("timm/a")], resume=True)


def test_files_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a file named \*\.jsonl"):
        begin(tmp_path / "out.json", TASKS, resume=True)
    with pytest.raises(ValueError, match="there is no folder"):
        begin(tmp_path / "none" / "out.jsonl", TASKS, resume=True)
    other = tmp_path / "notes.jsonl"
    other.write_text(ROWS[0].to_line() + '\n{"text": "mine"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"notes\.jsonl, line 2: schema: got None"):
        begin(other, TASKS, resume=True)
    assert "mine" in other.read_text(encoding="utf-8")
