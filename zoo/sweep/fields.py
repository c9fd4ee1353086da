"""Figures of a model by its name: how many Linears, how much of its arithmetic is theirs, how much can be swapped.

They were measured by a sweep and lie in ``results.jsonl``, a line a model; what is not there is computed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zoo.naming import natural_key
from zoo.sweep.rows import SweepRow, Task

__all__ = ["RESULTS", "ModelFields", "computed", "fields_of", "save_fields", "stored"]

RESULTS = Path(__file__).with_name("results.jsonl")


@dataclass(frozen=True)
class ModelFields:
    """A model as built with its default options. FLOPs are of one image's forward; None is what is not known."""

    name: str
    reference: str | None
    """The source library's model that the same weights fit."""
    input: tuple[int, ...] | None
    """Shape of one input: channels, height, width; or features."""
    parameters: int | None
    linears: int | None
    swapped: int | None
    """Of the Linears, those that ``custom_linear=True`` swaps."""
    flops: int | None
    linear_flops: int | None
    """Of those, the Linears' and the in-projections of MultiheadAttention."""
    custom_flops: int | None
    """Of those, what runs through the custom layer."""
    measured: str
    """With which versions."""
    why: str = ""
    """The reason why something is not known."""

    @property
    def linear_share(self) -> float | None:
        """Of the model's FLOPs, those of Linears, 0 to 1."""
        return self.linear_flops / self.flops if self.flops and self.linear_flops is not None else None

    @property
    def swappable(self) -> float | None:
        """Of the model's FLOPs, those that run through the custom layer, 0 to 1."""
        return self.custom_flops / self.flops if self.flops and self.custom_flops is not None else None

    @classmethod
    def of(cls, row: SweepRow) -> ModelFields:
        """The fields of what a sweep found."""
        return cls(
            name=row.name,
            reference=row.reference,
            input=row.input,
            parameters=row.parameters,
            linears=row.linears,
            swapped=row.swapped,
            flops=row.flops,
            linear_flops=row.linear_flops,
            custom_flops=row.custom_flops,
            measured=", ".join(f"{key} {value}" for key, value in row.versions.items()),
            why=str(row) if row.failure else row.untested.get("run", ""),
        )


def fields_of(name: str) -> ModelFields:
    """The stored figures of a model, or else computed ones. ValueError for an unknown name."""
    return stored().get(name) or computed(name)


def computed(name: str) -> ModelFields:
    """The figures of a model, computed on the meta device, in seconds. ValueError for an unknown name."""
    from zoo.registry import resolve
    from zoo.sweep.examining import examine

    resolve(name)
    return ModelFields.of(examine(Task(name, on="meta")))


def stored() -> dict[str, ModelFields]:
    """All figures that lie in the package, by name."""
    return _read(RESULTS)


@functools.lru_cache(maxsize=2)
def _read(path: Path) -> dict[str, ModelFields]:
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        data = json.loads(line)
        size = None if data["input"] is None else tuple(data["input"])
        found[data["name"]] = ModelFields(**{**data, "input": size})
    return found


def save_fields(rows: Iterable[SweepRow]) -> Path:
    """Put the figures of these models into the package's file; those of others stay. Returns the file.

    Left out are models that failed, and those looked at in a smaller size than their own.
    """
    fields = dict(stored())
    for row in rows:
        if row.ok and not row.asked.get("small"):
            fields[row.name] = ModelFields.of(row)
    lines = [json.dumps(_compact(fields[name]), separators=(",", ":")) for name in sorted(fields, key=natural_key)]
    beside = RESULTS.with_name(f".{RESULTS.name}.part")
    beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(beside, RESULTS)
    _read.cache_clear()
    return RESULTS


def _compact(fields: ModelFields) -> dict[str, object]:
    data = dataclasses.asdict(fields)
    return data if fields.why else {key: value for key, value in data.items() if key != "why"}
