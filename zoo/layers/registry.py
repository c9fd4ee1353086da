"""The registry of swappable layers: a kind (zoo.layers.kinds) has a stock layer and named layers for its place."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from zoo.layers.kinds import KINDS, Kind, call_of, kind_of, stock_kind, stock_of
from zoo.naming import natural_key, unknown_name
from zoo.offers import LAYERS, claimed, names_offered, take

__all__ = [
    "KINDS",
    "Kind",
    "custom_layer",
    "get_layer",
    "kind_of",
    "list_layers",
    "register_layer",
    "registered",
    "stock_kind",
    "stock_of",
]


_layers: dict[tuple[str, str], Any] = {}

_L = TypeVar("_L", bound=Callable[..., Any])


def register_layer(kind: str, name: str) -> Callable[[_L], _L]:
    """Decorator: register a layer under a name, for ``zoo.patch(model, kind, layer=name)``.

    Either a subclass of the kind's stock layer with a ``forward`` of its own, or a plain function, which returns the
    output:

    * "linear": ``nn.Linear``, or ``f(input, weight, bias)``;
    * "layer_norm": ``nn.LayerNorm``, or ``f(input, normalized_shape, weight, bias, eps)``, where weight and bias may be
      None;
    * "conv2d": ``nn.Conv2d``, or ``f(input, weight, bias, stride, padding, dilation, groups)`` as ``F.conv2d``;
    * "mlp": only a function, ``f(input, weight1, bias1, weight2, bias2, activation)``, which stands for
      ``act(input @ weight1.T + bias1) @ weight2.T + bias2``; the activation is "relu", "gelu", "gelu_tanh" or "silu",
      and a bias may be None.

    The patched module keeps its instance, and so its parameters: a class must live on what the stock layer has. If it
    needs more, it defines ``adopt(self)``, which is called on each module after its class has changed and may set
    attributes and non-persistent buffers, nothing else; unpatch removes them. A forward that hands its work to torch
    tells so by ``zoo.layers.note_fallback(self, reason)``.

    An installed package may offer layers without being imported (:mod:`zoo.offers`).

    Raises:
        ValueError: unknown kind, a name taken, or something that cannot stand in for the stock layer.
    """
    kind_of(kind)
    if not isinstance(name, str) or not name:
        raise ValueError(f"a layer's name must be a non-empty str, got {name!r}")

    def register(layer: _L) -> _L:
        if offer := claimed(LAYERS, f"{kind}.{name}", layer):
            raise ValueError(
                f"{kind} layer {name!r}: {layer!r} cannot have this name, which the installed package {offer} offers; "
                "choose another name"
            )
        _add(kind, name, layer)
        return layer

    return register


def _add(kind: str, name: str, layer: Any) -> None:
    stock = kind_of(kind).stock
    if (kind, name) in _layers:
        raise ValueError(
            f"{kind} layer {name!r} is registered already, as {_layers[kind, name].__qualname__}; choose another name"
        )
    if isinstance(layer, type):
        if stock is None or not issubclass(layer, stock):
            wanted = "" if stock is None else f"a subclass of {stock.__name__} or "
            raise ValueError(
                f"{kind} layer {name!r}: expected {wanted}a function "
                f"f({', '.join(kind_of(kind).arguments)}), got class {layer.__qualname__}"
            )
        if layer.forward is stock.forward:
            raise ValueError(
                f"{kind} layer {name!r}: {layer.__qualname__} has no forward of its own, so nothing would change"
            )
        try:
            object.__new__(stock).__class__ = layer
        except TypeError as error:
            raise ValueError(
                f"{kind} layer {name!r}: a {stock.__name__} cannot become a {layer.__qualname__} in place "
                f"({error}); leave out __slots__"
            ) from None
        _layers[kind, name] = layer
    elif callable(layer):
        _check_arguments(kind, name, layer)
        _layers[kind, name] = layer if stock is None else _from_function(kind, name, layer)
    else:
        raise ValueError(f"{kind} layer {name!r}: expected a class or a function, got {layer!r}")


def _check_arguments(kind: str, name: str, function: Callable[..., Any]) -> None:
    arguments = kind_of(kind).arguments
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{kind} layer {name!r}: {function!r} must take ({', '.join(arguments)}): {error}") from None


def _from_function(kind: str, name: str, function: Callable[..., Any]) -> type[nn.Module]:
    arguments = call_of(kind)

    def forward(self: nn.Module, input: Tensor) -> Any:
        return function(*arguments(self, input))

    return type(name, (stock_of(kind),), {"forward": forward, "__doc__": inspect.getdoc(function)})


def get_layer(kind: str, name: str) -> Any:
    """The class registered under that name, or of a kind of unit the function.

    ValueError, with the known ones, where there is none.
    """
    kind_of(kind)
    if (kind, name) not in _layers and not take(LAYERS, f"{kind}.{name}", functools.partial(_register_new, kind, name)):
        raise unknown_name(
            f"{kind} layer", name, list_layers(kind), remedy=f'register one with @zoo.register_layer("{kind}", ...)'
        )
    return _layers[kind, name]


@contextlib.contextmanager
def registered(kind: str, layer: Any) -> Iterator[str]:
    """The name of a registered layer; inside, one that is not registered has a name for the time.

    Raises:
        ValueError: as :func:`register_layer`.
    """
    known = next((name for (k, name), held in _layers.items() if k == kind and held is layer), None)
    if known is not None:
        yield known
        return
    name = f"{getattr(layer, '__qualname__', 'layer')} under test"
    register_layer(kind, name)(layer)
    try:
        yield name
    finally:
        del _layers[kind, name]


def _register_new(kind: str, name: str, layer: Any) -> None:
    if (kind, name) not in _layers:  # its module may have done so by itself
        _add(kind, name, layer)


def custom_layer(module: nn.Module, kind: str) -> str | None:
    """The name of the registered layer whose forward the module runs, or None."""
    if "forward" in module.__dict__:
        return None
    forward = type(module).forward
    if forward is getattr(type(module), "zoo_forward", None):  # its own, with the layer in it
        return module.zoo_layer if module.zoo_kind == kind else None  # type: ignore[return-value]
    if kind_of(kind).stock is None:
        return None
    names = [name for (k, name), layer in _layers.items() if k == kind and layer.forward is forward]
    patched_as = getattr(module, "zoo_layer", None)
    return patched_as if patched_as in names else names[0] if names else None


def list_layers(kind: str | None = None) -> list[str]:
    """The names of the layers of a kind, or of all kinds, in natural order: those that are registered, and those that
    installed packages offer."""
    if kind is not None:
        kind_of(kind)
    offered = (tuple(name.split(".", 1)) for name in names_offered(LAYERS))
    return sorted({n for k, n in (*_layers, *offered) if kind in (None, k)}, key=natural_key)
