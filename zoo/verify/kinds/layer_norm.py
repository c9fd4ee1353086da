"""The suite of LayerNorm. ``Case.size`` is normalized_shape, the last dimension unless given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.verify.case import Case
from zoo.verify.kinds.suite import NO_BIAS, Cases, Suite, WithFunction

if TYPE_CHECKING:
    from zoo.verify.subject import Subject

__all__ = ["LAYER_NORM"]

NO_AFFINE: Mapping[str, Any] = {"elementwise_affine": False}


class Functional(WithFunction, nn.LayerNorm):
    """An nn.LayerNorm that computes with a function of (input, normalized_shape, weight, bias, eps)."""

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _fill(stock: nn.Module) -> None:
    """Weights of one and biases of zero would hide what is done with them."""
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=parameter.device))


def _of(s: Subject, *shapes: tuple[int, ...], **more: Any) -> list[Case]:
    return [Case(f"{shape}", s.randn(*shape), **more) for shape in shapes]


def _values(s: Subject) -> list[Case]:
    return _of(s, (64, 768), (2, 197, 192), (2, 7, 7, 96), (8, 2048), (100, 384))


def _edges(s: Subject) -> list[Case]:
    rows = [(1, 64), (0, 64), (3, 1), (33, 63), (65, 129), (40, 2), (40, 3), (20, 7), (9, 16), (7, 4099)]
    return _of(s, *rows, (96,), (2, 0, 64), (1, 1, 1, 64))


def _no_bias(s: Subject) -> list[Case]:
    return _of(s, (64, 192), (1, 31), options=NO_BIAS, gradients=s.suite.all)


def _no_affine(s: Subject) -> list[Case]:
    return _of(s, (64, 192), (1, 31), options=NO_AFFINE, gradients=s.suite.all)


def _normalized_shape(s: Subject) -> list[Case]:
    return [
        Case("the last two of (4, 5, 8, 16)", s.randn(4, 5, 8, 16), (8, 16), gradients=s.suite.all),
        Case("the last three of (6, 4, 7, 5)", s.randn(6, 4, 7, 5), (4, 7, 5), gradients=s.suite.all),
        Case("all of (12, 16)", s.randn(12, 16), (12, 16), gradients=s.suite.all),
        Case("the last two, (1, 64)", s.randn(9, 1, 64), (1, 64), gradients=s.suite.all),
        Case("the last two, transposed", s.randn(20, 16, 8).transpose(1, 2), (8, 16), gradients=s.suite.all),
        Case("the last two, without parameters", s.randn(20, 8, 16), (8, 16), NO_AFFINE, gradients=s.suite.all),
    ]


def _eps(s: Subject) -> list[Case]:
    return [
        Case(f"eps={eps:g}, values of {scale:g}", scale * s.randn(64, 96), options={"eps": eps}, gradients=s.suite.all)
        for eps, scale in ((0.1, 1.0), (1e-3, 0.03), (1e-5, 3e-3), (1e-12, 1e-4))
    ]


def _strides(s: Subject) -> list[Case]:
    return [
        Case("transposed", s.randn(96, 64).T),
        Case("every second column", s.randn(64, 192)[:, ::2]),
        Case("every second row", s.randn(64, 96)[::2]),
        Case("a slice at an odd offset", s.randn(64, 99)[3:, 1:98]),
        Case("permuted (N, H, W, C)", s.randn(2, 96, 7, 5).permute(0, 2, 3, 1)),
        Case("expanded rows", s.randn(1, 96).expand(64, 96)),
        Case("middle dimension transposed", s.randn(8, 4, 96).transpose(0, 1)),
    ]


def _large(s: Subject) -> list[Case]:
    return [
        Case("values of 1e15", 1e15 * s.randn(64, 96)),
        Case("values of 1e-25", 1e-25 * s.randn(64, 96), options=NO_BIAS),
        Case("weights of 1e20", s.randn(64, 96), weight_scale=1e20),
    ]


def _denormals(s: Subject) -> list[Case]:
    return [Case("values of 1e-39", 1e-39 * s.randn(64, 96), options=NO_BIAS)]


def _constant(s: Subject) -> list[Case]:
    constants = (10 * s.randn(64, 1)).expand(64, 96).contiguous()
    mixed = s.randn(64, 96)
    mixed[::3] = constants[::3]
    return [
        Case("all rows constant", constants, gradients=s.suite.all, conditioned=True),
        Case("all values zero", torch.zeros_like(constants), gradients=s.suite.all, conditioned=True),
        Case("every third row constant", mixed, gradients=s.suite.all, conditioned=True),
    ]


def _large_mean(s: Subject) -> list[Case]:
    return [
        Case("mean 100, deviation 1", 100 + s.randn(64, 96), gradients=s.suite.all, conditioned=True),
        Case("mean 1e4, deviation 1", 1e4 + s.randn(64, 768), gradients=s.suite.all, conditioned=True),
        Case("means from -300 to 300", 300 * s.randn(64, 1) + s.randn(64, 96), gradients=s.suite.all, conditioned=True),
    ]


def _dtype(s: Subject) -> list[Case]:
    return _of(s, (64, 192), (2, 33, 65), gradients=s.suite.all)


def _gradients(s: Subject) -> list[Case]:
    return _of(s, (1, 64), (5, 63), (64, 192), (65, 192), (200, 96), (0, 16), (2, 50, 96), gradients=s.suite.all)


def _determinism(s: Subject) -> list[Case]:
    return _of(s, (130, 192), gradients=s.suite.all)


def _compile(s: Subject) -> list[Case]:
    return _of(s, (64, 96), (64, 96), (2, 9, 96), gradients=s.suite.all)


def _wrong(s: Subject) -> list[tuple[str, Tensor]]:
    return [
        ("95 features instead of 96", s.randn(8, 95)),
        ("192 features instead of 96", s.randn(8, 192)),
        ("one feature instead of 96", s.randn(8, 1)),
        ("float64 instead of float32", s.randn(8, 96).double()),
        ("integers", torch.ones(8, 96, dtype=torch.int64, device=s.device)),
    ]


_CASES: Mapping[str, Cases] = {
    "values": _values,
    "edge-shapes": _edges,
    "no-bias": _no_bias,
    "no-affine": _no_affine,
    "normalized-shape": _normalized_shape,
    "eps": _eps,
    "strides": _strides,
    "large": _large,
    "denormals": _denormals,
    "constant-rows": _constant,
    "large-mean": _large_mean,
    "dtype": _dtype,
    "autocast": lambda s: _of(s, (64, 192), (2, 33, 64), gradients=s.suite.all),
    "gradients": _gradients,
    "determinism": _determinism,
    "compile": _compile,
}

LAYER_NORM = Suite(
    "layer_norm",
    stock=nn.LayerNorm,
    functional=Functional,
    parameters=("weight", "bias"),
    weights=("weight",),
    size=96,
    sizes=(96,),
    sample=(96,),
    out=(96,),
    sizes_of=lambda case: (case.input.shape[-1] if case.size is None else case.size,),
    shape_of=lambda case: tuple(case.input.shape),
    cases=_CASES,
    wrong=_wrong,
    variants=({}, NO_BIAS, NO_AFFINE),
    required=({},),
    spare=1,  # what is centred and what is normal, where it is written in two steps
    fill=_fill,
)
