"""Gradients that are zero but for rounding, and those that a norm hides: what is honest there, and what is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.spoiling import spoiled, truncated
from zoo.parity import parity

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixer(nn.Module):
    """The tokens' bias adds the same to all channels of a token, which the norm takes off: its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm, self.head = nn.Linear(196, 196), nn.LayerNorm(384), nn.Linear(384, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm((x + self.tokens(x)).transpose(1, 2)))


class _Sum(torch.autograd.Function):
    """A Linear with this sum over the rows as the gradient of its bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, added: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.added = added
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, rows.T @ x.flatten(0, -2), ctx.added(rows), None


def with_bias_gradient(
    model: Mixer, layer: str, added: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> Mixer:
    class Summing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return _Sum.apply(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype), added)

    twin = copy.deepcopy(model)
    twin.get_submodule(layer).__class__ = Summing
    return twin


def one_by_one(rows: Tensor) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


def test_a_gradient_that_is_zero_but_for_rounding() -> None:
    model, x = Mixer(), torch.randn(2, 384, 196)
    report = parity(with_bias_gradient(model, "tokens", one_by_one), model, x, gradients=True)
    noise = next(entry for entry in report.entries if entry.name == "tokens.bias")
    assert noise.error > 1e3 and noise.reference_error > 1e3, "this case should be one"
    assert report.ok, report


@pytest.mark.parametrize(
    ("layer", "added"),
    [
        ("tokens", lambda rows: rows[1:].sum(0)),
        ("tokens", lambda rows: rows.sum(0) + 1e-3 * rows[0]),
        ("tokens", lambda rows: truncated(rows).sum(0)),
        ("tokens", lambda rows: rows.bfloat16().sum(0).float()),
        ("tokens", lambda rows: spoiled(rows.sum(0), 7, 1e-3)),
        ("head", lambda rows: rows[1:].sum(0)),
        ("head", lambda rows: rows.sum(0) * (1 + 1e-5)),
    ],
)
def test_faults_in_and_beside_it_are_caught(layer: str, added: Callable[[Tensor], Tensor]) -> None:
    model, x = Mixer(), torch.randn(2, 384, 196)
    report = parity(with_bias_gradient(model, layer, added), model, x, gradients=True)
    assert [entry.name for entry in report.entries if not entry.ok] == [f"{layer}.bias"]


def test_a_term_that_is_lost_under_autocast() -> None:
    """There the gradients are float32, and their noise is that of bfloat16."""

    def losing(first: int) -> Mixer:
        return with_bias_gradient(model, "tokens", lambda rows: rows[first:].float().sum(0), torch.bfloat16)

    model, x = Mixer(), torch.randn(16, 384, 196)
    with torch.autocast("cpu", torch.bfloat16):
        assert parity(losing(0), model, x, gradients=True).ok
        report = parity(losing(1), model, x, gradients=True)
    assert [entry.name for entry in report.entries if not entry.ok] == ["tokens.bias"]


class _Times(torch.autograd.Function):
    """Scaled forward alone."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, factor: float) -> Tensor:
        return y * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("factor", [0.1, 0.5, 4.0, 10.0])
def test_results_of_another_size_before_a_norm(factor: float) -> None:
    """The outputs are right, and the gradients those of the activations: ``1 / factor`` times what they should be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96, eps=1e-12), nn.GELU(), nn.Linear(96, 48))

    class Small(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return _Times.apply(F.linear(x, self.weight, self.bias), factor)

    custom, x = copy.deepcopy(model), torch.randn(64, 96)
    custom[0].__class__ = Small
    report = parity(custom, model, x, gradients=True)
    assert {entry.name for entry in report.entries if not entry.ok} >= {"0.weight"}, report
    assert all(entry.error > entry.limit for entry in report.entries if "error" in entry.reason[:6])
