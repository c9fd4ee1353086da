"""What ``bench_model`` reports: a row for each model, mode, phase and peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import RenderableType

from zoo.bench.document import BenchReport, spread
from zoo.machine import Machine
from zoo.tables import columns

__all__ = ["ModelReport", "ModelRow"]


@dataclass(frozen=True)
class ModelRow:
    """A model with zoo's Linears beside the stock one. Numbers are None where nothing could be measured."""

    model: str
    mode: str
    """"fp32", "tf32" (float32 with ``torch.set_float32_matmul_precision("high")``) or "bf16" (autocast)."""
    phase: str
    """"train": forward, cross entropy, backward and a step of SGD. "infer": the forward in eval mode."""
    peer: str
    """"eager", or "compiled": then zoo's side is compiled as well."""
    batch: int
    image: int
    zoo_img_s: float | None = None
    peer_img_s: float | None = None
    speedup: float | None = None
    """zoo_img_s / peer_img_s."""
    speedup_low: float | None = None
    """Of its 95% interval, a bootstrap over the blocks."""
    speedup_high: float | None = None
    custom_share: float | None = None
    """Of the forward's FLOPs, what ran through zoo's Linears in one forward apart, uncompiled."""
    zoo_peak_bytes: int | None = None
    """The most that one step allocated beside what lay there before it; None on the CPU."""
    peer_peak_bytes: int | None = None
    zoo_loss: float | None = None
    """Of the last step that was timed; both sides have made as many, on the same data."""
    peer_loss: float | None = None
    loss_difference: float | None = None
    """Relative."""
    output_difference: float | None = None
    """Of the first step's logits, whose weights are equal: relative (Frobenius)."""
    steps: int | None = None
    """In a block."""
    blocks: int | None = None
    failure: str = ""
    """What was wrong or could not be done; empty if all is well."""

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclass(frozen=True)
class ModelReport(BenchReport):
    """What :func:`zoo.bench.bench_model` measured. ``ok``: all could be measured, and logits and losses agree.

    Being slower is told, and is no failure.
    """

    machine: Machine
    command: str
    seed: int
    convolutions_tf32: bool
    """``torch.backends.cudnn.allow_tf32``, which is left as it is, for both sides and in every mode."""
    rows: tuple[ModelRow, ...]
    complete: bool = True
    """Whether all that was asked for has been measured."""
    schema: int = field(default=1)
    """Version of this document's form."""

    def __rich__(self) -> RenderableType:
        right = ("zoo img/s", "peer img/s", "speedup", "custom", "zoo peak", "peer peak", "output differs")
        table = columns("model", "mode", "phase", "peer", *right, right=right)
        for row in self.rows:
            what = (row.model, row.mode, row.phase, row.peer)
            if row.speedup is None:
                table.add_row(*what, *["-"] * len(right))
                continue
            table.add_row(
                *what,
                f"{row.zoo_img_s:.1f}",
                f"{row.peer_img_s:.1f}",
                spread(row),
                f"{row.custom_share:.1%}",
                _gib(row.zoo_peak_bytes),
                _gib(row.peer_peak_bytes),
                f"{row.output_difference:.0e}",
            )
        return self.around(
            table,
            right="all outputs and losses agree",
            name=lambda row: f"{row.model} {row.mode} {row.phase} {row.peer}",
        )


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"
