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
from zoo.verify.schema import SCHEMA
from zoo.verify.timing.report import TimingReport

__all__ = ["ESSENTIAL", "SCHEMA", "VerifyReport"]

ESSENTIAL = "values"
"""The claim without which nothing is proved: a layer that refuses it is not right."""

_STYLES = {PASS: "green", FAIL: "bold red", REFUSED: "yellow", UNTESTED: "dim"}


@dataclass(frozen=True)
class VerifyReport(TableReport):
    """The verdict on every claim, and on the layer's speed where it was timed.

    As JSON it is one object; :mod:`zoo.verify.schema` documents every field of it.
    """

    target: str
    kind: str
    source_file: str | None
    source_sha256: str | None
    libraries: dict[str, str]
    machine: Machine
    seed: int
    command: str
    verdicts: tuple[Verdict, ...]
    complete: bool = True
    against: str | None = None
    timing: TimingReport | None = None
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        """Whether the run came to its end, no claim fails, the values are right, and no time is to be doubted."""
        essential = [v.status for v in self.verdicts if v.claim == ESSENTIAL]
        timing = self.timing is None or self.timing.ok
        return self.complete and all(v.ok for v in self.verdicts) and set(essential) <= {PASS} and timing

    @property
    def counts(self) -> dict[str, int]:
        """How many claims have each status."""
        found = Counter(v.status for v in self.verdicts)
        return {status: found[status] for status in _STYLES}

    def to_dict(self) -> dict[str, Any]:
        """The fields as the class says."""
        data = super().to_dict()
        ok, verdicts, machine = data.pop("ok"), data.pop("verdicts"), data.pop("machine")
        data["timing"] = None if self.timing is None else self.timing.to_dict()
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
        timing = () if self.timing is None else (self.timing,)
        return Group(head, table, *timing, verdict(self.ok, end))
