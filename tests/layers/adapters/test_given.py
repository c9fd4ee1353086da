"""A registered layer on a weight that others hand it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Linear, get_layer, register_layer
from zoo.layers.adapters._given import given_listeners, layer_as_function, unfit


class Shaped(nn.Linear):
    """Uses all that a forward may, super() and an attribute of its own included."""

    def forward(self, input: Tensor) -> Tensor:
        assert (self.out_features, self.in_features) == self.weight.shape
        self.last = input.shape
        return super().forward(input)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [Linear, Shaped])
def test_it_is_the_layers_forward_and_gradients_reach_what_was_given(layer: type[nn.Module], bias: bool) -> None:
    x, whole = torch.randn(2, 5, 4), torch.randn(9, 4, requires_grad=True)
    b = torch.randn(3, requires_grad=True) if bias else None
    y = layer_as_function(layer)(x, whole[3:6], b)
    torch.testing.assert_close(y, F.linear(x, whole[3:6], b))
    y.sum().backward()
    torch.testing.assert_close(whole.grad[3:6], x.sum((0, 1)).expand(3, 4))
    assert whole.grad[:3].eq(0).all() and whole.grad[6:].eq(0).all() and (b is None or b.grad is not None)


def test_a_function_is_called_with_what_was_given() -> None:
    register_layer("linear", "doubled")(lambda input, weight, bias: 2 * F.linear(input, weight, bias))
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    torch.testing.assert_close(layer_as_function(get_layer("linear", "doubled"))(x, weight=w), 2 * F.linear(x, w))


def test_a_vector_is_no_linears_weight() -> None:
    x, w = torch.randn(2, 4), torch.randn(4)
    torch.testing.assert_close(layer_as_function(Linear)(x, w), F.linear(x, w))


def test_listeners_are_around_the_call() -> None:
    seen: list[tuple[Tensor, ...]] = []

    def listener(weights: tuple[Tensor, ...], call: Callable[[], Tensor]) -> Tensor:
        seen.append(weights)
        return call()

    x, w = torch.randn(2, 4), torch.randn(3, 4)
    given_listeners.append(listener)
    try:
        y = layer_as_function(Linear)(x, w)
    finally:
        given_listeners.remove(listener)
    torch.testing.assert_close(y, F.linear(x, w))
    assert len(seen) == 1 and len(seen[0]) == 1 and seen[0][0] is w


def test_which_layers_can_do_without_a_module() -> None:
    class Packs(nn.Linear):
        def adopt(self) -> None:
            self.times = 2

    class Asks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input if self.training else input + 1

    assert unfit(Linear) is None and unfit(Shaped) is None
    assert "adopt" in unfit(Packs) and "in training" in unfit(Asks)
