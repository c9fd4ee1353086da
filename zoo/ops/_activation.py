"""The derivative of the fused activations, and its own derivative."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zoo.ops._fake import needs_preactivation
from zoo.ops._library import operators
from zoo.ops._routing import Rule, Saved, apply, register

__all__ = ["activation_grad", "second_derivative"]


def activation_grad(grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    """``grad · act'(z)``, elementwise. ``saved`` is z, the activation's input, or for relu its output."""
    return apply(ActivationGrad, grad, saved, activation)


def second_derivative(z: Tensor, activation: str) -> Tensor:
    """``act''(z)``, in torch's own differentiable functions. Zero for relu."""
    match activation:
        case "gelu":
            return torch.exp(-0.5 * z * z) * (2 - z * z) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            c, a = math.sqrt(2 / math.pi), 0.044715
            t = torch.tanh(c * (z + a * z**3))
            du, ddu = c * (1 + 3 * a * z * z), 6 * a * c * z
            sech2 = 1 - t * t
            return sech2 * du + 0.5 * z * sech2 * (ddu - 2 * t * du * du)
        case "silu":
            s = torch.sigmoid(z)
            return s * (1 - s) * (2 + z * (1 - 2 * s))
    return torch.zeros_like(z)


@register
class ActivationGrad(Rule):
    op = operators.activation_grad.default

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        grad, z, ctx.activation = inputs
        return grad if ctx.needs_input_grad[1] else None, z

    @staticmethod
    def backward(ctx: Any, saved: Any, g: Tensor) -> Any:
        grad, z = saved
        needs_grad, needs_saved = ctx.needs_input_grad[:2]
        return (
            activation_grad(g, z, ctx.activation) if needs_grad else None,
            g * grad * second_derivative(z, ctx.activation)
            if needs_saved and needs_preactivation(ctx.activation)
            else None,
            None,
        )

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        (grad, saved, activation), (d_grad, d_saved, _) = inputs, tangents
        total = torch.zeros_like(output)
        if d_grad is not None:
            total = total + activation_grad(d_grad, saved, activation)
        if d_saved is not None and needs_preactivation(activation):
            total = total + d_saved * grad * second_derivative(saved, activation)
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        (grad, saved, activation), (g, s, _) = args, in_dims
        grad = grad.expand(info.batch_size, *grad.shape) if g is None else grad.movedim(g, 0)
        saved = saved.expand(info.batch_size, *saved.shape) if s is None else saved.movedim(s, 0)
        return operators.activation_grad(grad, saved, activation), 0
