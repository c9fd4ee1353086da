"""Shapes, dtypes and refusals of the operators without data: for compile, export and the meta device.

Each fake refuses what the real operator refuses, in the same words (csrc/checks.h).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zoo.ops._library  # noqa: F401 - the operators must exist

__all__ = ["ACTIVATIONS", "DTYPES", "needs_preactivation"]

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
_TWO_BYTES = (torch.float16, torch.bfloat16)
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


def _check_layer(op: str, input: Tensor, weight: Tensor, weight_name: str, bias: Tensor | None, bias_name: str) -> None:
    _check_dim(op, weight, weight_name, 2)
    _check_same(op, input, "input", weight, weight_name)
    if bias is not None:
        _check_dim(op, bias, bias_name, 1)
        _check_same(op, input, "input", bias, bias_name)
        torch._check(
            bias.shape[0] == weight.shape[0],
            lambda: f"{op}: {bias_name} must have {weight_name}'s out_features ({weight.shape[0]}), got {_shape(bias)}",
        )


def _check_linear(
    op: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_name: str = "weight",
    bias_name: str = "bias",
) -> None:
    _check_operand(op, input, "input")
    _check_leading(op, input, "input")
    _check_layer(op, input, weight, weight_name, bias, bias_name)
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: (
            f"{op}: input's last size must be {weight_name}'s in_features ({weight.shape[1]}), "
            f"got input {_shape(input)} and {weight_name} {_shape(weight)}"
        ),
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


def _check_input_grad(op: str, grad: Tensor, weight: Tensor, weight_name: str = "weight") -> None:
    _check_operand(op, grad, "grad")
    _check_leading(op, grad, "grad")
    _check_dim(op, weight, weight_name, 2)
    _check_same(op, grad, "grad", weight, weight_name)
    torch._check(
        grad.shape[-1] == weight.shape[0],
        lambda: (
            f"{op}: grad's last size must be {weight_name}'s out_features ({weight.shape[0]}), "
            f"got grad {_shape(grad)} and {weight_name} {_shape(weight)}"
        ),
    )


@torch.library.register_fake("zoo::linear_input_grad")
def _(grad: Tensor, weight: Tensor) -> Tensor:
    _check_input_grad("zoo::linear_input_grad", grad, weight)
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


def _check_weight_grad(op: str, grad: Tensor, input: Tensor, input_name: str = "input") -> None:
    _check_operand(op, grad, "grad")
    _check_leading(op, grad, "grad")
    _check_same(op, grad, "grad", input, input_name)
    torch._check(
        grad.dim() == input.dim() and all(a == b for a, b in zip(grad.shape[:-1], input.shape[:-1], strict=True)),
        lambda: (
            f"{op}: grad and {input_name} must have the same leading sizes, "
            f"got grad {_shape(grad)} and {input_name} {_shape(input)}"
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


def _given(op: str, t: Tensor | None, name: str, what: str) -> Tensor:
    if t is None:
        raise RuntimeError(f"{op}: {name} must be given for {what}, got none")
    return t


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
    wide: bool = False,
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
        weight = _given(op, weight, "weight", "the input's gradient")
        _check_input_grad(op, grad, weight)
        dx = grad.new_empty((*grad.shape[:-1], weight.shape[1]))
    if weight_grad:
        input = _given(op, input, "input", "the weight's gradient")
        _check_weight_grad(op, grad, input)
        dw = grad.new_empty((grad.shape[-1], input.shape[-1]), dtype=_widened(grad, wide))
    if bias_grad:
        db = grad.new_empty(grad.shape[-1], dtype=_widened(grad, wide))
    return dx, dw, db


def _widened(grad: Tensor, wide: bool) -> torch.dtype:
    return torch.float32 if wide and grad.dtype in _TWO_BYTES else grad.dtype


def _check_cast(op: str, input: Tensor, parameter: Tensor, name: str) -> None:
    torch._check(input.dtype in _TWO_BYTES, lambda: f"{op}: input must be float16 or bfloat16, got {input.dtype}")
    torch._check(parameter.dtype == torch.float32, lambda: f"{op}: {name} must be float32, got {parameter.dtype}")
    torch._check(
        input.device == parameter.device,
        lambda: (
            f"{op}: {name} must be on the device of input ({input.device}), got {parameter.device}; move one of them"
        ),
    )


def _lowered(op: str, input: Tensor, parameter: Tensor | None, name: str) -> Any:
    if parameter is None:
        return None
    _check_cast(op, input, parameter, name)
    return torch.empty_like(parameter, dtype=input.dtype, memory_format=torch.contiguous_format)


@torch.library.register_fake("zoo::linear_cast")
def _(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    op = "zoo::linear_cast"
    _check_activation(activation)
    weight, bias = _lowered(op, input, weight, "weight"), _lowered(op, input, bias, "bias")
    _check_linear("zoo::linear_activation", input, weight, bias)
    output = input.new_empty((*input.shape[:-1], weight.shape[0]))
    saved = torch.empty_like(output) if save and needs_preactivation(activation) else output.new_empty(0)
    return output, saved, weight


@torch.library.register_fake("zoo::mlp_cast")
def _(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    op = "zoo::mlp_cast"
    weight1, weight2 = _lowered(op, input, weight1, "weight1"), _lowered(op, input, weight2, "weight2")
    bias1, bias2 = _lowered(op, input, bias1, "bias1"), _lowered(op, input, bias2, "bias2")
    return *_mlp(input, weight1, bias1, weight2, bias2, activation, save), weight1, weight2


@torch.library.register_fake("zoo::mlp")
def _mlp(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "zoo::mlp"
    _check_activation(activation)
    _check_linear(op, input, weight1, bias1, "weight1", "bias1")
    _check_layer(op, input, weight2, "weight2", bias2, "bias2")
    torch._check(
        weight2.shape[1] == weight1.shape[0],
        lambda: (
            f"{op}: weight2's in_features must be weight1's out_features ({weight1.shape[0]}), "
            f"got weight1 {_shape(weight1)} and weight2 {_shape(weight2)}"
        ),
    )
    hidden = (*input.shape[:-1], weight1.shape[0])
    return (
        input.new_empty((*input.shape[:-1], weight2.shape[0])),
        input.new_empty(hidden if save else 0),
        input.new_empty(hidden if save and needs_preactivation(activation) else 0),
    )


def _check_width(op: str, t: Tensor, name: str, weight2: Tensor) -> None:
    torch._check(
        t.shape[-1] == weight2.shape[1],
        lambda: f"{op}: {name}'s last size must be weight2's in_features ({weight2.shape[1]}), got {_shape(t)}",
    )


@torch.library.register_fake("zoo::mlp_backward")
def _(
    grad: Tensor,
    hidden: Tensor | None,
    saved: Tensor | None,
    input: Tensor | None,
    weight1: Tensor | None,
    weight2: Tensor | None,
    activation: str,
    input_grad: bool,
    weight1_grad: bool,
    bias1_grad: bool,
    weight2_grad: bool,
    bias2_grad: bool,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    op = "zoo::mlp_backward"
    _check_activation(activation)
    _check_operand(op, grad, "grad")
    _check_leading(op, grad, "grad")
    dx, dw1, db1, dw2, db2 = (grad.new_empty(0) for _ in range(5))
    if weight2_grad:
        hidden = _given(op, hidden, "hidden", "weight2's gradient")
        _check_weight_grad(op, grad, hidden, "hidden")
        dw2 = grad.new_empty((grad.shape[-1], hidden.shape[-1]), dtype=_widened(grad, wide))
    if bias2_grad:
        db2 = grad.new_empty(grad.shape[-1], dtype=_widened(grad, wide))
    if not (input_grad or weight1_grad or bias1_grad):
        return dx, dw1, db1, dw2, db2
    weight2 = _given(op, weight2, "weight2", "the gradients of input, weight1 and bias1")
    _check_input_grad(op, grad, weight2, "weight2")
    if weight2_grad and hidden is not None:
        _check_width(op, hidden, "hidden", weight2)
    if activation != "none":
        if saved is None:
            raise RuntimeError(f"{op}: saved must be given with an activation, got none; pass what mlp returned")
        _check_weight_grad(op, grad, saved, "saved")
        _check_width(op, saved, "saved", weight2)
    if input_grad:
        weight1 = _given(op, weight1, "weight1", "the input's gradient")
        _check_dim(op, weight1, "weight1", 2)
        _check_same(op, grad, "grad", weight1, "weight1")
        torch._check(
            weight1.shape[0] == weight2.shape[1],
            lambda: (
                f"{op}: weight1's out_features must be weight2's in_features ({weight2.shape[1]}), "
                f"got weight1 {_shape(weight1)}"
            ),
        )
        dx = grad.new_empty((*grad.shape[:-1], weight1.shape[1]))
    if weight1_grad:
        input = _given(op, input, "input", "weight1's gradient")
        _check_weight_grad(op, grad, input)
        dw1 = grad.new_empty((weight2.shape[1], input.shape[-1]), dtype=_widened(grad, wide))
    if bias1_grad:
        db1 = grad.new_empty(weight2.shape[1], dtype=_widened(grad, wide))
    return dx, dw1, db1, dw2, db2


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
