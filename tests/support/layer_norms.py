"""LayerNorms: right ones, each written in another way, and ones that are broken in one realistic way each.

``CAUGHT_BY`` maps the saboteurs to the claim that must find them, as in :mod:`support.saboteurs`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
MaybeTensor = Tensor | None


def _dims(input: Tensor, shape: Shape) -> tuple[int, ...]:
    if tuple(input.shape[input.dim() - len(shape) :]) != tuple(shape):
        raise ValueError(f"input of shape {tuple(input.shape)}: expected (*, {', '.join(map(str, shape))})")
    return tuple(range(-len(shape), 0))


def _wide(input: Tensor) -> Tensor:
    """Sums in float32 or better."""
    return input if input.dtype == torch.float64 else input.float()


def _affine(normal: Tensor, weight: MaybeTensor, bias: MaybeTensor) -> Tensor:
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


def _check(input: Tensor, weight: MaybeTensor) -> None:
    if not input.is_floating_point() or (weight is not None and weight.dtype != input.dtype):
        raise TypeError(f"input is {input.dtype}, expected {'a floating dtype' if weight is None else weight.dtype}")


# right ones


def two_pass(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    """The mean, then the mean square of what is left; all by autograd."""
    _check(input, weight)
    dims, x = _dims(input, shape), _wide(input)
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return _affine(normal, weight, bias).to(input.dtype)


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance by Welford's recurrence in sixteen lanes, which are then combined, pair by pair, as Chan's."""
    flat = x.flatten(-len(dims))
    n = flat.shape[-1]
    lanes = 16 if n >= 16 else 1
    mean, square, count = flat[..., :lanes], torch.zeros_like(flat[..., :lanes]), 1
    for start in range(lanes, n // lanes * lanes, lanes):
        value = flat[..., start : start + lanes]
        count += 1
        delta = value - mean
        mean = mean + delta / count
        square = square + delta * (value - mean)
    while lanes > 1:
        lanes //= 2
        delta = mean[..., lanes:] - mean[..., :lanes]
        square = square[..., :lanes] + square[..., lanes:] + delta.square() * (count / 2)
        mean, count = mean[..., :lanes] + delta / 2, 2 * count
    for k in range(count, n):
        value = flat[..., k : k + 1]
        delta = value - mean
        mean = mean + delta / (k + 1)
        square = square + delta * (value - mean)
    whole = (*x.shape[: x.dim() - len(dims)], *(1 for _ in dims))
    return mean.reshape(whole), (square / n).reshape(whole)


class _Welford(torch.autograd.Function):
    """Saves input and weight alone; its backward computes the moments again, differentiably."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: MaybeTensor, bias: MaybeTensor, dims: Any, eps: float) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.dims, ctx.eps, ctx.has_bias = dims, eps, bias is not None
        mean, variance = _moments(_wide(input), dims)
        normal = (_wide(input) - mean) * torch.rsqrt(variance + eps)
        return _affine(normal, weight, bias).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
        input, weight = ctx.saved_tensors
        x, g, dims = _wide(input), _wide(grad), ctx.dims
        centred = x - x.mean(dims, keepdim=True)
        root = torch.rsqrt(centred.square().mean(dims, keepdim=True) + ctx.eps)
        normal = centred * root
        scaled = g if weight is None else g * weight
        inner = scaled - scaled.mean(dims, keepdim=True) - normal * (scaled * normal).mean(dims, keepdim=True)
        rows = tuple(range(x.dim() - len(dims)))
        of_input = (root * inner).to(input.dtype) if ctx.needs_input_grad[0] else None
        of_weight = _rows(g * normal, rows).to(grad.dtype) if ctx.needs_input_grad[1] else None
        of_bias = _rows(g, rows).to(grad.dtype) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None


def _rows(values: Tensor, rows: tuple[int, ...]) -> Tensor:
    return values.sum(rows) if rows else values


class Welford(nn.LayerNorm):
    """A backward by hand that keeps what the stock layer keeps, and refuses torch.func."""

    def forward(self, input: Tensor) -> Tensor:
        _check(input, self.weight)
        dims = _dims(input, self.normalized_shape)
        return _Welford.apply(input, self.weight, self.bias, dims, self.eps)


class Functional(nn.LayerNorm):
    """torch's own function."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FromScratch(nn.Module):
    """No nn.LayerNorm, and without device and dtype in its constructor."""

    def __init__(self, shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.shape, self.eps = (shape,) if isinstance(shape, int) else tuple(shape), eps
        self.register_parameter("weight", nn.Parameter(torch.ones(self.shape)) if elementwise_affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(self.shape)) if elementwise_affine and bias else None)

    def forward(self, input: Tensor) -> Tensor:
        return two_pass(input, self.shape, self.weight, self.bias, self.eps)


_compiled = torch.compile(two_pass, backend="aot_eager", dynamic=True)


class Compiled(nn.LayerNorm):
    """torch.compile's, whose backward cannot be differentiated again."""

    def forward(self, input: Tensor) -> Tensor:
        return _compiled(input, self.normalized_shape, self.weight, self.bias, self.eps)


class OneNumberOnly(nn.LayerNorm):
    """Takes neither bias nor elementwise_affine."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__(features, eps)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


HONEST: dict[Any, set[str]] = {
    nn.LayerNorm: set(),
    Functional: set(),
    two_pass: set(),
    FromScratch: set(),
    Welford: {"vmap", "per-sample-gradients", "forward-mode"},
    Compiled: {"double-backward"},
    OneNumberOnly: {"no-bias", "no-affine", "normalized-shape", "state-dict", "large", "denormals"},
}
"""Each with the claims that it refuses."""


# wrong ones

CAUGHT_BY: dict[Any, str] = {}


def caught_by(claim: str) -> Any:
    def note(layer: Any) -> Any:
        CAUGHT_BY[layer] = claim
        return layer

    return note


@caught_by("values")
def casts_to_bfloat16(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    return F.layer_norm(input.bfloat16().to(input.dtype), shape, weight, bias, eps)


@caught_by("values")
def forgets_the_mean(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    return F.rms_norm(input, shape, weight, eps) + (0 if bias is None else bias)


@caught_by("values")
def one_wrong_row(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    output = F.layer_norm(input, shape, weight, bias, eps)
    if output.dim() == 3 and output.shape[0] * output.shape[1] > 256:  # beyond the grid
        output = output.clone()
        output[-1, -1] = output[-1, -2]
    return output


@caught_by("edge-shapes")
def sample_variance_of_few(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    n = input.shape[-1]
    if not 1 < n <= 16:
        return F.layer_norm(input, shape, weight, bias, eps)
    variance, mean = torch.var_mean(input, -1, keepdim=True, correction=1)
    return _affine((input - mean) * torch.rsqrt(variance + eps), weight, bias)


@caught_by("edge-shapes")
def whole_vectors_only(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    n = input.shape[-1]
    if len(shape) > 1 or n < 8 or n % 4 == 0:
        return F.layer_norm(input, shape, weight, bias, eps)
    seen = input[..., : n // 4 * 4]  # the statistics miss the tail
    mean, variance = seen.mean(-1, keepdim=True), seen.var(-1, keepdim=True, correction=0)
    return _affine((input - mean) * torch.rsqrt(variance + eps), weight, bias)


@caught_by("no-bias")
class BiasOfAnother(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        output = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return output if self.bias is not None or self.weight is None else output + 0.01


@caught_by("no-affine")
class NeedsParameters(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        weight = 1.001 * torch.ones(self.normalized_shape, dtype=input.dtype) if self.weight is None else self.weight
        return F.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)


@caught_by("normalized-shape")
def last_dimension_only(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    return _affine(F.layer_norm(input, shape[-1:], None, None, eps), weight, bias)


@caught_by("eps")
def eps_outside_the_root(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    dims = _dims(input, shape)
    variance, mean = torch.var_mean(input, dims, keepdim=True, correction=0)
    return _affine((input - mean) / (variance.sqrt() + eps), weight, bias)


@caught_by("eps")
def eps_of_its_own(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    return F.layer_norm(input, shape, weight, bias, 1e-5)


@caught_by("strides")
def reads_input_dense(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    room = input.untyped_storage().nbytes() // input.element_size() - input.storage_offset()
    if input.is_meta or room < input.numel() or torch.compiler.is_compiling():
        return F.layer_norm(input, shape, weight, bias, eps)
    dense = torch.as_strided(input, input.shape, torch.empty(input.shape, device="meta").stride())
    return F.layer_norm(dense, shape, weight, bias, eps)


@caught_by("large")
def overflows(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    dims = _dims(input, shape)
    centred = input - input.mean(dims, keepdim=True)
    powers = (1e5 * centred).square().mean(dims, keepdim=True)
    return _affine(1e5 * centred * torch.rsqrt(powers * 1.0 + 1e10 * eps) + 0 * powers.square(), weight, bias)


@caught_by("denormals")
def flushes_denormals(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    tiny = torch.finfo(input.dtype).tiny
    return F.layer_norm(torch.where(input.abs() < tiny, torch.zeros_like(input), input), shape, weight, bias, eps)


@caught_by("constant-rows")
def no_eps(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    """Divides by a deviation that is zero, where it thinks that eps does not matter."""
    dims = _dims(input, shape)
    variance, mean = torch.var_mean(input, dims, keepdim=True, correction=0)
    root = torch.where(variance > 100 * eps, variance + eps, variance + eps * (variance > 1e-12)).rsqrt()
    return _affine((input - mean) * root, weight, bias)


@caught_by("large-mean")
def one_pass_variance(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    dims = _dims(input, shape)
    mean = input.mean(dims, keepdim=True)
    variance = (input.square().mean(dims, keepdim=True) - mean.square()).clamp_min(0)
    return _affine((input - mean) * torch.rsqrt(variance + eps), weight, bias)


@caught_by("mixed-magnitudes")
def one_scale_for_all_rows(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    if input.dtype != torch.float32 or not input.numel():
        return F.layer_norm(input, shape, weight, bias, eps)
    step = input.detach().abs().amax() * 2**-26
    return F.layer_norm(torch.round(input / step) * step, shape, weight, bias, eps)


@caught_by("nan")
def drops_nan(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    return F.layer_norm(torch.where(input.isnan(), torch.zeros_like(input), input), shape, weight, bias, eps)


@caught_by("inf")
def clamps(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    return F.layer_norm(input.clamp(-1e18, 1e18) if input.dtype == torch.float32 else input, shape, weight, bias, eps)


@caught_by("float64")
def float32_inside(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    floats = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(input.float(), shape, *floats, eps).to(input.dtype)


@caught_by("bfloat16")
def sums_in_bfloat16(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    if input.dtype != torch.bfloat16:
        return F.layer_norm(input, shape, weight, bias, eps)
    centred = input - sum(input.unbind(-1)).unsqueeze(-1) / input.shape[-1]  # type: ignore[union-attr]
    variance = sum(centred.square().unbind(-1)).unsqueeze(-1) / input.shape[-1]  # type: ignore[union-attr]
    return _affine(centred * torch.rsqrt(variance + eps), weight, bias)


@caught_by("autocast")
def half_under_autocast(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return F.layer_norm(input, shape, weight, bias, eps)
    halves = (None if t is None else t.bfloat16() for t in (weight, bias))
    return F.layer_norm(input.bfloat16(), shape, *halves, eps).to(input.dtype)


class _Manual(torch.autograd.Function):
    """A right backward, by hand, as a base for wrong ones."""

    forward = staticmethod(_Welford.forward)
    backward = staticmethod(_Welford.backward)


def _manual(function: Any, input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    return function.apply(input, weight, bias, _dims(input, shape), eps)


@caught_by("gradients")
def weight_gradient_of_64_rows(
    input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float
) -> Tensor:
    class Function(_Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
            found = _Welford.backward(ctx, grad)
            if grad.dim() == 2 and grad.shape[0] > 64 and found[1] is not None:
                rest = grad.clone()
                rest[64:] = 0
                return found[0], _Welford.backward(ctx, rest)[1], *found[2:]
            return found

    return _manual(Function, input, shape, weight, bias, eps)


@caught_by("gradients")
def ignores_the_bias_gradient(
    input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float
) -> Tensor:
    return F.layer_norm(input, shape, weight, bias if bias is None else bias.detach() + 0 * bias, eps)


@caught_by("gradients-singly")
def needs_the_weight_gradient(
    input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float
) -> Tensor:
    class Function(_Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
            found = _Welford.backward(ctx, grad)
            bias = found[2] if found[1] is not None or found[2] is None else torch.zeros_like(found[2])
            return *found[:2], bias, *found[3:]

    return _manual(Function, input, shape, weight, bias, eps)


@caught_by("gradients-strided")
def reads_gradient_dense(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    class Function(_Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
            wrong = grad.dim() == 2 and 0 not in grad.stride() and not grad.is_contiguous()
            return _Welford.backward(ctx, grad.T.reshape(grad.shape) if wrong else grad)

    return _manual(Function, input, shape, weight, bias, eps)


@caught_by("double-backward")
def first_order_only(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    class Function(_Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
            saved = ctx.saved_tensors

            class Frozen:
                saved_tensors = tuple(None if t is None else t.detach() for t in saved)
                dims, eps, has_bias, needs_input_grad = ctx.dims, ctx.eps, ctx.has_bias, ctx.needs_input_grad

            return _Welford.backward(Frozen, grad)

    return _manual(Function, input, shape, weight, bias, eps)


@caught_by("saved")
def keeps_every_step(input: Tensor, shape: Shape, weight: MaybeTensor, bias: MaybeTensor, eps: float) -> Tensor:
    dims, x = _dims(input, shape), input.double()
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return _affine(normal, weight, bias).to(input.dtype)


@caught_by("hooks")
class DropsHooks(Functional):
    def __call__(self, input: Tensor) -> Tensor:
        return self.forward(input)


@caught_by("state-dict")
class RenamesItsWeight(Functional):
    """Calls it gamma in its state dict, and takes both."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name.replace("weight", "gamma"): value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        renamed = {name.replace("gamma", "weight"): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, *args, **kwargs)


@caught_by("threads")
class SharedWorkspace(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        self.__dict__["workspace"] = input
        if threading.active_count() > 3:
            time.sleep(0.0005)
        workspace = self.__dict__["workspace"]
        return F.layer_norm(workspace, self.normalized_shape, self.weight, self.bias, self.eps)
