"""The door to torchvision's classifiers: ``torchvision/<name>``, built by torchvision's own functions."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.registry import unknown_options

__all__ = ["builder", "names"]

# torchvision's functions take **options and hand them to the class of the model. What the class takes is read from
# its signature, but for what the functions fix themselves, and for what they add.
_FIXED = {
    "densenet*": {"growth_rate", "block_config", "num_init_features"},
    "efficientnet_*": {"last_channel"},
    "efficientnet_b[567]": {"norm_layer"},
    "efficientnet_v2_*": {"norm_layer"},
    "resnext*": {"groups", "width_per_group"},
    "squeezenet*": {"version"},
    "swin_*": {"stochastic_depth_prob"},
    "swin_v2_*": {"block", "downsample_layer"},
    "wide_resnet*": {"width_per_group"},
}
_ADDED = {
    "efficientnet_*": {"dropout"},
    "maxvit_*": {"input_size"},
    "mobilenet_v3_*": {"width_mult", "reduced_tail", "dilated"},
    "vit_*": {"image_size"},
}

_WITH_INIT_WEIGHTS = ("googlenet", "inception_v3")


def names() -> list[str]:
    """torchvision's 80 classifiers, as torchvision calls them."""
    from torchvision import models

    return models.list_models(module=models)


def builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds ``name``, with options as torchvision takes them; TypeError for others."""
    return functools.partial(_build, name)


def options(name: str) -> set[str]:
    """The names of the options that torchvision's ``name`` takes."""
    from torchvision import models

    model_class = inspect.signature(models.get_model_builder(name)).return_annotation
    parameters = inspect.signature(model_class).parameters.values()
    taken = {p.name for p in parameters if p.default is not p.empty}
    taken |= {option for pattern, added in _ADDED.items() if fnmatch.fnmatch(name, pattern) for option in added}
    return taken - {option for pattern, fixed in _FIXED.items() if fnmatch.fnmatch(name, pattern) for option in fixed}


def _build(name: str, /, **given: Any) -> nn.Module:
    from torchvision import models

    known = options(name)
    if not known >= given.keys():
        raise unknown_options(f"torchvision/{name}", given, known)
    if name in _WITH_INIT_WEIGHTS:
        given.setdefault("init_weights", True)  # torchvision's default too, but left to the default it warns
    return models.get_model(name, **given)
