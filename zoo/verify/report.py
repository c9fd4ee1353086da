"""What :func:`zoo.verify` found, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from zoo.machine import Machine
from zoo.tables import TableReport, columns, verdict
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED, Verdict

__all__ = ["ESSENTIAL", "SCHEMA", "VerifyReport"]

SCHEMA = 1
ESSENTIAL = "values"
"""The claim without which nothing is proved: a layer that refuses it is not right."""

_STYLES = {PASS: "green", FAIL: "bold red", REFUSED: "yellow", UNTESTED: "dim"}


@dataclass(frozen=True)
class VerifyReport(TableReport):
    """The verdict on every claim.

    As JSON (``schema`` 1): one object with ``ok``, ``schema``; ``target``, ``kind``, ``source_file`` (the name of the
    file that defines the layer, or null) and ``source_sha256`` (of that file); ``against`` (what it was compared with,
    or null for the stock layer); the facts of the machine, ``device``, ``driver``, ``torch``, ``cuda``, ``zoo``,
    ``python``, ``threads``, ``date`` (UTC, when the run began); ``seed``, ``command`` (which reproduces the run),
    ``complete`` (false where it was cut off); ``counts`` by status; and
    ``verdicts``, an array of ``claim`` (its name), ``says``, ``status`` ("pass", "fail", "refused", "untested"),
    ``reason`` (empty for a pass) and ``seconds``. A claim that was not reached is "untested". The schema's number
    grows when a field goes or changes its meaning; new ones may come at any time.
    """

    target: str
    kind: str
    source_file: str | None
    source_sha256: str | None
    machine: Machine
    seed: int
    command: str
    verdicts: tuple[Verdict, ...]
    complete: bool = True
    against: str | None = None
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        """Whether the run came to its end, no claim fails, and the values themselves were judged right."""
        essential = [v.status for v in self.verdicts if v.claim == ESSENTIAL]
        return self.complete and all(v.ok for v in self.verdicts) and set(essential) <= {PASS}

    @property
    def counts(self) -> dict[str, int]:
        """How many claims have each status."""
        found = Counter(v.status for v in self.verdicts)
        return {status: found[status] for status in _STYLES}

    def to_dict(self) -> dict[str, Any]:
        """The fields as the class says."""
        data = super().to_dict()
        ok, verdicts, machine = data.pop("ok"), data.pop("verdicts"), data.pop("machine")
        return {"ok": ok, "schema": data.pop("schema"), **data, **machine, "counts": self.counts, "verdicts": verdicts}

    def __rich__(self) -> RenderableType:
        table = columns("claim", "verdict", "seconds", "what is claimed, and why it did not pass", right=("seconds",))
        for v in self.verdicts:
            text = v.says + (f"\n{v.reason}" if v.reason else "")
            table.add_row(v.claim, Text(v.status, style=_STYLES[v.status]), f"{v.seconds:.1f}", text)
        failed = [v.claim for v in self.verdicts if not v.ok]
        end = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        end += f"; FAILED: {', '.join(failed)}" if failed else ""
        end += "" if self.complete else "; stopped before its end"
        beside = f", against {self.against}" if self.against else ""
        head = f"{self.target} ({self.kind}{beside}), on {self.machine.device}, seed {self.seed}"
        return Group(head, table, verdict(self.ok, end))
