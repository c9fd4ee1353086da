"""The door to timm's architectures: ``timm/<name>``, built by ``timm.create_model``."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.registry import unknown_options

__all__ = ["build", "build_pretrained", "builder", "names"]

_ABOUT_WEIGHTS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def names() -> list[str]:
    """timm's architectures, as timm calls them."""
    import timm

    return timm.list_models()


def builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds ``name``, with options as timm takes them; TypeError for others."""
    return functools.partial(build, name, None)


def build_pretrained(name: str, tag: str, given: dict[str, Any]) -> nn.Module:
    """timm's ``name`` with the weights of ``tag``, all of them.

    timm only logs which tensors a file lacks, and for some models loads what is there; here that is a ValueError.
    """
    with _Written() as written:
        model = _create(name, tag, True, given)
    config: Any = model.pretrained_cfg
    custom = config.get("custom_load")  # a foreign format, which the model reads by itself
    lost = [key for key, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in written.tensors]
    lost = [key for key in lost if not key.endswith("num_batches_tracked")]
    if lost and not custom:
        raise ValueError(f"weights {tag!r} of timm/{name} lack {len(lost)} tensors of the model: {', '.join(lost[:8])}")
    return model


def build(name: str, tag: str | None, /, **given: Any) -> nn.Module:
    """timm's ``name``, with the input size, classes and preprocessing of ``tag`` (None: of its usual one)."""
    return _create(name, tag, False, given)


def _create(name: str, tag: str | None, pretrained: bool, given: dict[str, Any]) -> nn.Module:
    import timm

    for option in given.keys() & set(_ABOUT_WEIGHTS):
        raise TypeError(f"timm/{name}: the option {option!r} is about weights; pass weights='<tag>' or a path instead")
    for option, value in given.items():
        if value is None:
            raise TypeError(f"timm/{name}: timm would drop the option {option!r}, which is None; leave it out")
    try:
        return timm.create_model(name, pretrained=pretrained, pretrained_cfg=tag, **given)
    except TypeError as error:
        refused = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if refused is None or refused[2] not in given:
            raise
        raise unknown_options(f"timm/{name}", [refused[2]], _options(name, refused[1])) from error


def _options(name: str, model_class: str) -> list[str]:
    from timm.models import model_entrypoint

    found = getattr(sys.modules[model_entrypoint(name).__module__], model_class, None)
    return [key for key in inspect.signature(found).parameters if key not in ("device", "dtype")] if found else []


class _Written(TorchFunctionMode):
    """Remembers the tensors that are copied into."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}  # the tensors are kept, so that no id is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self.tensors[id(args[0])] = args[0]
        return func(*args, **(kwargs or {}))
