"""The suite of Conv2d. ``Case.size`` is (out_channels, kernel_size)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.layers.kinds import call_of
from zoo.verify.case import Case
from zoo.verify.kinds.suite import NO_BIAS, Cases, Suite, WithFunction

if TYPE_CHECKING:
    from zoo.verify.subject import Subject

__all__ = ["CONV2D"]

_arguments = call_of("conv2d")


class Functional(WithFunction, nn.Conv2d):
    """An nn.Conv2d that computes with a function of (input, weight, bias, stride, padding, dilation, groups)."""

    def forward(self, input: Tensor) -> Tensor:
        return self.function(*_arguments(self, input))


def _values(s: Subject, gradients: tuple[str, ...] = ()) -> list[Case]:
    def case(name: str, shape: tuple[int, ...], size: Any, **options: Any) -> Case:
        return Case(f"{shape}->{size[0]}, {name}", s.randn(*shape), size, options, gradients)

    return [
        case("7x7 of stride 2", (2, 3, 32, 32), (16, 7), stride=2, padding=3),
        case("3x3 padded", (2, 64, 14, 14), (32, 3), padding=1),
        case("1x1", (2, 96, 7, 7), (40, 1)),
        case("1x1 of stride 2", (2, 16, 14, 14), (24, 1), stride=2),
        case("7x7 of each channel", (2, 24, 14, 14), (24, 7), padding=3, groups=24),
        case("4x4 patches", (2, 3, 32, 32), (48, 4), stride=4),
        case("four groups", (2, 32, 9, 9), (16, 3), padding=1, groups=4),
        case("dilated", (2, 8, 15, 15), (12, 3), dilation=2, padding=2),
        case("3x5, strides (2, 1)", (2, 8, 13, 11), (12, (3, 5)), stride=(2, 1), padding=(1, 2)),
        case("padding 'same'", (2, 8, 9, 8), (12, (3, 4)), padding="same"),
        case("reflected", (2, 8, 9, 8), (12, 3), padding=1, padding_mode="reflect"),
    ]


def _edges(s: Subject) -> list[Case]:
    return [
        Case("(0, 8, 9, 9)->12, no image", s.randn(0, 8, 9, 9), (12, 3)),
        Case("(8, 9, 9)->12, without a batch", s.randn(8, 9, 9), (12, 3)),
        Case("(1, 1, 3, 3)->1, one output", s.randn(1, 1, 3, 3), (1, 3)),
        Case("(3, 7, 1, 1)->5, of one pixel", s.randn(3, 7, 1, 1), (5, 1)),
        Case("(3, 7, 5, 2)->5, wider than high", s.randn(3, 7, 5, 2), (5, (5, 1))),
        Case("(2, 5, 8, 8)->3, stride over the end", s.randn(2, 5, 8, 8), (3, 3), {"stride": 3}),
        Case("(2, 5, 4, 4)->3, more padding than image", s.randn(2, 5, 4, 4), (3, 9), {"padding": 4}),
    ]


def _no_bias(s: Subject) -> list[Case]:
    options = {**NO_BIAS, "padding": 1}
    return [Case("(2, 16, 9, 9)->12", s.randn(2, 16, 9, 9), (12, 3), options, gradients=s.suite.all)]


def _strides(s: Subject) -> list[Case]:
    return [
        Case("channels last", s.randn(2, 16, 9, 8).contiguous(memory_format=torch.channels_last), (12, 3)),
        Case("height and width transposed", s.randn(2, 16, 8, 9).transpose(2, 3), (12, 3)),
        Case("every second column", s.randn(2, 16, 9, 16)[..., ::2], (12, 3)),
        Case("a slice at an odd offset", s.randn(3, 17, 10, 11)[1:, 1:, 1:, 3:], (12, 3)),
        Case("one image expanded", s.randn(1, 16, 9, 8).expand(4, 16, 9, 8), (12, 3)),
        Case("one channel expanded", s.randn(2, 1, 9, 8).expand(2, 16, 9, 8), (12, 3)),
    ]


def _large(s: Subject) -> list[Case]:
    return [
        Case("values of 1e15", 1e15 * s.randn(2, 16, 9, 9), (12, 3)),
        Case("values of 1e-25", 1e-25 * s.randn(2, 16, 9, 9), (12, 3), NO_BIAS),
    ]


def _few(s: Subject) -> list[Case]:
    strided, images = {"stride": 2, "groups": 2}, s.randn(3, 12, 8, 7)
    return [
        Case("(2, 16, 9, 9)->12", s.randn(2, 16, 9, 9), (12, 3), {"padding": 1}, gradients=s.suite.all),
        Case("(3, 12, 8, 7)->8, two groups", images, (8, 3), strided, gradients=s.suite.all),
    ]


def _compile(s: Subject) -> list[Case]:
    shapes = [(4, 16, 10, 9), (4, 16, 10, 9), (2, 16, 11, 9)]
    return [Case(f"{shape}->12", s.randn(*shape), (12, 3), gradients=s.suite.all) for shape in shapes]


def _wrong(s: Subject) -> list[tuple[str, Tensor]]:
    return [
        ("15 channels instead of 16", s.randn(2, 15, 10, 9)),
        ("32 channels instead of 16", s.randn(2, 32, 10, 9)),
        ("an image smaller than the kernel", s.randn(2, 16, 2, 9)),
        ("two dimensions", s.randn(16, 10)),
        ("float64 instead of float32", s.randn(2, 16, 10, 9).double()),
        ("integers", torch.ones(2, 16, 10, 9, dtype=torch.int64, device=s.device)),
    ]


def _shape_of(case: Case) -> tuple[int, ...]:
    with torch.device("meta"):
        module = nn.Conv2d(*_sizes_of(case), **case.options)
    return tuple(module(torch.empty(case.input.shape, device="meta")).shape)


def _sizes_of(case: Case) -> tuple[Any, ...]:
    return case.input.shape[-3], *case.size


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

CONV2D = Suite(
    "conv2d",
    stock=nn.Conv2d,
    functional=Functional,
    parameters=("weight", "bias"),
    weights=("weight",),
    size=(12, 3),
    sizes=(16, 12, 3),
    sample=(16, 10, 9),
    out=(12, 8, 7),
    sizes_of=_sizes_of,
    shape_of=_shape_of,
    cases=_CASES,
    wrong=_wrong,
    leading=False,
)
