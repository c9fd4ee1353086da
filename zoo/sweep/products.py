"""Counts the arithmetic that is a Linear's, whoever does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from zoo.flops import FlopCounter

__all__ = ["LinearProducts"]


class LinearProducts(FlopCounter):
    """Inside, ``products`` grows by the FLOPs of products with a Linear's weight.

    A weight is an ``nn.Linear``'s, or an in-projection of ``nn.MultiheadAttention``; also what is made of nothing but
    such weights and other parameters, as a slice, a concatenation or a copy in another dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.products = 0
        self._weights = {id(weight): weight for module in model.modules() for weight in _weights(module)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        total, products = self.total, self.products
        output = super().__torch_dispatch__(func, types, args, kwargs)
        given = list(_tensors((*args, *(kwargs or {}).values())))
        if any(id(tensor) in self._weights for tensor in given):
            if self.products == products:  # else what it was decomposed into is counted already
                self.products += self.total - total
            if all(id(tensor) in self._weights or isinstance(tensor, nn.Parameter) for tensor in given):
                # kept, so that its id stands for it alone
                self._weights.update((id(made), made) for made in _tensors([output]))
        return output


def _weights(module: nn.Module) -> Iterator[Tensor]:
    if isinstance(module, (nn.Linear, nn.MultiheadAttention)):
        yield from (weight for weight in module._parameters.values() if weight is not None and weight.dim() == 2)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
