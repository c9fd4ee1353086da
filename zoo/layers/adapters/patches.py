"""Patches of any size in timm's NaFlexViT: its embedding's weight is resampled to their size before it is used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.layers.adapters._given import given_listeners, made_from

__all__ = ["resampled"]


def resampled(forward: Callable[..., Tensor], stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of PatchEmbedInterpolator: those who listen know the weight it makes by the one that it is given."""

    @functools.wraps(forward)
    def interpolator(self: Any, patches: Tensor, proj_weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not given_listeners:
            return forward(self, patches, proj_weight, *args, **kwargs)
        token = made_from.set(proj_weight)
        try:
            return forward(self, patches, proj_weight, *args, **kwargs)
        finally:
            made_from.reset(token)

    return interpolator
