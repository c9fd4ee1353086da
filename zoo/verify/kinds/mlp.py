"""The suite of the mlp unit. ``Case.size`` is (hidden_features, out_features, activation)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.kinds import call_of
from zoo.verify.case import Case
from zoo.verify.kinds.linear import wrong_inputs
from zoo.verify.kinds.suite import NO_BIAS, Cases, Suite, WithFunction

if TYPE_CHECKING:
    from zoo.verify.subject import Subject

__all__ = ["MLP", "Unit"]

_arguments = call_of("mlp")

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Unit(nn.Module):
    """Two Linears and the activation between them, by torch's functions; initialised as nn.Linear is."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        activation: str,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        for number, rows, columns in ((1, hidden_features, in_features), (2, out_features, hidden_features)):
            bound = 1 / math.sqrt(columns)
            weight = torch.empty(rows, columns, device=device, dtype=dtype).uniform_(-bound, bound)
            self.register_parameter(f"weight{number}", nn.Parameter(weight))
            vector = torch.empty(rows, device=device, dtype=dtype).uniform_(-bound, bound) if bias else None
            self.register_parameter(f"bias{number}", None if vector is None else nn.Parameter(vector))

    def forward(self, input: Tensor) -> Tensor:
        x, weight1, bias1, weight2, bias2, activation = _arguments(self, input)
        return F.linear(ACTIVATIONS[activation](F.linear(x, weight1, bias1)), weight2, bias2)


class Functional(WithFunction, Unit):
    """A unit that computes with a function of (input, weight1, bias1, weight2, bias2, activation)."""

    def forward(self, input: Tensor) -> Tensor:
        return self.function(*_arguments(self, input))


def _values(s: Subject, gradients: tuple[str, ...] = ()) -> list[Case]:
    cases = [
        Case(f"(64, 192)->256->96, {name}", s.randn(64, 192), (256, 96, name), gradients=gradients)
        for name in ACTIVATIONS
    ]
    return [
        *cases,
        Case("(2, 50, 96)->384->96, gelu", s.randn(2, 50, 96), (384, 96, "gelu"), gradients=gradients),
        Case("(130, 64)->32->10, relu", s.randn(130, 64), (32, 10, "relu"), gradients=gradients),
    ]


def _edges(s: Subject) -> list[Case]:
    return [
        Case("(1, 64)->48->32", s.randn(1, 64), (48, 32, "gelu")),
        Case("(0, 64)->48->32", s.randn(0, 64), (48, 32, "relu")),
        Case("(3, 1)->5->1", s.randn(3, 1), (5, 1, "silu")),
        Case("(33, 63)->127->65", s.randn(33, 63), (127, 65, "gelu_tanh")),
        Case("(40, 17)->1->3", s.randn(40, 17), (1, 3, "gelu")),
        Case("(96,)->40->24, one vector", s.randn(96), (40, 24, "relu")),
        Case("(2, 0, 64)->48->32", s.randn(2, 0, 64), (48, 32, "gelu")),
    ]


def _no_bias(s: Subject) -> list[Case]:
    wanted = s.suite.all
    return [Case(f"without biases, {a}", s.randn(64, 96), (128, 48, a), NO_BIAS, wanted) for a in ("gelu", "relu")]


def _strides(s: Subject) -> list[Case]:
    size = (64, 48, "gelu")
    return [
        Case("transposed", s.randn(96, 64).T, size),
        Case("every second column", s.randn(64, 192)[:, ::2], size),
        Case("a slice at an odd offset", s.randn(64, 99)[3:, 1:98], size),
        Case("permuted (N, H, W, C)", s.randn(2, 96, 7, 5).permute(0, 2, 3, 1), size),
        Case("expanded rows", s.randn(1, 96).expand(64, 96), size),
    ]


def _large(s: Subject) -> list[Case]:
    return [
        Case("values of 1e10", 1e10 * s.randn(64, 96), (64, 48, "relu")),
        Case("values of 30", 30 * s.randn(64, 96), (64, 48, "gelu_tanh")),
        Case("values of 1e-20", 1e-20 * s.randn(64, 96), (64, 48, "gelu"), NO_BIAS),
    ]


def _few(s: Subject) -> list[Case]:
    return [
        Case("(64, 192)->128->96, gelu", s.randn(64, 192), (128, 96, "gelu"), gradients=s.suite.all),
        Case("(2, 33, 65)->64->48, relu", s.randn(2, 33, 65), (64, 48, "relu"), gradients=s.suite.all),
    ]


def _compile(s: Subject) -> list[Case]:
    shapes = [(64, 96), (64, 96), (2, 9, 96)]
    return [Case(f"{shape}->64->48", s.randn(*shape), (64, 48, "gelu"), gradients=s.suite.all) for shape in shapes]


_CASES: Mapping[str, Cases] = {
    "values": _values,
    "edge-shapes": _edges,
    "no-bias": _no_bias,
    "strides": _strides,
    "large": _large,
    "dtype": _few,
    "autocast": _few,
    "gradients": lambda s: _values(s, s.suite.all),
    "determinism": _few,
    "compile": _compile,
}

MLP = Suite(
    "mlp",
    stock=Unit,
    functional=Functional,
    parameters=("weight1", "bias1", "weight2", "bias2"),
    weights=("weight1", "weight2"),
    size=(64, 48, "gelu"),
    sizes=(96, 64, 48, "gelu"),
    sample=(96,),
    out=(48,),
    sizes_of=lambda case: (case.input.shape[-1], *case.size),
    shape_of=lambda case: (*case.input.shape[:-1], case.size[1]),
    cases=_CASES,
    wrong=wrong_inputs,
)
