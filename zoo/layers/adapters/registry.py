"""The registry of adapters: the classes whose forward may be run with another layer where it calls ``F.linear``, or
what stands for a layer of another kind.

Most parents of a Linear call it. Some read its weight and do the arithmetic themselves, ``F.linear(x,
self.qkv.weight, bias)``, and whatever was swapped in for ``qkv`` would not run. For a class that is known here, the
parent is patched as well: its own code runs, with the layer in the place of ``F.linear``. So does a subclass of a stock
layer that computes with the same function, such as timm's LayerNorm.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from zoo.derived import original_class
from zoo.layers.adapters._given import layer_as_function
from zoo.layers.adapters._rebind import Rebinding
from zoo.layers.adapters.nested import padded_inside, stock_where_nested
from zoo.layers.adapters.patches import resampled
from zoo.layers.kinds import functional_of, kind_of, stock_kind

__all__ = ["Adapter", "adapter_of", "computing", "register_adapter", "rewritten", "routes"]

_Around = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Adapter:
    """What to do with a class whose code reads the weight of a layer past its forward."""

    kinds: tuple[str, ...] = ("linear",)
    """Of the layers whose weights it reads, or of the layer that it is."""
    asks: bool = False
    """The code asks about the weights, but computes nothing with them: it is left as it is."""
    around: _Around | None = None
    """Makes the forward from the one with the layer in it and the class's own."""
    through: str | None = None
    """The child that it hands the weights to, and that has an adapter of its own; None where it computes itself."""


# By name, so that nothing is imported for them.
_ENCODER = ("linear", "layer_norm")  # its fast path reads the weights of both
_KNOWN: dict[str, Adapter] = {
    "torch.nn.modules.activation.MultiheadAttention": Adapter(around=stock_where_nested),
    "torch.nn.modules.transformer.TransformerEncoderLayer": Adapter(_ENCODER, around=padded_inside),
    "torch.nn.modules.transformer.TransformerEncoder": Adapter(_ENCODER, asks=True),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": Adapter(),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": Adapter(),
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": Adapter(),
    "timm.layers.linear.Linear": Adapter(),
    "timm.models.beit.Attention": Adapter(),
    "timm.models.eva.EvaAttention": Adapter(),
    "timm.models.swin_transformer_v2.WindowAttention": Adapter(),
    "timm.models.naflexvit.NaFlexEmbeds": Adapter(through="patch_interpolator"),
    "timm.layers.patch_embed.PatchEmbedInterpolator": Adapter(around=resampled),
    "timm.layers.norm.LayerNorm": Adapter(("layer_norm",)),
    "timm.layers.norm.LayerNorm2d": Adapter(("layer_norm",)),
    "torchvision.models.convnext.LayerNorm2d": Adapter(("layer_norm",)),
}
_registered: dict[type[nn.Module], Adapter] = {}

_C = TypeVar("_C", bound=type[nn.Module])


def register_adapter(parent: _C) -> _C:
    """Let the layers of :func:`zoo.patch` run inside a class that reads a Linear's weight past its forward.

    For a module class, or as a decorator of one, whose methods call ``F.linear(x, self.child.weight, ...)`` with the
    weight of an ``nn.Linear`` below it, and maybe with parameters of its own too; also for a subclass of ``nn.Linear``
    with such a forward, or of ``nn.LayerNorm`` with one that calls ``F.layer_norm``. When a patch swaps those layers,
    the methods run as they are written, those of the bases that they reach by ``super()`` included, but what they, and
    the functions that they call by name, reach as ``F.linear`` is the layer. A weight that they use in another way
    still goes past it: coverage, and a patch with ``example``, say so. A subclass of the class is another class and
    must be registered too.

    The layer's forward must live on its module's weight, bias, in_features and out_features alone (a LayerNorm's on
    weight, bias, normalized_shape, eps and elementwise_affine): there is no module
    of its own behind a given weight, which may be a part of one, or made of several.

    Raises:
        ValueError: no module class, one that is registered already, or one whose methods never call ``F.linear`` (of a
            LayerNorm ``F.layer_norm``).
    """
    if not (isinstance(parent, type) and issubclass(parent, nn.Module)):
        raise ValueError(f"register_adapter: expected a class of modules, got {parent!r}")
    if _known(parent):
        raise ValueError(f"register_adapter: {_dotted(parent)} is registered already")
    kind = stock_kind(parent) or "linear"
    if kind_of(kind).functional is None:
        raise ValueError(f"register_adapter: {_dotted(parent)} is a {kind} layer, for which there are no adapters")
    if not _reached(parent, kind):  # type: ignore[arg-type]
        raise ValueError(
            f"register_adapter: no method of {_dotted(parent)} calls torch.nn.functional.{kind}, by itself or in a "
            "function that it names; there is no place to put a layer"
        )
    _registered[parent] = Adapter((kind,))
    return parent


def adapter_of(module: nn.Module | type[nn.Module], kind: str = "linear") -> Adapter | None:
    """The adapter of a kind for a module or its class, patched or not; None for any other, a subclass of a known one
    included."""
    if isinstance(module, nn.Module) and "forward" in module.__dict__:
        return None
    adapter = _known(original_class(module if isinstance(module, type) else type(module)))
    return adapter if adapter is not None and kind in adapter.kinds else None


def computing(reader: nn.Module, kind: str = "linear") -> nn.Module | None:
    """The module that computes with the weights that another one reads: itself, or a child. None if it has no such."""
    adapter = adapter_of(reader, kind)
    return reader if adapter is None or adapter.through is None else reader._modules.get(adapter.through)


def rewritten(
    original: type[nn.Module], layer: type[nn.Module], kind: str = "linear"
) -> tuple[dict[str, Any], tuple[type[nn.Module], ...]]:
    """What a class changes to with ``layer`` in the place of the kind's function, as ``F.linear``: its methods, and
    bases to add after it.

    The bases stand before those that the class had, so that ``super()`` in its methods finds theirs changed, too.
    """
    rebinding = Rebinding({functional_of(kind): layer_as_function(layer, kind), **_NO_FAST_PATH})
    own: dict[str, Any] = {}
    bases: list[type[nn.Module]] = []
    for cls in _classes(original):
        methods = _methods(cls)
        changed: dict[str, Any] = {}
        for name, method in methods.items():
            if (new := rebinding.function(_function(method))) is not _function(method):
                changed[name] = new if method is _function(method) else type(method)(new)
        around = getattr(_known(cls), "around", None)
        if around is not None and "forward" in methods:
            changed["forward"] = around(changed.get("forward", methods["forward"]), methods["forward"])
        if cls is original:
            own = changed
        elif changed:
            members = {**changed, "__module__": cls.__module__}
            bases.append(type(f"{cls.__name__}[{layer.__name__}]", (cls,), members))
    return own, tuple(bases)


def routes(module: nn.Module, kind: str = "linear") -> bool:
    """Whether the code of a module's class does arithmetic with weights itself (it may only keep off a fast path)."""
    return functional_of(kind) in _reached(original_class(type(module)), kind)  # type: ignore[arg-type]


def _never() -> bool:
    """Stands for ``get_fastpath_enabled``: the fast path is one fused kernel that reads all weights."""
    return False


_NO_FAST_PATH = {torch.backends.mha.get_fastpath_enabled: _never}


@functools.lru_cache(maxsize=1024)
def _reached(cls: type[nn.Module], kind: str) -> set[Any]:
    """What there is to replace in the code that instances of a class run."""
    functional = functional_of(kind)
    rebinding = Rebinding({functional: functional, **_NO_FAST_PATH})
    covered: set[str] = set()
    for base in _classes(cls):
        methods = _methods(base)
        for name in methods.keys() - covered:
            rebinding.function(_function(methods[name]))
        covered |= {name for name, method in methods.items() if "super" not in _function(method).__code__.co_names}
    return rebinding.used


def _known(cls: type) -> Adapter | None:
    return _registered.get(cls) or _KNOWN.get(_dotted(cls))


def _classes(cls: type[nn.Module]) -> list[type[nn.Module]]:
    """A class and its bases, but for those that every module has."""
    return [base for base in cls.__mro__ if base not in (object, nn.Module)]


def _methods(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods that a class defines, static ones and such of the class included; none that Python calls itself."""
    return {n: m for n, m in vars(cls).items() if isinstance(_function(m), types.FunctionType) and n[:2] != "__"}


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
