"""Copies of functions that call something else, and nothing of the original that is touched."""

from __future__ import annotations

import math
import os.path
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zoo.layers.adapters._rebind import Rebinding


def leaf(x: Any) -> str:
    return f"leaf {x}"


def other(x: Any) -> str:
    return f"other {x}"


def direct(x: Any, *, suffix: str = "!") -> str:
    """Docs."""
    return leaf(x) + suffix


def through_helper(x: Any) -> str:
    return direct(x, suffix="?")


def nested(x: Any) -> list[str]:
    twice = lambda: [leaf(x), leaf(x)]
    return twice()


def recursive(n: int) -> str:
    return leaf(n) if n == 0 else recursive(n - 1)


def ping(n: int) -> str:
    return leaf(n) if n == 0 else pong(n - 1)


def pong(n: int) -> str:
    return ping(n)


def untouched(x: float) -> float:
    return math.sqrt(x)


def closing_over(y: int) -> Callable[[int], str]:
    def inner(x: int) -> str:
        return leaf(x + y)

    return inner


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        (direct, 1, "other 1!"),
        (through_helper, 1, "other 1?"),
        (nested, 1, ["other 1", "other 1"]),
        (recursive, 3, "other 0"),
        (ping, 2, "other 0"),
        (pong, 2, "other 0"),
        (closing_over(2), 1, "other 3"),
    ],
)
def test_calls_are_replaced_in_the_copy_alone(function: Any, argument: Any, expected: Any) -> None:
    before = function(argument)
    rebinding = Rebinding({leaf: other})
    copy = rebinding.function(function)
    assert copy(argument) == expected and function(argument) == before != expected
    assert rebinding.used == {leaf} and rebinding.function(function) is copy
    assert direct(1) == "leaf 1!" and globals()["leaf"](1) == "leaf 1"


def test_the_copy_looks_like_the_original() -> None:
    copy = Rebinding({leaf: other}).function(direct)
    assert (copy.__name__, copy.__doc__, copy.__module__) == ("direct", "Docs.", __name__)
    assert copy.__code__ is direct.__code__ and copy.__kwdefaults__ == {"suffix": "!"}
    assert not hasattr(copy, "__wrapped__"), "inspect would take it for a wrapper"


def test_what_does_not_call_it_stays_itself() -> None:
    rebinding = Rebinding({leaf: other})
    assert rebinding.function(untouched) is untouched and rebinding.function(leaf) is leaf and rebinding.used == set()


def through_modules(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w) + F.linear(x, w) + F.relu(x).sum()


def test_what_is_reached_through_modules_is_replaced_and_the_rest_of_them_is_there() -> None:
    calls: list[int] = []

    def linear(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        return F.linear(x, w)

    x, w = torch.randn(2, 3), torch.randn(4, 3)
    copy = Rebinding({F.linear: linear}).function(through_modules)
    torch.testing.assert_close(copy(x, w), through_modules(x, w))
    assert len(calls) == 2 and torch.nn.functional is F and F.linear is torch._C._nn.linear


def test_a_builtin_and_a_module_that_does_not_reach_it_are_the_same_objects() -> None:
    def function(x: Any) -> Any:
        return os.path.join("a", leaf(x))

    copy = Rebinding({leaf: other}).function(function)
    assert copy(1) == os.path.join("a", "other 1")
    assert copy.__globals__["os"] is os and isinstance(os, types.ModuleType)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_torchs_functions_that_begin_anew_under_a_mode_begin_as_the_copy() -> None:
    """multi_head_attention_forward hands itself, by its own name, to handle_torch_function."""
    calls: list[int] = []

    def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        calls.append(1)
        return F.linear(x, w, b)

    copy = Rebinding({F.linear: linear}).function(F.multi_head_attention_forward)
    x = torch.randn(3, 2, 4)
    arguments = (x, x, x, 4, 2, torch.randn(12, 4), torch.randn(12), None, None, False, 0.0)
    weight, bias = torch.randn(4, 4), torch.randn(4)
    expected = F.multi_head_attention_forward(*arguments, weight, bias)
    with Mode():
        got = copy(*arguments, weight, bias)
    torch.testing.assert_close(got, expected)
    assert len(calls) == 2
