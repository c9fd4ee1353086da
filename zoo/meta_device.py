"""Models without values: built on the meta device where a constructor needs values too, and copied to it."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

__all__ = ["build_on_meta", "held_tensors", "within", "without_values"]


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` makes where the default device is the meta device, all of it there if it can be copied.

    Some constructors compute with tensors (the depths of a RegNet, rates of drop path) and read the results, which
    the meta device cannot tell. Such a model is built again with tensors of given values on the host, and if that is
    not enough, on the CPU with all its memory. Raises whatever ``build`` raises; it is tried again only where the
    error speaks of the meta device.
    """
    random = torch.get_rng_state()
    for place in (nullcontext, _ValuesOnHost):
        try:
            with place():
                model = build()
        except Exception as error:  # libraries fail in any way
            if not _of_meta(error):
                raise
            torch.set_rng_state(random)
        else:
            if all(tensor.is_meta for tensor in held_tensors(model)):
                return model
            with suppress(Exception):  # some hold what cannot be copied (locks): they are as they were built
                return without_values(model)
            return model
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return without_values(build())


def without_values(model: nn.Module) -> nn.Module:
    """A deep copy on the meta device, with the same ties."""
    memo: dict[int, Any] = {}
    for tensor in held_tensors(model):
        if is_lazy(tensor):  # it has no values
            continue
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        else:
            memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Each tensor that a module holds, once: parameters, buffers, and plain attributes, also in lists and dicts."""
    return [value for value in within(vars(module) for module in model.modules()) if isinstance(value, Tensor)]


def within(values: Iterable[Any]) -> list[Any]:
    """The tensors and containers among the values and in them, at any depth, each once, in their order."""
    counts = _Counts()
    seen: dict[int, Any] = {}
    left = [value for value in values if counts[type(value)]]
    left.reverse()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if not isinstance(value, Tensor):
            with suppress(Exception):  # a mapping may read a file that is closed: it holds nothing that is seen
                inner = value.values() if isinstance(value, Mapping) else value
                left += reversed([each for each in inner if counts[type(each)]])
    return list(seen.values())


class _Counts(dict[type, bool]):
    """Whether values of a type are tensors or containers: asked once a type, as a list may hold millions of numbers."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, (Tensor, Mapping, list, tuple, deque))
        return self[kind]


class _ValuesOnHost(TorchFunctionMode):
    """Makes tensors of given values on the host, unless their device is passed, as modules pass it for their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.arange, torch.as_tensor, torch.linspace, torch.logspace, torch.tensor):
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


def _of_meta(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, speaks of the meta device."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if re.search(r"\bmeta\b", str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False
