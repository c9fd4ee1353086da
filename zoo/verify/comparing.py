"""What changed between two verdicts: claims, errors, speed, environment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from zoo.tables import TableReport, columns, verdict
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED
from zoo.verify.reading import read
from zoo.verify.timing.judging import LEAST, SUSPECT
from zoo.verify.timing.report import FAILED

__all__ = ["Change", "CompareReport", "compare", "compare_files"]

Data = Mapping[str, Any]

_RANK = {PASS: 2, REFUSED: 1, UNTESTED: 1, FAIL: 0}
_ERROR_FACTOR = 2.0
"""An error that changed by less is not told."""
_ENVIRONMENT = (
    *("kind", "device", "driver", "torch", "cuda", "zoo", "python", "threads", "seed"),
    *("target", "against", "source_file", "source_sha256", "command"),
)


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was."""

    what: str
    before: str
    after: str
    worse: bool = False
    note: str = ""


@dataclass(frozen=True)
class CompareReport(TableReport):
    """The changes between two verdicts. ``ok``: nothing got worse."""

    before: str
    after: str
    claims: tuple[Change, ...]
    """Claims whose status changed. Worse: one that passed no longer does, or one fails that did not."""
    errors: tuple[Change, ...]
    """Claims whose error changed by more than a factor of two. Within its limit that is never worse."""
    timing: tuple[Change, ...]
    """Rows whose speed changed for certain: their intervals are apart by more than the noise. Worse: slower, or a time
    that can no longer be believed. Not on another device."""
    environment: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        return not any(change.worse for change in (*self.claims, *self.errors, *self.timing))

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [f"{self.before} -> {self.after}"]
        for name in ("claims", "errors", "timing", "environment"):
            changes: tuple[Change, ...] = getattr(self, name)
            if not changes:
                continue
            table = columns(name, "before", "after", "")
            for change in changes:
                style = "bold red" if change.worse else ""
                note = " ".join(filter(None, ("WORSE" if change.worse else "", change.note)))
                table.add_row(change.what, change.before, Text(change.after, style=style), note)
            parts.append(table)
        worse = sum(change.worse for change in (*self.claims, *self.errors, *self.timing))
        some = any((self.claims, self.errors, self.timing))
        end = f"{worse} got WORSE" if worse else "nothing got worse" if some else "no claim, error or speed changed"
        return Group(*parts, verdict(self.ok, end))


def compare_files(before: str | Path, after: str | Path) -> CompareReport:
    """Compare two files that ``zoo verify --json`` wrote. ValueError, with the file's name, where one is none."""
    return compare(read(before), read(after), names=(str(before), str(after)))


def compare(before: Data, after: Data, *, names: tuple[str, str] = ("before", "after")) -> CompareReport:
    """Compare two verdicts as :meth:`VerifyReport.to_dict` gives them. ValueError where they are of different kinds."""
    if before["kind"] != after["kind"]:
        raise ValueError(
            f"{names[0]} is of kind {before['kind']!r} and {names[1]} of {after['kind']!r}; expected the same kind"
        )
    return CompareReport(
        *names,
        tuple(_claims(before, after)),
        tuple(_errors(before, after)),
        tuple(_timing(before, after)),
        tuple(_environment(before, after)),
    )


def _claims(before: Data, after: Data) -> Iterator[Change]:
    if before["complete"] and not after["complete"]:
        yield Change("the run", "complete", "stopped before its end", worse=True)
    old, new = _by_claim(before), _by_claim(after)
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            yield Change(name, old[name]["status"], "absent", worse=old[name]["status"] == PASS)
        elif name not in old:
            status, reason = new[name]["status"], new[name]["reason"]
            yield Change(name, "absent", status, worse=status == FAIL, note=reason)
        elif old[name]["status"] != new[name]["status"]:
            was, now = old[name]["status"], new[name]["status"]
            note = new[name]["reason"] or old[name]["reason"]
            yield Change(name, was, now, worse=_RANK[now] < _RANK[was], note=note)


def _errors(before: Data, after: Data) -> Iterator[Change]:
    old, new = _by_claim(before), _by_claim(after)
    for name in old.keys() & new.keys():
        was, now = (None if v["error"] is None else float(v["error"]) for v in (old[name], new[name]))
        if was is None or now is None or was == now or (math.isnan(was) and math.isnan(now)):
            continue
        if min(was, now) > 0 and 1 / _ERROR_FACTOR <= now / was <= _ERROR_FACTOR:
            continue
        yield Change(name, f"{was:.1e}", f"{now:.1e}", note=f"the limit is {float(new[name]['error_limit']):.1e}")


def _timing(before: Data, after: Data) -> Iterator[Change]:
    old, new = (_by_row(data) for data in (before, after))
    same_device = before["device"] == after["device"]
    note = "" if same_device else "another device"
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            yield Change(name, _speed(was), _speed(now))
            continue
        doubted = now["verdict"] in (SUSPECT, FAILED) and was["verdict"] not in (SUSPECT, FAILED)
        moved = _moved(was, now)
        if moved or doubted or was["verdict"] != now["verdict"]:
            worse = doubted or (moved < 0 and same_device)
            yield Change(name, _speed(was), _speed(now), worse=worse, note=now["reason"] if doubted else note)


def _moved(was: Data, now: Data) -> int:
    """1 where the layer is faster for certain than it was, -1 where it is slower, else 0."""
    if was["speedup"] is None or now["speedup"] is None:
        return 0
    least = max(LEAST, *(math.log1p(float(row["floor"])) for row in (was, now)))
    if math.log(now["speedup_low"] / was["speedup_high"]) > 0 and math.log(now["speedup"] / was["speedup"]) > least:
        return 1
    if math.log(now["speedup_high"] / was["speedup_low"]) < 0 and math.log(now["speedup"] / was["speedup"]) < -least:
        return -1
    return 0


def _environment(before: Data, after: Data) -> Iterator[Change]:
    for key in _ENVIRONMENT:
        if before.get(key) != after.get(key):
            yield Change(key, str(before.get(key)), str(after.get(key)))
    old, new = before["libraries"], after["libraries"]
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield Change(name, str(old.get(name)), str(new.get(name)))


def _speed(row: Data | None) -> str:
    if row is None:
        return "absent"
    if row["speedup"] is None:
        return str(row["verdict"])
    return f"{row['speedup']:.3f}x ({row['speedup_low']:.3f}-{row['speedup_high']:.3f}) {row['verdict']}"


def _by_claim(data: Data) -> dict[str, Data]:
    return {v["claim"]: v for v in data["verdicts"]}


def _by_row(data: Data) -> dict[str, Data]:
    rows = (data["timing"] or {"rows": ()})["rows"]
    return {f"{r['case']} {r['dtype']} {r['pass']} {r['state']} over {r['peer']}": r for r in rows}
