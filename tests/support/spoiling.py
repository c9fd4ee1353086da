"""Tensors made wrong in one way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def truncated(t: Tensor) -> Tensor:
    """With a mantissa of 10 bits, as tf32 has."""
    return (t.detach().view(torch.int32) & ~0x1FFF).view(torch.float32) + (t - t.detach())


def spoiled(t: Tensor, index: Any, value: float) -> Tensor:
    t = t.clone()
    t[index] = value
    return t
