"""zoo.layers.Linear: nn.Linear in everything but the kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo import ops
from zoo.layers import Linear
from zoo.layers._fallback import alters_torch_functions, fallback_listeners


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_built_initialised_and_saved_as_torchs(bias: bool) -> None:
    torch.manual_seed(0)
    mine = Linear(4, 3, bias=bias)
    torch.manual_seed(0)
    stock = nn.Linear(4, 3, bias=bias)
    assert isinstance(mine, nn.Linear) and repr(mine) == repr(stock)
    assert list(mine.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(mine.parameters(), stock.parameters(), strict=True))
    stock.load_state_dict(mine.state_dict())


@pytest.mark.parametrize("shape", [(4,), (2, 4), (0, 4), (2, 3, 4)])
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    mine = Linear(4, 3)
    stock = nn.Linear(4, 3)
    stock.load_state_dict(mine.state_dict())
    x = torch.randn(shape)
    results = []
    for layer in (mine, stock):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        results.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4)])
def test_the_output_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    mine, stock = Linear(4, 3), nn.Linear(4, 3)
    stock.load_state_dict(mine.state_dict())
    x = torch.randn(shape, requires_grad=True)
    for layer in (mine, stock):
        nn.ReLU(inplace=True)(layer(x).mul_(2)).sum().backward()
    torch.testing.assert_close(mine.weight.grad, stock.weight.grad)
    grad = ops.linear_input_grad(torch.randn(*shape[:-1], 3, requires_grad=True), mine.weight)
    grad.add_(1).sum().backward()


class Answers(Tensor):
    """A weight that brings its own linear."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return torch.full((len(args[0]), 3), 7.0)
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(Tensor):
    """A subclass that leaves torch functions as they are."""


def test_a_weight_that_brings_its_own_linear_is_heeded_and_told() -> None:
    told: list[Any] = []
    layer = Linear(4, 3)
    fallback_listeners.append(lambda module, reason: told.append((module, reason)))
    try:
        layer(torch.ones(2, 4))
        assert not told
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Answers))
        assert torch.equal(layer(torch.ones(2, 4)), torch.full((2, 3), 7.0))
    finally:
        fallback_listeners.pop()
    assert [module for module, _ in told] == [layer] and "brings its own linear" in told[0][1]


def test_which_weights_bring_their_own() -> None:
    plain = torch.ones(2, 2)
    for weight in (plain, nn.Parameter(plain), plain.as_subclass(Plain), nn.Buffer(plain)):
        assert not alters_torch_functions(weight), type(weight)
    assert alters_torch_functions(plain.as_subclass(Answers))


def test_functional_calls_and_copies() -> None:
    layer = Linear(4, 3)
    weights = {"weight": torch.zeros(3, 4), "bias": torch.ones(3)}
    assert torch.equal(torch.func.functional_call(layer, weights, torch.ones(2, 4)), torch.ones(2, 3))
    twin = copy.deepcopy(layer)
    assert type(twin) is Linear and torch.equal(twin.weight, layer.weight) and twin.weight is not layer.weight
