"""Inputs of the shape that a model is made for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.isolation import undisturbed
from zoo.sweep.rows import reference_name

__all__ = ["input_shape", "random_inputs", "smallest_shape"]

USUAL = 224
STEP = 32


def input_shape(name: str, model: nn.Module) -> tuple[int, ...]:
    """One input's shape: (C, H, W), or (features,) for a model without convolutions that begins with a Linear.

    The size is the model's own: what timm's configuration says, or what torchvision's model was built or trained for.
    """
    if config := getattr(model, "pretrained_cfg", None):
        return tuple(config["input_size"])
    if (features := getattr(model, "in_features", None)) is not None:
        return (features,)
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if convolution is None:
        linear = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
        if linear is None:
            raise ValueError(f"{name}: it has neither a convolution nor a Linear to tell the shape of its input by")
        return (linear.in_features,)
    side = getattr(model, "image_size", None) or _trained_at(name)
    return (convolution.in_channels, side, side)


def _trained_at(name: str) -> int:
    reference = reference_name(name)
    if reference is None:
        return USUAL
    from torchvision.models import get_model_weights

    first = next(iter(get_model_weights(reference.removeprefix("torchvision/"))), None)
    return USUAL if first is None else int(first.transforms().crop_size[0])


def smallest_shape(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest square image, in steps of 32 pixels, that a model in eval mode takes; at most ``shape`` itself."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if len(shape) < 3 or (getattr(model, "pretrained_cfg", None) or {}).get("fixed_input_size"):
        return shape
    for side in range(STEP, min(shape[1:]), STEP):
        smaller = (shape[0], side, side)
        try:
            with undisturbed(model), torch.no_grad():
                model(random_inputs(1, smaller, device))
        except Exception:  # libraries refuse a size in many ways
            continue
        return smaller
    return shape


def random_inputs(batch: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Normal values from a fixed seed, (batch, *shape); on the meta device their shape alone."""
    if device.type == "meta":
        return torch.empty(batch, *shape, device=device)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(device)
