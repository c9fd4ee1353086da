"""Linears that are right, each written in another way, or that say clearly what they do not do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def addmm(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One product over all leading dimensions."""
    rows = input.reshape(-1, weight.shape[1])
    output = rows @ weight.T if bias is None else torch.addmm(bias, rows, weight.T)
    return output.view(*input.shape[:-1], weight.shape[0])


def einsum(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The bias added after the product."""
    output = torch.einsum("...k,nk->...n", input, weight)
    return output if bias is None else output + bias.to(output.dtype)


class Sliced(nn.Linear):
    """Computes slices of its features; has a setting that adopt gives it."""

    slices: int

    def adopt(self) -> None:
        self.slices = min(4, self.out_features)

    def forward(self, input: Tensor) -> Tensor:
        weights = self.weight.tensor_split(self.slices)
        biases = [None] * self.slices if self.bias is None else self.bias.tensor_split(self.slices)
        return torch.cat([F.linear(input, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)


class TwoHalves(nn.Linear):
    """Sums two halves of the input features, in another order than the stock layer."""

    def forward(self, input: Tensor) -> Tensor:
        half = self.in_features // 2
        if input.shape[-1] != self.in_features:
            raise ValueError(f"input has {input.shape[-1]} features, expected {self.in_features}")
        first = F.linear(input[..., half:], self.weight[:, half:], self.bias)
        return first + F.linear(input[..., :half], self.weight[:, :half])


class FromScratch(nn.Module):
    """No nn.Linear, and without device and dtype in its constructor."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        keep = ctx.needs_input_grad
        ctx.save_for_backward(input if keep[1] else None, weight if keep[0] else None)
        return F.linear(input, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows, needed = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad
        return (
            grad @ weight if needed[0] else None,
            rows.T @ input.reshape(-1, input.shape[-1]) if needed[1] else None,
            rows.sum(0) if needed[2] else None,
        )


class Refuses(nn.Linear):
    """A backward by hand that is differentiable once, and neither half precision, autocast nor torch.func."""

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.dtype == torch.float16 or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise NotImplementedError("float16 and autocast are not supported; use float32 or bfloat16")
        return _Function.apply(input, self.weight, self.bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _added_up(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _added_up(grad, b.T), _added_up(a.T, grad)


def _added_up(a: Tensor, b: Tensor) -> Tensor:
    total = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total.addr_(a[:, k], b[k])
    return total


def plain_sum(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One term after the other, as a first kernel adds up: several times the error of a library's blocks."""
    output = _Product.apply(input.reshape(-1, input.shape[-1]), weight.T)
    return (output if bias is None else output + bias).view(*input.shape[:-1], weight.shape[0])


LAYERS = (nn.Linear, addmm, einsum, Sliced, TwoHalves, FromScratch, Refuses)
REFUSED_BY_REFUSES = {
    "float16",
    "autocast",
    "double-backward",
    "vmap",
    "per-sample-gradients",
    "forward-mode",
}
