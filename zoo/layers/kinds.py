"""The kinds of layers that can be swapped: what each stands for, and how a function that takes its place is called.

The kind "mlp" has no stock layer: it is a unit of several modules that run as one, and its layers are functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.naming import unknown_name

__all__ = ["KINDS", "Kind", "call_of", "functional_of", "kind_of", "stock_kind", "stock_of"]


@dataclass(frozen=True)
class Kind:
    """A kind of layer that can be swapped."""

    arguments: tuple[str, ...]
    """What a layer given as a function is called with: the input, then attributes of the module, or of a unit its
    parameters and activation."""
    stock: type[nn.Module] | None = None
    """The layer it stands for; a swappable layer is a subclass, and shares its parameters and their names. None of a
    unit of several modules (zoo.layers.units)."""
    functional: Callable[..., Tensor] | None = None
    """What code that does the layer's arithmetic itself calls for it. An adapter puts a layer in its place. None where
    zoo adapts no such code."""
    computes: tuple[str, ...] = ("forward",)
    """The methods of the stock layer that compute: a class that has another one is another layer."""
    flops: Callable[[Any, Tensor], int] = lambda module, output: 0
    """Of the stock layer's forward, from the module and the output, as torch counts them (2 M N K a product)."""
    needs_weight: bool = True
    """Whether there is no such layer without a weight."""
    call: Callable[[Any, Tensor], tuple[Any, ...]] | None = None
    """The arguments of a function, from the module and the input, where they are more than its attributes."""


def _conv2d_arguments(module: Any, input: Tensor) -> tuple[Any, ...]:
    """As nn.Conv2d calls F.conv2d: a padding that is not of zeros is done beforehand, and is then (0, 0)."""
    padding = module.padding
    if module.padding_mode != "zeros":
        input = F.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = (0, 0)
    return input, module.weight, module.bias, module.stride, padding, module.dilation, module.groups


KINDS: dict[str, Kind] = {
    "linear": Kind(
        arguments=("input", "weight", "bias"),
        stock=nn.Linear,
        functional=F.linear,
        flops=lambda module, output: 2 * output.numel() * module.in_features,
    ),
    "mlp": Kind(arguments=("input", "weight1", "bias1", "weight2", "bias2", "activation")),
    "layer_norm": Kind(
        arguments=("input", "normalized_shape", "weight", "bias", "eps"),
        stock=nn.LayerNorm,
        functional=F.layer_norm,
        needs_weight=False,
    ),
    "conv2d": Kind(
        arguments=("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        stock=nn.Conv2d,
        computes=("forward", "_conv_forward"),
        flops=lambda module, output: 2 * output.numel() * math.prod(module.weight.shape[1:]),
        call=_conv2d_arguments,
    ),
}


def kind_of(kind: str) -> Kind:
    """The kind of that name. ValueError, with the known ones, where there is none."""
    if kind not in KINDS:
        raise unknown_name("kind of layer", kind, KINDS)
    return KINDS[kind]


def stock_of(kind: str) -> type[nn.Module]:
    """The stock layer of a kind that has one."""
    stock = kind_of(kind).stock
    assert stock is not None, f"{kind} is a kind of unit"
    return stock


def functional_of(kind: str) -> Callable[..., Tensor]:
    """The function that stands for the layer in code that does its arithmetic, of a kind that has one."""
    functional = kind_of(kind).functional
    assert functional is not None, f"no code is adapted to {kind} layers"
    return functional


def stock_kind(module: nn.Module | type[nn.Module]) -> str | None:
    """The kind that a module, or a class of modules, is of, swapped or not; None where it is of none."""
    cls = module if isinstance(module, type) else type(module)
    return next((name for name, kind in KINDS.items() if kind.stock and issubclass(cls, kind.stock)), None)


def call_of(kind: str) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    """What tells, from a module and its input, the arguments of a function in the place of ``module(input)``."""
    known = kind_of(kind)
    attributes = known.arguments[1:]
    return known.call or (lambda module, input: (input, *(getattr(module, attribute) for attribute in attributes)))
