"""Batch norms that norm: a fresh model's have the statistics 0 and 1, and leave what comes in as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zoo.isolation import nothing_kept

__all__ = ["set_scales"]


def set_scales(model: nn.Module, inputs: Tensor) -> int:
    """Have each batch norm of a model in eval mode give values of about one for these inputs. Returns how many do.

    Without, values grow from layer to layer: gates and softmaxes saturate, and float32 has no right digit of the
    gradients that go through them, which then tell nothing of a layer (examples/results/README.md has figures). Or
    they fade, and the gradients with them.

    ``running_var`` becomes the mean square of all that comes in, and ``running_mean`` stays. It is one number for all
    channels: a channel that is small, or hardly differs from its mean, would be blown up with its rounding errors.
    Where all are zero, or not finite, it stays too, and the norm is not counted. A norm that is called several times
    has that of its last call.
    """
    given: set[nn.Module] = set()

    def hook(norm: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        square = (args[0] if args else named["input"]).square().mean()
        if square > 0 and square.isfinite():
            norm.running_var.fill_(square)
            given.add(norm)

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_var is not None]
    handles = [norm.register_forward_pre_hook(hook, with_kwargs=True) for norm in norms]
    try:
        with torch.no_grad(), nothing_kept(model):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return len(given)
