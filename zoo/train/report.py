"""What a training run came to, and what two of them, stock and custom, came to side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from zoo.tables import TableReport, columns, rows, verdict

__all__ = ["CompareReport", "Curve", "TrainReport"]


@dataclass(frozen=True)
class TrainReport(TableReport):
    """A run that reached its end; one that did not is an error."""

    model: str
    data: str
    layers: str
    """"stock" or "custom"."""
    device: str
    steps: int
    """Of the optimizer, from the beginning."""
    resumed_from: int | None
    """The step of the checkpoint that it went on from."""
    images: int
    """Trained on in this call."""
    seconds: float
    """Of training in this call, without the evaluations."""
    loss: float
    """Mean over the last epoch."""
    accuracy: float
    """Top-1 on the test part at the end, 0 to 1; of the averaged weights where there are such."""
    best_accuracy: float
    best_step: int
    corrupt: int
    """Images that were replaced in this call."""
    folder: str

    @property
    def ok(self) -> bool:
        return True

    def __rich__(self) -> RenderableType:
        table = rows()
        rate = f", {self.images / self.seconds:,.0f} images/s" if self.images else ""
        resumed = "" if self.resumed_from is None else f", resumed from step {self.resumed_from}"
        table.add_row("trained", f"{self.steps} steps{resumed}; {self.seconds:.1f} s here{rate}")
        table.add_row("loss", f"{self.loss:.4f}, the last epoch's mean")
        table.add_row("top-1", f"{self.accuracy:.2%}; best {self.best_accuracy:.2%} at step {self.best_step}")
        if self.corrupt:
            table.add_row("replaced", f"{self.corrupt} images that cannot be read; the log names them")
        table.add_row("files", f"{self.folder}: final.safetensors, best.safetensors, log.jsonl, config.toml")
        return Group(f"{self.model}, {self.layers} layers, on {self.data}, on {self.device}", table)


@dataclass(frozen=True)
class Curve:
    """Losses and accuracies of a run, each with its step."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """Mean over the steps since the one before."""
    evaluated: tuple[int, ...]
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class CompareReport(TableReport):
    """Stock and custom, trained from one seed in one order.

    ``ok``: the losses of the first steps are equal but for rounding. With autocast that is not judged, and accuracies
    are not either: what one seed says of them is no proof.
    """

    stock: TrainReport
    custom: TrainReport
    stock_curve: Curve
    custom_curve: Curve
    first_steps: int
    """So many steps are judged."""
    difference: float
    """Largest relative difference of their losses."""
    tolerance: float | None
    """None: not judged."""

    @property
    def ok(self) -> bool:
        return self.tolerance is None or self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "stock": self.stock.to_dict(), "custom": self.custom.to_dict()}

    def __rich__(self) -> RenderableType:
        right = ("loss", "top-1", "best", "images/s")
        table = columns("layers", *right, right=right)
        curve = columns("step", "stock", "custom", right=("step", "stock", "custom"), title="top-1")
        for run in (self.stock, self.custom):
            rate = f"{run.images / run.seconds:,.0f}" if run.images else "-"
            table.add_row(run.layers, f"{run.loss:.4f}", f"{run.accuracy:.2%}", f"{run.best_accuracy:.2%}", rate)
        both = zip(self.stock_curve.evaluated, self.stock_curve.accuracies, self.custom_curve.accuracies, strict=True)
        for step, stock, custom in both:
            curve.add_row(str(step), f"{stock:.2%}", f"{custom:.2%}")
        apart = f"within {self.difference:.0e}" if self.difference else "to the bit"
        end = f"losses of the first {self.first_steps} steps are equal {apart}"
        if self.tolerance is None:
            end += "; with autocast this is not judged"
        elif not self.ok:
            end = f"losses of the first {self.first_steps} steps part by {self.difference:.0e}, over {self.tolerance}"
        points = 100 * (self.custom.accuracy - self.stock.accuracy)
        return Group(
            f"{self.stock.model} on {self.stock.data}, on {self.stock.device}, one seed",
            table,
            curve,
            f"custom's top-1 is {points:+.2f} points beside stock's (one seed: no proof of anything)",
            verdict(self.ok, end),
        )
