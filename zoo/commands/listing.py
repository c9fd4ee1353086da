"""``zoo list``: the names of models, or of layers."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from zoo.report import Report

__all__ = ["LayerList", "ModelList", "list_layers", "list_models"]


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
class LayerList(Report):
    """Names of layers by their kind."""

    layers: dict[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        return True

    def __str__(self) -> str:
        return "\n".join(f"{kind} {name}" for kind, names in self.layers.items() for name in names)


def list_models(pattern: str, *, source: str | None) -> ModelList:
    """The models that match. ValueError where none does."""
    from zoo import registry

    names = registry.list_models(pattern, source=source)
    if not names:
        raise ValueError(f"no model{f' of {source}' if source else ''} matches {pattern!r}; `zoo list` shows them all")
    return ModelList(tuple(names))


def list_layers(pattern: str) -> LayerList:
    """The layers that match, by kind. ValueError where none does."""
    from zoo import layers
    from zoo.layers.registry import KINDS

    found = {kind: tuple(fnmatch.filter(layers.list_layers(kind), pattern)) for kind in KINDS}
    if not any(found.values()):
        raise ValueError(f"no layer matches {pattern!r}; `zoo list --layers` shows them all")
    return LayerList(found)
