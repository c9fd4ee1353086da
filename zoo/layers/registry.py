"""The registry of swappable layers: a kind ("linear") has a stock layer and named layers to put in its place.

The kind "mlp" has none: it is a unit of several modules that run as one, and its layers are functions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from zoo.naming import natural_key, unknown_name

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


@dataclass(frozen=True)
class Kind:
    """A kind of layer that can be swapped."""

    arguments: tuple[str, ...]
    """What a layer given as a function is called with: the input, then attributes of the module, or of a unit its
    parameters and activation."""
    stock: type[nn.Module] | None = None
    """The layer it stands for; a swappable layer is a subclass, and shares its parameters and their names. None of a
    unit of several modules (zoo.layers.units)."""
    flops: Callable[[Any, Tensor], int] = lambda module, output: 0
    """Of the stock layer's forward, from the module and the output, as torch counts them (2 M N K a product)."""


KINDS: dict[str, Kind] = {
    "linear": Kind(
        arguments=("input", "weight", "bias"),
        stock=nn.Linear,
        flops=lambda module, output: 2 * output.numel() * module.in_features,
    ),
    "mlp": Kind(arguments=("input", "weight1", "bias1", "weight2", "bias2", "activation")),
}

_layers: dict[tuple[str, str], Any] = {}

_L = TypeVar("_L", bound=Callable[..., Any])


def kind_of(kind: str) -> Kind:
    """The kind of that name. ValueError, with the known ones, where there is none."""
    if kind not in KINDS:
        raise unknown_name("kind of layer", kind, KINDS)
    return KINDS[kind]


def stock_of(kind: str) -> type[nn.Module]:
    """The stock layer of a kind that has one."""
    stock = kind_of(kind).stock
    assert stock is not None, f"{kind} is a kind of unit"
    return stock


def register_layer(kind: str, name: str) -> Callable[[_L], _L]:
    """Decorator: register a layer under a name, for ``zoo.patch(model, kind, layer=name)``.

    Either a subclass of the kind's stock layer (``nn.Linear`` for "linear") with a ``forward`` of its own, or a plain
    function ``f(input, weight, bias) -> output``. The patched module keeps its instance, and so its parameters: a
    class must live on what the stock layer has. If it needs more, it defines ``adopt(self)``, which is called on each
    module after its class has changed and may set attributes and non-persistent buffers, nothing else; unpatch removes
    them. A forward that hands its work to torch tells so by ``zoo.layers.note_fallback(self, reason)``.

    A layer of kind "mlp" is a function ``f(input, weight1, bias1, weight2, bias2, activation) -> output``, which stands
    for ``act(input @ weight1.T + bias1) @ weight2.T + bias2``; the activation is "relu", "gelu", "gelu_tanh" or "silu",
    and a bias may be None.

    Raises:
        ValueError: unknown kind, a name taken, or something that cannot stand in for the stock layer.
    """
    stock = kind_of(kind).stock
    if not isinstance(name, str) or not name:
        raise ValueError(f"a layer's name must be a non-empty str, got {name!r}")

    def register(layer: _L) -> _L:
        if (kind, name) in _layers:
            raise ValueError(
                f"{kind} layer {name!r} is registered already, as {_layers[kind, name].__qualname__}; "
                "choose another name"
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
        return layer

    return register


def _check_arguments(kind: str, name: str, function: Callable[..., Any]) -> None:
    arguments = kind_of(kind).arguments
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{kind} layer {name!r}: {function!r} must take ({', '.join(arguments)}): {error}") from None


def _from_function(kind: str, name: str, function: Callable[..., Any]) -> type[nn.Module]:
    attributes = kind_of(kind).arguments[1:]

    def forward(self: nn.Module, input: Tensor) -> Any:
        return function(input, *(getattr(self, attribute) for attribute in attributes))

    return type(name, (stock_of(kind),), {"forward": forward, "__doc__": inspect.getdoc(function)})


def get_layer(kind: str, name: str) -> Any:
    """The class registered under that name, or of a kind of unit the function.

    ValueError, with the known ones, where there is none.
    """
    kind_of(kind)
    if (kind, name) not in _layers:
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


def stock_kind(module: nn.Module) -> str | None:
    """The kind that a module is of, swapped or not; None where it is of none."""
    return next((name for name, kind in KINDS.items() if kind.stock and isinstance(module, kind.stock)), None)


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
    """The names of the registered layers of a kind, or of all kinds, in natural order."""
    if kind is not None:
        kind_of(kind)
    return sorted({n for k, n in _layers if kind in (None, k)}, key=natural_key)
