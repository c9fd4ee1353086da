"""What commands, the demo and the sweep need first: a device, a model as asked for, and real inputs for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import weights_index
from zoo.data import digits, eval_transform, photos
from zoo.factory import create
from zoo.machine import present
from zoo.models.resnet import ResNet
from zoo.readout import numbers

__all__ = [
    "channels_of",
    "choose_device",
    "input_side",
    "make",
    "options_from",
    "real_inputs",
    "resized",
    "side_of",
    "transform_for",
]


def choose_device(text: str) -> torch.device:
    """The device of that name; "auto" is a GPU if zoo can use one. ValueError for one that is not here."""
    from zoo.ops._library import CUDA_LOADED

    if text == "auto":
        return torch.device("cuda" if CUDA_LOADED and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"device {text!r}: expected cpu, cuda, cuda:N or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {text!r}: zoo's kernels run on cpu and cuda")
    return present(device)


def options_from(pairs: Iterable[str]) -> dict[str, Any]:
    """Model options from ``key=value`` texts; a value is JSON, or else text. ValueError for another form."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"option {pair!r}: expected KEY=VALUE, such as num_classes=10")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def make(name: str, options: Mapping[str, Any], *, device: torch.device | str, **given: Any) -> nn.Module:
    """``zoo.create``; an option that the model does not take is a ValueError too.

    Without weights it has fresh ones from seed 0, none of them constant: a head that begins as zeros, or a branch that
    begins with a weight of 1e-6, would hide whatever is computed before it.
    """
    torch.manual_seed(0)
    try:
        model = create(name, **{**options, **given}, device=device)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if given.get("weights") is None and torch.device(device).type != "meta":
        with torch.no_grad():
            _unlevel([parameter for parameter in model.parameters() if parameter.numel() > 1])
    return model


def _unlevel(parameters: list[nn.Parameter]) -> None:
    """Add noise, from a fixed seed, to those that are constant."""
    constant = numbers((parameter == parameter.flatten()[0]).all() for parameter in parameters)
    chosen = [parameter for parameter, is_constant in zip(parameters, constant, strict=True) if is_constant]
    noise = torch.randn(sum(parameter.numel() for parameter in chosen), generator=torch.Generator().manual_seed(1))
    for device in {parameter.device for parameter in chosen}:
        there = noise.to(device).split([parameter.numel() for parameter in chosen])
        for parameter, part in zip(chosen, there, strict=True):
            if parameter.device == device:
                parameter.add_(part.view(parameter.shape).to(parameter.dtype), alpha=0.3)


def real_inputs(name: str, model: nn.Module) -> Tensor:
    """Real images as the model takes them, (N, C, H, W): two photographs, or eight digits for an ``mlp``."""
    if (pixels := getattr(model, "in_features", None)) is not None:
        return resized(digits(train=False)[:8][0], side_of(pixels))
    transform = transform_for(name, model, None)
    images = torch.stack([transform(photo) for photo in photos().values()])
    channels = channels_of(model)
    return images if channels == 3 else images.mean(1, keepdim=True).expand(-1, channels, -1, -1).contiguous()


def transform_for(name: str, model: nn.Module, weights: str | None) -> Callable[[Any], Tensor]:
    """From a photograph to the model's input, as its weights were evaluated with where they have a name."""
    if getattr(model, "pretrained_cfg", None):
        return eval_transform(model)
    named = weights is not None and not Path(weights).suffix and weights not in weights_index.names()
    return eval_transform(name, weights=weights if named else None)


def channels_of(model: nn.Module) -> int:
    """Channels of the images that a model takes: those of its first convolution, 1 for one without."""
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 1)


def input_side(model: nn.Module, transform: Any) -> int | None:
    """The side of the images that a model takes, or None if it takes any; ``transform`` is its transform_for."""
    if (pixels := getattr(model, "in_features", None)) is not None:
        return side_of(pixels)
    if isinstance(model, ResNet):
        return None
    config = getattr(model, "pretrained_cfg", None)
    return config["input_size"][-1] if config else transform.crop_size[0]


def side_of(pixels: int) -> int:
    """The side of a square image of so many pixels. ValueError if there is none."""
    side = math.isqrt(pixels)
    if side * side != pixels:
        raise ValueError(f"in_features={pixels}: no square image has so many pixels; expected 784, 64 or the like")
    return side


def resized(images: Tensor, side: int) -> Tensor:
    """Images (..., C, H, W) brought to side x side by bilinear interpolation."""
    flat = F.interpolate(images.reshape(-1, *images.shape[-3:]), (side, side), mode="bilinear")
    return flat.reshape(*images.shape[:-2], side, side)
