"""What is asked of a model and what was found: one line of JSON a model."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.report import Report
from zoo.version import __version__

__all__ = [
    "SCHEMA",
    "Failure",
    "ParitySummary",
    "SweepRow",
    "Task",
    "failed",
    "reference_name",
    "source_of",
    "versions_of",
]

SCHEMA = 1


@dataclass(frozen=True)
class Task:
    """One model to be swept, and how."""

    name: str
    on: str = "data"
    """"data": with values, on ``device``. "meta": without any, so that nothing but shapes is computed."""
    device: str = "cpu"
    gradients: bool = True
    small: bool = False
    """Images of the smallest size that the model takes, instead of its own."""
    max_parameters: int | None = None
    """A larger model is built on the meta device."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the model, as zoo.create takes them."""
    lean: bool = False
    """Keep no activations for backward but compute them again there, where the model can (gradient checkpointing)."""

    def asked(self) -> dict[str, Any]:
        """What rows must share to stand in one file; on the meta device the rest has no meaning."""
        if self.on == "meta":
            return {"on": "meta"}
        return {
            "on": self.on,
            "device": torch.device(self.device).type,
            "gradients": self.gradients,
            "small": self.small,
            "max_parameters": self.max_parameters,
        }


@dataclass(frozen=True)
class Failure:
    """Where it ended."""

    step: str
    """Of build, stock, patch, run, backward, state_dict, parity, unpatch."""
    message: str
    starved: bool = False
    """Whether memory or time ran out, or the process died: with nothing beside it, it may do better."""


@dataclass(frozen=True)
class ParitySummary:
    """:class:`zoo.ParityReport` in short."""

    ok: bool
    outputs: int
    gradients: int
    blank: int
    """Tensors that are zero in the reference, and so show little."""
    worst: str
    """The tensor nearest to its limit, or furthest over it; ``error`` and ``limit`` are its relative errors."""
    error: float
    limit: float


@dataclass(frozen=True)
class SweepRow(Report):
    """What was found in one model. FLOPs are of one image's forward, 2 M N K a product; None was not measured.

    ``ok``: no step failed. What a step could not test is in ``untested``, and is no failure.
    """

    name: str
    source: str
    """"zoo", "torchvision" or "timm"."""
    reference: str | None
    """The source library's model that it was compared with; None where there is none."""
    asked: dict[str, Any]
    versions: dict[str, str]
    on: str
    """Where it was done: "meta", also for a model over ``max_parameters``, or "data"."""
    failure: Failure | None = None
    untested: dict[str, str] = field(default_factory=dict)
    """Step -> why it could not be done."""
    input: tuple[int, ...] | None = None
    """Shape of one input: channels, height, width; or features."""
    parameters: int | None = None
    linears: int | None = None
    swapped: int | None = None
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Reason -> the Linears that were left alone for it."""
    idle: tuple[str, ...] = ()
    """Swapped Linears that the forward, in eval mode, did not call, and whose weight it did not use."""
    flops: int | None = None
    reached_flops: int | None = None
    """Of those, what ran in the forward of an nn.Linear before the patch."""
    linear_flops: int | None = None
    """Products with weights of Linears, and in-projections of MultiheadAttention, whoever computes them."""
    custom_flops: int | None = None
    """What ran through custom layers after the patch."""
    parity: ParitySummary | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """By step."""
    lean: bool = False
    """Whether activations were computed again in backward, as they would not have fitted into memory."""
    batch_norms: int | None = None
    """How many gave values of about one for the inputs; None where they were as in a fresh model."""
    peak_bytes: int | None = None
    """Of the GPU's memory; None elsewhere."""
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        return self.failure is None

    def share(self, flops: int | None) -> float | None:
        """``flops`` of the model's, 0 to 1."""
        return None if flops is None or not self.flops else flops / self.flops

    def to_line(self) -> str:
        """One line of JSON, without its end."""
        shares = {
            "linear": self.share(self.linear_flops),
            "before": self.share(self.reached_flops),
            "after": self.share(self.custom_flops),
        }
        rounded = {key: None if value is None else round(value, 5) for key, value in shares.items()}
        seconds = {key: round(value, 3) for key, value in self.seconds.items()}
        return json.dumps({**self.to_dict(), "seconds": seconds, "shares": rounded}, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> SweepRow:
        """The row that :meth:`to_line` gave. ValueError for anything else."""
        data = json.loads(line)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"schema: got {got}, expected {SCHEMA}")
        fields = {f.name for f in dataclasses.fields(cls)}
        given = {key: value for key, value in data.items() if key in fields}
        try:
            for key, nested in (("failure", Failure), ("parity", ParitySummary)):
                if given.get(key) is not None:
                    given[key] = nested(**given[key])
            if given.get("input") is not None:
                given["input"] = tuple(given["input"])
            given["idle"] = tuple(given["idle"])
            given["skipped"] = {reason: tuple(names) for reason, names in given["skipped"].items()}
            return cls(**given)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a row of a sweep: {error}") from error

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.name}: FAILED in {self.failure.step}: {self.failure.message}"
        return f"{self.name}: ok, {self.swapped} of {self.linears} Linears"


def source_of(name: str) -> str:
    """Whose model it is."""
    library, slash, _ = name.partition("/")
    return library if slash else "zoo"


def reference_name(name: str) -> str | None:
    """The source library's model of that name; for zoo's own that is torchvision's, where it has one."""
    if source_of(name) != "zoo":
        return name
    from zoo.models import torchvision

    return f"torchvision/{name}" if name in torchvision.names() else None


def versions_of(name: str) -> dict[str, str]:
    """Of all that the findings depend on."""
    library = source_of(name) if source_of(name) != "zoo" else "torchvision"
    return {"zoo": __version__, "torch": torch.__version__, library: importlib.metadata.version(library)}


def failed(task: Task, failure: Failure | None, seconds: dict[str, float] | None = None) -> SweepRow:
    """A row without findings."""
    return SweepRow(
        name=task.name,
        source=source_of(task.name),
        reference=reference_name(task.name),
        asked=task.asked(),
        versions=versions_of(task.name),
        on=task.on,
        failure=failure,
        seconds=seconds or {},
    )
