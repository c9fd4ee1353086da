"""What is timed of each kind of layer: layers of real models, and the shapes of their inputs.

M, K and N are those of the product that the layer is: rows, features in, features out. Of a convolution the rows are
the output's pixels, and K a filter's taps; a LayerNorm has K = N features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.bench.cases import Case, cases_named

__all__ = ["LayerCase", "cases_of", "conv2d", "layer_norm", "linear", "mlp"]


@dataclass(frozen=True)
class LayerCase:
    """A layer of a kind, and the shapes of its input and output."""

    name: str
    kind: str
    M: int
    K: int
    N: int
    sizes: tuple[Any, ...]
    """What the kind's stock layer is built with, and ``options``."""
    input: tuple[int, ...]
    output: tuple[int, ...]
    operations: int
    """Of a forward, at least."""
    parameters: int
    """How many values they have."""
    options: tuple[tuple[str, Any], ...] = ()

    def flops(self, *, backward: bool) -> int:
        """At least: a backward has two products for each of the forward's."""
        return self.operations * (3 if backward else 1)

    def reads(self, *, backward: bool) -> int:
        """How many values must be read."""
        return math.prod(self.input) + self.parameters + (math.prod(self.output) if backward else 0)


def linear(case: Case) -> LayerCase:
    """The Linear alone, without the activation that the bench's case may have."""
    m, k, n = case.M, case.K, case.N
    weights = n * k + (n if case.bias else 0)
    bias = (("bias", case.bias),)
    return LayerCase(case.name, "linear", m, k, n, (k, n), (m, k), (m, n), 2 * m * n * k, weights, bias)


def layer_norm(name: str, rows: int, features: int) -> LayerCase:
    """Of the last dimension."""
    shape = rows, features
    return LayerCase(
        name, "layer_norm", rows, features, features, (features,), shape, shape, 5 * rows * features, 2 * features
    )


def mlp(name: str, rows: int, features: int, hidden: int, out: int, activation: str) -> LayerCase:
    """Two Linears and the activation between them."""
    weights = features * hidden + hidden * out
    return LayerCase(
        *(name, "mlp", rows, features, out),
        sizes=(features, hidden, out, activation),
        input=(rows, features),
        output=(rows, out),
        operations=2 * rows * weights,
        parameters=weights + hidden + out,
    )


def conv2d(
    name: str, images: int, channels: int, side: int, out: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> LayerCase:
    """Of square images and filters, padded by half a filter, without a bias."""
    padding = (kernel - 1) // 2
    end = (side + 2 * padding - kernel) // stride + 1
    rows, taps = images * end * end, channels // groups * kernel * kernel
    return LayerCase(
        *(name, "conv2d", rows, taps, out),
        sizes=(channels, out, kernel),
        input=(images, channels, side, side),
        output=(images, out, end, end),
        operations=2 * rows * taps * out,
        parameters=taps * out,
        options=(("stride", stride), ("padding", padding), ("groups", groups), ("bias", False)),
    )


def cases_of(kind: str, *, gpu: bool, full: bool) -> tuple[LayerCase, ...]:
    """The cases of a form on a device: of a batch of 64 images on a GPU, of one on a CPU. ValueError for no kind."""
    if kind == "linear":
        quick = ("resnet50/fc_b64", "vit_b/proj") if gpu else ("mnist/fc1", "vit_b/head")
        more = () if not full else ("mnist/fc1",) if gpu else ("resnet50/fc_b64", "mnist/fc3")
        return tuple(linear(case) for case in cases_named((*quick, *more)))
    images = 64 if gpu else 1
    table: Mapping[str, tuple[LayerCase, ...]] = {
        "layer_norm": (
            layer_norm("vit_b/norm1", 197 * images, 768),
            layer_norm("convnext_t/stage1_norm", 3136 * images, 96),
            layer_norm("convnext_t/stage4_norm", 49 * images, 768),
        ),
        "mlp": (
            mlp("vit_b/mlp", 197 * images, 768, 3072, 768, "gelu")
            if gpu
            else mlp("vit_t/mlp", 197, 192, 768, 192, "gelu"),
            mlp("mnist/fc1-fc2", 64, 784, 256, 256, "relu"),
            mlp("mixer_b/tokens", 768 * images, 196, 384, 196, "gelu"),
        ),
        "conv2d": (
            conv2d("resnet50/layer1_conv2", images, 64, 56, 64, 3),
            conv2d("resnet50/layer4_conv1", images, 2048, 7, 512, 1),
            conv2d("convnext_t/stage2_dwconv", images, 192, 28, 192, 7, groups=192),
        ),
    }
    if kind not in table:
        raise ValueError(f"timing: kind {kind!r} has no cases; expected one of linear, {', '.join(table)}")
    return table[kind] if full else table[kind][:2]
