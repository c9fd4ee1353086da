"""The classes that patched modules have.

A swap changes a module's class and nothing else. The new class is made from the layer to run and the class that the
module had; being made at run time it cannot be pickled by name, so its instances are pickled (and deep-copied) as
"the class made from these two".
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from zoo.layers.registry import get_layer

__all__ = ["Patched", "adopt", "patched_class", "release"]

_ADOPTED = "_zoo_adopted"
_STORES = ("_parameters", "_buffers", "_modules")


class Patched:
    """Mixin that marks a module as swapped, and remembers what it was."""

    zoo_kind: str
    zoo_layer: str
    zoo_original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        made_from = (self.zoo_original, self.zoo_kind, self.zoo_layer)
        return (_rebuild, made_from, *reduced[2:])


def _rebuild(original: type[nn.Module], kind: str, layer: str) -> nn.Module:
    cls = patched_class(original, kind, layer)
    return cls.__new__(cls)


def patched_class(original: type[nn.Module], kind: str, layer: str) -> type[nn.Module]:
    """The class of a module of class ``original`` that runs the layer of that name."""
    return _make(original, kind, layer, get_layer(kind, layer))


@functools.cache
def _make(original: type[nn.Module], kind: str, layer: str, layer_class: type[nn.Module]) -> type[nn.Module]:
    bases = (Patched, layer_class) if issubclass(layer_class, original) else (Patched, layer_class, original)
    marks = {"zoo_kind": kind, "zoo_layer": layer, "zoo_original": original, "__module__": original.__module__}
    return type(f"{original.__name__}[{layer}]", bases, marks)


def adopt(module: nn.Module, kind: str, layer: str) -> None:
    """Turn ``module`` into the layer of that name, in place. A layer's own ``adopt`` may add attributes and buffers.

    Raises:
        ValueError: the layer's ``adopt`` changed the module's state dict. Whenever it raises, the module is as it was.
    """
    keys, before = list(module.state_dict(keep_vars=True)), _names(module)
    module.__class__ = patched_class(type(module), kind, layer)
    hook = getattr(module, "adopt", None)
    if hook is None:
        return
    try:
        hook()
    finally:
        added = {store: names - before[store] for store, names in _names(module).items()}
        module.__dict__[_ADOPTED] = added
        changed = list(module.state_dict(keep_vars=True)) != keys
        if changed or sys.exc_info()[0]:
            release(module)
    if changed:
        raise ValueError(
            f"{kind} layer {layer!r}: its adopt() changed the state dict's keys; use plain attributes or "
            "register_buffer(..., persistent=False)"
        )


def _names(module: nn.Module) -> dict[str, set[str]]:
    return {"__dict__": set(module.__dict__), **{store: set(getattr(module, store)) for store in _STORES}}


def release(module: nn.Module) -> None:
    """Give a patched module back the class it had, without whatever its layer's ``adopt`` had added."""
    assert isinstance(module, Patched)
    for store, names in module.__dict__.pop(_ADOPTED, {}).items():
        for name in names:
            getattr(module, store).pop(name, None)
            module._non_persistent_buffers_set.discard(name)
    module.__class__ = module.zoo_original
