"""The linear operators and their calculus.

``y = x Wᵀ + b`` is bilinear, and so are its three gradients, so the four operators are each other's derivatives:

===================  ==============================  ============================================
operator             computes                        shapes
===================  ==============================  ============================================
linear               ``x Wᵀ + b``                    x (*, K), W (N, K), b (N) -> (*, N)
linear_input_grad    ``g W``                         g (*, N), W (N, K) -> (*, K)
linear_weight_grad   ``Σ gᵀ x`` over ``*``           g (*, N), x (*, K) -> (N, K)
linear_bias_grad     ``Σ g`` over ``*``              g (*, N) -> (N)
===================  ==============================  ============================================
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd

from zoo.ops._activation import ActivationGrad, activation_grad
from zoo.ops._fake import needs_preactivation
from zoo.ops._library import implement
from zoo.ops._library import operators as _ops
from zoo.ops._routing import (
    Rule,
    Saved,
    apply,
    has_tangent,
    is_compiled,
    is_final,
    is_plain,
    not_differentiable,
    register,
)

__all__ = [
    "linear",
    "linear_activation",
    "linear_bias_grad",
    "linear_input_grad",
    "linear_tangent",
    "linear_weight_grad",
    "summed",
    "sums_apart",
]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return apply(Linear, input, weight, bias)


def linear_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    """``act(x Wᵀ + b)`` and, with ``save``, the product before the activation (else an empty tensor)."""
    return apply(LinearActivation, input, weight, bias, activation, save)


def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return apply(InputGrad, grad, weight)


def linear_weight_grad(grad: Tensor, input: Tensor) -> Tensor:
    return apply(WeightGrad, grad, input)


def linear_bias_grad(grad: Tensor) -> Tensor:
    return apply(BiasGrad, grad)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], *more: Tensor | None) -> Saved:
    """Input and weight, each only where the other's gradient is asked for."""
    input, weight = inputs[:2]
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    return input if needs_weight else None, weight if needs_input else None, *more


def _linear_gradients(ctx: Any, grad: Tensor, input: Tensor | None, weight: Tensor | None) -> tuple[Any, Any, Any]:
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    return (
        linear_input_grad(grad, weight) if needs_input else None,  # type: ignore[arg-type]
        linear_weight_grad(grad, input) if needs_weight else None,  # type: ignore[arg-type]
        linear_bias_grad(grad) if needs_bias else None,
    )


def _plain_gradients(
    ctx: Any, grad: Tensor, saved: Tensor | None, input: Tensor | None, weight: Tensor | None, activation: str
) -> tuple[Any, Any, Any]:
    """The gradients through the activation where no derivative is taken of them: without autograd."""
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    with _AutoDispatchBelowAutograd():
        if grad.is_cuda:
            return _fused_gradients(_backward, ctx, grad, saved, input, weight, activation)
        if activation != "none":
            grad = ActivationGrad.run(grad, saved, activation)
        return (  # on the CPU nothing is fused, and small calls cost less host time than one of eight arguments
            InputGrad.run(grad, weight) if needs_input else None,
            WeightGrad.run(grad, input) if needs_weight else None,
            BiasGrad.run(grad) if needs_bias else None,
        )


_backward = _ops.linear_backward.default._op
_cast = _ops.linear_cast.default._op


def _fused_gradients(
    operator: Any,
    ctx: Any,
    grad: Tensor,
    saved: Tensor | None,
    input: Tensor | None,
    weight: Tensor | None,
    activation: str,
) -> tuple[Any, Any, Any]:
    """On CUDA: the activation's derivative and the bias's gradient in one pass, or everything in one launch."""
    needs, wide = ctx.needs_input_grad[:3], getattr(ctx, "wide", False)
    apart = needs[2] and activation == "none" and sums_apart(grad)
    made = operator(grad, saved, input, weight, activation, *needs[:2], needs[2] and not apart, wide)
    if apart:
        made = *made[:2], summed(grad, wide)
    return tuple(t if need else None for t, need in zip(made, needs, strict=True))  # type: ignore[return-value]


def _in_graph(grad: Tensor) -> bool:
    """Whether a graph that is compiled shall hold the fused operator."""
    return grad.is_cuda and is_compiled() and is_final()


_ONE_LAUNCH = 256
"""Up to so many rows the operator makes the bias's gradient too: its backward pass is often one launch, which narrow
layers have for more rows (csrc/choice_backward.cpp, choose_together)."""


def sums_apart(grad: Tensor) -> bool:
    """Whether a graph that is compiled takes a bias's gradient as torch's sum: the compiler adds it up where it makes
    ``grad``, and the operator would read ``grad`` once more for it. float32's is read anyway, to be split."""
    if grad.dtype not in (torch.float16, torch.bfloat16) or not is_compiled():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # sympy, half a second of import

    return not statically_known_true(math.prod(grad.shape[:-1]) <= _ONE_LAUNCH)


def summed(grad: Tensor, wide: bool) -> Tensor:
    """A bias's gradient as a sum of torch's, float32 if ``wide``."""
    return grad.flatten(0, -2).sum(0, dtype=torch.float32 if wide else None)


def linear_tangent(inputs: tuple[Any, ...], tangents: tuple[Any, ...]) -> Tensor:
    """The output's tangent, from (input, weight, ...) and the tangents of input, weight and bias (one not None)."""
    input, weight = inputs[:2]
    d_input, d_weight, d_bias = tangents[:3]
    terms = []
    if d_input is not None:
        terms.append(linear(d_input, weight, None))
    if d_weight is not None:
        terms.append(linear(input, d_weight, None))
    if d_bias is not None:
        terms.append(d_bias.expand(*input.shape[:-1], weight.shape[0]))
    return _sum(terms)


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    # a tangent must not be a view of another one
    return total if len(terms) > 1 else total.clone()


def _batch_first(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _as_batched_matrix(t: Tensor, dim: int | None, size: int) -> Tensor:
    """(B, *, last) as (B, rows, last)."""
    t = _batch_first(t, dim, size)
    return t.reshape(size, math.prod(t.shape[1:-1]), t.shape[-1])


@register
class Linear(Rule):
    op = _ops.linear.default
    parameters = (1, 2)
    saved_parameters = ((1, 1),)

    @staticmethod
    def run_cast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, tuple[Any, ...]]:
        output, _, lowered = _cast(input, weight, bias, "none", False)
        return output, (input, lowered, bias)

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        return _save_linear(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor) -> Any:
        input, weight = saved
        if is_plain():
            return _plain_gradients(ctx, grad, None, input, weight, "none")
        if _in_graph(grad):
            return _fused_gradients(_ops.linear_backward.default, ctx, grad, None, input, weight, "none")
        return _linear_gradients(ctx, grad, input, weight)

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        return linear_tangent(inputs, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        (input, weight, bias), (x, w, b) = args, in_dims
        size = info.batch_size
        if w is None and b is None:
            return _ops.linear(input.movedim(x, 0), weight, bias), 0
        if w is None:
            output = _ops.linear(_batch_first(input, x, size), weight, None)
        else:  # one weight for each member of the batch: a batched product
            leading = (input.shape if x is None else input.movedim(x, 0).shape[1:])[:-1]
            output = _ops.matmul(_as_batched_matrix(input, x, size), weight.movedim(w, 0).mT)
            output = output.reshape(size, *leading, output.shape[-1])
        if bias is None:
            return output, 0
        bias = _batch_first(bias, b, size)
        return output + bias.reshape(size, *[1] * (output.dim() - 2), bias.shape[-1]), 0


@register
class LinearActivation(Rule):
    op = _ops.linear_activation.default
    parameters = (1, 2)
    saved_parameters = ((1, 1),)

    @staticmethod
    def run_cast(
        input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        output, product, lowered = _cast(input, weight, bias, activation, save)
        return (output, product), (input, lowered, bias, activation, save)

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        activation, save = inputs[3:]
        ctx.activation = activation
        saved: Tensor | None = None
        if any(ctx.needs_input_grad[:3]):
            if needs_preactivation(activation) and not save:
                raise ValueError(
                    f"torch.ops.zoo.linear_activation: gradients through {activation} need the product before it; "
                    "pass save=True"
                )
            saved = output[1] if needs_preactivation(activation) else output[0]
        ctx.set_materialize_grads(False)
        return _save_linear(ctx, inputs, saved)

    @staticmethod
    def backward(ctx: Any, kept: Any, grad: Tensor | None, preactivation_grad: Tensor | None) -> Any:
        input, weight, saved = kept
        if preactivation_grad is None and grad is not None and is_plain():
            return *_plain_gradients(ctx, grad, saved, input, weight, ctx.activation), None, None
        if preactivation_grad is None and grad is not None and _in_graph(grad):
            operator = _ops.linear_backward.default
            return *_fused_gradients(operator, ctx, grad, saved, input, weight, ctx.activation), None, None
        total = None if grad is None else activation_grad(grad, saved, ctx.activation)
        # the product before the activation is an output too: it carries what a second derivative sends back
        if preactivation_grad is not None and needs_preactivation(ctx.activation):
            total = preactivation_grad if total is None else total + preactivation_grad
        if total is None:
            return None, None, None, None, None
        return *_linear_gradients(ctx, total, input, weight), None, None

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        activation = inputs[3]
        d_product = linear_tangent(inputs, tangents)
        if not needs_preactivation(activation):
            return activation_grad(d_product, output[0], activation), torch.zeros_like(output[1])
        product = output[1] if inputs[4] else linear(*inputs[:3])
        return activation_grad(d_product, product, activation), d_product if inputs[4] else torch.zeros_like(output[1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        (input, weight, bias, activation, save), (x, w, b, *_) = args, in_dims
        keep = save and needs_preactivation(activation)
        if w is None and b is None:
            output, product = _ops.linear_activation(input.movedim(x, 0), weight, bias, activation, save)
            return (output, product), (0, 0 if keep else None)
        product, _ = Linear.vmap(info, (x, w, b), input, weight, bias)
        return (activate(product, activation), product if keep else product.new_empty(0)), (0, 0 if keep else None)


def activate(x: Tensor, activation: str) -> Tensor:
    """torch's own activation of that name."""
    functional = torch.nn.functional
    match activation:
        case "relu":
            return functional.relu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "silu":
            return functional.silu(x)
    return x


@register
class InputGrad(Rule):
    op = _ops.linear_input_grad.default

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        grad, weight = inputs
        return grad if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None

    @staticmethod
    def backward(ctx: Any, saved: Any, g: Tensor) -> Any:
        grad, weight = saved
        return (
            linear(g, weight, None) if ctx.needs_input_grad[0] else None,
            linear_weight_grad(grad, g) if ctx.needs_input_grad[1] else None,
        )

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        (grad, weight), (d_grad, d_weight) = inputs, tangents
        terms = [] if d_grad is None else [linear_input_grad(d_grad, weight)]
        return _sum(terms if d_weight is None else [*terms, linear_input_grad(grad, d_weight)])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        (grad, weight), (g, w) = args, in_dims
        if w is None:
            return _ops.linear_input_grad(grad.movedim(g, 0), weight), 0
        size = info.batch_size
        leading = (grad.shape if g is None else grad.movedim(g, 0).shape[1:])[:-1]
        output = _ops.matmul(_as_batched_matrix(grad, g, size), weight.movedim(w, 0))
        return output.reshape(size, *leading, output.shape[-1]), 0


@register
class WeightGrad(Rule):
    op = _ops.linear_weight_grad.default

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        grad, input = inputs
        return grad if ctx.needs_input_grad[1] else None, input if ctx.needs_input_grad[0] else None

    @staticmethod
    def backward(ctx: Any, saved: Any, g: Tensor) -> Any:
        grad, input = saved
        return (
            linear(input, g, None) if ctx.needs_input_grad[0] else None,
            linear_input_grad(grad, g) if ctx.needs_input_grad[1] else None,
        )

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        (grad, input), (d_grad, d_input) = inputs, tangents
        terms = [] if d_grad is None else [linear_weight_grad(d_grad, input)]
        return _sum(terms if d_input is None else [*terms, linear_weight_grad(grad, d_input)])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        (grad, input), (g, x), size = args, in_dims, info.batch_size
        return _ops.matmul(_as_batched_matrix(grad, g, size).mT, _as_batched_matrix(input, x, size)), 0


@register
class BiasGrad(Rule):
    op = _ops.linear_bias_grad.default

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        ctx.shape = inputs[0].shape
        return ()

    @staticmethod
    def backward(ctx: Any, saved: Any, g: Tensor) -> Any:
        return g.expand(ctx.shape)

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        return linear_bias_grad(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return _as_batched_matrix(args[0], in_dims[0], info.batch_size).sum(1), 0


def _composed_backward(
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
    """linear_backward where a derivative of it may be asked for: by the operators that have one."""
    tensors = (grad, saved, input, weight)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not wanted and not has_tangent(tensors):
        with _AutoDispatchBelowAutograd():
            return _backward(grad, saved, input, weight, activation, input_grad, weight_grad, bias_grad, wide)
    dtype = torch.float32 if wide and grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    g = grad if activation == "none" else activation_grad(grad, saved, activation)  # type: ignore[arg-type]
    return (
        linear_input_grad(g, weight) if input_grad else grad.new_empty(0),  # type: ignore[arg-type]
        linear_weight_grad(g, input).to(dtype) if weight_grad else grad.new_empty(0),  # type: ignore[arg-type]
        linear_bias_grad(g).to(dtype) if bias_grad else grad.new_empty(0),
    )


implement("linear_backward", _composed_backward)
not_differentiable("linear_cast", "linear")
