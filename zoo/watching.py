"""Watches a forward: which layers are called, what they fall back to, and whose weights are used without a call."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from zoo.flops import FlopCounter
from zoo.layers._fallback import fallback_listeners
from zoo.layers.registry import KINDS, custom_layer, stock_kind

__all__ = ["Watch", "watch"]


class Watch(FlopCounter):
    """What happened to some modules, by their ids."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.calls: Counter[int] = Counter()
        self.flops: Counter[int] = Counter()
        self.fallbacks: dict[int, Counter[str]] = defaultdict(Counter)
        self.past: dict[int, str] = {}
        """id of a module -> the operator that took its weight while no module that owns it was being called."""
        self.running: list[tuple[nn.Module, int]] = []
        """The calls under way, outermost first, with the FLOPs when they began."""
        self._watched = {id(module) for module in modules}
        self._thread = threading.get_ident()
        self._owners: dict[int, list[int]] = defaultdict(list)
        for module in modules:
            for weight in _weights(module):
                self._owners[id(weight)].append(id(module))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in _tensors(args):
            owners = self._owners.get(id(argument), ())
            if owners and not any(argument is weight for module, _ in self.running for weight in _weights(module)):
                self.past.update((owner, str(func)) for owner in owners if owner not in self.past)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def before(self, module: nn.Module, args: Any) -> None:
        if self._concerns(module):
            self.running.append((module, self.total))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._concerns(module):
            return
        begun = self.total
        while self.running:  # calls that ended in an exception have left theirs behind
            called, begun = self.running.pop()
            if called is module:
                break
        kind = stock_kind(module)
        if kind and custom_layer(module, kind) and isinstance(output, Tensor):
            # a kernel without a formula did at least what the stock layer would have done
            self.total = max(self.total, begun + KINDS[kind].flops(module, output))
        self.calls[id(module)] += 1
        self.flops[id(module)] += self.total - begun

    def fell_back(self, module: nn.Module, reason: str) -> None:
        if self._concerns(module):
            self.fallbacks[id(module)][reason] += 1

    def _concerns(self, module: nn.Module) -> bool:
        """Whether it is watched, or shares a weight with one that is."""
        watched = id(module) in self._watched or any(id(weight) in self._owners for weight in _weights(module))
        return watched and threading.get_ident() == self._thread


@contextlib.contextmanager
def watch(modules: Iterable[nn.Module]) -> Iterator[Watch]:
    """Watch what this thread runs inside. What is compiled runs uncompiled, as under any dispatch mode.

    The hooks are global ones, for one on a module itself would change what runs: it turns the encoder's fast path off.
    As all hooks do, they miss a parent that calls ``child.forward(x)`` instead of ``child(x)``.
    """
    watching = Watch(list(modules))
    with contextlib.ExitStack() as stack:
        fallback_listeners.append(watching.fell_back)
        stack.callback(fallback_listeners.remove, watching.fell_back)
        stack.enter_context(torch_module.register_module_forward_pre_hook(watching.before))
        stack.enter_context(torch_module.register_module_forward_hook(watching.after))
        stack.enter_context(watching)
        yield watching


def _weights(module: nn.Module) -> Iterator[Tensor]:
    return (p for p in module._parameters.values() if p is not None and not is_lazy(p) and p.dim() > 1)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
