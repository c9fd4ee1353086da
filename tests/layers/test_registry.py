"""The registry of layers: what can be registered, and what is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Linear, get_layer, list_layers, register_layer
from zoo.layers.registry import KINDS, custom_layer, stock_kind
from zoo.swap import patch


def test_zoos_own_is_there() -> None:
    assert list_layers() == list_layers("linear") == ["zoo"] and get_layer("linear", "zoo") is Linear


def test_a_class_and_a_function_can_be_registered_and_are_returned_as_they_are() -> None:
    class Mine(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight, self.bias)

    def twice(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Twice as much."""
        return 2 * F.linear(input, weight, bias)

    assert register_layer("linear", "mine10")(Mine) is Mine and register_layer("linear", "mine9")(twice) is twice
    assert list_layers("linear") == ["mine9", "mine10", "zoo"] and get_layer("linear", "mine10") is Mine
    layer = get_layer("linear", "mine9")
    assert issubclass(layer, nn.Linear) and layer.__doc__ == "Twice as much." and layer.__name__ == "mine9"
    model, x = nn.Linear(2, 3, bias=False), torch.ones(1, 2)
    expected = 2 * model(x)
    patch(model, layer="mine9")
    assert torch.equal(model(x), expected)


class Slots(nn.Linear):
    __slots__ = ("more",)

    def forward(self, input: Tensor) -> Tensor:
        return input


class NoForward(nn.Linear):
    pass


class Alien(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Alien, r"expected a subclass of Linear or a function f\(input, weight, bias\), got class Alien"),
        (NoForward, "NoForward has no forward of its own"),
        (Slots, "a Linear cannot become a Slots in place .*leave out __slots__"),
        (lambda x: x, r"must take \(input, weight, bias\)"),
        (3, "expected a class or a function, got 3"),
    ],
)
def test_what_cannot_stand_in_is_refused(layer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"linear layer 'bad': .*{message}"):
        register_layer("linear", "bad")(layer)
    assert list_layers() == ["zoo"]


def test_a_layer_of_a_unit_is_a_function() -> None:
    def mine(input: Tensor, weight1: Tensor, bias1: Any, weight2: Tensor, bias2: Any, activation: str) -> Tensor:
        return input

    assert list_layers("mlp") == ["zoo"]
    assert register_layer("mlp", "mine")(mine) is mine and get_layer("mlp", "mine") is mine
    assert list_layers("mlp") == list_layers() == ["mine", "zoo"] and list_layers("linear") == ["zoo"]
    words = r"f\(input, weight1, bias1, weight2, bias2, activation\)"
    with pytest.raises(ValueError, match=f"mlp layer 'bad': expected a function {words}, got class Alien"):
        register_layer("mlp", "bad")(Alien)
    with pytest.raises(ValueError, match=r"mlp layer 'bad': .*must take \(input, weight1, bias1, weight2"):
        register_layer("mlp", "bad")(lambda input, weight, bias: input)
    assert custom_layer(nn.Linear(2, 2), "mlp") is None


def test_names_and_kinds() -> None:
    with pytest.raises(ValueError, match=r"'zoo' is registered already, as Linear; choose another name"):
        register_layer("linear", "zoo")(lambda input, weight, bias: input)
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="must be a non-empty str"):
            register_layer("linear", name)  # type: ignore[arg-type]
    for call in (lambda: register_layer("norm", "x"), lambda: list_layers("norm"), lambda: get_layer("norm", "x")):
        with pytest.raises(ValueError, match="unknown kind of layer 'norm'; known: conv2d, layer_norm, linear, mlp"):
            call()
    with pytest.raises(ValueError, match="unknown linear layer 'zo'; known: zoo"):
        get_layer("linear", "zo")


def test_which_layer_a_module_runs() -> None:
    class Further(Linear):
        pass

    class Other(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    assert custom_layer(nn.Linear(2, 2), "linear") is None and custom_layer(Other(2, 2), "linear") is None
    assert custom_layer(Linear(2, 2), "linear") == custom_layer(Further(2, 2), "linear") == "zoo"
    module = Linear(2, 2)
    module.forward = lambda input: input  # type: ignore[method-assign]
    assert custom_layer(module, "linear") is None
    register_layer("linear", "same")(Linear)
    patched = nn.Linear(2, 2)
    patch(patched, layer="same")
    assert custom_layer(patched, "linear") == "same" and custom_layer(Linear(2, 2), "linear") == "zoo"
    assert stock_kind(patched) == stock_kind(nn.Linear(2, 2)) == "linear" and stock_kind(nn.ReLU()) is None


def test_the_flops_of_the_stock_layer() -> None:
    layer = nn.Linear(4, 3)
    assert KINDS["linear"].flops(layer, layer(torch.ones(2, 5, 4))) == 2 * 10 * 4 * 3
