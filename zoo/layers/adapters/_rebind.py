"""Functions that run the code of others with some of the functions it calls replaced.

Nothing of the original is touched and nothing is switched on and off while it runs: the copy has the same code and sees
other globals. So it is as safe among threads, under compile and in export as the original is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch.fx import _symbolic_trace

__all__ = ["Rebinding"]


class Rebinding:
    """Copies functions so that they call ``replacements[f]`` where they called ``f``, themselves or in helpers.

    A helper is a Python function that the code names, in its module or through a module (``F.helper``); one that
    comes in another way (an argument, a closure, a method) is called as it is.
    """

    def __init__(self, replacements: Mapping[Any, Any]) -> None:
        self._replacements = replacements
        self.used: set[Any] = set()
        """Which of the originals the code rebound so far calls."""
        self._copies: dict[types.FunctionType, types.FunctionType] = {}

    def function(self, original: types.FunctionType) -> types.FunctionType:
        """The copy; ``original`` itself where there is nothing to replace."""
        if original in self._copies:
            return self._copies[original]
        around = original.__globals__
        names = _names_in(original.__code__)
        known = {name: around[name] for name in names if name in around}
        seen = {**known, "__builtins__": around["__builtins__"]}
        copy = types.FunctionType(
            original.__code__, seen, original.__name__, original.__defaults__, original.__closure__
        )
        functools.update_wrapper(copy, original)
        del vars(copy)["__wrapped__"]  # it stands in its place, not around it
        copy.__kwdefaults__ = original.__kwdefaults__
        # itself too: where a mode is on, torch's functions begin anew through their own name
        self._copies[original] = copy
        seen.update({name: self._bound(value, names) for name, value in known.items()})
        if all(seen[name] is value or value is original for name, value in known.items()):
            self._copies[original] = original
        else:
            _keep_leaves(around, seen)
        return self._copies[original]

    def _bound(self, value: Any, names: set[str]) -> Any:
        if isinstance(value, types.ModuleType):
            return self._module(value, names)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and value in self._replacements:
            self.used.add(value)
            return self._replacements[value]
        return self.function(value) if isinstance(value, types.FunctionType) else value

    def _module(self, module: types.ModuleType, names: set[str]) -> types.ModuleType:
        """The module as the code sees it: what it names of it, rebound."""
        known = {name: getattr(module, name) for name in sorted(names) if hasattr(module, name)}
        seen = {}
        for name, value in known.items():
            # deeper only along what the code spells out: torch.nn.functional, not torch.functional.torch
            seen[name] = self._bound(value, names - {name})
        if all(seen[name] is value for name, value in known.items()):
            return module
        stand_in = types.ModuleType(module.__name__, module.__doc__)
        vars(stand_in).update(known | seen)
        return stand_in


def _keep_leaves(around: dict[str, Any], seen: dict[str, Any]) -> None:
    """What torch.fx.wrap marked in the original globals, torch.fx leaves untraced in the copy's, too."""
    marked = getattr(_symbolic_trace, "_wrapped_fns_to_patch", {})
    marked.update({(id(seen), name): seen for name in seen if (id(around), name) in marked})


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)
