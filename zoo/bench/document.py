"""What the reports of both benches have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType

from zoo.machine import Machine
from zoo.tables import TableReport, verdict

__all__ = ["BenchReport", "spread"]


class BenchReport(TableReport):
    """Rows that one machine measured; ``ok`` where all could be measured and were right. Slower is no failure."""

    machine: Machine
    command: str
    rows: tuple[Any, ...]
    complete: bool

    @property
    def ok(self) -> bool:
        return self.complete and all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The facts of the machine among the other fields, and the rows last."""
        data = super().to_dict()
        rows, machine = data.pop("rows"), data.pop("machine")
        plain = [
            {"ok": row.ok, **{key.rstrip("_"): value for key, value in fields.items()}}
            for row, fields in zip(self.rows, rows, strict=True)
        ]
        return {"ok": data.pop("ok"), "schema": data.pop("schema"), **machine, **data, "rows": plain}

    def around(self, *tables: RenderableType, right: str, name: Callable[[Any], str]) -> RenderableType:
        """The tables between the command and the verdict, with a line for each row that failed."""
        bad = [row for row in self.rows if not row.ok]
        end = f"{len(self.rows)} rows, {right}" if self.ok else f"{len(bad)} of {len(self.rows)} rows FAILED"
        end += "" if self.complete else "; stopped before its end"
        lines = [f"{name(row)}: {row.failure}" for row in bad]
        return Group(f"{self.command}, on {self.machine.device}", *tables, *lines, verdict(self.ok, end))


def spread(row: Any) -> str:
    """A speedup with its interval."""
    return f"{row.speedup:.2f} ({row.speedup_low:.2f}-{row.speedup_high:.2f})"
