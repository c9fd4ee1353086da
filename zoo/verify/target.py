"""What is to be verified: found by name, and built like the stock layer."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.layers.kinds import kind_of
from zoo.layers.registry import get_layer
from zoo.verify.kinds import suite_of

__all__ = ["Source", "build", "name_of", "resolve", "source_of"]


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
        ValueError: for no kind, a name that leads nowhere, or something that is no layer.
    """
    known = kind_of(kind)
    arguments = f"({', '.join(known.arguments)})"
    layer = _named(target, kind) if isinstance(target, str) else target
    if isinstance(layer, type):
        if known.stock is None:
            raise ValueError(
                f"target {name_of(target)}: a layer of kind {kind!r} is a function of {arguments}, "
                f"got class {layer.__name__}"
            )
        if not issubclass(layer, nn.Module):
            raise ValueError(f"target {name_of(target)}: expected a subclass of nn.Module, got class {layer.__name__}")
        return layer
    if isinstance(layer, nn.Module) or not callable(layer):
        raise ValueError(f"target {name_of(target)}: expected a class, or a function of {arguments}, got {layer!r}")
    try:
        inspect.signature(layer).bind(*known.arguments)
    except TypeError as error:
        raise ValueError(f"target {name_of(target)}: it must take {arguments}: {error}") from None
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
    if not hasattr(target, "__qualname__"):
        return repr(target)
    return f"{getattr(target, '__module__', '?')}:{target.__qualname__}"


def build(
    layer: Any, *sizes: Any, kind: str = "linear", device: torch.device | str, dtype: torch.dtype, **options: Any
) -> nn.Module:
    """A layer of these sizes and options, with weights of its own.

    A class is called as the kind's stock layer is, with device and dtype if it takes them; a class with ``adopt`` is
    made of a stock layer, as zoo.patch does; a function gets the parameters of a stock layer.
    """
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    if not isinstance(layer, type):
        return suite_of(kind).functional(layer, *sizes, **options, **where)
    stock = kind_of(kind).stock
    if stock is not None and issubclass(layer, stock) and hasattr(layer, "adopt"):
        module = stock(*sizes, **options, **where)
        module.__class__ = layer
        module.adopt()  # type: ignore[operator]
        return module
    try:
        inspect.signature(layer).bind(*sizes, **options, **where)
    except TypeError:
        return layer(*sizes, **options).to(**where)
    return layer(*sizes, **options, **where)


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
