"""Names of models and what builds them.

zoo's own models, and those that users register, lie in one dict. ``torchvision/<name>`` and ``timm/<name>`` go through
doors that are opened, and their library imported, only when a name or pattern needs it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast, overload

import torch
from torch import nn

from zoo.meta_device import build_on_meta
from zoo.naming import natural_key, unknown_name
from zoo.offers import MODELS, claimed, names_offered, take

__all__ = ["ModelSpec", "build", "list_models", "options_of", "register_model", "resolve", "spec_of", "unknown_options"]

Builder = Callable[..., nn.Module]
_B = TypeVar("_B", bound=Builder)

_builders: dict[str, Builder] = {}
_DOORS = {"torchvision": "zoo.models.torchvision", "timm": "zoo.models.timm"}
_SPEC = "_zoo_spec"


class Door(Protocol):
    """What a module of ``_DOORS`` offers; names are without the door's prefix."""

    def names(self) -> list[str]: ...

    def builder(self, name: str) -> Builder: ...


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What rebuilds a model: its name, and the options (``num_classes`` among them) that zoo.create was given.

    ``zoo.create(spec.name, **spec.options)`` makes the same architecture.
    """

    name: str
    options: dict[str, Any]


@overload
def register_model(name: _B) -> _B: ...
@overload
def register_model(name: str | None = None) -> Callable[[_B], _B]: ...
def register_model(name: Any = None) -> Any:
    """Decorator: register a builder, a function or class that returns an nn.Module, for zoo.create and list_models.

    ``@register_model`` takes the function's own name, ``@register_model("name")`` another. The builder's keyword
    arguments are the model's options; one of them should be ``num_classes``.

    An installed package may offer models without being imported (:mod:`zoo.offers`).

    Raises ValueError for a name that is taken or is no name for a model.
    """
    if callable(name):
        return register_model()(name)

    def register(builder: _B) -> _B:
        key = getattr(builder, "__name__", None) if name is None else name
        if offer := claimed(MODELS, key, builder):
            raise ValueError(
                f"model {key!r}: {builder!r} cannot have this name, which the installed package {offer} offers; "
                "choose another name"
            )
        _add(key, builder)
        return builder

    return register


def _add(name: Any, builder: Any) -> None:
    if not isinstance(name, str) or not name or name.split("/")[0] in _DOORS:
        raise ValueError(
            f"a model's name must be a non-empty str without {' or '.join(f'{door}/' for door in _DOORS)} "
            f"in front, got {name!r}; name it with @register_model('name')"
        )
    if name in _builders:
        raise ValueError(f"model {name!r} is registered already, by {_builders[name]!r}; choose another name")
    _builders[name] = builder


def list_models(pattern: str = "*", *, source: str | None = None) -> list[str]:
    """The names that zoo.create knows and that match ``pattern`` (``*``, ``?``, ``[]``), in natural order.

    ``source``: only those of "zoo" (users' own and those of installed packages included), "torchvision" or "timm".
    """
    sources = ("zoo", *_DOORS)
    if source is not None and source not in sources:
        raise unknown_name("source", source, sources)
    found = fnmatch.filter({*_own(), *names_offered(MODELS)}, pattern) if source in (None, "zoo") else []
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    for door in _DOORS:
        prefix = f"{door}/"
        if source in (None, door) and (prefix.startswith(fixed) or fixed.startswith(prefix)):
            found += fnmatch.filter((prefix + name for name in _door(door).names()), pattern)
    return sorted(found, key=natural_key)


def resolve(name: str) -> Builder:
    """The builder of a model. ValueError, with the nearest names, where there is none."""
    if not isinstance(name, str):
        raise ValueError(f"a model's name must be a str, got {name!r}")
    door, _, bare = name.partition("/")
    if door in _DOORS:
        known = _door(door).names()
        if bare not in known:
            raise unknown_name(f"{door} model", bare, known, remedy=_remedy(door, bare, known))
        return _door(door).builder(bare)
    if name not in _own() and not take(MODELS, name, functools.partial(_register_new, name)):
        elsewhere = [f"{door}/{name}" for door in _DOORS if name in _door(door).names()]
        remedy = f"It exists as {' and '.join(elsewhere)}" if elsewhere else "zoo.list_models() lists all"
        raise unknown_name("model", name, {*_own(), *names_offered(MODELS)}, remedy=remedy)
    return _builders[name]


def _register_new(name: str, builder: Any) -> None:
    if name not in _builders:  # its module may have done so by itself
        if not callable(builder):
            raise TypeError(f"expected a function or class that returns an nn.Module, got {builder!r}")
        _add(name, builder)


def build(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The model of that name, freshly initialised. TypeError for an option that its builder does not take.

    Where the default device is the meta device, also one whose constructor needs values (:mod:`zoo.meta_device`).
    """
    builder = resolve(name)
    known = options_of(builder)
    if known is not None and not known.keys() >= options.keys():
        raise unknown_options(name, options, known)
    on_meta = torch.get_default_device().type == "meta"
    return build_on_meta(lambda: builder(**options)) if on_meta else builder(**options)


def options_of(builder: Builder) -> dict[str, Any] | None:
    """The options that a builder takes, with their defaults; None where its signature leaves them open (``**``)."""
    parameters = inspect.signature(builder).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    # What a partial has fixed is part of the name, no option: resnext50_32x4d has 32 groups.
    fixed = builder.keywords if isinstance(builder, functools.partial) else {}
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {parameter.name: parameter.default for parameter in named if parameter.name not in fixed}


def unknown_options(name: str, given: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for options that a model does not take."""
    wrong = ", ".join(repr(option) for option in given if option not in set(known))
    return TypeError(f"model {name!r} does not take the option {wrong}; its options: {', '.join(sorted(known))}")


def spec_of(model: nn.Module) -> ModelSpec | None:
    """What zoo.create built ``model`` from, brought up to date with what reset_classifier changed; else None."""
    spec: ModelSpec | None = model.__dict__.get(_SPEC)
    if spec is None:
        return None
    builder = _builders.get(spec.name)
    defaults = (options_of(builder) if builder else None) or {}
    options = dict(spec.options)
    for key, kind in (("num_classes", int), ("global_pool", str)):
        value = getattr(model, key, None)
        if type(value) is kind and value != options.get(key, defaults.get(key, value)):
            options[key] = value
    return ModelSpec(spec.name, options)


def attach_spec(model: nn.Module, name: str, options: Mapping[str, Any]) -> None:
    """Keep on the model what it was built from, in the instance, where copies and pickles take it along."""
    recorded = dict(options)
    classes = getattr(model, "num_classes", None)
    if name.partition("/")[0] in _DOORS and type(classes) is int:
        recorded.setdefault("num_classes", classes)  # what it is by default is known to the library alone
    model.__dict__[_SPEC] = ModelSpec(name, recorded)


def _own() -> dict[str, Builder]:
    importlib.import_module("zoo.models")  # registers zoo's own
    return _builders


def _door(name: str) -> Door:
    return cast(Door, importlib.import_module(_DOORS[name]))


def _remedy(door: str, bare: str, known: list[str]) -> str:
    architecture, _, tag = bare.partition(".")
    if door == "timm" and tag and architecture in known:
        return f"A tag goes into weights: zoo.create('timm/{architecture}', weights='{tag}')"
    return f"zoo.list_models('{door}/*') lists all"
