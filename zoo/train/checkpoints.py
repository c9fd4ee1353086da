"""The checkpoints of a run: everything that it needs to go on, there whole or not at all.

One process writes a file, ``step-00000120.pt``; several write a folder of that name together, without suffix
(:mod:`zoo.train.split_checkpoints`). Either is read by any number of processes. What is in them is read with
``weights_only``: no code comes with it.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from zoo.tensor_files import on_host, replacing

__all__ = ["FORMAT", "latest", "listed", "newest", "prune", "read", "remove_unfinished", "save"]

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(\.pt)?")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.tmp")

_T = TypeVar("_T")


class OtherFormat(ValueError):
    """A checkpoint that another zoo wrote."""


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (int(path.stem[5:]), path.name), reverse=True)


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint in one step, then remove all but the newest ``keep``.

    OSError, naming the file, where the writing failed: the former checkpoints are then all there.
    """
    path = folder / f"step-{step:08d}.pt"
    tensors: list[Tensor] = []
    _changed(state, tensors.append)
    fetched = iter(on_host(tensors))
    here = _changed(state, lambda tensor: next(fetched))
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save({"format": FORMAT, "step": step, **here}, file)
    prune(folder, path, keep=keep)
    return path


def _changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same dicts, lists and tuples, with what ``change`` makes of each tensor in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        whole = copy.copy(value)  # with what a state dict has beside its keys
        whole.update((name, _changed(entry, change)) for name, entry in value.items())
        return whole
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(entry, change) for entry in value)
    return value


def prune(folder: Path, new: Path, *, keep: int) -> None:
    """Remove all but the newest ``keep``, and one of the other kind with the step of ``new``."""
    for index, path in enumerate(path for path in listed(folder) if path == new or path.stem != new.stem):
        if index >= keep:
            _remove(path)
    for path in listed(folder):
        if path.stem == new.stem and path != new:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        # by another name first: a folder is not gone in one step, and half of one is no checkpoint
        unfinished = path.with_name(f".{os.urandom(8).hex()}.tmp")
        path.rename(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run left half written in a folder that is its own."""
    for entry in folder.iterdir():
        if _UNFINISHED.fullmatch(entry.name):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """What :func:`save` wrote, on the CPU."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if state.get("format") != FORMAT:
        raise OtherFormat(f"{path}: got a checkpoint of format {state.get('format')}, this zoo reads {FORMAT}")
    return state


def newest(folder: Path, load: Callable[[Path], _T]) -> tuple[_T | None, list[str]]:
    """What ``load`` makes of the newest checkpoint that it does not fail on, or None where there is none; and what is
    wrong with others.

    ValueError where there are checkpoints and none can be read.
    """
    damaged: list[str] = []
    for path in listed(folder):
        try:
            return load(path), damaged
        except OtherFormat:
            raise
        except Exception as error:  # what a damaged file raises changes between releases of torch
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            size = f" ({os.path.getsize(path)} bytes)" if path.is_file() else ""
            damaged.append(f"{path}: damaged{size}: {reason}")
    if damaged:
        raise ValueError("no checkpoint can be read; remove them to begin anew\n" + "\n".join(damaged))
    return None, []


def latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest file of one process that can be read, as :func:`newest`."""
    return newest(folder, read)
