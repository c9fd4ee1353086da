"""``zoo info``: what a model is, what of it can be swapped, and what it takes."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from torch import nn

from zoo import weights_index
from zoo.models import pretrained
from zoo.models import torchvision as torchvision_door
from zoo.models.head import head_names
from zoo.models.resnet import ResNet
from zoo.preparing import make
from zoo.registry import options_of, resolve
from zoo.swap import patch
from zoo.sweep.fields import ModelFields, fields_of
from zoo.tables import TableReport, rows

__all__ = ["ModelInfo", "describe"]

_SHOWN = 4


@dataclass(frozen=True)
class ModelInfo(TableReport):
    """A model, as built with its default options."""

    name: str
    model_class: str
    parameters: int
    linear_parameters: int
    """Of those, the ones that Linears hold."""
    head: tuple[str, ...]
    """The modules that make the logits."""
    swapped: tuple[str, ...]
    """The Linears that ``custom_linear=True`` swaps."""
    skipped: dict[str, str]
    """Every other Linear -> why it is left alone."""
    options: tuple[str, ...]
    """What it takes, as "key=default"; none are known where timm's own function decides."""
    weights: dict[str, tuple[str, ...]]
    """Whose -> names of weights."""
    fields: ModelFields | None
    """Its FLOPs, input and reference; None where options were given, as the figures are of a model without any."""

    @property
    def ok(self) -> bool:
        return True

    def __rich__(self) -> RenderableType:
        table = rows()
        table.add_row("model", f"{self.name} ({self.model_class})")
        share = self.linear_parameters / self.parameters if self.parameters else 0.0
        table.add_row("parameters", f"{self.parameters:,}, {share:.1%} of them in Linears")
        table.add_row("head", ", ".join(self.head) or "none")
        total = len(self.swapped) + len(self.skipped)
        table.add_row("Linears", f"{total}, {len(self.swapped)} swapped by custom_linear=True{_examples(self.swapped)}")
        for reason, count in Counter(self.skipped.values()).most_common():
            alone = [name for name, why in self.skipped.items() if why == reason]
            table.add_row("", f"{count} left alone{_examples(alone)}: {reason}")
        if self.fields is not None:
            for label, text in _figures(self.fields):
                table.add_row(label, text)
        table.add_row("options", ", ".join(self.options) or "what timm.create_model takes for it")
        for whose, names in self.weights.items():
            table.add_row("weights", f"{whose}: {', '.join(names)}")
        if not self.weights:
            table.add_row("weights", "no names; a path")
        return Group(table)


def _examples(names: list[str] | tuple[str, ...]) -> str:
    if not names:
        return ""
    more = ", ..." if len(names) > _SHOWN else ""
    return f" ({', '.join(name or 'the model itself' for name in names[:_SHOWN])}{more})"


def _figures(fields: ModelFields) -> list[tuple[str, str]]:
    size = "not known" if fields.input is None else " x ".join(map(str, fields.input))
    if fields.flops is None or fields.linear_share is None or fields.swappable is None:
        flops = f"not known: {fields.why or 'it has none'}"
    else:
        shares = f"{fields.linear_share:.1%} of them in Linears, {fields.swappable:.1%} run through custom layers"
        flops = f"{fields.flops:,} a forward, {shares} ({fields.measured})"
    return [("input", size), ("FLOPs", flops), ("reference", fields.reference or "none")]


def describe(name: str, *, options: Mapping[str, Any]) -> ModelInfo:
    """Look at a model, built on the meta device. ValueError for an unknown name or option."""
    model = make(name, options, device="meta")
    cls, head = type(model), head_names(model)
    linear = {id(p): p.numel() for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    parameters = sum(p.numel() for p in model.parameters())
    swap = patch(model)
    return ModelInfo(
        name=name,
        model_class=f"{cls.__module__}.{cls.__qualname__}",
        parameters=parameters,
        linear_parameters=sum(linear.values()),
        head=head,
        swapped=swap.swapped,
        skipped=swap.skipped,
        options=_options(name),
        weights=_weights(name),
        fields=None if options else fields_of(name),
    )


def _options(name: str) -> tuple[str, ...]:
    library, _, twin = name.rpartition("/")
    if library == "torchvision":
        return tuple(sorted(torchvision_door.options(twin)))
    options = options_of(resolve(name)) or {}
    return tuple(
        key if default is inspect.Parameter.empty else f"{key}={default!r}" for key, default in options.items()
    )


def _weights(name: str) -> dict[str, tuple[str, ...]]:
    library, _, twin = name.rpartition("/")
    builder = resolve(name)
    shared = bool(library) or (isinstance(builder, functools.partial) and builder.func is ResNet)
    torchvisions = pretrained.torchvision_members(twin) if shared and library != "timm" else {}
    timms = pretrained.timm_configs(twin) if shared and library != "torchvision" else {}
    known = {"torchvision": tuple(torchvisions), "timm": tuple(timms), "zoo": tuple(weights_index.names(name))}
    return {whose: names for whose, names in known.items() if names}
