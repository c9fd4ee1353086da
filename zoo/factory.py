"""``zoo.create``: a model by name, with weights if asked for, and its layers swapped if asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from zoo import registry
from zoo.models import pretrained

__all__ = ["create"]

Only = str | tuple[str, ...] | Callable[[str, nn.Module], bool] | None


def create(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = None,
    num_classes: int | None = None,
    custom_linear: bool | str | Sequence[str] | Callable[[str, nn.Module], bool] = False,
    layers: Mapping[str, str] | None = None,
    reset_head: bool = False,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    **model_options: Any,
) -> nn.Module:
    """Build a model: its architecture, then its weights, then its custom layers. It comes in training mode.

    Args:
        name: one of zoo.list_models(): "resnet50", "torchvision/vit_b_16", "timm/convnext_tiny".
        weights: a name of torchvision, of timm or of zoo's index, or a path (see zoo.models.pretrained); None leaves
            the model freshly initialised.
        num_classes: number of logits; None is what the weights have, or the model's own number.
        custom_linear: which Linears to swap: none (False), every one that can be (True), the classifier ("head"), those
            whose names match one of a list of globs, or those for which a predicate ``(name, module)`` is true. Where
            both Linears of an ``mlp`` unit are chosen (see zoo.patch), it runs as one layer.
        layers: the registered layer to put in, by kind: ``{"linear": "mine", "layer_norm": "mine"}``. Named without
            ``custom_linear``, which chooses among Linears alone, it swaps all of its kind. With another linear layer
            than zoo's, units are left alone unless named.
        reset_head: load everything but the classifier, which stays freshly initialised, whatever classes the weights
            have. All else is loaded strictly.
        device: where to build the model; "meta" builds it without memory.
        dtype: floating-point type of its parameters and buffers. They are initialised in the default type and then
            converted, so that a seed gives the same model in each type.
        **model_options: what else the model takes, as its own library calls it.

    Raises:
        ValueError: an unknown name or weights, weights that do not fit, an argument of the wrong form.
        TypeError: an option that the model does not take.
        OSError: weights that could not be fetched or read.
    """
    if "pretrained" in model_options:
        raise ValueError(
            f"pretrained={model_options['pretrained']!r} is no option of zoo.create; name the weights: "
            "weights='DEFAULT' (torchvision's and zoo's ResNets), weights='<tag>' (timm)"
        )
    if reset_head and weights is None:
        raise ValueError("reset_head=True needs weights: without them the whole model is freshly initialised")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: expected a floating-point torch.dtype, such as torch.bfloat16")
    rules = _rules(custom_linear, layers)
    options = dict(model_options)
    if num_classes is not None:
        options["num_classes"] = num_classes
    registry.resolve(name)
    chosen = None if weights is None else pretrained.find(name, weights)
    if chosen is not None:
        options = chosen.complete(options, reset_head=reset_head)

    with nullcontext() if device is None else _device(device):
        model = chosen.builder(**options) if chosen and chosen.builder else registry.build(name, options)
    if dtype is not None:
        model = model.to(dtype)
    if chosen is not None:
        chosen.load(model, options, reset_head=reset_head)
    registry.attach_spec(model, name, options)
    for kind, layer, only in rules:
        from zoo.swap import patch

        patch(model, kind, layer=layer, only=only)
    if rules and _fuses(custom_linear, rules):
        from zoo.swap import Rule, apply_rules

        apply_rules(model, [Rule("mlp", "zoo", rules[0][2])])  # not a patch: a glob may well match no unit
    return model


def _fuses(custom_linear: Any, rules: list[tuple[str, str, Only]]) -> bool:
    """Whether ``custom_linear`` makes units of the Linears that it chose: with zoo's layer, and not of a head."""
    kinds = {kind: layer for kind, layer, _ in rules}
    return custom_linear is not False and custom_linear != "head" and kinds["linear"] == "zoo" and "mlp" not in kinds


def _rules(custom_linear: Any, layers: Any) -> list[tuple[str, str, Only]]:
    """What to swap, as (kind, layer, only)."""
    chosen = {} if layers is None else layers
    if not isinstance(chosen, Mapping) or not all(isinstance(text, str) for pair in chosen.items() for text in pair):
        raise ValueError(f"layers={layers!r}: expected the name of a layer by kind, such as {{'linear': 'zoo'}}")
    only: Only = None
    if custom_linear == "head" or (callable(custom_linear) and not isinstance(custom_linear, type)):
        only = custom_linear
    elif isinstance(custom_linear, (list, tuple)) and custom_linear and all(isinstance(g, str) for g in custom_linear):
        only = tuple(custom_linear)
    elif not isinstance(custom_linear, bool):
        remedy = f"; a single glob goes into a list: [{custom_linear!r}]" if isinstance(custom_linear, str) else ""
        raise ValueError(
            f"custom_linear={custom_linear!r}: expected False, True, 'head', a list of globs over module names, or a "
            f"predicate (name, module) -> bool{remedy}"
        )
    wanted = dict(chosen) if custom_linear is False else {"linear": "zoo", **chosen}
    if wanted:
        from zoo.layers import get_layer

        for kind, layer in wanted.items():
            get_layer(kind, layer)  # a wrong name is refused before anything is built
    return [(kind, layer, only if kind in ("linear", "mlp") else None) for kind, layer in wanted.items()]


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={device!r}: expected a device, such as 'cpu', 'cuda:0' or 'meta' ({error})"
        ) from error
