"""What ``bench_linear`` reports: a row for each measurement and peer."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import RenderableType

from zoo.bench.document import BenchReport, spread
from zoo.machine import Machine
from zoo.tables import columns

__all__ = ["LinearReport", "LinearRow", "Summary", "geometric_mean"]


@dataclass(frozen=True)
class LinearRow:
    """zoo's Linear beside one peer. Numbers are None where nothing could be measured.

    Times are medians in microseconds a call; errors are relative (Frobenius) against float64, in forward + backward the
    largest of y, dx, dw and db.
    """

    case: str
    M: int
    K: int
    N: int
    dtype: str
    precision: str
    """Of float32's products: ``torch.get_float32_matmul_precision()`` during the measurement."""
    activation: str | None
    pass_: str
    """"forward" or "forward+backward"; "pass" in the JSON."""
    peer: str
    """"eager" or "compiled"."""
    kernel: str
    """What :func:`zoo.ops.explain` names."""
    zoo_us: float | None = None
    peer_us: float | None = None
    speedup: float | None = None
    """peer_us / zoo_us."""
    speedup_low: float | None = None
    """Of its 95% interval, a bootstrap over the repetitions."""
    speedup_high: float | None = None
    zoo_err: float | None = None
    """On normal data, of the outputs of the calls that were timed."""
    peer_err: float | None = None
    zoo_err_positive: float | None = None
    """On data that is all positive, of one call apart."""
    peer_err_positive: float | None = None
    zoo_host_us: float | None = None
    """The host's time for an eager call; None on the CPU, and where the device's time is so long that it hides it."""
    peer_host_us: float | None = None
    zoo_flop_share: float | None = None
    """zoo's FLOP/s over the peak of the device in this dtype; None where the device is not known."""
    zoo_byte_share: float | None = None
    """Each operand and result once, a second, over the bandwidth of the device's memory."""
    clock: str | None = None
    """"graph" (replays), "events" (eager launches) or "wall" (the CPU)."""
    clock_note: str = ""
    """Why it is not "graph" on a GPU."""
    sets: int | None = None
    """Buffer sets that were rotated."""
    repeats: int | None = None
    failure: str = ""
    """What was wrong or could not be done; empty if all is well."""

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclass(frozen=True)
class Summary:
    """Rows of one kind together."""

    dtype: str
    precision: str
    pass_: str
    peer: str
    activation: bool
    rows: int
    speedup: float
    """The geometric mean."""
    least: float
    least_case: str


@dataclass(frozen=True)
class LinearReport(BenchReport):
    """What :func:`zoo.bench.bench_linear` measured. ``ok``: all could be measured, and every output was right.

    Being slower is told, and is no failure.
    """

    machine: Machine
    command: str
    precision: tuple[str, ...]
    """The settings of float32's products that were asked for."""
    seed: int
    rows: tuple[LinearRow, ...]
    complete: bool = True
    """Whether all that was asked for has been measured."""
    schema: int = field(default=1)
    """Version of this document's form."""

    def summaries(self) -> Iterator[Summary]:
        """Geometric means by dtype, precision, pass and peer, with an activation and without apart."""
        groups: dict[tuple[str, str, str, str, bool], list[LinearRow]] = defaultdict(list)
        for row in self.rows:
            if row.speedup is not None:
                groups[row.dtype, row.precision, row.pass_, row.peer, row.activation is not None].append(row)
        for key, rows in groups.items():
            speedups = {row.case: row.speedup for row in rows if row.speedup is not None}
            least = min(speedups, key=speedups.__getitem__)
            yield Summary(*key, len(rows), geometric_mean(speedups.values()), speedups[least], least)

    def __rich__(self) -> RenderableType:
        right = ("zoo µs", "peer µs", "speedup", "zoo error", "peer error")
        table = columns("case", "dtype", "pass", "peer", *right, "kernel", right=right)
        for row in self.rows:
            dtype = row.dtype if row.precision == "highest" else f"{row.dtype} {row.precision}"
            what = (row.case, dtype, row.pass_.replace("forward+backward", "fwd+bwd"), row.peer)
            if row.speedup is None:
                table.add_row(*what, *["-"] * 5, row.kernel)
                continue
            numbers = (
                f"{row.zoo_us:.1f}",
                f"{row.peer_us:.1f}",
                spread(row),
                _error(row.zoo_err),
                _error(row.peer_err),
            )
            table.add_row(*what, *numbers, row.kernel)
        means = columns("together", "rows", "geometric mean", "least", right=("rows", "geometric mean", "least"))
        for s in self.summaries():
            dtype = s.dtype if s.precision == "highest" else f"{s.dtype} {s.precision}"
            name = f"{dtype}, {s.pass_}, {'with' if s.activation else 'without'} activation, over {s.peer}"
            means.add_row(name, str(s.rows), f"{s.speedup:.2f}x", f"{s.least:.2f}x {s.least_case}")
        return self.around(
            table,
            means,
            right="every output right",
            name=lambda row: f"{row.case} {row.dtype} {row.pass_} {row.peer}",
        )


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    return statistics.geometric_mean(values)


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
