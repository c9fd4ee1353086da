"""What timing found: a row for each measurement and peer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from zoo.tables import TableReport, columns, verdict
from zoo.verify.timing.judging import FASTER, INCONCLUSIVE, SAME, SLOWER, SUSPECT, TOO_SMALL

__all__ = ["FAILED", "UNTIMED", "TimingReport", "TimingRow"]

UNTIMED = "UNTIMED"
"""There is no time, since the layer refuses the pass or the run was cut off."""
FAILED = "FAILED"
"""There is no time, since the layer raised, or its process ended."""

_STYLES = {
    FASTER: "green",
    SAME: "green",
    SLOWER: "yellow",
    INCONCLUSIVE: "dim",
    SUSPECT: "bold red",
    FAILED: "bold red",
}


@dataclass(frozen=True)
class TimingRow:
    """A layer beside one peer. Times are medians in microseconds a call; numbers are None where there is no time."""

    case: str
    M: int
    K: int
    N: int
    dtype: str
    pass_: str
    """"forward" or "forward+backward"; "pass" in the JSON."""
    state: str
    """Of the caches: "cold" or "warm"."""
    peer: str
    """"eager" or "compiled"."""
    verdict: str
    """"FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "SUSPECT", "UNTIMED" or "FAILED"."""
    reason: str = ""
    layer_us: float | None = None
    peer_us: float | None = None
    speedup: float | None = None
    """How many times as fast as its peer the layer is: the median of the pairs."""
    speedup_low: float | None = None
    """Of its 95% interval."""
    speedup_high: float | None = None
    floor: float | None = None
    """What the stock layer against itself came to, as a part of 1."""
    detectable: float | None = None
    """The smallest effect that would have been found, as a part of 1."""
    by_process: tuple[float, ...] = ()
    """The median speedup of each process."""
    blocks: int = 0
    dropped: int = 0
    """Blocks left out as outliers, blindly."""
    clocks_us: dict[str, float | None] | None = None
    """The layer's time by each clock; the parent's has what surrounds a call in it."""
    layer_host_us: float | None = None
    """What a call takes the host, on a GPU."""
    peer_host_us: float | None = None
    roofline_us: float | None = None
    """The least that the device could take, where its data sheet is known."""
    roofline_share: float | None = None
    """Of the roofline that the layer reaches."""

    @property
    def ok(self) -> bool:
        """Whether the time can be believed. Slower is no failure."""
        return self.verdict not in (SUSPECT, FAILED)

    @property
    def name(self) -> str:
        """All that tells it from the others."""
        return f"{self.case} {self.dtype} {self.pass_} {self.state} over {self.peer}"


@dataclass(frozen=True)
class TimingReport(TableReport):
    """The verdicts on a layer's speed, and how they were come by."""

    form: str
    """"quick" or "full"."""
    note: str
    processes: int
    """Fresh processes that have been run."""
    planned: int
    blocks: int
    """Of each measurement in each process, fixed beforehand."""
    clocks: tuple[str, ...]
    conditions: tuple[dict[str, str], ...]
    """Of the device before each process and after the last."""
    rows: tuple[TimingRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.processes == self.planned and all(row.ok for row in self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """How many rows have each verdict."""
        return dict(Counter(row.verdict for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        rows = [{key.rstrip("_"): value for key, value in row.items()} for row in data.pop("rows")]
        return {**data, "counts": self.counts, "rows": rows}

    def __rich__(self) -> RenderableType:
        roofline = ("roofline",) if any(row.roofline_share is not None for row in self.rows) else ()
        right = ("layer µs", "peer µs", "speedup", "noise", "finds", *roofline)
        table = columns("case", "pass", "cache", "peer", "verdict", *right, right=right)
        for column in table.columns[3:]:
            column.no_wrap = True
        for row in self.rows:
            kind = row.pass_.replace("forward+backward", "fwd+bwd")
            case = row.case if row.dtype == "float32" else f"{row.case} {row.dtype}"
            numbers = ["-"] * len(right)
            if row.speedup is not None and row.layer_us is not None and row.peer_us is not None:
                numbers = [
                    f"{row.layer_us:.1f}",
                    f"{row.peer_us:.1f}",
                    f"{row.speedup:.3f} ({row.speedup_low:.3g}-{row.speedup_high:.3g})",
                    f"{row.floor:.2g}",
                    f"{row.detectable:.2g}",
                    "-" if row.roofline_share is None else f"{row.roofline_share:.0%}",
                ][: len(right)]
            word = Text(row.verdict, style=_STYLES.get(row.verdict, ""))
            table.add_row(case, kind, row.state, row.peer, word, *numbers)
        told = [row for row in self.rows if row.reason and not row.reason.startswith(TOO_SMALL)]
        lines = [f"{row.name}: {row.verdict}: {row.reason}" for row in told]  # the others' is in the table
        head = (
            f"timing, {self.form} form: {self.processes} of {self.planned} fresh processes, {self.blocks} blocks each; "
        )
        head += f"clocks: {', '.join(self.clocks)}"
        end = ", ".join(f"{n} {word}" for word, n in self.counts.items()) or "nothing was timed"
        return Group(head, table, *filter(None, (*lines, self.note, *self.notes)), verdict(self.ok, end))
