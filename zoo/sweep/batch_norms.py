"""Batch norms that norm: a fresh model's have the statistics 0 and 1, and leave what comes in as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zoo.isolation import nothing_kept

__all__ = ["set_statistics"]


def set_statistics(model: nn.Module, inputs: Tensor) -> int:
    """Give the batch norms of a model in eval mode the statistics of these inputs. Returns how many were given them.

    Without, values grow from layer to layer: gates and softmaxes saturate, and float32 has no right digit of the
    gradients that go through them, which then tell nothing of a layer (examples/results/README.md has figures).

    ``running_var`` becomes the mean square, not the variance, which may be zero where the values are not: what comes
    out is never larger than about one, and its rounding neither. Where all are zero, the statistics stay. A norm that
    is called several times has those of its last call.
    """
    given: set[nn.Module] = set()

    def hook(norm: Any, args: tuple[Any, ...]) -> None:
        values = args[0].transpose(0, 1).flatten(1)  # (channels, values)
        square = values.square().mean(1)
        norm.running_mean.copy_(values.mean(1))
        norm.running_var.copy_(torch.where(square > 0, square, norm.running_var))
        given.add(norm)

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    handles = [norm.register_forward_pre_hook(hook) for norm in norms]
    try:
        with torch.no_grad(), nothing_kept(model):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return len(given)
