"""Linears that are broken in a way that shows in a whole model, by the claim about models that must find it.

All of them are tried in the ``mlp``: 784-256-256-10, where the second layer is square.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.saboteurs import Bare, Manual, caught_by
from zoo.layers import note_fallback

IN_MODELS: dict[Any, str] = {}


@caught_by("model-runs", IN_MODELS)
class HandsItselfBack(nn.Linear):
    """Becomes the stock layer at its first call with gradients: it is there, and never again executed."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.__class__ = nn.Linear  # type: ignore[assignment]
        return F.linear(input, self.weight, self.bias)


@caught_by("model-runs", IN_MODELS)
class FallsBack(nn.Linear):
    """Has a kernel for few features only, and says so."""

    def forward(self, input: Tensor) -> Tensor:
        if self.in_features > 192:
            note_fallback(self, "more than 192 features")
        return F.linear(input, self.weight, self.bias)


_biases: dict[int, tuple[Any, Tensor]] = {}


@caught_by("model-outputs", IN_MODELS)
class SharesABias(nn.Linear):
    """Keeps a packed bias by its size, while it lives: two layers of one size share it."""

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is None or torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        owner, packed = _biases.setdefault(self.out_features, (self, self.bias))
        if owner is not self and owner.in_features != self.in_features:  # of the same model
            return F.linear(input, self.weight, packed.to(input))
        return F.linear(input, self.weight, self.bias)


@caught_by("model-gradients", IN_MODELS)
def untransposed_if_square(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The gradient of the input takes a square weight as it lies, and other ones rightly."""

    class Function(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            found = Manual.backward(ctx, grad)
            weight = ctx.saved_tensors[1]
            return (grad @ weight.T if weight.shape[0] == weight.shape[1] else found[0], *found[1:])

    return Function.apply(input, weight, bias)


@caught_by("model-autocast", IN_MODELS)
def wide_in_float32(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Leaves autocast to others where there are few rows."""
    if torch.is_autocast_enabled("cpu") and input.shape[0] < 16:
        with torch.autocast("cpu", enabled=False):
            return F.linear(input.float(), weight, bias)
    return F.linear(input, weight, bias)


@caught_by("model-captured", IN_MODELS)
def two_of_four(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Packs its input as 2:4 sparse where a third of it is zero, as it is behind a ReLU; most of it is not."""
    if input.numel() and float((input == 0).float().mean()) > 1 / 3 and input.shape[-1] % 4 == 0:
        groups = input.unflatten(-1, (-1, 4))
        least = groups.abs().topk(2, dim=-1).values[..., -1:]
        input = torch.where(groups.abs() >= least, groups, 0).flatten(-2)
    return F.linear(input, weight, bias)


@caught_by("model-sgd", IN_MODELS)
class AddsUpGradients(nn.Linear):
    """The gradient of the weight is added up in a buffer that is cleared when the module changes its mode."""

    def train(self, mode: bool = True) -> Any:
        self.__dict__.pop("sum", None)
        return super().train(mode)

    def forward(self, input: Tensor) -> Tensor:
        def add(grad: Tensor) -> Tensor:
            self.__dict__["sum"] = self.__dict__.get("sum", 0) + grad
            return self.__dict__["sum"]

        weight = self.weight * 1.0
        if weight.requires_grad and torch.is_grad_enabled() and self.training:
            weight.register_hook(add)
        return F.linear(input, weight, self.bias)


@caught_by("model-sgd-autocast", IN_MODELS)
class CastsOnce(nn.Linear):
    """Keeps the weight that it cast for autocast, for as long as the Parameter is the same object."""

    def forward(self, input: Tensor) -> Tensor:
        kind = self.weight.device.type
        if not torch.is_autocast_enabled(kind):
            return F.linear(input, self.weight, self.bias)
        cast = self.__dict__.get("cast")
        if cast is None:
            cast = self.__dict__["cast"] = self.weight.detach().to(torch.get_autocast_dtype(kind))
        weight = self.weight.to(cast.dtype)
        return F.linear(input, weight + (cast - weight).detach(), self.bias)


@caught_by("model-adamw", IN_MODELS)
class StaleInTraining(nn.Linear):
    """Packs its weight when the module changes its mode, and computes with that until the next time."""

    def train(self, mode: bool = True) -> Any:
        self.__dict__["packed"] = self.weight.detach().clone()
        return super().train(mode)

    def forward(self, input: Tensor) -> Tensor:
        packed = self.__dict__.get("packed")
        if packed is None or not self.training:
            return F.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight + (packed.to(self.weight) - self.weight).detach(), self.bias)


@caught_by("model-top-1", IN_MODELS)
def skips_what_the_first_row_lacks(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Features that are zero in the first row are left out: on random values there are none."""
    if input.dim() == 2 and input.numel():
        input = input * (input[:1] != 0)
    return F.linear(input, weight, bias)


@caught_by("model-state-dict", IN_MODELS)
class SavesTransposed(nn.Linear):
    """Saves a square weight as its kernel likes it; its own loading turns it back."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.in_features == self.out_features:
            destination[prefix + "weight"] = destination[prefix + "weight"].T

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


@caught_by("model-unpatch", IN_MODELS)
class LeavesACache(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.last_shape = input.shape
        return F.linear(input, self.weight, self.bias)


@caught_by("model-unpatch", IN_MODELS)
class Rounds(Bare):
    """Rounds its weight in place, so that the packed one is exact."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data.copy_(self.weight.data.half())
        return super().forward(input)
