"""What is to be verified: found by name, and built like the stock layer."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.registry import get_layer, kind_of

__all__ = ["Functional", "Source", "build", "name_of", "resolve", "source_of"]


class Functional(nn.Linear):
    """An nn.Linear that computes with a function of (input, weight, bias)."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input, self.weight, self.bias)


@dataclass(frozen=True)
class Source:
    """Where a layer's code is. All is None where Python cannot tell."""

    source_file: str | None
    """The file's name, without its folder."""
    source_sha256: str | None
    """Of the whole file, since a layer is rarely in its class alone."""
    libraries: dict[str, str] = field(default_factory=dict)
    """The compiled libraries that may do its work, zoo's own among them: the file's name -> its sha256."""


def resolve(target: Any, kind: str = "linear") -> Any:
    """The class or function that a target means.

    Args:
        target: "module:Name", where Name may have dots; the name of a registered layer; or a class or function.

    Raises:
        ValueError: for a kind that has no suite, a name that leads nowhere, or something that is no layer.
    """
    kind_of(kind)
    if kind != "linear":
        raise ValueError(f"kind {kind!r}: verify has a suite for 'linear' alone")
    layer = _named(target, kind) if isinstance(target, str) else target
    if isinstance(layer, type):
        if not issubclass(layer, nn.Module):
            raise ValueError(f"target {name_of(target)}: expected a subclass of nn.Module, got class {layer.__name__}")
        return layer
    if isinstance(layer, nn.Module) or not callable(layer):
        raise ValueError(
            f"target {name_of(target)}: expected a class, or a function of (input, weight, bias), got {layer!r}"
        )
    try:
        inspect.signature(layer).bind(*kind_of(kind).arguments)
    except TypeError as error:
        raise ValueError(f"target {name_of(target)}: it must take (input, weight, bias): {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    return layer


def _named(target: str, kind: str) -> Any:
    module_name, colon, path = target.partition(":")
    if not colon:
        return get_layer(kind, target)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"target {target!r}: {error}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            names = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
            raise ValueError(f"target {target!r}: there is no {part!r}; there are {', '.join(sorted(names)) or 'none'}")
        found = getattr(found, part)
    return found


def name_of(target: Any) -> str:
    """How a report calls the target."""
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


def build(
    layer: Any, in_features: int, out_features: int, *, bias: bool, device: torch.device | str, dtype: torch.dtype
) -> nn.Module:
    """A layer of these sizes, with weights of its own.

    A class is called as nn.Linear is, with device and dtype if it takes them; a class with ``adopt`` is made of an
    nn.Linear, as zoo.patch does; a function gets the parameters of an nn.Linear.
    """
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    if not isinstance(layer, type):
        return Functional(layer, in_features, out_features, bias=bias, **where)
    if issubclass(layer, nn.Linear) and hasattr(layer, "adopt"):
        module = nn.Linear(in_features, out_features, bias=bias, **where)
        module.__class__ = layer
        module.adopt()  # type: ignore[operator]
        return module
    try:
        inspect.signature(layer).bind(in_features, out_features, bias=bias, **where)
    except TypeError:
        return layer(in_features, out_features, bias=bias).to(**where)
    return layer(in_features, out_features, bias=bias, **where)


def source_of(layer: Any) -> Source:
    """The file that a layer is written in, and its hash."""
    if not isinstance(layer, (type, types.FunctionType)):
        layer = type(layer)
    libraries = _libraries(layer.__module__)
    try:
        file = Path(inspect.getsourcefile(layer) or "")
        return Source(file.name, hashlib.sha256(file.read_bytes()).hexdigest(), libraries)
    except (TypeError, OSError):
        return Source(None, None, libraries)


def _libraries(module: str) -> dict[str, str]:
    """What torch was told to load, and the extension modules of the layer's package."""
    package = module.partition(".")[0]
    files = set(torch.ops.loaded_libraries)
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if name.partition(".")[0] == package != "torch" and file and file.endswith((".so", ".pyd")):
            files.add(file)
    found = {}
    for path in map(Path, sorted(files)):
        with contextlib.suppress(OSError):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
