"""Shapes, dtypes and refusals of the operators without data: for compile, export and the meta device.

Each fake refuses what the real operator refuses, in the same words (csrc/checks.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

import zoo.ops._library  # noqa: F401 - the operators must exist

__all__ = ["ACTIVATIONS", "DTYPES", "needs_preactivation"]

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def needs_preactivation(activation: str) -> bool:
    """Whether the derivative needs the product before the activation; relu's is known from its output."""
    return activation not in ("none", "relu")


def _shape(t: Tensor) -> str:
    return f"({', '.join(str(s) for s in t.shape)})"


def _check_operand(op: str, t: Tensor, name: str) -> None:
    torch._check(
        t.dtype in DTYPES, lambda: f"{op}: {name} must be float64, float32, float16 or bfloat16, got {t.dtype}"
    )


def _check_leading(op: str, t: Tensor, name: str) -> None:
    torch._check(t.dim() >= 1, lambda: f"{op}: {name} must have at least 1 dimension, got a scalar")


def _check_dim(op: str, t: Tensor, name: str, dim: int) -> None:
    torch._check(t.dim() == dim, lambda: f"{op}: {name} must have {dim} dimension(s), got shape {_shape(t)}")


def _check_same(op: str, a: Tensor, a_name: str, b: Tensor, b_name: str) -> None:
    torch._check(
        a.dtype == b.dtype,
        lambda: f"{op}: {b_name} must have the dtype of {a_name} ({a.dtype}), got {b.dtype}; convert one of them",
    )
    torch._check(
        a.device == b.device,
        lambda: f"{op}: {b_name} must be on the device of {a_name} ({a.device}), got {b.device}; move one of them",
    )


def _check_linear(op: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_operand(op, input, "input")
    _check_leading(op, input, "input")
    _check_dim(op, weight, "weight", 2)
    _check_same(op, input, "input", weight, "weight")
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: (
            f"{op}: input's last size must be weight's in_features ({weight.shape[1]}), "
            f"got input {_shape(input)} and weight {_shape(weight)}"
        ),
    )
    if bias is not None:
        _check_dim(op, bias, "bias", 1)
        _check_same(op, input, "input", bias, "bias")
        torch._check(
            bias.shape[0] == weight.shape[0],
            lambda: f"{op}: bias must have weight's out_features ({weight.shape[0]}), got {_shape(bias)}",
        )


@torch.library.register_fake("zoo::linear")
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check_linear("zoo::linear", input, weight, bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@torch.library.register_fake("zoo::linear_activation")
def _(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Tensor, Tensor]:
    _check_activation(activation)
    _check_linear("zoo::linear_activation", input, weight, bias)
    output = input.new_empty((*input.shape[:-1], weight.shape[0]))
    return output, torch.empty_like(output) if save and needs_preactivation(activation) else output.new_empty(0)


def _check_activation(activation: str) -> None:
    torch._check(
        activation == "none" or activation in ACTIVATIONS,
        lambda: f"zoo: unknown activation '{activation}'; known: none, {', '.join(ACTIVATIONS)}",
    )


def _check_input_grad(op: str, grad: Tensor, weight: Tensor) -> None:
    _check_operand(op, grad, "grad")
    _check_leading(op, grad, "grad")
    _check_dim(op, weight, "weight", 2)
    _check_same(op, grad, "grad", weight, "weight")
    torch._check(
        grad.shape[-1] == weight.shape[0],
        lambda: (
            f"{op}: grad's last size must be weight's out_features ({weight.shape[0]}), "
            f"got grad {_shape(grad)} and weight {_shape(weight)}"
        ),
    )


@torch.library.register_fake("zoo::linear_input_grad")
def _(grad: Tensor, weight: Tensor) -> Tensor:
    _check_input_grad("zoo::linear_input_grad", grad, weight)
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


def _check_weight_grad(op: str, grad: Tensor, input: Tensor) -> None:
    _check_operand(op, grad, "grad")
    _check_leading(op, grad, "grad")
    _check_same(op, grad, "grad", input, "input")
    torch._check(
        grad.dim() == input.dim() and all(a == b for a, b in zip(grad.shape[:-1], input.shape[:-1], strict=True)),
        lambda: (
            f"{op}: grad and input must have the same leading sizes, got grad {_shape(grad)} and input {_shape(input)}"
        ),
    )


@torch.library.register_fake("zoo::linear_weight_grad")
def _(grad: Tensor, input: Tensor) -> Tensor:
    _check_weight_grad("zoo::linear_weight_grad", grad, input)
    return grad.new_empty((grad.shape[-1], input.shape[-1]))


@torch.library.register_fake("zoo::linear_bias_grad")
def _(grad: Tensor) -> Tensor:
    _check_operand("zoo::linear_bias_grad", grad, "grad")
    _check_leading("zoo::linear_bias_grad", grad, "grad")
    return grad.new_empty(grad.shape[-1])


def _check_activation_grad(op: str, grad: Tensor, saved: Tensor) -> None:
    _check_operand(op, grad, "grad")
    _check_same(op, grad, "grad", saved, "saved")
    torch._check(
        grad.dim() == saved.dim() and all(a == b for a, b in zip(grad.shape, saved.shape, strict=True)),
        lambda: f"{op}: grad must have the shape of saved {_shape(saved)}, got {_shape(grad)}",
    )


@torch.library.register_fake("zoo::activation_grad")
def _(grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    _check_activation_grad("zoo::activation_grad", grad, saved)
    return grad.new_empty(grad.shape)


@torch.library.register_fake("zoo::linear_backward")
def _(
    grad: Tensor,
    saved: Tensor | None,
    input: Tensor | None,
    weight: Tensor | None,
    activation: str,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "zoo::linear_backward"
    _check_activation(activation)
    _check_operand(op, grad, "grad")
    _check_leading(op, grad, "grad")
    if activation != "none":
        if saved is None:
            raise RuntimeError(
                f"{op}: saved must be given with an activation, got none; pass what linear_activation returned"
            )
        _check_activation_grad(op, grad, saved)
    dx, dw, db = (grad.new_empty(0) for _ in range(3))
    if input_grad:
        if weight is None:
            raise RuntimeError(f"{op}: weight must be given for the input's gradient, got none")
        _check_input_grad(op, grad, weight)
        dx = grad.new_empty((*grad.shape[:-1], weight.shape[1]))
    if weight_grad:
        if input is None:
            raise RuntimeError(f"{op}: input must be given for the weight's gradient, got none")
        _check_weight_grad(op, grad, input)
        dw = grad.new_empty((grad.shape[-1], input.shape[-1]))
    if bias_grad:
        db = grad.new_empty(grad.shape[-1])
    return dx, dw, db


@torch.library.register_fake("zoo::matmul")
def _(a: Tensor, b: Tensor) -> Tensor:
    op = "zoo::matmul"
    _check_operand(op, a, "a")
    torch._check(
        a.dim() >= 2 and a.dim() == b.dim(),
        lambda: (
            f"{op}: a and b must have the same number of dimensions, at least 2, got a {_shape(a)} and b {_shape(b)}"
        ),
    )
    _check_same(op, a, "a", b, "b")
    torch._check(
        a.shape[-1] == b.shape[-2] and all(x == y for x, y in zip(a.shape[:-2], b.shape[:-2], strict=True)),
        lambda: (
            f"{op}: expected a (*, M, K) and b (*, K, N) with the same leading sizes, "
            f"got a {_shape(a)} and b {_shape(b)}"
        ),
    )
    return a.new_empty((*a.shape[:-1], b.shape[-1]))
