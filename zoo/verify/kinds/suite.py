"""What the claims need to know of a kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zoo.verify.case import Case

if TYPE_CHECKING:
    from zoo.verify.subject import Subject

__all__ = ["NO_BIAS", "Cases", "Suite", "WithFunction"]

NO_BIAS: Mapping[str, Any] = {"bias": False}

Cases = Callable[["Subject"], Sequence[Case]]


def _left(stock: nn.Module) -> None:
    """The stock layer's own initialisation will do."""


@dataclass(frozen=True)
class Suite:
    """A kind of layer: the stock layer, which is the reference in float64 too, how one is built, and its cases."""

    kind: str
    stock: Callable[..., nn.Module]
    """Builds the stock layer of some sizes and options, with ``device`` and ``dtype``."""
    functional: Callable[..., nn.Module]
    """Builds a layer that computes with a function, which comes first; then as ``stock``."""
    parameters: tuple[str, ...]
    weights: tuple[str, ...]
    """Those of the parameters that the gradient of the input depends on."""
    size: Any
    sizes: tuple[Any, ...]
    """What a typical layer is built with, as :attr:`Case.size` and as arguments."""
    sample: tuple[int, ...]
    """The shape of one row of its input: an input is (rows, *sample)."""
    out: tuple[int, ...]
    """The shape of one row of its output."""
    sizes_of: Callable[[Case], tuple[Any, ...]]
    """The arguments that a case's layer is built with."""
    shape_of: Callable[[Case], tuple[int, ...]]
    """The shape of a case's output."""
    cases: Mapping[str, Cases]
    """By the claim that they are for."""
    wrong: Callable[[Subject], Sequence[tuple[str, Tensor]]]
    """Inputs that a typical layer must refuse, and what is wrong with each."""
    variants: tuple[Mapping[str, Any], ...] = ({}, NO_BIAS)
    """Options that a layer may be built with."""
    required: tuple[Mapping[str, Any], ...] = ({}, NO_BIAS)
    """Those without which it is not built as the stock layer is."""
    leading: bool = True
    """Whether an input may have any number of dimensions before ``sample``."""
    spare: int = 0
    """How many tensors of the input's size a layer may keep for the backward beyond what the stock layer keeps."""
    fill: Callable[[nn.Module], None] = _left
    """Gives a stock layer parameters that tell, where its own initialisation does not."""

    @property
    def all(self) -> tuple[str, ...]:
        """What has a gradient."""
        return ("input", *self.parameters)


class WithFunction(nn.Module):
    """Mixin of a stock layer that computes with a function."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.function = function
