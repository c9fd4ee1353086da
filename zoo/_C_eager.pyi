"""Eager mode in C++ (csrc/eager.cpp). Each takes an operator's tensors and the name of its activation, or None."""

from collections.abc import Callable
from types import NotImplementedType
from typing import Any

from torch import Tensor

def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, /
) -> Tensor | NotImplementedType: ...
def mlp(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str | None,
    /,
) -> Tensor | NotImplementedType: ...
def implement(name: str, function: Callable[..., Any], /) -> None:
    """The kernel of an operator's Autograd key, once; ``function`` is called where a derivative is asked for."""
