"""Reads many numbers from a device at once: each question to a GPU waits for all that it has to do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["equalities", "numbers"]


def numbers(tensors: Iterable[Tensor]) -> list[Any]:
    """What ``tolist`` gives of each tensor of any shape, with one wait for all of a device and dtype."""
    given = list(tensors)
    groups: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(given):
        groups.setdefault((type(tensor), tensor.device, tensor.dtype), []).append(index)
    found: list[Any] = [None] * len(given)
    for group in groups.values():
        flat = torch.cat([given[index].reshape(-1) for index in group]).cpu()
        parts = flat.split([given[index].numel() for index in group])
        for index, part in zip(group, parts, strict=True):
            found[index] = part.reshape(given[index].shape).tolist()
    return found


def equalities(pairs: Iterable[tuple[Tensor, Tensor]], *, equal_nan: bool = False) -> list[bool]:
    """Whether the two of each pair are of one shape, dtype, device and layout, and equal in every value.

    Only with ``equal_nan`` is a NaN equal to another.
    """
    found: list[bool | None] = []
    asked = []
    for one, other in pairs:
        if (one.shape, one.dtype, one.device, one.layout) != (other.shape, other.dtype, other.device, other.layout):
            found.append(False)
            continue
        same = one == other
        if equal_nan:
            same = same | (one.isnan() & other.isnan())
        found.append(None)
        asked.append(same.all())
    answers = iter(numbers(asked))
    return [bool(next(answers)) if known is None else known for known in found]
