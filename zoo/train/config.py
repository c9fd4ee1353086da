"""What a training run is made of: one frozen record, written as TOML beside its results and read from there."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.naming import unknown_name
from zoo.tensor_files import PathLike, replacing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "AUTOCAST",
    "FREE",
    "ON_CORRUPT",
    "SCHEDULES",
    "STRATEGIES",
    "TrainConfig",
    "differences",
    "read_config",
    "write_config",
]

SCHEDULES = ("cosine", "tanh", "step", "poly", "none")
"""timm's schedules that need nothing but the number of the step."""
AUTOCAST = ("none", "bf16", "fp16")
ON_CORRUPT = ("error", "replace")
STRATEGIES = ("ddp", "fsdp", "tp")
FREE = ("device", "workers", "checkpoint_every", "keep_last", "log_every", "tensorboard", "strategy")
"""What may be another one when a run is resumed: nothing that it computes depends on it, but for rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. ValueError, naming the field, for a value that cannot be meant."""

    model: str
    """A name of zoo.list_models()."""
    data: str
    """``digits``, ``fashion_mnist``, ``mnist``, ``cifar10`` or ``cifar100`` (``fashion_mnist:DIR`` says where it lies),
    or a folder of images."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the model; ``num_classes`` is the data's unless it is here."""
    weights: str | None = None
    """What to start from: a name or a file, as zoo.create takes it."""
    reset_head: bool = False
    custom_linear: bool = False
    """Whether zoo's layers are in the place of torch's Linears."""
    size: int | None = None
    """Side of the images; by default what the model takes."""
    epochs: int = 10
    batch_size: int = 128
    """Images of a forward pass, of all ranks together."""
    accumulate: int = 1
    """Forward and backward passes of an optimizer step."""
    optimizer: str = "adamw"
    """One of timm.optim.list_optimizers()."""
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    schedule: str = "cosine"
    """Of the learning rate, by optimizer steps: one of SCHEDULES."""
    warmup_epochs: int = 0
    min_lr: float = 0.0
    decay_epochs: int = 90
    """Of the schedule ``step``: epochs between two decays."""
    decay_rate: float = 0.1
    """Of the schedules ``step`` (a factor) and ``poly`` (the power)."""
    clip_grad: float | None = None
    """Largest norm of all gradients together."""
    label_smoothing: float = 0.0
    mixup: float = 0.0
    """Alpha of timm's Mixup; 0 is none."""
    cutmix: float = 0.0
    ema: float | None = None
    """Decay, a step, of the averaged weights; None is no average."""
    autocast: str = "none"
    """One of AUTOCAST; fp16 scales the loss."""
    channels_last: bool = False
    compile: bool = False
    """Whether torch.compile compiles the model."""
    grad_checkpointing: bool = False
    """Whether the model keeps fewer activations and computes them again in the backward pass; timm's models can."""
    strategy: str = "ddp"
    """How the ranks that torchrun starts share the work: one of STRATEGIES. Without torchrun it says nothing."""
    sync_bn: bool = False
    """Batch norms over the images of all ranks, on GPUs. Without, each rank normalizes its own part of a batch."""
    device: str = "auto"
    workers: int = 0
    """Processes that read images; the order and the augmentation of images do not depend on it."""
    seed: int = 0
    on_corrupt: str = "error"
    """A training image that cannot be read: an error, or replaced by the next one of the data set and logged."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; one is written at the end of every epoch in any case."""
    keep_last: int = 2
    """Checkpoints that are kept."""
    log_every: int = 50
    """Steps of a line in the log; the first 20 steps have a line each."""
    tensorboard: bool = False
    """Whether the losses and accuracies are written for TensorBoard, too."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_type(field.name, str(field.type))
        for name in ("epochs", "batch_size", "accumulate", "keep_last", "log_every", "decay_epochs"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("checkpoint_every", "size"):
            self._check(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1, or none")
        for name in ("weight_decay", "momentum", "min_lr", "mixup", "cutmix", "workers", "warmup_epochs", "seed"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        self._check("lr", self.lr > 0, "more than 0")
        self._check("clip_grad", self.clip_grad is None or self.clip_grad > 0, "more than 0, or none")
        self._check("label_smoothing", 0 <= self.label_smoothing < 1, "0 or more and under 1")
        self._check("ema", self.ema is None or 0 < self.ema < 1, "between 0 and 1, or none")
        self._check("warmup_epochs", self.warmup_epochs < self.epochs, f"fewer than the {self.epochs} epochs")
        if self.warmup_epochs and self.schedule == "none":
            raise ValueError("warmup_epochs: the schedule 'none' has no warm-up; choose another schedule")
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ValueError(f"batch_size: got {self.batch_size}, expected an even number, since mixup mixes pairs")
        known_names = {"schedule": SCHEDULES, "autocast": AUTOCAST, "on_corrupt": ON_CORRUPT, "strategy": STRATEGIES}
        for name, known in known_names.items():
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

    def _check_type(self, name: str, wanted: str) -> None:
        value = getattr(self, name)
        kind, _, optional = wanted.partition(" | ")
        if value is None and optional:
            return
        expected = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}.get(kind, (Mapping,))
        fits = isinstance(value, expected) and (kind == "bool" or not isinstance(value, bool))
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name}: got {value!r}, expected {wanted}")
        if kind == "float":
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are one setting
        elif kind not in ("str", "int", "bool"):
            object.__setattr__(self, name, dict(value))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; what is None is left out, as TOML has no word for it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}


def differences(got: TrainConfig, saved: TrainConfig) -> list[str]:
    """The fields, other than FREE, in which a run that is to go on differs from what it began with: a line each."""
    names = [field.name for field in dataclasses.fields(got) if field.name not in FREE]
    pairs = [(name, getattr(got, name), getattr(saved, name)) for name in names]
    return [f"{name}: got {one!r}, the run has {other!r}" for name, one, other in pairs if one != other]


def read_config(path: PathLike) -> dict[str, Any]:
    """The fields that a TOML file sets. ValueError, naming it, for a file that is none or a field that is none."""
    try:
        fields = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file; expected a TOML file of a training run") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from error
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in fields:
        if name not in known:
            raise unknown_name(f"field of {path}", name, known)
    return fields


def write_config(config: TrainConfig, path: PathLike) -> None:
    """Write a run as TOML, in one step. OSError, naming the file, where it cannot be written."""
    fields = config.to_dict()
    options = fields.pop("options")
    lines = [f"{name} = {_toml(value, name)}" for name, value in fields.items()]
    if options:
        lines += ["", "[options]", *(f"{_key(name)} = {_toml(value, name)}" for name, value in options.items())]
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _toml(value: Any, name: str) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item, name) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_toml(item, name)}' for key, item in value.items())}}}"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ValueError(f"{name}: {value!r} cannot be written as TOML; expected text, numbers, lists or tables of them")
