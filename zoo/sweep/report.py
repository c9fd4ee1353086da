"""What a sweep found in all models together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from zoo.sweep.rows import SCHEMA, SweepRow
from zoo.tables import TableReport, columns, verdict

__all__ = ["SweepReport"]


@dataclass(frozen=True)
class SweepReport(TableReport):
    """What :func:`zoo.sweep.sweep` found. ``ok``: no model failed.

    FLOPs are of one image's forward in each model. What was not measured is not part of a share.
    """

    command: str
    rows: tuple[SweepRow, ...]
    resumed: int = 0
    """Rows that the file held already."""
    left: int = 0
    """Models that were not looked at, as the time was up."""
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> tuple[SweepRow, ...]:
        """The models that failed."""
        return tuple(row for row in self.rows if not row.ok)

    @property
    def share(self) -> float | None:
        """Of the FLOPs of Linear arithmetic in all models that ran, those that ran through custom layers, 0 to 1."""
        return _share(self.rows, "custom_flops")

    @property
    def share_before(self) -> float | None:
        """The same before the patch: what reached the forward of an nn.Linear."""
        return _share(self.rows, "reached_flops")

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {**super().to_dict(), "rows": rows, "share": self.share, "share_before": self.share_before}

    def __rich__(self) -> RenderableType:
        right = ("models", "ok", "on data", "Linears", "swapped", "ran", "before", "after")
        table = columns("source", *right, right=right)
        for source in (*dict.fromkeys(row.source for row in self.rows), "all"):
            rows = [row for row in self.rows if source in (row.source, "all")]
            table.add_row(
                source,
                str(len(rows)),
                str(sum(row.ok for row in rows)),
                str(sum(row.on == "data" for row in rows)),
                str(sum(row.linears or 0 for row in rows)),
                str(sum(row.swapped or 0 for row in rows)),
                str(sum(row.custom_flops is not None for row in rows)),
                _percent(_share(rows, "reached_flops")),
                _percent(_share(rows, "custom_flops")),
            )
        lines = [
            "before, after: of the Linears' FLOPs in the models that ran, what reached nn.Linear.forward as built, "
            "and what ran through custom layers once patched"
        ]
        lines += [str(row) for row in self.failures]
        untested = Counter(f"{step}: {why}" for row in self.rows for step, why in row.untested.items())
        lines += [f"not tested in {count}: {what}" for what, count in untested.most_common()]
        alone = Counter(reason for row in self.rows for reason, names in row.skipped.items() for _ in names)
        lines += [f"{count} left alone: {reason}" for reason, count in alone.most_common()]
        if self.resumed:
            lines.append(f"{self.resumed} of these rows were in the file already")
        bad = len(self.failures)
        models = f"{len(self.rows)} model{'' if len(self.rows) == 1 else 's'}"
        end = f"{bad} of {models} FAILED" if bad else f"{models}, all well"
        end += f"; {self.left} left, as the time was up: resume with the same command" if self.left else ""
        return Group(self.command, table, *lines, "", verdict(self.ok, end))


def _share(rows: Iterable[SweepRow], what: str) -> float | None:
    ran = [row for row in rows if row.custom_flops is not None]
    linear = sum(row.linear_flops or 0 for row in ran)
    return sum(getattr(row, what) or 0 for row in ran) / linear if linear else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
