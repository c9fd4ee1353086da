"""Models without values: built on the meta device where a constructor needs values too, and copied to it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["build_on_meta", "held_tensors", "without_values"]


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` makes where the default device is the meta device, all of it there.

    Some constructors compute with tensors (the depths of a RegNet, rates of drop path) and read the results, which
    the meta device cannot tell. Such a model is built again with tensors of given values on the host, and if that is
    not enough, on the CPU with all its memory. Raises whatever ``build`` raises; it is tried again only where the
    error speaks of the meta device.
    """
    for place in (nullcontext, _ValuesOnHost):
        try:
            with place():
                model = build()
        except Exception as error:  # libraries fail in any way
            if not _of_meta(error):
                raise
        else:
            return model if all(tensor.is_meta for tensor in held_tensors(model)) else without_values(model)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return without_values(build())


def without_values(model: nn.Module) -> nn.Module:
    """A deep copy on the meta device, with the same ties."""
    memo: dict[int, Any] = {}
    for tensor in held_tensors(model):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        else:
            memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Each tensor that a module holds, once: parameters, buffers, and plain attributes, also in lists and dicts."""
    leaves = (leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module)))
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


class _ValuesOnHost(TorchFunctionMode):
    """Makes tensors of given values on the host, unless their device is passed, as modules pass it for their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.arange, torch.as_tensor, torch.linspace, torch.logspace, torch.tensor):
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


def _of_meta(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, speaks of the meta device."""
    while error is not None:
        if re.search(r"\bmeta\b", str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False
