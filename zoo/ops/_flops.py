"""FLOP counts of zoo's operators for torch's FlopCounterMode: 2 M N K a product, as torch counts its own."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from zoo.ops._library import operators as _ops

__all__: list[str] = []


@register_flop_formula([_ops.linear, _ops.linear_activation])
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
    _, input_grad, weight_grad, _ = args
    products = (weight[-1] if input_grad else 0) + (input[-1] if weight_grad else 0)
    return 2 * math.prod(grad) * products
