"""Classes made at run time over the class that a module has, so that it keeps its identity and gains behaviour.

Such a class cannot be found by name; its instances are pickled and copied as "the original, then made over again".
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Derived", "derive", "original_class", "without"]

_OF_THE_CLASS_ITSELF = ("__dict__", "__weakref__")


class Derived:
    """Base of the mixins that such classes begin with."""

    zoo_base: type[nn.Module]
    """The class that this one was made over."""
    zoo_recipe: tuple[Any, ...]
    """What makes it: a function of the base and further arguments, then those arguments."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        base: type = type(self)
        recipes = []
        while "zoo_recipe" in vars(base):
            recipes.append(base.zoo_recipe)  # type: ignore[attr-defined]
            base = base.zoo_base  # type: ignore[attr-defined]
        if not recipes:  # the class was made over again by others (FSDP, a parametrization), who see to this themselves
            return reduced
        build, arguments, *rest = reduced
        arguments = tuple(base if argument is type(self) else argument for argument in arguments)
        return _rebuild, (build, arguments, tuple(reversed(recipes))), *rest


def _rebuild(build: Callable[..., nn.Module], arguments: tuple[Any, ...], recipes: tuple[Any, ...]) -> nn.Module:
    module = build(*arguments)
    for make, *more in recipes:
        module.__class__ = make(type(module), *more)
    return module


def derive(
    name: str, bases: tuple[type, ...], base: type[nn.Module], recipe: tuple[Any, ...], **attributes: Any
) -> type[nn.Module]:
    """The class of that name with ``bases``, made over ``base`` by ``recipe`` (see :class:`Derived`)."""
    places = {key: getattr(base, key) for key in ("__module__", "__doc__")}
    members = {**places, "zoo_base": base, "zoo_recipe": recipe, **attributes}
    return types.new_class(name, bases, exec_body=lambda namespace: namespace.update(members))


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that was there before any was made over it; one that others made over it again is its own original."""
    while "zoo_recipe" in vars(cls):
        cls = cls.zoo_base  # type: ignore[attr-defined]
    return cls


def without(cls: type[nn.Module], mixin: type[Derived]) -> type[nn.Module]:
    """``cls`` as it would be had the class that begins with ``mixin`` never been made, also under others' classes."""
    if not issubclass(cls, mixin):
        return cls
    if mixin in cls.__bases__:
        return cls.zoo_base
    if "zoo_recipe" in vars(cls):
        make, *more = cls.zoo_recipe
        return make(without(cls.zoo_base, mixin), *more)
    made = next(base for base in cls.__mro__ if mixin in base.__bases__)
    name = cls.__name__.replace(made.__name__, without(made, mixin).__name__)
    members = {key: value for key, value in vars(cls).items() if key not in _OF_THE_CLASS_ITSELF}
    bases = tuple(without(base, mixin) for base in cls.__bases__)
    return types.new_class(name, bases, exec_body=lambda namespace: namespace.update(members))
