"""What a model learns with the layer in it, and what a trained one says of real images."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from zoo.judging import PEAK_RATIO, SMALL, Entry, Measure, judge
from zoo.parity import HOPELESS, RESAMPLES
from zoo.passes import jittered, named_tensors, twin_of
from zoo.verify.models import small_model, swapped
from zoo.verify.outcome import Broken, Untested
from zoo.verify.subject import Subject, measures, saying
from zoo.verify.trained import trained

__all__ = ["STEPS", "adamw", "cross_entropy", "sgd", "sgd_autocast", "top1"]

STEPS = 20
BUDGET = 75.0
"""Seconds; a model that is too slow for it says nothing about the layer."""
_SEED = 5

Optimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
Measures = dict[str, "Measure | None"]


def sgd(s: Subject, name: str) -> None:
    _trains_alike(s, name, _SGD)


def sgd_autocast(s: Subject, name: str) -> None:
    _trains_alike(s, name, _SGD, half=True)


def adamw(s: Subject, name: str) -> None:
    # eps: a gradient that is zero but for rounding, as that of a key's bias in attention, shall not become a step
    _trains_alike(s, name, functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-5))


_SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def _trains_alike(s: Subject, name: str, optimizer: Optimizer, *, half: bool = False) -> None:
    stock, images = small_model(name, s.device)
    begun = took = time.monotonic()
    for _ in range(2):  # the first has things to set up
        took = time.monotonic()
        _learnt(twin_of(stock, torch.float64), images.double(), optimizer, steps=1)
    if (took := time.monotonic() - took) * STEPS > BUDGET / 2:
        raise Untested(f"a step of the stock model in float64 takes {took:.1f} s; {STEPS} would take too long")
    custom = copy.deepcopy(stock)
    exact = _learnt(twin_of(stock, torch.float64), images.double(), optimizer)
    with swapped(custom, s):
        got = measures("", _learnt(custom, images, optimizer, half=half), exact)
    want = measures("", _learnt(copy.deepcopy(stock), images, optimizer, half=half), exact)
    entries = judge("value", got, want)
    rounding = torch.finfo(torch.bfloat16 if half else torch.float32).eps
    for moved in _moved(stock, images, rounding):
        if not _in_doubt(entries):
            break
        if time.monotonic() - begun > BUDGET:
            raise Untested(f"in doubt after {BUDGET:g} s, in which the stock model was to show how far rounding leads")
        want = _larger(want, measures("", _learnt(*moved, optimizer, half=half), exact))
        entries = judge("value", got, want)
    if wrong := [entry for entry in entries if not entry.ok]:
        first = next((e for e in wrong if e.name == "losses"), None) or max(wrong, key=lambda e: e.excess)
        raise Broken(f"{len(wrong)} of {len(entries)} are wrong after {STEPS} steps, {saying(first)}")


def _learnt(
    model: nn.Module, images: Tensor, optimizer: Optimizer, *, steps: int = STEPS, half: bool = False
) -> dict[str, Tensor]:
    """The losses of the steps, and all that the state dict holds after them."""
    model.train()
    for module in model.modules():
        # the one drops other values in float64, and the other is timm's of whole paths
        if isinstance(module, _DropoutNd) or type(module).__name__ == "DropPath":
            module.eval()
    chosen = optimizer(p for p in model.parameters() if p.requires_grad)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
            loss = cross_entropy(model, images)
        loss.backward()
        chosen.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **{f"{n} (weights)": v for n, v in model.state_dict().items()}}


def cross_entropy(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of a model's first output (N, classes) against fixed classes, different ones for each image."""
    _, logits = next(named_tensors(model(images), "output"))
    labels = torch.arange(len(images), device=logits.device) * 7 % logits.shape[-1]
    return F.cross_entropy(logits, labels)


def _moved(stock: nn.Module, images: Tensor, rounding: float) -> Iterator[tuple[nn.Module, Tensor]]:
    """The stock model and its images, moved at random by about a rounding: what training makes of one."""
    generator = torch.Generator().manual_seed(_SEED)
    for _ in range(RESAMPLES):
        moved = copy.deepcopy(stock)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.copy_(jittered(parameter, generator, rounding))
        yield moved, jittered(images, generator, rounding)


def _in_doubt(entries: Iterable[Entry]) -> bool:
    failing = [entry for entry in entries if not entry.ok]
    sizes = {entry.name: torch.Size(entry.shape).numel() for entry in failing}
    return bool(failing) and not any(e.excess > HOPELESS and sizes[e.name] >= SMALL for e in failing)


def _larger(one: Measures, other: Measures) -> Measures:
    pairs = {name: (measure, other.get(name)) for name, measure in one.items()}
    return {name: a if a is None or b is None else a.at_least(b) for name, (a, b) in pairs.items()}


def top1(s: Subject, name: str) -> None:
    """Predictions may differ only where the stock model's two classes are as near as its rounding errors are."""
    stock, images, labels = trained(name, s.device)
    custom = copy.deepcopy(stock)
    with torch.no_grad(), swapped(custom, s):
        want, exact = stock(images), twin_of(stock, torch.float64)(images.double())
        got = custom(images)
    if got.shape != want.shape:
        raise Broken(f"logits: got shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    off = float((want.double() - exact).abs().max())
    least = torch.finfo(want.dtype).eps * float(exact.abs().max())
    tie = 2 * PEAK_RATIO * max(off, least)
    if not float((want.argmax(1) == labels).double().mean()) > 0.5:
        raise Untested(f"the weights of {name} that are here name fewer than half of the images rightly")
    changed = (got.argmax(1) != want.argmax(1)).nonzero().flatten()
    gap = want.gather(1, want.argmax(1)[:, None]) - want.gather(1, got.argmax(1)[:, None])
    unexplained = [int(i) for i in changed if not float(gap[i]) <= tie]
    if unexplained or bool(got.isnan().any()):
        right, of_stock = (int((logits.argmax(1) == labels).sum()) for logits in (got, want))
        raise Broken(
            f"{len(unexplained)} of {len(images)} predictions are other ones, by more than rounding; "
            f"{right} are right, and {of_stock} of the stock model's"
        )
