"""Runs a registered layer on weights that some other module hands it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GivenListener", "given_listeners", "layer_as_function", "made_from", "run_given", "unfit"]


class GivenListener(Protocol):
    """Sees each call on given weights; must return what ``call()`` returns."""

    def __call__(self, weights: tuple[Tensor, ...], call: Callable[[], Tensor]) -> Tensor: ...


given_listeners: list[GivenListener] = []
"""Coverage adds one while it watches a forward."""


made_from: ContextVar[Tensor | None] = ContextVar("made_from", default=None)
"""The weight that those which a parent hands on in the meantime are made from."""


def run_given(weights: tuple[Tensor, ...], call: Callable[[], Tensor]) -> Tensor:
    """``call()``, which multiplies by the weights, before those who listen."""
    for listener in tuple(given_listeners):  # other threads add theirs
        call = functools.partial(listener, weights, call)
    return call()


def layer_as_function(layer: type[nn.Module], kind: str = "linear") -> Callable[..., Tensor]:
    """A function to be called in the place of the kind's (``F.linear``): the layer's forward on what it is given."""
    return _FUNCTIONS[kind](layer)


def _linear(layer: type[nn.Module]) -> Callable[..., Tensor]:
    """``f(input, weight, bias=None)``. A vector for a weight, which ``F.linear`` takes too, is no Linear's and stays
    with it."""

    def run(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, columns = weight.shape
        module = _bare(layer, weight=weight, bias=bias, in_features=columns, out_features=rows)
        return layer.forward(module, input)

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() != 2:
            return F.linear(input, weight, bias)
        if torch.compiler.is_compiling() or not given_listeners:
            return run(input, weight, bias)
        return run_given((weight,), functools.partial(run, input, weight, bias))

    return linear


def _layer_norm(layer: type[nn.Module]) -> Callable[..., Tensor]:
    """``f(input, normalized_shape, weight=None, bias=None, eps=1e-5)``."""

    def layer_norm(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        module = _bare(
            layer,
            normalized_shape=tuple(normalized_shape),
            weight=weight,
            bias=bias,
            eps=eps,
            elementwise_affine=weight is not None,
        )
        return layer.forward(module, input)

    return layer_norm


_FUNCTIONS = {"linear": _linear, "layer_norm": _layer_norm}


def _bare(layer: type[nn.Module], **attributes: Any) -> nn.Module:
    """A module only to the layer's forward; made by hand, for a module's own __init__ takes longer than a kernel."""
    module = layer.__new__(layer)
    module.__dict__.update(_parameters={}, _buffers={}, _modules={}, **attributes)
    return module


def unfit(layer: type[nn.Module]) -> str | None:
    """Why a layer cannot run on a given weight, in plain words; or None."""
    if hasattr(layer, "adopt"):
        return "keeps things of its own in the module (adopt)"
    if "training" in _names_of(layer.forward):
        return "asks whether its module is in training"
    return None


def _names_of(forward: Any) -> tuple[str, ...]:
    code = getattr(forward, "__code__", None)
    return code.co_names if isinstance(code, types.CodeType) else ()
