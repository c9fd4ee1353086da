"""``zoo parity``: the top-1 accuracy of a model with stock and with custom layers, on real images."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms.functional import to_tensor

from zoo.commands.output import progress
from zoo.data import digits, fashion_mnist, image_folder, top1
from zoo.parity import ParityReport, parity
from zoo.preparing import channels_of, choose_device, input_side, make, resized, transform_for
from zoo.swap import SwapReport, patch
from zoo.tables import TableReport, columns, verdict

__all__ = ["AccuracyReport", "compare"]

BUILT_IN = ("digits", "fashion_mnist")
_PROBE = 8
"""Images that the float64 comparison is made on."""


@dataclass(frozen=True)
class AccuracyReport(TableReport):
    """What :func:`compare` found.

    ``ok``: the outputs on the first images agree as float arithmetic allows, and no prediction changed other than where
    stock's two classes are as near to each other as its rounding errors are.
    """

    model: str
    weights: str | None
    data: str
    images: int
    device: str
    stock_top1: float
    """Fraction of the images."""
    custom_top1: float
    stock_seconds: float
    """Of the forward passes alone."""
    custom_seconds: float
    changed: int
    """Images whose prediction is another one."""
    unexplained: int
    """Of those, the ones that rounding does not explain."""
    swap: SwapReport
    parity: ParityReport

    @property
    def ok(self) -> bool:
        return self.parity.ok and self.unexplained == 0

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "swap": self.swap.to_dict(), "parity": self.parity.to_dict()}

    def __rich__(self) -> RenderableType:
        weights = f"weights {self.weights}" if self.weights else "fresh weights"
        table = columns("layers", "top-1", "forward", "a second", right=("top-1", "forward", "a second"))
        for layers, accuracy, seconds in (
            ("stock", self.stock_top1, self.stock_seconds),
            ("custom", self.custom_top1, self.custom_seconds),
        ):
            table.add_row(layers, f"{accuracy:.2%}", f"{seconds:.2f} s", f"{self.images / seconds:.0f} images")
        if not self.changed:
            changed = "every prediction is the same"
        else:
            changed = f"{self.changed} of {self.images} predictions differ, {self.unexplained} by more than rounding"
        end = "parity holds" if self.ok else "parity does NOT hold"
        return Group(
            f"{self.model}, {weights}, on {self.images} images of {self.data}, on {self.device}",
            str(self.swap),
            table,
            str(self.parity),
            "",
            verdict(self.ok, f"{end}: {changed}"),
        )


def compare(
    name: str,
    *,
    data: str,
    weights: str | None,
    limit: int | None,
    batch_size: int,
    size: int | None,
    device: str,
    options: Mapping[str, Any],
) -> AccuracyReport:
    """Run the model with stock and with custom layers over the images of ``data``, with progress on stderr.

    Args: as the command's, see ``zoo parity --help``. ValueError or FileNotFoundError for what does not go together.
    """
    place = choose_device(device)
    if data in BUILT_IN and weights is None:
        options = {"num_classes": 10, **options}
    stock = make(name, options, weights=weights, device=place).eval()
    images: Any = _images(name, stock, weights, data, size)
    if limit is not None and limit < len(images):
        images = Subset(images, [i * len(images) // limit for i in range(limit)])
    loader = DataLoader(images, batch_size=batch_size)
    first = torch.stack([images[i][0] for i in range(min(_PROBE, len(images)))]).to(place)
    custom = copy.deepcopy(stock)
    swap = patch(custom, example=first)
    agreement = parity(custom, stock, first)
    # Two logits of each model may be off by as much as parity allows before one passes the other.
    watch = _Watch(tie=4 * max(entry.max_limit for entry in agreement.entries))
    with progress() as bar, watch.on(stock, custom):
        found = top1({"stock": stock, "custom": custom}, loader, progress=lambda b: bar.track(b, description=name))
    return AccuracyReport(
        model=name,
        weights=weights,
        data=data,
        images=len(images),
        device=str(place),
        stock_top1=found["stock"],
        custom_top1=found["custom"],
        stock_seconds=watch.seconds["stock"],
        custom_seconds=watch.seconds["custom"],
        changed=watch.changed,
        unexplained=watch.unexplained,
        swap=swap,
        parity=agreement,
    )


class _Watch:
    """Times the forwards of two models that are called in turn on the same images, and compares their predictions."""

    def __init__(self, *, tie: float) -> None:
        self.tie = tie
        self.seconds = {"stock": 0.0, "custom": 0.0}
        self.changed = self.unexplained = 0
        self._started = 0.0
        self._logits = torch.empty(0)

    @contextlib.contextmanager
    def on(self, stock: nn.Module, custom: nn.Module) -> Iterator[None]:
        def before(module: nn.Module, args: Any) -> None:
            _finish(args[0])
            self._started = time.perf_counter()

        def after(module: nn.Module, args: Any, logits: Tensor) -> None:
            _finish(logits)
            self.seconds["stock" if module is stock else "custom"] += time.perf_counter() - self._started
            if module is stock:
                self._logits = logits
            else:
                self._compare(self._logits, logits)

        hooks = [
            h for m in (stock, custom) for h in (m.register_forward_pre_hook(before), m.register_forward_hook(after))
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _compare(self, stock: Tensor, custom: Tensor) -> None:
        ours, theirs = custom.argmax(1, keepdim=True), stock.argmax(1, keepdim=True)
        changed = ours != theirs
        # a NaN gap is no tie
        tie = stock.gather(1, theirs) - stock.gather(1, ours) <= self.tie
        self.changed += int(changed.sum())
        self.unexplained += int((changed & ~tie).sum())


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _images(name: str, model: nn.Module, weights: str | None, data: str, size: int | None) -> Dataset[Any]:
    if data == "photos":
        raise ValueError(f"photos have no classes to be right about; `zoo check {name}` compares the outputs on them")
    transform = transform_for(name, model, weights)
    if data in BUILT_IN:
        images = digits(train=False) if data == "digits" else fashion_mnist(train=False, transform=to_tensor)
        return Grey(images, side=size or input_side(model, transform), channels=channels_of(model))
    if size is not None:
        raise ValueError(f"--size is for {' and '.join(BUILT_IN)}; a folder's photographs are cut as the model asks")
    if not Path(data).is_dir():
        raise ValueError(
            f"data {data!r}: there is no such folder; expected a folder of images, {' or '.join(BUILT_IN)}"
        )
    return image_folder(data, transform=transform)


class Grey(Dataset[tuple[Tensor, int]]):
    """Grey images (1, H, W) in [0, 1] as a model takes them: (channels, side, side), the channels equal."""

    def __init__(self, images: Dataset[Any], *, side: int | None, channels: int) -> None:
        self.images, self.side, self.channels = images, side, channels

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        if self.side is not None and image.shape[-1] != self.side:
            image = resized(image, self.side)
        return image.expand(self.channels, -1, -1), int(label)
