"""The suite of Linear. ``Case.size`` is out_features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo.verify.case import Case
from zoo.verify.kinds.suite import NO_BIAS, Cases, Suite, WithFunction

if TYPE_CHECKING:
    from zoo.verify.subject import Subject

__all__ = ["LINEAR", "Functional", "wrong_inputs"]


class Functional(WithFunction, nn.Linear):
    """An nn.Linear that computes with a function of (input, weight, bias)."""

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input, self.weight, self.bias)


def _values(s: Subject) -> list[Case]:
    return [
        Case("(64, 784)->256", s.randn(64, 784), 256),
        Case("(100, 256)->10", s.randn(100, 256), 10),
        Case("(2, 50, 192)->768", s.randn(2, 50, 192), 768),
        Case("(8, 2048)->1000", s.randn(8, 2048), 1000),
        Case("(2, 7, 7, 96)->384", s.randn(2, 7, 7, 96), 384),
    ]


def _edges(s: Subject) -> list[Case]:
    sizes = [
        (1, 64, 48),
        (0, 64, 48),
        (3, 1, 5),
        (33, 63, 127),
        (65, 129, 1),
        (2, 7, 3),
        (129, 17, 65),
    ]
    cases = [Case(f"({m}, {k})->{n}", s.randn(m, k), n) for m, k, n in sizes]
    return [
        *cases,
        Case("(96,)->40, one vector", s.randn(96), 40),
        Case("(2, 0, 64)->48", s.randn(2, 0, 64), 48),
        Case("(1, 1, 1, 64)->48", s.randn(1, 1, 1, 64), 48),
    ]


def _no_bias(s: Subject) -> list[Case]:
    return [
        Case("(64, 192)->96 without bias", s.randn(64, 192), 96, NO_BIAS, gradients=s.suite.all),
        Case("(1, 31)->17 without bias", s.randn(1, 31), 17, NO_BIAS, gradients=s.suite.all),
    ]


def _strides(s: Subject) -> list[Case]:
    return [
        Case("transposed", s.randn(96, 64).T, 96),
        Case("every second column", s.randn(64, 192)[:, ::2], 96),
        Case("every second row", s.randn(64, 96)[::2], 96),
        Case("a slice at an odd offset", s.randn(64, 99)[3:, 1:98], 96),
        Case("permuted (N, H, W, C)", s.randn(2, 96, 7, 5).permute(0, 2, 3, 1), 96),
        Case("expanded rows", s.randn(1, 96).expand(64, 96), 96),
        Case("expanded columns", s.randn(64, 1).expand(64, 96), 96),
        Case("middle dimension transposed", s.randn(8, 4, 96).transpose(0, 1), 96),
    ]


def _large(s: Subject) -> list[Case]:
    return [
        Case("values of 1e15, weights of 1e15", 1e15 * s.randn(64, 96), 96, weight_scale=1e16),
        Case("values of 1e25", 1e25 * s.randn(64, 96), 96),
        Case("values of 1e-25", 1e-25 * s.randn(64, 96), 96, NO_BIAS),
    ]


def _denormals(s: Subject) -> list[Case]:
    return [Case("values of 1e-39", 1e-39 * s.randn(64, 96), 96, NO_BIAS, weight_scale=10.0)]


def _dtype(s: Subject) -> list[Case]:
    return [
        Case("(64, 192)->96", s.randn(64, 192), 96, gradients=s.suite.all),
        Case("(2, 33, 65)->48", s.randn(2, 33, 65), 48, gradients=s.suite.all),
    ]


def _autocast(s: Subject) -> list[Case]:
    return [
        Case("(64, 192)->96 in bfloat16", s.randn(64, 192), 96, gradients=s.suite.all),
        Case("(2, 33, 64)->48 in bfloat16", s.randn(2, 33, 64), 48),
    ]


def _gradients(s: Subject) -> list[Case]:
    sizes = [(1, 64, 48), (5, 63, 31), (64, 192, 96), (65, 192, 96), (200, 96, 10), (0, 16, 8)]
    cases = [Case(f"({m}, {k})->{n}", s.randn(m, k), n, gradients=s.suite.all) for m, k, n in sizes]
    return [*cases, Case("(2, 50, 96)->48", s.randn(2, 50, 96), 48, gradients=s.suite.all)]


def _determinism(s: Subject) -> list[Case]:
    return [Case("", s.randn(130, 192), 96, gradients=s.suite.all)]


def _compile(s: Subject) -> list[Case]:
    shapes = [(64, 96), (64, 96), (2, 9, 96)]
    return [Case(f"{shape}->48", s.randn(*shape), 48, gradients=s.suite.all) for shape in shapes]


def wrong_inputs(s: Subject) -> list[tuple[str, Tensor]]:
    """What a layer of 96 features must refuse, with what is wrong of it."""
    return [
        ("95 features instead of 96", s.randn(8, 95)),
        ("192 features instead of 96", s.randn(8, 192)),
        ("float64 instead of float32", s.randn(8, 96).double()),
        ("integers", torch.ones(8, 96, dtype=torch.int64, device=s.device)),
    ]


_CASES: Mapping[str, Cases] = {
    "values": _values,
    "edge-shapes": _edges,
    "no-bias": _no_bias,
    "strides": _strides,
    "large": _large,
    "denormals": _denormals,
    "dtype": _dtype,
    "autocast": _autocast,
    "gradients": _gradients,
    "determinism": _determinism,
    "compile": _compile,
}

LINEAR = Suite(
    "linear",
    stock=nn.Linear,
    functional=Functional,
    parameters=("weight", "bias"),
    weights=("weight",),
    size=48,
    sizes=(96, 48),
    sample=(96,),
    out=(48,),
    sizes_of=lambda case: (case.input.shape[-1], case.size),
    shape_of=lambda case: (*case.input.shape[:-1], case.size),
    cases=_CASES,
    wrong=wrong_inputs,
)
