"""The file of a sweep: a line a model, each written as soon as it is known."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from zoo.lock import locked
from zoo.sweep.rows import SweepRow, Task, versions_of

__all__ = ["append", "begin", "held", "read"]


def begin(path: Path, tasks: Iterable[Task], *, resume: bool) -> dict[str, SweepRow]:
    """Make the file ready to be added to. Returns the rows that are there already, by name; none unless ``resume``.

    What a run that was cut off left of a line is taken off. ValueError for a file of something else, or of a sweep of
    other libraries or in another way.
    """
    _check(path)
    if not resume or not path.exists():
        path.write_bytes(b"")
        return {}
    data = path.read_bytes()
    rows = {row.name: row for row in read(path)}
    for task in tasks:
        row = rows.get(task.name)
        if row is None:
            continue
        for what, got, expected in (
            ("versions", row.versions, versions_of(task.name)),
            ("settings", row.asked, task.asked()),
        ):
            if got != expected:
                raise ValueError(
                    f"{path}: {task.name} is there with {what} {_words(got)}, and this run has {_words(expected)}; "
                    "begin anew with --fresh, or take another file"
                )
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return rows


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Inside, the file is there and no other process sweeps into it. ValueError where one does, or as :func:`begin`."""
    _check(path)
    path.touch()
    with locked(path, doing="sweeping into this file", remedy="take another file"):
        yield


def _check(path: Path) -> None:
    if path.suffix != ".jsonl":
        raise ValueError(f"out {str(path)!r}: expected a file named *.jsonl")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"out {str(path)!r}: there is no folder {path.absolute().parent}")


def append(path: Path, row: SweepRow) -> None:
    """Add a row's line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(row.to_line() + "\n")


def read(path: Path) -> list[SweepRow]:
    """The rows of a file, but for a last line that has no end. ValueError, with its number, for a line of another kind.

    Raises OSError where it cannot be read.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows.append(SweepRow.from_line(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


def _words(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())
