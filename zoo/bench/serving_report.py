"""What ``bench_serving`` reports: a row for each model, mode, peer and batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import RenderableType

from zoo.bench.document import BenchReport, spread
from zoo.machine import Machine
from zoo.tables import columns

__all__ = ["ServeReport", "ServeRow"]


@dataclass(frozen=True)
class ServeRow:
    """Latencies of a model with zoo's Linears beside the stock one's. Numbers are None where nothing was measured.

    A latency is the time from the call to the logits' being there, in microseconds, the images already on the device;
    ``p50``, ``p90`` and ``p99`` are percentiles over the calls.
    """

    model: str
    mode: str
    """"fp32", "tf32" (float32 with ``torch.set_float32_matmul_precision("high")``) or "bf16" (autocast)."""
    peer: str
    """"eager", or "compiled" (``torch.compile(mode="reduce-overhead")``): then zoo's side is compiled as well."""
    batch: int
    """Images of a request."""
    image: int
    zoo_p50_us: float | None = None
    zoo_p90_us: float | None = None
    zoo_p99_us: float | None = None
    peer_p50_us: float | None = None
    peer_p90_us: float | None = None
    peer_p99_us: float | None = None
    speedup: float | None = None
    """peer_p50_us / zoo_p50_us."""
    speedup_low: float | None = None
    """Of its 95% interval, a bootstrap over the calls."""
    speedup_high: float | None = None
    calls: int | None = None
    """Of each side, that the percentiles are of; of fewer than 100 the 99th is the slowest."""
    cuda_graphs: bool | None = None
    """Whether both sides were replayed from CUDA graphs, as torch counts it; None where none were asked for."""
    custom_share: float | None = None
    """Of the forward's FLOPs, what ran through zoo's Linears in one forward apart, uncompiled."""
    zoo_error: float | None = None
    """Of the logits, from those of the stock model in float64: relative (Frobenius), of all requests, before and after
    the timing."""
    peer_error: float | None = None
    eager_error: float | None = None
    """Of the stock model's in the same mode, run eagerly."""
    failure: str = ""
    """What was wrong or could not be done; empty if all is well."""

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclass(frozen=True)
class ServeReport(BenchReport):
    """What :func:`zoo.bench.bench_serving` measured. ``ok``: all could be measured, and the logits agree.

    Being slower is told, and is no failure.
    """

    machine: Machine
    command: str
    seed: int
    convolutions_tf32: bool
    """``torch.backends.cudnn.allow_tf32``, which is left as it is, for both sides and in every mode."""
    rows: tuple[ServeRow, ...]
    complete: bool = True
    """Whether all that was asked for has been measured."""
    schema: int = field(default=2)
    """Version of this document's form."""

    def __rich__(self) -> RenderableType:
        right = ("batch", "zoo ms: p50", "p90", "p99", "torch ms: p50", " p90", " p99", "speedup")
        table = columns("model", "mode", "peer", *right, right=right)
        for row in self.rows:
            what = (row.model, row.mode, row.peer, str(row.batch))
            if row.speedup is None:
                table.add_row(*what, *["-"] * (len(right) - 1))
                continue
            taken = (row.zoo_p50_us, row.zoo_p90_us, row.zoo_p99_us, row.peer_p50_us, row.peer_p90_us, row.peer_p99_us)
            table.add_row(*what, *(f"{us / 1e3:.3g}" for us in taken if us is not None), spread(row))
        return self.around(
            table,
            right="all outputs agree",
            name=lambda row: f"{row.model} {row.mode} {row.peer} batch {row.batch}",
        )
