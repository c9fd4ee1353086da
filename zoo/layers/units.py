"""Units: Linear, activation, (dropout), Linear in a row, which run as one layer of kind "mlp".

The modules stay where they are. The parent's class changes: its forward hands their parameters to the layer wherever
that gives what the modules would have given, and calls the modules, one by one, wherever it might not. It looks at
each call, so a hook that comes later is heeded, and so is a module that takes another's place.

A parent is one that does nothing but call its children one after the other: an nn.Sequential, with any class that
leaves its forward alone (torchvision's MLP), and timm's Mlp; or one with a method that does: zoo's own MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from zoo.derived import derive, without
from zoo.layers._fallback import alters_torch_functions, note_fallback
from zoo.layers.adapters import given_listeners, run_given
from zoo.layers.linear import Linear
from zoo.layers.patched import Patched, release
from zoo.layers.registry import get_layer, list_layers
from zoo.ops import DTYPES

__all__ = [
    "FusedParent",
    "Unit",
    "adopt_units",
    "chain_of",
    "inside_units",
    "known_units",
    "observers",
    "unfusable",
    "units_in",
]

Unit = tuple[str, ...]
"""The names of a unit's modules in their parent, in the order of their calls: a Linear first, a Linear last."""

observers: set[int] = set()
"""Global module hooks (by the ids of their handles) that only look on, and do not mind units."""

_ACTIVATIONS: dict[tuple[str, str], str] = {
    ("torch.nn.modules.activation", "ReLU"): "relu",
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("timm.layers.activations", "GELU"): "gelu",
    ("timm.layers.activations", "GELUTanh"): "gelu_tanh",
}
"""By name, so that nothing is imported for them. nn.GELU is asked which it is."""

_CHAINS: dict[tuple[str, str], Unit] = {
    ("timm.layers.mlp", "Mlp.forward"): ("fc1", "act", "drop1", "norm", "fc2", "drop2"),
}
"""Forwards that call these children, in this order, each on what the one before gave, and nothing else."""

_ROW, _ROW_OF = "_in_a_row", ("zoo.models.mlp", "MLP._in_a_row")
"""A method ``(x, first, end)`` that does so with some of the children of a sequence, by their places; all but the last,
which is zoo's MLP's classifier."""


class FusedParent:
    """Mixin, after :class:`Patched`, that marks a parent whose units run as one."""

    zoo_kind: str
    zoo_layer: str
    zoo_units: dict[str, Unit]
    """By the name of their first module."""
    zoo_chain: Unit | None
    """The children in the order of their calls; None for an nn.Sequential, which may gain and lose some."""
    zoo_function: Callable[..., Tensor]
    """The layer."""
    zoo_replaces: tuple[Any, ...]
    """The forwards of Linears that the layer may stand for."""


# which modules are a unit


def chain_of(parent: nn.Module) -> Unit | None:
    """The names of a parent's children in the order of their calls, where that is all that it does; else None."""
    cls = without(type(parent), Patched)
    forward: Any = cls.forward
    if cls.__call__ is not nn.Module.__call__ or "forward" in parent.__dict__:
        return None
    if forward is nn.Sequential.forward:
        return tuple(parent._modules) if cls.__iter__ is nn.Sequential.__iter__ else None  # type: ignore[attr-defined]
    if _has_row(cls):
        return tuple(parent._modules)[:-1]
    known = _CHAINS.get((forward.__module__, forward.__qualname__))
    # of another version it may be another one
    if known is None or forward.__code__.co_names != known or not set(known) <= parent._modules.keys():
        return None
    return known


def _has_row(cls: Any) -> bool:
    row = getattr(cls, _ROW, None)
    known = (getattr(row, "__module__", None), getattr(row, "__qualname__", None)) == _ROW_OF
    return known and cls.__getitem__ is nn.Sequential.__getitem__


def units_in(parent: nn.Module) -> Iterator[Unit]:
    """The units of a parent, by the kinds of its modules; :func:`unfusable` says which of them cannot run as one."""
    yield from _units(parent, chain_of(parent) or ())


def known_units(parent: nn.Module, chain: Unit) -> Iterator[Unit]:
    """The units with an activation that is elementwise for certain, of a parent that calls these children in a row."""
    for unit in _units(parent, chain):
        if _kind_of_activation(parent._modules[unit[1]]) is not None:
            yield unit


def _units(parent: nn.Module, names: Unit) -> Iterator[Unit]:
    children, at = parent._modules, 0
    while at < len(names):
        end = _end_of_unit(names, children, at, fixed=not isinstance(parent, nn.Sequential))
        if end is None:
            at += 1
            continue
        unit = names[at : end + 1]
        yield unit
        # what is no unit after all may end in the first Linear of one
        at = end if _kind_of_activation(children[unit[1]]) is None else end + 1


def _end_of_unit(names: Unit, children: Mapping[str, Any], at: int, *, fixed: bool) -> int | None:
    if not isinstance(children[names[at]], nn.Linear) or at + 1 >= len(names):
        return None
    if not (fixed or type(children[names[at + 1]]).__module__ in {place for place, _ in _ACTIVATIONS}):
        return None
    for end in range(at + 2, len(names)):
        module = children[names[end]]
        if isinstance(module, nn.Linear):
            return end
        if not (fixed or isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd))):
            return None
    return None


def _kind_of_activation(module: Any) -> str | None:
    cls = type(module)
    if cls is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    return _ACTIVATIONS.get((cls.__module__, cls.__qualname__))


# whether it may run as one


def unfusable(parent: nn.Module, unit: Unit, layer: str) -> str | None:
    """Why a unit cannot run as the layer of that name, in plain words; or None. Of a dropout, if it ever can."""
    return _as_one(parent._modules, unit, _replaceable(layer))[1]


def _as_one(children: Mapping[str, Any], unit: Unit, replaces: tuple[Any, ...]) -> tuple[str | None, str | None]:
    """The activation of a unit that may run as one, or why it may not. Dropouts aside."""
    for name in unit:
        module = children[name]
        if "forward" in module.__dict__:
            return None, f"a forward of its own was set on {name}"
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return None, f"{name} has a hook"
    for name in unit[2:-1]:
        if type(children[name]) is not nn.Dropout and type(children[name]) is not nn.Identity:
            return None, f"{name} is a {type(children[name]).__name__}"
    activation = _kind_of_activation(children[unit[1]])
    if activation is None:
        return None, f"its activation {unit[1]} is a {type(children[unit[1]]).__name__}"
    first, last = children[unit[0]], children[unit[-1]]
    why = _altered(unit[0], first, replaces) or _altered(unit[-1], last, replaces)
    return activation, why or _unlike(unit, first._parameters["weight"], last._parameters["weight"])


def _unlike(unit: Unit, first: Tensor, last: Tensor) -> str | None:
    if first.dtype == last.dtype and first.device == last.device:
        return None
    return f"{unit[0]} is {first.dtype} on {first.device}, and {unit[-1]} is {last.dtype} on {last.device}"


def _altered(name: str, linear: nn.Module, replaces: tuple[Any, ...]) -> str | None:
    """Why a Linear is more than ``input @ weight.T + bias`` on parameters of its own."""
    cls = type(linear)
    if cls.forward not in replaces or cls.__call__ is not nn.Module.__call__:
        return f"{name} is a {cls.__name__} with a forward of its own"
    parameters: dict[str, Any] = linear._parameters
    if parameters.get("weight") is None or "bias" not in parameters:
        return f"{name} is parametrized: its weight or bias is computed"
    weight = parameters["weight"]
    if type(weight) is not nn.Parameter and alters_torch_functions(weight):
        return f"the weight of {name} is a {type(weight).__name__}, which brings its own linear"
    if weight.dtype not in DTYPES:
        return f"the dtype {weight.dtype} of {name} is none of float64, float32, float16, bfloat16"
    return None


def _not_now(children: Mapping[str, Any], unit: Unit, x: Any) -> str | None:
    """Why a unit that may run as one may not in this call."""
    if type(x) is not Tensor and (not isinstance(x, Tensor) or alters_torch_functions(x)):
        return f"its input is a {type(x).__name__}"
    if x.is_nested:
        return "its input is nested"
    for name in unit[2:-1]:
        module = children[name]
        if type(module) is nn.Dropout and module.training and module.p != 0:
            return f"{name} drops values in training"
    forward_hooks, forward_pre_hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    if (forward_hooks or forward_pre_hooks) and not observers.issuperset((*forward_hooks, *forward_pre_hooks)):
        return "a hook is registered on all modules"
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return "a hook is registered on all modules"
    return None


def _replaceable(layer: str) -> tuple[Any, ...]:
    """A layer of units stands for torch's Linear, zoo's, and the linear layer of its own name."""
    same = (get_layer("linear", layer).forward,) if layer in list_layers("linear") else ()
    return (nn.Linear.forward, Linear.forward, *same)


# the parent


def adopt_units(parent: nn.Module, kind: str, layer: str, units: tuple[Unit, ...]) -> None:
    """Let these units of a parent run as the layer of that name."""
    if isinstance(parent, FusedParent):
        release(parent)
    parent.__class__ = _fused_class(type(parent), kind, layer, units)


def inside_units(model: nn.Module, *, below: bool = True) -> set[nn.Module]:
    """The modules that a model's units stand for; of the units further below too, unless told otherwise."""
    return {
        parent._modules[name]  # type: ignore[misc]
        for parent in (model.modules() if below else (model,))
        if isinstance(parent, FusedParent)
        for unit in parent.zoo_units.values()
        for name in unit
        if name in parent._modules
    }


def _fused_class(original: type[nn.Module], kind: str, layer: str, units: tuple[Unit, ...]) -> type[nn.Module]:
    """The class of a parent of class ``original`` whose units run as the layer of that name."""
    return _make(original, kind, layer, units, get_layer(kind, layer), _replaceable(layer))  # type: ignore[arg-type]


@functools.cache
def _make(
    original: type[nn.Module],
    kind: str,
    layer: str,
    units: tuple[Unit, ...],
    function: Callable[..., Tensor],
    replaces: tuple[Any, ...],
) -> type[nn.Module]:
    changed = _ROW if _has_row(without(original, Patched)) else "forward"
    own: Any = getattr(original, changed)

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):  # torch.fx traces with something else
            return own(self, *args, **kwargs)
        return _run(self, args[0], self.zoo_chain or tuple(self._modules))

    @functools.wraps(own)
    def row(self: Any, x: Any, first: int, end: int) -> Any:
        return _run(self, x, tuple(self._modules)[first:end])

    new = row if changed == _ROW else forward
    return derive(
        f"{original.__name__}[{layer}]",
        (Patched, FusedParent, original),
        original,
        (_fused_class, kind, layer, units),
        zoo_kind=kind,
        zoo_layer=layer,
        zoo_units={unit[0]: unit for unit in units},
        zoo_chain=_CHAINS.get((own.__module__, own.__qualname__)),
        zoo_function=staticmethod(function),
        zoo_replaces=replaces,
        zoo_forward=original.forward if changed == _ROW else new,
        **{changed: new},
    )


def _run(parent: FusedParent, x: Any, names: Unit) -> Any:
    """The parent's children of these names one after the other, the units as one wherever that is the same."""
    children: dict[str, Any] = parent._modules  # type: ignore[attr-defined]
    at = 0
    while at < len(names):
        unit = parent.zoo_units.get(names[at])
        if unit is not None:
            activation: str | None = None
            why: str | None = f"{unit[0]} to {unit[-1]} are not called in a row"
            if names[at : at + len(unit)] == unit:
                activation, why = _as_one(children, unit, parent.zoo_replaces)
                why = why or _not_now(children, unit, x)
            if why is None:
                x = _call(parent, children[unit[0]]._parameters, children[unit[-1]]._parameters, activation, x)
                at += len(unit)
                continue
            note_fallback(parent, why)  # type: ignore[arg-type]
        x = children[names[at]](x)
        at += 1
    return x


def _call(
    parent: FusedParent, first: dict[str, Any], last: dict[str, Any], activation: str | None, x: Tensor
) -> Tensor:
    args = (x, first["weight"], first["bias"], last["weight"], last["bias"], activation)
    if torch.compiler.is_compiling() or not given_listeners:
        return parent.zoo_function(*args)
    return run_given((first["weight"], last["weight"]), functools.partial(parent.zoo_function, *args))
