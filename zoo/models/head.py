"""The head of a model: the modules that make the logits, by name, whatever library the model is from."""

from __future__ import annotations

from torch import nn

__all__ = ["head_names", "make_classifier"]

_ATTRIBUTES = ("fc", "classifier", "head", "heads")
"""Where torchvision's models, and most others, keep their classifier."""

_AUXILIARY = ("aux1.fc2", "aux2.fc2", "AuxLogits.fc")
"""The further classifiers by which GoogLeNet and Inception train."""


def head_names(model: nn.Module) -> tuple[str, ...]:
    """The dotted names of the modules that make the logits; ``""`` is the model itself, ``()`` that it has none.

    A model that declares its classifier, as timm's do, is taken at its word, and one that has ``get_classifier`` is
    asked. Of others it is the last Linear or convolution of ``fc``, ``classifier``, ``head`` or ``heads`` (the first
    of these that there is), and else the last Linear of all. Where a classifier was taken out, it is an Identity.
    """
    named = dict(model.named_modules())
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict):
        declared = config.get("classifier")
        names = (declared,) if isinstance(declared, str) else tuple(declared or ())
        return tuple(name for name in names if name in named) or _asked(model, named)
    if asked := _asked(model, named):
        return asked
    for attribute in _ATTRIBUTES:
        if attribute in named:
            return _last(attribute, named) + tuple(name for name in _AUXILIARY if name in named)
    return tuple(name for name, module in named.items() if isinstance(module, nn.Linear))[-1:]


def make_classifier(num_features: int, num_classes: int) -> nn.Module:
    """A Linear from features to logits, freshly initialised; an Identity where there are no classes."""
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
        raise ValueError(f"num_classes={num_classes!r}: expected an int, 0 for no classifier")
    return nn.Linear(num_features, num_classes) if num_classes else nn.Identity()


def _asked(model: nn.Module, named: dict[str, nn.Module]) -> tuple[str, ...]:
    get_classifier = getattr(model, "get_classifier", None)
    answer = get_classifier() if callable(get_classifier) else None
    modules = answer if isinstance(answer, (tuple, list, nn.ModuleList)) else (answer,)
    wanted = {id(module) for module in modules if isinstance(module, nn.Module)}
    found = [_last(name, named) for name, module in named.items() if id(module) in wanted]
    return tuple(name for names in found for name in names)


def _last(name: str, named: dict[str, nn.Module]) -> tuple[str, ...]:
    """The last Linear or convolution of the module ``name``; the module itself where it has none."""
    inside = [
        other
        for other, module in named.items()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and f"{other}.".startswith(f"{name}." if name else "")
    ]
    return tuple(inside[-1:]) or (name,)
