"""The operator ``matmul`` (batched, no broadcasting) and its calculus."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.ops._library import operators
from zoo.ops._routing import Rule, Saved, apply, register

__all__ = ["batched_matmul"]


def batched_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (*, M, K) times b (*, K, N) with equal leading sizes -> (*, M, N)."""
    return apply(Matmul, a, b)


@register
class Matmul(Rule):
    op = operators.matmul.default

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        a, b = inputs
        return a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None

    @staticmethod
    def backward(ctx: Any, saved: Any, g: Tensor) -> Any:
        a, b = saved
        return (
            batched_matmul(g, b.mT) if ctx.needs_input_grad[0] else None,
            batched_matmul(a.mT, g) if ctx.needs_input_grad[1] else None,
        )

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        (a, b), (d_a, d_b) = inputs, tangents
        if d_b is None:
            return batched_matmul(d_a, b)
        if d_a is None:
            return batched_matmul(a, d_b)
        return batched_matmul(d_a, b) + batched_matmul(a, d_b)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        a, b = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(args, in_dims, strict=True)
        )
        return operators.matmul(a, b), 0
