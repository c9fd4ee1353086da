"""zoo's operators: ``linear``, ``mlp`` and ``matmul``, forward and backward, in C++ for the CPU and CUDA.

They take any strides, zero sizes and 0-D leading dimensions, in float64, float32, float16 and bfloat16, accumulate in
float32 or better, and are differentiable to any order, in eager mode and under torch.compile, torch.export, vmap and
the rest of torch.func, autocast and forward mode.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from zoo.ops import _flops as _flops
from zoo.ops import _sharding as _sharding
from zoo.ops._activation import activation_grad
from zoo.ops._explain import Choice, Rejected, explain
from zoo.ops._fake import ACTIVATIONS, DTYPES, needs_preactivation
from zoo.ops._library import eager_linear, eager_mlp
from zoo.ops._linear import Linear, LinearActivation, linear_bias_grad, linear_input_grad, linear_weight_grad
from zoo.ops._matmul import batched_matmul
from zoo.ops._mlp import Mlp
from zoo.ops._routing import apply, apply_cast

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "Choice",
    "Rejected",
    "activation_grad",
    "explain",
    "linear",
    "linear_bias_grad",
    "linear_input_grad",
    "linear_weight_grad",
    "matmul",
    "mlp",
]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    """``act(input @ weight.T + bias)``, as :func:`torch.nn.functional.linear` with the activation fused in.

    Args:
        input: (*, K); ``*`` is any number of leading dimensions, none included. Any strides.
        weight: (N, K), of the same dtype and device.
        bias: (N), or None.
        activation: None, "relu", "gelu" (exact, by erf), "gelu_tanh" or "silu".

    Returns:
        (*, N), row-major, of the input's dtype; under autocast, of autocast's (float64 is left alone).

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, with what was got and expected.
        ValueError: an unknown activation.
    """
    if not torch.compiler.is_compiling():
        output = eager_linear(input, weight, bias, activation)
        if output is not NotImplemented:
            return output
    dtype = _autocast_dtype(input) if _is_any_autocast_enabled() else None
    if activation is None:
        if dtype is not None:
            return apply_cast(Linear, dtype, input, weight, bias)
        return apply(Linear, input, weight, bias)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: None, {', '.join(ACTIVATIONS)}")
    wants_grad = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    save = needs_preactivation(activation) and (wants_grad or _transforming())
    if dtype is not None:
        return apply_cast(LinearActivation, dtype, input, weight, bias, activation, save)[0]
    return apply(LinearActivation, input, weight, bias, activation, save)[0]


def mlp(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, *, activation: str
) -> Tensor:
    """``act(input @ weight1.T + bias1) @ weight2.T + bias2``: two :func:`linear` as one operator, backward included.

    The backward puts the activation's derivative and ``bias1``'s gradient into the product with ``weight2``. It saves
    what the two would: the input, the weights, the hidden layer, and what the activation's derivative needs.

    Args:
        input: (*, K); ``*`` is any number of leading dimensions, none included. Any strides.
        weight1: (H, K), of the same dtype and device as the input, as are the others.
        bias1: (H), or None.
        weight2: (N, H).
        bias2: (N), or None.
        activation: "relu", "gelu" (exact, by erf), "gelu_tanh" or "silu".

    Returns:
        (*, N), row-major, of the input's dtype; under autocast, of autocast's (float64 is left alone).

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, with what was got and expected.
        ValueError: an unknown activation.
    """
    if not torch.compiler.is_compiling():
        output = eager_mlp(input, weight1, bias1, weight2, bias2, activation)
        if output is not NotImplemented:
            return output
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    tensors = (input, weight1, bias1, weight2, bias2)
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    save = wants_grad or _transforming()
    if _is_any_autocast_enabled() and (dtype := _autocast_dtype(input)) is not None:
        return apply_cast(Mlp, dtype, *tensors, activation, save)[0]
    return apply(Mlp, *tensors, activation, save)[0]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product, as :func:`torch.matmul`: 1-D operands are vectors, leading dimensions broadcast.

    Args:
        a: (*, M, K) or (K).
        b: (*, K, N) or (K), of the same dtype and device.

    Returns:
        (*, M, N), without M or N where that operand was a vector.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, with what was got and expected.
    """
    if _is_any_autocast_enabled() and (dtype := _autocast_dtype(a)) is not None:
        a, b = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (a, b))
    if a.dim() == 0 or b.dim() == 0:
        raise RuntimeError(
            f"zoo::matmul: a and b must have at least 1 dimension, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    a_vector, b_vector = a.dim() == 1, b.dim() == 1
    a = a.unsqueeze(0) if a_vector else a
    b = b.unsqueeze(1) if b_vector else b
    if b.dim() == 2 and a.dim() > 2:  # one product with all rows, not one for each member of the batch
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        y = batched_matmul(rows, b).reshape(*a.shape[:-1], b.shape[1])
    else:
        try:
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            raise RuntimeError(
                f"zoo::matmul: leading sizes must broadcast, got a {tuple(a.shape)} and b {tuple(b.shape)}"
            ) from None
        y = batched_matmul(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))
    if a_vector:
        y = y.squeeze(-2)
    return y.squeeze(-1) if b_vector else y


def _transforming() -> bool:
    """Inside torch.func, forward mode or a trace, where requires_grad does not tell whether a derivative will be asked
    for."""
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _autocast_dtype(input: Tensor) -> torch.dtype | None:
    """Autocast's dtype where it is on for the device of ``input``, else None."""
    device = "cuda" if input.is_cuda else input.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):  # it raises for meta
        return None
    return torch.get_autocast_dtype(device)
