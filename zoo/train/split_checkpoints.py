"""Checkpoints that several ranks write together, by torch.distributed.checkpoint, and any number of ranks reads.

``step-00000120/`` holds the tensors in torch's files, each rank's part in one, and ``rest.pt`` what is no tensor. The
folder gets its name when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_together
from torch.distributed.checkpoint.state_dict_saver import save as save_together

from zoo.train import checkpoints
from zoo.train.ranks import Ranks

__all__ = ["RunTensors", "read", "save"]

_REST = "rest.pt"


class RunTensors:
    """The tensors of a run by name, however its model is spread: of the models and of their optimizer."""

    def __init__(self, models: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.models, self.optimizer = models, optimizer

    def taken(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, each rank's part of them, and the optimizer's settings."""
        tensors = {
            f"{name}.{key}": value
            for name, model in self.models.items()
            for key, value in get_model_state_dict(model).items()
        }
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        settings: dict[str, Any] = {}
        for key, value in get_optimizer_state_dict(self.models["model"], self.optimizer, options=options).items():
            (tensors if isinstance(value, Tensor) else settings)[f"optimizer.{key}"] = value
        return tensors, settings  # type: ignore[return-value]

    def put(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Set what :meth:`taken` gave."""
        for name, model in self.models.items():
            set_model_state_dict(model, _under(f"{name}.", tensors))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        whole = {**_under("optimizer.", tensors), **_under("optimizer.", settings)}
        set_optimizer_state_dict(self.models["model"], self.optimizer, whole, options=options)

    def put_whole(self, state: Mapping[str, Any], names: list[str]) -> None:
        """Set what one process saved, whole tensors: of each model by its name, and of the optimizer, whose
        parameters have these names in their order."""
        for name, model in self.models.items():
            set_model_state_dict(model, state[name], options=StateDictOptions(full_state_dict=True))
        saved, here = state["optimizer"], {id(p): name for name, p in self.models["model"].named_parameters()}
        settings = {names[index]: group for group in saved["param_groups"] for index in group["params"]}
        groups = [[here[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        named: Any = {
            "state": {names[index]: value for index, value in saved["state"].items()},
            # in the groups that there are here: they may be more, see strategies.split_groups
            "param_groups": [{**settings[group[0]], "params": group} for group in groups],
        }
        options = StateDictOptions(full_state_dict=True, strict=False)  # some optimizers keep no state
        set_optimizer_state_dict(self.models["model"], self.optimizer, named, options=options)


def _under(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def save(
    folder: Path, step: int, tensors: dict[str, Tensor], rest: Mapping[str, Any], ranks: Ranks, *, keep: int
) -> Path:
    """Write a checkpoint, all ranks together; it appears in one step. Then remove all but the newest ``keep``.

    OSError, on every rank, naming the folder, where a rank failed: the former checkpoints are then all there.
    """
    path = folder / f"step-{step:08d}"
    unfinished = folder / ranks.lead(lambda: f".{secrets.token_hex(8)}.tmp")
    try:
        save_together(tensors, checkpoint_id=unfinished, no_dist=not ranks.several)
    except CheckpointException as error:  # raised on every rank
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items())
        ranks.lead(lambda: checkpoints.remove_unfinished(folder))
        raise OSError(f"{path}: not saved, the former checkpoints are as they were: {reasons}") from None

    def finish() -> None:
        with (unfinished / _REST).open("wb") as file:
            torch.save({"format": checkpoints.FORMAT, "step": step, **rest}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        if path.exists():  # a damaged one of this step, which the run went on without
            path.rename(folder / f".{secrets.token_hex(8)}.tmp")
        unfinished.rename(path)
        _sync(folder)
        checkpoints.remove_unfinished(folder)
        checkpoints.prune(folder, path, keep=keep)

    ranks.lead(finish)
    return path


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path, tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Any]:
    """Read a folder's tensors into those of this rank, in place, and return the rest. All ranks must ask.

    ValueError, on every rank, where one cannot read it.
    """
    rest: dict[str, Any] = checkpoints.read(path / _REST)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # of one process, which is meant
            load_together(tensors, storage_reader=_Reader(path), no_dist=not ranks.several)
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise ValueError(f"rank {rank}: {type(reason).__name__}: {reason}") from None
    return rest


class _Reader(FileSystemReader):
    """torch's, whose table of contents is a pickle: here of torch's own classes for such tables alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            table = _Tables(file).load()
        if not isinstance(table, Metadata):
            raise pickle.UnpicklingError(f"got {type(table).__name__} for a table of contents")
        table.storage_meta = table.storage_meta or StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class _Tables(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()) and not (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            raise pickle.UnpicklingError(f"the table of contents holds {module}.{name}, which has no place there")
        return super().find_class(module, name)


_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    ),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),
}
