"""Finds parents that read a child's weight past the child's forward.

``F.linear(x, self.qkv.weight)`` never calls ``qkv``; whatever was swapped in there does not run. Such reads are in the
parent's code, so they can be found before anything runs: in ``forward``, in the methods and properties it uses, and in
the functions it hands a child to, any load of a child's ``weight`` or ``bias``, other than to ask for its dtype, shape,
device or presence. Children are followed through local names, loops and containers. Where the source is not at hand,
every child that such code names is doubtful.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from zoo.reading import (
    BELOW,
    CHILD,
    Names,
    Path,
    arguments_of,
    asked_about,
    bound_names,
    chain_of,
    function_of,
    is_super,
    names_in,
    parsed,
    paths_of,
)

__all__ = ["weights_read_past_forward"]

_READ = {"weight", "bias"}


def weights_read_past_forward(model: nn.Module) -> dict[nn.Module, dict[nn.Module, str]]:
    """Each module whose weight is read past its forward -> the parents that do, and where, in words."""
    found: dict[nn.Module, dict[nn.Module, str]] = {}
    readers: dict[tuple[type, Any], _Reader] = {}
    for parent in model.modules():
        forward = function_of(parent.__dict__.get("forward", inspect.getattr_static(type(parent), "forward")))
        key = type(parent), forward
        if forward is not None and key not in readers:
            readers[key] = _Reader(type(parent))
            readers[key].read(forward, {name: {()} for name in _names_of_self(forward, parent)})
        for path, where in readers[key].found.items() if key in readers else ():
            for child in _resolve(parent, path):
                found.setdefault(child, {}).setdefault(parent, where)
    return found


def _resolve(thing: object, path: Path) -> Iterator[nn.Module]:
    """The modules at the end of a path that begins at ``thing``, a module or a container of some."""
    if isinstance(thing, (list, tuple, dict)):
        for member in thing.values() if isinstance(thing, dict) else thing:
            yield from _resolve(member, path[1:] if path[:1] == (CHILD,) else path)
    elif not isinstance(thing, nn.Module):
        return
    elif not path:
        yield thing
    elif path[0] == BELOW:
        for module in thing.modules():
            yield from _resolve(module, path[1:])
    elif path[0] == CHILD:
        for module in thing.children():
            yield from _resolve(module, path[1:])
    else:
        # looked up, not asked for: a property may do anything
        yield from _resolve(thing._modules.get(path[0], thing.__dict__.get(path[0])), path[1:])


def _names_of_self(function: types.FunctionType, parent: nn.Module) -> tuple[str, ...]:
    """How a function names the module whose forward it is: from around it, or by its first argument."""
    around = inspect.getclosurevars(function).nonlocals
    return tuple(name for name, value in around.items() if value is parent) or arguments_of(function)[:1]


class _Reader:
    """Collects, in ``found``, the paths of the children whose weights the code of a class reads -> where."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.found: dict[Path, str] = {}
        self._seen: set[Any] = set()

    def read(self, function: types.FunctionType, given: Names) -> None:
        """Read a function in which the names in ``given`` stand for modules."""
        key = function, frozenset((name, frozenset(paths)) for name, paths in given.items())
        if key in self._seen:
            return
        self._seen.add(key)
        tree = parsed(function.__code__)
        if tree is None:
            self._read_without_source(function)
            return
        names, asking = bound_names(tree, given), set(asked_about(tree))
        for node in ast.walk(tree):
            for path in paths_of(node, names):
                if len(path) > 1 and path[-1] in _READ and id(node) not in asking:
                    self.found.setdefault(path[:-1], f"{function.__qualname__} reads its weight past its forward")
                if len(path) == 1:
                    self._read_with(inspect.getattr_static(self.cls, path[0], None), [{()}], {})
            if isinstance(node, ast.Call):
                positional = [paths_of(argument, names) for argument in node.args]
                keywords = {k.arg: paths_of(k.value, names) for k in node.keywords if k.arg}
                self._read_called(node.func, function, names, positional, keywords)

    def _read_called(
        self, node: ast.expr, caller: types.FunctionType, names: Names, positional: list[set[Path]], keywords: Names
    ) -> None:
        if isinstance(node, ast.Attribute) and is_super(node.value):
            for base in self.cls.__mro__:
                self._read_with(vars(base).get(node.attr), [{()}, *positional], keywords)
        elif own := [path[0] for path in paths_of(node, names) if len(path) == 1]:
            self._read_with(inspect.getattr_static(self.cls, own[0], None), [{()}, *positional], keywords)
        elif any((*positional, *keywords.values())) and (chain := chain_of(node)):
            target = caller.__globals__.get(chain[0])
            for attribute in chain[1]:
                target = getattr(target, attribute, None)
            if isinstance(target, types.FunctionType) and _READ.intersection(names_in(target.__code__)):
                self._read_with(target, positional, keywords)

    def _read_with(self, member: Any, positional: list[set[Path]], keywords: Names) -> None:
        function = function_of(member)
        if function is not None:
            self.read(function, {**dict(zip(arguments_of(function), positional, strict=False)), **keywords})

    def _read_without_source(self, function: types.FunctionType) -> None:
        names = names_in(function.__code__)
        for name in names:
            if names & _READ:
                why = f"{function.__qualname__}, whose source is not at hand, may read its weight past its forward"
                self.found.setdefault((name, BELOW), why)
            self._read_with(inspect.getattr_static(self.cls, name, None), [{()}], {})
