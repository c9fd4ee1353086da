"""The operator ``mlp``, two linear layers with an activation between them, and its calculus.

===================  ==============================================  =============================================
operator             computes                                        shapes
===================  ==============================================  =============================================
mlp                  ``y = h W₂ᵀ + b₂``, ``h = act(x W₁ᵀ + b₁)``     x (*, K), W₁ (H, K), W₂ (N, H) -> (*, N)
mlp_backward         the gradients of x, W₁, b₁, W₂ and b₂           g (*, N) -> as theirs
===================  ==============================================  =============================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd

from zoo.ops._activation import activation_grad
from zoo.ops._fake import needs_preactivation
from zoo.ops._library import implement
from zoo.ops._library import operators as _ops
from zoo.ops._linear import (
    Linear,
    LinearActivation,
    linear_activation,
    linear_bias_grad,
    linear_input_grad,
    linear_tangent,
    linear_weight_grad,
    summed,
    sums_apart,
)
from zoo.ops._routing import Rule, Saved, has_tangent, is_compiled, is_final, not_differentiable, register

__all__ = ["Mlp"]

_backward = _ops.mlp_backward.default._op
_cast = _ops.mlp_cast.default._op


@register
class Mlp(Rule):
    op = _ops.mlp.default
    parameters = (1, 2, 3, 4)
    saved_parameters = ((1, 1), (2, 3))

    @staticmethod
    def run_cast(
        input: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        activation: str,
        save: bool,
    ) -> tuple[Any, tuple[Any, ...]]:
        *output, lowered1, lowered2 = _cast(input, weight1, bias1, weight2, bias2, activation, save)
        return tuple(output), (input, lowered1, bias1, lowered2, bias2, activation, save)

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        input, weight1, _, weight2, _, ctx.activation, save = inputs
        _, hidden, product = output
        needs_input, needs_weight1, needs_bias1, needs_weight2 = ctx.needs_input_grad[:4]
        first = needs_input or needs_weight1 or needs_bias1
        if (first or needs_weight2) and not save:
            raise ValueError("torch.ops.zoo.mlp: gradients need the hidden layer; pass save=True")
        ctx.set_materialize_grads(False)
        from_product = needs_preactivation(ctx.activation)
        return (
            input if needs_weight1 else None,
            weight1 if needs_input else None,
            weight2 if first else None,
            hidden if needs_weight2 or (first and not from_product) else None,
            product if first and from_product else None,
        )

    @staticmethod
    def backward(
        ctx: Any, kept: Any, grad: Tensor | None, hidden_grad: Tensor | None, product_grad: Tensor | None
    ) -> Any:
        input, weight1, weight2, hidden, product = kept
        saved = hidden if product is None else product
        needs = ctx.needs_input_grad[:5]
        if hidden_grad is None and product_grad is None and grad is not None and is_final():
            wide = getattr(ctx, "wide", False)
            apart = needs[4] and sums_apart(grad)
            asked = *needs[:4], needs[4] and not apart
            args = (grad, hidden, saved, input, weight1, weight2, ctx.activation, *asked, wide)
            if is_compiled():  # the graph shall hold the operator
                made = _ops.mlp_backward.default(*args)
            else:
                with _AutoDispatchBelowAutograd():
                    made = _backward(*args)
            if apart:
                made = *made[:4], summed(grad, wide)
            return *(t if need else None for t, need in zip(made, needs, strict=True)), None, None
        # the hidden layer and the product before it are outputs too: they carry what a second derivative sends back
        if not needs_preactivation(ctx.activation):
            product_grad = None
        first = (
            _first_gradient(grad, hidden_grad, product_grad, weight2, saved, ctx.activation) if any(needs[:3]) else None
        )
        made = _gradients(first, grad, hidden, input, weight1, needs)
        return *made, None, None

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        input, weight1, bias1, weight2, _, activation, save = inputs
        _, hidden, product = output
        d_input, d_weight1, d_bias1, d_weight2, d_bias2 = tangents[:5]
        if not save:
            hidden, product = linear_activation(input, weight1, bias1, activation, True)
        d_product = d_hidden = None
        if not (d_input is None and d_weight1 is None and d_bias1 is None):
            d_product = linear_tangent((input, weight1), (d_input, d_weight1, d_bias1))
            d_hidden = activation_grad(d_product, product if needs_preactivation(activation) else hidden, activation)
        return (
            linear_tangent((hidden, weight2), (d_hidden, d_weight2, d_bias2)),
            d_hidden if save and d_hidden is not None else torch.zeros_like(output[1]),
            d_product
            if save and d_product is not None and needs_preactivation(activation)
            else torch.zeros_like(output[2]),
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        input, weight1, bias1, weight2, bias2, activation, save = args
        keep, x = save and needs_preactivation(activation), in_dims[0]
        if all(dim is None for dim in in_dims[1:5]):
            out = _ops.mlp(input.movedim(x, 0), *args[1:])
            return out, (0, 0 if save else None, 0 if keep else None)
        if all(dim is None for dim in in_dims[:3]):
            hidden, product = _ops.linear_activation(input, weight1, bias1, activation, save)
            dims: tuple[Any, Any] = (None, None)
        else:
            (hidden, product), dims = LinearActivation.vmap(
                info, (*in_dims[:3], None, None), input, weight1, bias1, activation, save
            )
        output, _ = Linear.vmap(info, (dims[0], *in_dims[3:5]), hidden, weight2, bias2)
        return (output, hidden if save else hidden.new_empty(0), product), (0, dims[0] if save else None, dims[1])


def _first_gradient(
    grad: Tensor | None,
    hidden_grad: Tensor | None,
    product_grad: Tensor | None,
    weight2: Tensor,
    saved: Tensor,
    activation: str,
) -> Tensor | None:
    """The gradient of the product before the activation, from those of the outputs."""
    through = None if grad is None else linear_input_grad(grad, weight2)
    if hidden_grad is not None:
        through = hidden_grad if through is None else through + hidden_grad
    if through is not None and activation != "none":
        through = activation_grad(through, saved, activation)
    if product_grad is None:
        return through
    return product_grad if through is None else through + product_grad


def _gradients(
    first: Tensor | None,
    grad: Tensor | None,
    hidden: Tensor | None,
    input: Tensor | None,
    weight1: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Of input, weight1, bias1, weight2 and bias2, by the operators that have a derivative."""
    needs_input, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = needs
    return (
        linear_input_grad(first, weight1) if needs_input and first is not None else None,  # type: ignore[arg-type]
        linear_weight_grad(first, input) if needs_weight1 and first is not None else None,  # type: ignore[arg-type]
        linear_bias_grad(first) if needs_bias1 and first is not None else None,
        linear_weight_grad(grad, hidden) if needs_weight2 and grad is not None else None,  # type: ignore[arg-type]
        linear_bias_grad(grad) if needs_bias2 and grad is not None else None,
    )


def _composed_backward(
    grad: Tensor,
    hidden: Tensor | None,
    saved: Tensor | None,
    input: Tensor | None,
    weight1: Tensor | None,
    weight2: Tensor | None,
    activation: str,
    *asked: bool,
) -> tuple[Tensor, ...]:
    """mlp_backward where a derivative of it may be asked for: by the operators that have one."""
    tensors = (grad, hidden, saved, input, weight1, weight2)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not wanted and not has_tangent(tensors):
        with _AutoDispatchBelowAutograd():
            return _backward(*tensors, activation, *asked)
    needs, wide = asked[:5], asked[5:] == (True,)
    dtype = torch.float32 if wide and grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    first = _first_gradient(grad, None, None, weight2, saved, activation) if any(needs[:3]) else None  # type: ignore[arg-type]
    made = _gradients(first, grad, hidden, input, weight1, needs)
    return tuple(grad.new_empty(0) if t is None else t.to(dtype) if i else t for i, t in enumerate(made))


implement("mlp_backward", _composed_backward)
not_differentiable("mlp_cast", "mlp")
