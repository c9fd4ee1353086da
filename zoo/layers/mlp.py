"""zoo's own layer of kind "mlp"."""

from __future__ import annotations

from torch import Tensor

from zoo import ops
from zoo.layers.registry import register_layer

__all__ = ["mlp"]


@register_layer("mlp", "zoo")
def mlp(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str
) -> Tensor:
    """Two Linears and the activation between them on zoo's operator (:func:`zoo.ops.mlp`)."""
    return ops.mlp(input, weight1, bias1, weight2, bias2, activation=activation)
