"""One input, and what is asked of a layer with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """One input, and what is asked of the layer with it."""

    name: str
    input: Tensor
    """With the strides that the layer shall see."""
    size: Any = None
    """What the input does not tell of the layer's sizes: of a Linear out_features; see the kind's suite."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else the layer is built with, such as ``bias=False``."""
    gradients: tuple[str, ...] = ()
    """Of which of "input" and the parameters gradients are asked for, all at once; none: a forward without grad."""
    cotangent: Tensor | None = None
    """Of the output's shape; a random one unless given."""
    weight_scale: float = 1.0
    conditioned: bool = False
    """Whether the error that a rounding of the input would make is allowed too, for inputs on which every way to
    compute loses digits."""
