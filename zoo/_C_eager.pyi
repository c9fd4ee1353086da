"""Eager mode in C++ (csrc/eager.cpp). Each takes an operator's tensors and the name of its activation, or None."""

from types import NotImplementedType

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
