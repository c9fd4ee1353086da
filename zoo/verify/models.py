"""Whole models for a layer to be tried in: the stock one, and the layer put into a copy of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bypass import weights_read_past_forward
from zoo.layers.kinds import kind_of
from zoo.layers.registry import registered
from zoo.preparing import make, real_inputs
from zoo.swap import patch
from zoo.sweep.inputs import smallest_shape
from zoo.verify.outcome import Untested
from zoo.verify.subject import Subject
from zoo.verify.target import build

__all__ = ["Swap", "small_model", "stock_model", "swapped"]

LEAST_SIDE = 64
"""Pixels of the images that a model is trained on, where it takes that few: a last stage of 2 x 2 values."""


@dataclass(frozen=True)
class Swap:
    """What was put into a model."""

    names: tuple[str, ...]
    """Of the modules that are the layer now."""
    built: str = ""
    """Why the layer was built anew and put in the stock modules' places; empty where zoo.patch did it, in place."""


def stock_model(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A stock model in training mode, and real images for it (N, C, H, W).

    Its fresh weights depend on torch's seed, which stays what it is: another call gives the same.
    """
    model = _made(name, {}, device)
    return model, real_inputs(name, model).to(device)


def small_model(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """As :func:`stock_model`, for smaller images where the model takes or can be built for them."""
    model, images = stock_model(name, device)
    if getattr(model, "in_features", None) is not None or images.shape[-1] <= LEAST_SIDE:
        return model, images
    side = LEAST_SIDE
    if (getattr(model, "pretrained_cfg", None) or {}).get("fixed_input_size"):
        try:
            model = _made(name, {"img_size": side}, device)
        except Exception:  # libraries refuse an option in many ways
            return model, images
    else:
        side = max(side, smallest_shape(model.eval(), tuple(images.shape[1:]))[-1])
    small = F.interpolate(images, (side, side), mode="area")
    return model.train(), torch.cat([small, small.flip(-1)])  # twice as many, for the sake of BatchNorm


def _made(name: str, options: dict[str, Any], device: torch.device) -> nn.Module:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    with torch.random.fork_rng(devices=[]):
        model = make(name, options, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


@contextlib.contextmanager
def swapped(model: nn.Module, s: Subject) -> Iterator[Swap]:
    """Put the layer under test into a model, in place; whatever is patched stays patched after.

    By zoo.patch, where the layer can be registered and needs no more than the stock layer has, or what its ``adopt``
    adds. Else a layer is built for each stock one, with its weights, and takes its place.

    Raises:
        Untested: the model has no layer that can be swapped.
    """
    why = _unpatchable(s)
    if why:
        yield _used(Swap(_rebuilt(model, s, why), why), s)
        return
    with registered(s.kind, s.layer) as name:
        yield _used(Swap(patch(model, s.kind, layer=name).swapped), s)


def _used(swap: Swap, s: Subject) -> Swap:
    if not swap.names:
        raise Untested(f"the model has no {s.kind} layer that can be swapped")
    return swap


def _unpatchable(s: Subject) -> str:
    stock = kind_of(s.kind).stock
    own_init = stock is not None and isinstance(s.layer, type) and s.layer.__init__ is not stock.__init__  # type: ignore[misc]
    if own_init and not hasattr(s.layer, "adopt"):
        return "it has an __init__ of its own and no adopt(), so that a module cannot become one in place"
    try:
        with registered(s.kind, s.layer):
            return ""
    except ValueError as error:
        return str(error)


def _rebuilt(model: nn.Module, s: Subject, why: str) -> tuple[str, ...]:
    if s.kind != "linear":
        raise Untested(f"{why}, and a {s.kind} layer is not built anew for a model")
    past = weights_read_past_forward(model)
    chosen = [(n, m) for n, m in model.named_modules() if n and type(m) is nn.Linear and m not in past]
    for name, stock in chosen:
        where: dict[str, Any] = {"device": stock.weight.device, "dtype": stock.weight.dtype}
        layer = build(s.layer, stock.in_features, stock.out_features, bias=stock.bias is not None, **where)
        layer.load_state_dict(stock.state_dict())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.train(stock.training))
    return tuple(name for name, _ in chosen)
