"""Which layers of a model a rule is for, and which of them cannot become another layer."""

from __future__ import annotations

import fnmatch

import torch
from torch import nn
from torch.nn.utils import parametrize

from zoo.derived import without
from zoo.layers._fallback import alters_torch_functions
from zoo.layers.adapters import adapter_of, unfit
from zoo.layers.patched import Patched
from zoo.layers.registry import custom_layer, get_layer, kind_of, stock_of
from zoo.models.head import head_names
from zoo.naming import unknown_name
from zoo.ops import DTYPES
from zoo.policy import Rule
from zoo.state_dict import plain_names, unwrap

__all__ = ["names_of", "selected", "unswappable"]

Names = dict[nn.Module, list[str]]


def names_of(model: nn.Module, kind: str) -> Names:
    """Each module of a kind, the model itself included, with all of its names; the first is the one to report."""
    stock, names = stock_of(kind), Names()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, stock):
            names.setdefault(module, []).append(name)
    return names


def selected(model: nn.Module, names: Names, rule: Rule, *, strict: bool) -> set[nn.Module]:
    """The modules that the rule is for. Names count with and without the prefixes of wrappers such as torch.compile's.

    Raises:
        ValueError: with ``strict``, for a glob, or "head", that is no layer of the kind.
    """
    only = rule.only
    if only is None:
        return set(names)
    plain = plain_names(model)
    known = {module: {plain(f"{alias}.").rstrip(".") for alias in aliases} for module, aliases in names.items()}
    if callable(only):
        return {module for module, aliases in known.items() if any(only(alias, module) for alias in sorted(aliases))}
    globs = head_names(unwrap(model)) if only == "head" else [plain(glob) for glob in only]
    matches = {
        glob: {m for m, aliases in known.items() if glob in aliases or fnmatch.filter(aliases, glob)} for glob in globs
    }
    if strict:
        _refuse_idle(rule, matches, sorted(alias for aliases in known.values() for alias in aliases))
    return set().union(*matches.values())


def _refuse_idle(rule: Rule, matches: dict[str, set[nn.Module]], known: list[str]) -> None:
    remedy = "name what to swap by globs over module names"
    if not matches:
        raise ValueError(
            f"only='head': the model has no classifier; {remedy}"
            if rule.only == "head"
            else f"only={rule.only!r} selects nothing; {remedy}, or leave it out for all"
        )
    for glob, found in matches.items():
        if found:
            continue
        if rule.only == "head":
            raise ValueError(f"only='head': the model's classifier {glob!r} is no {rule.kind} layer; {remedy}")
        raise unknown_name(f"{rule.kind} layer", glob, known, remedy="A glob in only must match a layer of the model")


def unswappable(module: nn.Module, kind: str, layer: str) -> str | None:  # noqa: PLR0911 - one reason a line
    """Why a module cannot become the layer of that name in place, in plain words; or None."""
    stock, cls = stock_of(kind), without(type(module), Patched)
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy: its first forward makes it what it will be; patch again after that"
    if "forward" in module.__dict__:
        return "a forward of its own was set on this instance"
    if parametrize.is_parametrized(module):
        return "parametrized: its weight is computed; patch before the parametrization is registered"
    if not isinstance(module, Patched) and (built_as := custom_layer(module, kind)):
        return f"it was built as the layer {built_as!r}"
    adapted = adapter_of(module, kind) is not None
    own = any(getattr(cls, name) is not getattr(stock, name) for name in kind_of(kind).computes)
    if (own and not adapted) or cls.__call__ is not stock.__call__:
        return f"its class {cls.__module__}.{cls.__qualname__} has a forward of its own"
    if adapted and (why := unfit(get_layer(kind, layer))):
        return f"its class {cls.__module__}.{cls.__qualname__} has a forward of its own, and the layer {layer!r} {why}"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return "it has no weight tensor" if kind_of(kind).needs_weight else None
    if alters_torch_functions(weight):
        return f"its weight is a {type(weight).__name__}, which brings its own {kind}"
    if weight.dtype not in DTYPES:
        return f"its dtype {weight.dtype} is none of float64, float32, float16, bfloat16"
    return None
