"""Watches a forward: which layers are called, what they fall back to, and whose weights are used without a call."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from zoo.flops import FlopCounter
from zoo.layers._fallback import fallback_listeners
from zoo.layers.adapters import given_listeners, made_from
from zoo.layers.patched import Patched
from zoo.layers.registry import KINDS, custom_layer, stock_kind
from zoo.layers.units import observers

__all__ = ["Watch", "watch"]


_Part = tuple[nn.Module, bool, int]
"""A module that a weight stands for, whether it is that module's own, and its number of elements."""


class Watch(FlopCounter):
    """What happened to some modules, by their ids."""

    def __init__(self, modules: Iterable[nn.Module], parents: Iterable[nn.Module]) -> None:
        super().__init__()
        self.calls: Counter[int] = Counter()
        self.given_calls: Counter[int] = Counter()
        """Of those, the calls of a custom layer on the module's weight by a parent, which did not call the module."""
        self.flops: Counter[int] = Counter()
        self.fallbacks: dict[int, Counter[str]] = defaultdict(Counter)
        self.past: dict[int, str] = {}
        """id of a module -> the operator that took its weight while no module that owns it was being called."""
        self.running: list[tuple[nn.Module, int]] = []
        """The calls under way, outermost first, with the FLOPs when they began."""
        self._watched = {id(module) for module in modules}
        self._thread = threading.get_ident()
        self._owners: dict[int, list[int]] = defaultdict(list)
        self._parts: dict[int, list[_Part]] = {}
        self._kept: list[Tensor] = []
        for module in modules:
            for weight in _weights(module):
                self._owners[id(weight)].append(id(module))
                self._parts.setdefault(id(weight), [(module, True, weight.numel())])
            for tensor, size in _origins(module):
                self._parts.setdefault(id(tensor), [(module, True, size)])
        for parent in parents:
            # what a parent has of its own, such as a packed in-projection, counts with the first layer below it
            layer = next((module for module in parent.modules() if id(module) in self._watched), None)
            if layer is not None and layer is not parent and isinstance(parent, Patched):
                for weight in _weights(parent):
                    self._parts.setdefault(id(weight), [(layer, False, weight.numel())])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in _tensors(args):
            owners = self._owners.get(id(argument), ())
            if owners and not any(argument is weight for module, _ in self.running for weight in _weights(module)):
                self.past.update((owner, str(func)) for owner in owners if owner not in self.past)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.running:
            self._note_made_of(output, list(_tensors(args)))
        return output

    def _note_made_of(self, output: Any, arguments: list[Tensor]) -> None:
        """A weight may be computed from others, as the concatenation of several: from nothing but parameters."""
        parts = list(dict.fromkeys(part for argument in arguments for part in self._parts.get(id(argument), ())))
        if parts and all(isinstance(a, nn.Parameter) or id(a) in self._parts for a in arguments):
            for tensor in _tensors([output]):
                self._parts.setdefault(id(tensor), parts)
                self._kept.append(tensor)  # for as long as its id stands for it

    def before(self, module: nn.Module, args: Any) -> None:
        if self._concerns(module):
            self.running.append((module, self.total))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._concerns(module):
            return
        kind = stock_kind(module)
        custom = kind and custom_layer(module, kind) and isinstance(output, Tensor)
        self.flops[id(module)] += self._ended(module, KINDS[kind].flops(module, output) if kind and custom else 0)
        self.calls[id(module)] += 1

    def _ended(self, module: nn.Module, least: int) -> int:
        """The FLOPs of a call that ended. A kernel without a formula did at least what the stock layer would have."""
        begun = self.total
        while self.running:  # calls that ended in an exception have left theirs behind
            called, begun = self.running.pop()
            if called is module:
                break
        self.total = max(self.total, begun + least)
        return self.total - begun

    def given(self, weights: tuple[Tensor, ...], call: Callable[[], Tensor]) -> Tensor:
        """A layer runs on weights that a parent handed it."""
        origin = made_from.get()
        known = [next(filter(None, (self._parts.get(id(t)) for t in (w, w._base, origin))), []) for w in weights]
        parts = [part for found in known for part in found]
        if not all(known) or threading.get_ident() != self._thread:
            return call()
        first, own, _ = parts[0]
        if own and self.running and self.running[-1][0] is first:  # in its own forward, which is counted already
            return call()
        outermost = len(self.running)
        self.running += [(module, self.total) for module in dict.fromkeys(found[0][0] for found in known)]
        begun = self.total
        output = call()
        del self.running[outermost:]
        # a kernel without a formula did at least what the stock layers would have
        least = 2 * math.prod(output.shape[:-1]) * sum(w.numel() for w in weights)
        self.total = max(self.total, begun + least)
        size = sum(n for *_, n in parts)
        for module, own, n in parts:
            self.calls[id(module)] += own
            self.given_calls[id(module)] += own
            self.flops[id(module)] += (self.total - begun) * n // size
        return output

    def fell_back(self, module: nn.Module, reason: str) -> None:
        if self._concerns(module):
            self.fallbacks[id(module)][reason] += 1
        elif "weight" in module.__dict__ and self.running and threading.get_ident() == self._thread:
            self.fallbacks[id(self.running[-1][0])][reason] += 1  # one that runs on a given weight

    def _concerns(self, module: nn.Module) -> bool:
        """Whether it is watched, or shares a weight with one that is."""
        watched = id(module) in self._watched or any(id(weight) in self._owners for weight in _weights(module))
        return watched and threading.get_ident() == self._thread


@contextlib.contextmanager
def watch(modules: Iterable[nn.Module], parents: Iterable[nn.Module] = ()) -> Iterator[Watch]:
    """Watch what this thread runs inside. What is compiled runs uncompiled, as under any dispatch mode.

    Of the ``parents``, those that were adapted count what they multiply by weights of their own, with a layer in them.

    The hooks are global ones, for one on a module itself would change what runs: it turns the encoder's fast path off.
    As all hooks do, they miss a parent that calls ``child.forward(x)`` instead of ``child(x)``.
    """
    watching = Watch(list(modules), parents)
    with contextlib.ExitStack() as stack:
        fallback_listeners.append(watching.fell_back)
        stack.callback(fallback_listeners.remove, watching.fell_back)
        given_listeners.append(watching.given)
        stack.callback(given_listeners.remove, watching.given)
        for handle in (
            torch_module.register_module_forward_pre_hook(watching.before),
            torch_module.register_module_forward_hook(watching.after),
        ):
            stack.enter_context(handle)
            observers.add(handle.id)
            stack.callback(observers.discard, handle.id)
        stack.enter_context(watching)
        yield watching


def _weights(module: nn.Module) -> Iterator[Tensor]:
    named = ((name, p) for name, p in module._parameters.items() if p is not None and not is_lazy(p))
    return (p for name, p in named if p.dim() > 1 or (name == "weight" and p.dim() == 1))  # a norm's is a vector


def _origins(module: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """What a weight that is no parameter is, or is made of, with its size: one that is pruned, or parametrized."""
    if isinstance(weight := module.__dict__.get("weight"), Tensor):
        yield weight, weight.numel()
    if parametrize.is_parametrized(module, "weight"):
        made_of: Any = module.parametrizations.weight  # type: ignore[union-attr]
        size = max(p.numel() for p in made_of.parameters())
        yield from ((tensor, size) for tensor in (*made_of.parameters(), *made_of.buffers()))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
