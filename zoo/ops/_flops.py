"""FLOP counts of zoo's operators for torch's FlopCounterMode: 2 M N K a product, as torch counts its own."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from zoo.ops._library import operators as _ops

__all__: list[str] = []


@register_flop_formula([_ops.linear, _ops.linear_activation, _ops.linear_cast])
def _(input: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(input[:-1]) * math.prod(weight)


@register_flop_formula(_ops.linear_input_grad)
def _(grad: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(grad[:-1]) * math.prod(weight)


@register_flop_formula(_ops.linear_weight_grad)
def _(grad: Any, input: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(grad) * input[-1]


@register_flop_formula(_ops.matmul)
def _(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(a) * b[-1]


@register_flop_formula(_ops.linear_backward)
def _(grad: Any, saved: Any, input: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    _, input_grad, weight_grad, *_ = args
    products = (weight[-1] if input_grad else 0) + (input[-1] if weight_grad else 0)
    return 2 * math.prod(grad) * products


@register_flop_formula([_ops.mlp, _ops.mlp_cast])
def _(input: Any, weight1: Any, bias1: Any, weight2: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(input[:-1]) * (math.prod(weight1) + math.prod(weight2))


@register_flop_formula(_ops.mlp_backward)
def _(grad: Any, hidden: Any, saved: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    input, weight1, weight2, _, input_grad, weight1_grad, bias1_grad, weight2_grad, *_ = args
    rows, width = math.prod(grad[:-1]), (weight2 or hidden or [0])[-1]
    second = (input_grad or weight1_grad or bias1_grad) + weight2_grad
    first = (weight1[-1] if input_grad else 0) + (input[-1] if weight1_grad else 0)
    return 2 * rows * width * (second * grad[-1] + first)
