"""``zoo list``: the names of models, with figures if asked for, of layers, or of zoo's own weights."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from zoo.report import Report
from zoo.tables import TableReport, columns

if TYPE_CHECKING:
    from zoo.sweep import ModelFields
    from zoo.weights_index import WeightEntry

__all__ = [
    "FieldsList",
    "LayerList",
    "ModelList",
    "WeightsList",
    "comparison",
    "list_fields",
    "list_layers",
    "list_models",
    "list_weights",
]

_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "=": operator.eq}


@dataclass(frozen=True)
class ModelList(Report):
    """Names of models, in natural order."""

    models: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return True

    def __str__(self) -> str:
        return "\n".join(self.models)


@dataclass(frozen=True)
class FieldsList(TableReport):
    """Models with their figures, in natural order."""

    models: tuple[ModelFields, ...]
    unknown: dict[str, str]
    """Models without figures -> why there are none."""

    @property
    def ok(self) -> bool:
        return True

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        shares = [{"linear_share": m.linear_share, "swappable": m.swappable} for m in self.models]
        data["models"] = [{**plain, **share} for plain, share in zip(data["models"], shares, strict=True)]
        return data

    def __rich__(self) -> RenderableType:
        right = ("parameters", "Linears", "FLOPs", "in Linears", "swappable")
        table = columns("model", *right, "input", right=right)
        for m in self.models:
            flops = "-" if m.flops is None else f"{m.flops:.3g}"
            size = "-" if m.input is None else "x".join(map(str, m.input))
            shares = [("-" if share is None else f"{share:.1%}") for share in (m.linear_share, m.swappable)]
            parameters = "-" if m.parameters is None else f"{m.parameters / 1e6:.2f} M"
            linears = "-" if m.linears is None else str(m.linears)
            table.add_row(m.name, parameters, linears, flops, *shares, size)
        return Group(table, *(f"{name}: not known: {why}" for name, why in self.unknown.items()))


@dataclass(frozen=True)
class LayerList(Report):
    """Names of layers by their kind."""

    layers: dict[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        return True

    def __str__(self) -> str:
        return "\n".join(f"{kind} {name}" for kind, names in self.layers.items() for name in names)


@dataclass(frozen=True)
class WeightsList(TableReport):
    """zoo's own checkpoints, in natural order."""

    weights: tuple[WeightEntry, ...]

    @property
    def ok(self) -> bool:
        return True

    def __rich__(self) -> RenderableType:
        table = columns("weights", "model", "accuracy", "size", "licence", "data", right=("accuracy", "size"))
        for entry in self.weights:
            size = f"{entry.path.stat().st_size / 1e6:.2f} MB" if entry.path.is_file() else "absent"
            accuracy = f"{entry.metrics['accuracy']:.2%}" if "accuracy" in entry.metrics else "-"
            table.add_row(entry.name, entry.model, accuracy, size, entry.license, entry.dataset)
        return table


def list_models(pattern: str, *, source: str | None) -> ModelList:
    """The models that match. ValueError where none does."""
    from zoo import registry

    names = registry.list_models(pattern, source=source)
    if not names:
        raise ValueError(f"no model{f' of {source}' if source else ''} matches {pattern!r}; `zoo list` shows them all")
    return ModelList(tuple(names))


def list_fields(pattern: str, *, source: str | None, swappable: str | None) -> FieldsList:
    """The models that match, with figures; those whose ``swappable`` share is as ``swappable`` says, if given.

    What is not stored is computed, with progress on stderr. ValueError where no model matches.
    """
    from zoo.commands.output import progress, tell
    from zoo.sweep.fields import computed, stored

    wanted = None if swappable is None else comparison(swappable)
    names = list_models(pattern, source=source).models
    known = dict(stored())
    if missing := [name for name in names if name not in known]:
        tell(f"{len(missing)} of {len(names)} models have no stored figures; zoo sweep --save-fields would store them")
        with progress() as bar:
            known |= {name: computed(name) for name in bar.track(missing, description="computing on the meta device")}
    found = [known[name] for name in names]
    unknown = {fields.name: fields.why or "it has no FLOPs" for fields in found if fields.swappable is None}
    if wanted is not None:
        found = [fields for fields in found if fields.swappable is not None and wanted(fields.swappable)]
    return FieldsList(tuple(found), unknown)


def comparison(text: str) -> Callable[[float], bool]:
    """The test that a text such as ">0.9" or "<=50%" stands for. ValueError for another form."""
    match = re.fullmatch(r"\s*(>=|<=|>|<|=)\s*(\d*\.?\d+)(%?)\s*", text)
    if not match:
        raise ValueError(f"swappable {text!r}: expected a comparison with a share, such as '>0.9' or '<=50%'")
    compare, limit = _COMPARISONS[match[1]], float(match[2]) / (100 if match[3] else 1)
    return lambda share: bool(compare(share, limit))


def list_layers(pattern: str) -> LayerList:
    """The layers that match, by kind. ValueError where none does."""
    from zoo import layers
    from zoo.layers.registry import KINDS

    found = {kind: tuple(fnmatch.filter(layers.list_layers(kind), pattern)) for kind in KINDS}
    if not any(found.values()):
        raise ValueError(f"no layer matches {pattern!r}; `zoo list --layers` shows them all")
    return LayerList(found)


def list_weights(pattern: str) -> WeightsList:
    """zoo's own checkpoints that match. ValueError where none does."""
    from zoo import weights_index

    found = [weights_index.find(name) for name in fnmatch.filter(weights_index.names(), pattern)]
    if not found:
        raise ValueError(f"no weights of zoo's match {pattern!r}; `zoo list --weights` shows them all")
    return WeightsList(tuple(found))
