"""``zoo demo``: the main job from end to end, on real data, without network or GPU.

1. resnet50 with custom Linears: its state dict beside torchvision's, then its outputs and gradients on real
   photographs, judged against float64.
2. An MLP trained twice on real digits from one seed, once on torch's Linear and once on zoo's: loss, accuracy and time.

The two trainings go epoch by epoch, in turns (stock, custom, custom, stock, ...), so that whatever else the machine is
doing falls on both; their times are compared epoch with epoch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Group, RenderableType
from torch import Tensor

from zoo.commands.check import CheckReport, check
from zoo.data import digits, top1
from zoo.factory import create
from zoo.preparing import choose_device, resized
from zoo.tables import TableReport, columns, verdict

__all__ = ["DemoReport", "Speed", "Training", "demo", "train_side_by_side"]

SEED, EPOCHS, BATCH, LEARNING_RATE = 0, 12, 64, 1e-3
STEPS, STEP_TOLERANCE = 20, 1e-4
"""So many first steps, the losses of both runs are equal but for rounding; later, training magnifies rounding."""
ACCURACY_TOLERANCE = 0.02
"""Seven of the 360 test images. Two runs that differ by rounding alone differ by one or two."""
LEARNED = 0.9
"""An accuracy that only a model that has learned the digits has."""


@dataclass(frozen=True)
class Training:
    """One training run of the MLP."""

    layers: str
    """"stock" or "custom"."""
    losses: tuple[float, ...]
    """Cross-entropy of each step's batch."""
    accuracy: float
    """On the test digits, 0 to 1."""
    seconds: tuple[float, ...]
    """Of each epoch."""
    final_loss: float
    """Mean of the last epoch's."""


@dataclass(frozen=True)
class Speed:
    """Stock's time over custom's, by paired epochs: above 1 custom is the faster one."""

    ratio: float
    """The median."""
    low: float
    """The first quartile."""
    high: float
    """The third quartile."""

    def __str__(self) -> str:
        spread = f"(half of the epochs within {self.low:.2f} to {self.high:.2f} times stock's speed)"
        if self.low <= 1 <= self.high:
            return f"no difference in speed that this run could show {spread}"
        if self.ratio > 1:
            return f"custom trained {self.ratio:.2f} times as fast {spread}"
        return f"custom trained {1 / self.ratio:.2f} times SLOWER {spread}"


@dataclass(frozen=True)
class DemoReport(TableReport):
    """What :func:`demo` showed. ``ok``: every check holds. Being slower is told, and is no failure."""

    device: str
    check: CheckReport
    stock: Training
    custom: Training
    first_steps: float
    """Largest relative difference of the losses over the first steps."""
    speed: Speed
    seconds: float

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold, in words."""
        found = [] if self.check.ok else [f"resnet50 is not what {self.check.reference} is"]
        if not self.first_steps <= STEP_TOLERANCE:
            found.append(f"the losses part in the first {STEPS} steps, by {self.first_steps:.0e}")
        if not abs(self.stock.accuracy - self.custom.accuracy) <= ACCURACY_TOLERANCE:
            found.append(f"the accuracies differ by over {ACCURACY_TOLERANCE:.0%}")
        learned = {run.layers: run.accuracy >= LEARNED for run in (self.stock, self.custom)}
        found += [f"the {layers} MLP did not learn the digits" for layers, yes in learned.items() if not yes]
        return tuple(found)

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "check": self.check.to_dict(), "failures": list(self.failures)}

    def __rich__(self) -> RenderableType:
        right = ("final loss", "test accuracy", "training time", "per epoch")
        table = columns("Linear", *right, right=right)
        for run in (self.stock, self.custom):
            name = "torch (stock)" if run is self.stock else "zoo (custom)"
            epoch = f"{statistics.median(run.seconds) * 1e3:.1f} ms"
            table.add_row(name, f"{run.final_loss:.5f}", f"{run.accuracy:.2%}", f"{sum(run.seconds):.2f} s", epoch)
        if self.ok:
            end = "VERDICT: the custom Linear computes what torch's does, in resnet50 and through a training"
        else:
            end = f"VERDICT: FAILED: {'; '.join(self.failures)}"
        epochs = len(self.stock.seconds)
        equal = f"equal within {self.first_steps:.0e}" if self.first_steps else "bit-equal"
        return Group(
            "1. resnet50 on two photographs, beside torchvision's",
            "",
            self.check,
            "",
            f"2. mlp 784-256-256-10, trained on 1,437 real digits for {epochs} epochs, tested on 360, one seed",
            table,
            f"first {STEPS} steps: losses {equal}",
            f"time: {self.speed}",
            "",
            verdict(self.ok, f"{end} ({self.seconds:.0f} s on {self.device})"),
        )


def demo(*, device: str = "auto", say: Callable[[str], None] = lambda text: None) -> DemoReport:
    """Do all of it, in about a minute on two cores.

    Args:
        device: "cpu", "cuda", "cuda:N", or "auto" for a GPU if zoo can use one.
        say: called with a line on what comes next.
    """
    started, place = time.perf_counter(), choose_device(device)
    say("resnet50: custom Linears in it, and torchvision's beside it, on two photographs")
    found = check("resnet50", against="torchvision", weights=None, gradients=True, device=str(place), options={})
    say(f"mlp: trained on real digits, stock and custom, {EPOCHS} epochs each")
    stock, custom = train_side_by_side(place, epochs=EPOCHS)
    steps = zip(stock.losses[:STEPS], custom.losses[:STEPS], strict=True)
    return DemoReport(
        device=str(place),
        check=found,
        stock=stock,
        custom=custom,
        first_steps=max(abs(a - b) / abs(a) for a, b in steps),
        speed=speed_of(stock.seconds, custom.seconds),
        seconds=time.perf_counter() - started,
    )


def speed_of(stock: Sequence[float], custom: Sequence[float]) -> Speed:
    """The speed of custom in units of stock's, from seconds of paired epochs (two pairs at least)."""
    low, ratio, high = statistics.quantiles([a / b for a, b in zip(stock, custom, strict=True)], n=4)
    return Speed(ratio, low, high)


def train_side_by_side(device: torch.device, *, epochs: int) -> tuple[Training, Training]:
    """Train the MLP on the digits, as 28 x 28 images, with stock and with custom Linears; the same seed for both."""
    images, labels = digits(train=True).tensors
    images, labels = resized(images, 28).to(device), labels.to(device)
    runs = [_Run(layers, images, labels) for layers in ("stock", "custom")]
    for epoch in range(epochs):
        for run in runs if epoch % 2 == 0 else reversed(runs):
            run.epoch()
    test, answers = digits(train=False).tensors
    accuracies = top1({run.layers: run.model for run in runs}, [(resized(test, 28), answers)])
    stock, custom = (run.result(accuracies[run.layers]) for run in runs)
    return stock, custom


class _Run:
    """A training in progress."""

    def __init__(self, layers: str, images: Tensor, labels: Tensor) -> None:
        self.layers, self.images, self.labels = layers, images, labels
        torch.manual_seed(SEED)
        self.model = create("mlp", custom_linear=layers == "custom").to(images.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.order = torch.Generator().manual_seed(SEED)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._loss(slice(BATCH)).backward()  # what a first call has to set up is not training time

    def epoch(self) -> None:
        """Go once through the images, in an order that the seed decides."""
        batches = torch.randperm(len(self.images), generator=self.order).to(self.images.device).split(BATCH)
        self._finish()
        started = time.perf_counter()
        losses = [self._step(batch) for batch in batches]
        self._finish()
        self.seconds.append(time.perf_counter() - started)
        self.losses += torch.stack(losses).tolist()

    def result(self, accuracy: float) -> Training:
        """What has come of it."""
        steps = len(self.losses) // len(self.seconds)
        final_loss = statistics.fmean(self.losses[-steps:])
        return Training(self.layers, tuple(self.losses), accuracy, tuple(self.seconds), final_loss)

    def _step(self, batch: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _loss(self, batch: Tensor | slice) -> Tensor:
        return F.cross_entropy(self.model(self.images[batch]), self.labels[batch])

    def _finish(self) -> None:
        if self.images.is_cuda:
            torch.cuda.synchronize(self.images.device)
