"""The classes that patched modules have: a swap changes a module's class and nothing else.

The new class is made from the layer to run and the class that the module had; where there is an adapter for that class,
from its own methods with the layer in the place of ``F.linear``, or the function of its kind.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from zoo.derived import Derived, derive, original_class, without
from zoo.layers.adapters import Adapter, adapter_of, rewritten
from zoo.layers.registry import get_layer, stock_of

__all__ = ["Patched", "adopt", "all_or_nothing", "release"]

_ADOPTED = "_zoo_adopted"
_STORES = ("_parameters", "_buffers", "_modules")


class Patched(Derived):
    """Mixin that marks a module as swapped."""

    zoo_kind: str
    zoo_layer: str
    zoo_forward: Callable[..., Any]
    """Of a module with an adapter: its own forward, with the layer in it."""


def _patched_class(original: type[nn.Module], kind: str, layer: str) -> type[nn.Module]:
    """The class of a module of class ``original`` that runs the layer of that name."""
    return _make(original, kind, layer, get_layer(kind, layer), _adapter(original, kind))  # type: ignore[arg-type]


def _adapter(original: type[nn.Module], kind: str) -> Adapter | None:
    adapter = adapter_of(original, kind)
    if adapter is None and not issubclass(original, stock_of(kind)):
        name = f"{original.__module__}.{original.__qualname__}"
        raise ValueError(f"no adapter is registered for {name}; register it with zoo.register_adapter({name})")
    return adapter


@functools.cache
def _make(
    original: type[nn.Module], kind: str, layer: str, layer_class: type[nn.Module], adapter: Adapter | None
) -> type[nn.Module]:
    recipe = (_patched_class, kind, layer)
    name, marks = f"{original.__name__}[{layer}]", {"zoo_kind": kind, "zoo_layer": layer}
    if adapter is not None:
        methods, below = rewritten(original_class(original), layer_class, kind)
        made = derive(name, (Patched, original, *below), original, recipe, **marks, **methods)
        made.zoo_forward = made.forward  # type: ignore[attr-defined]
        return made
    bases = (Patched, layer_class) if issubclass(layer_class, original) else (Patched, layer_class, original)
    return derive(name, bases, original, recipe, **marks)


def adopt(module: nn.Module, kind: str, layer: str) -> None:
    """Turn ``module`` into the layer of that name, in place. The layer's own ``adopt`` may add to it.

    A module with an adapter keeps its methods, with the layer in them.

    Raises:
        ValueError: that ``adopt`` did more than add attributes and non-persistent buffers.
    """
    module.__class__ = _patched_class(type(module), kind, layer)
    hook = getattr(get_layer(kind, layer), "adopt", None)
    if hook is None or adapter_of(module, kind) is not None:
        return
    before = _attributes(module)
    hook(module)
    after = _attributes(module)
    added = after.keys() - before.keys()
    changed = [key for key, value in before.items() if key not in after or after[key] is not value]
    kept = [(store, name) for store, name in added if store != "__dict__" and not _is_transient(module, store, name)]
    if changed or kept:
        raise ValueError(
            f"{kind} layer {layer!r}: its adopt() may only add plain attributes and buffers with persistent=False, "
            f"but it touched {', '.join(sorted(repr(name) for _, name in (*changed, *kept)))}"
        )
    if added:
        module.__dict__[_ADOPTED] = added


def release(module: nn.Module) -> None:
    """Give a patched module back the class it had, without whatever its layer's ``adopt`` had added."""
    for store, name in module.__dict__.pop(_ADOPTED, ()):
        getattr(module, store).pop(name, None)
        module._non_persistent_buffers_set.discard(name)
    module.__class__ = without(type(module), Patched)


@contextlib.contextmanager
def all_or_nothing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """On an exception the modules get back the classes and the attributes that they had."""
    before = [(module, type(module), _contents(module)) for module in modules]
    try:
        yield
    except BaseException:
        for module, cls, contents in before:
            module.__class__ = cls
            for container, was in contents:
                container.clear()
                container.update(was)
        raise


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    containers = [module.__dict__, *(getattr(module, store) for store in _STORES), module._non_persistent_buffers_set]
    return [(container, container.copy()) for container in containers]


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    stores = {"__dict__": module.__dict__, **{store: getattr(module, store) for store in _STORES}}
    return {(store, name): value for store, held in stores.items() for name, value in held.items()}


def _is_transient(module: nn.Module, store: str, name: str) -> bool:
    return store == "_buffers" and name in module._non_persistent_buffers_set
