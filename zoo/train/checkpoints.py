"""The checkpoints of a run: everything that it needs to go on, in one file that is there whole or not at all.

They lie in a folder as ``step-00000120.pt``. What is in them is read with ``weights_only``: no code comes with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.tensor_files import replacing

__all__ = ["latest", "listed", "remove_unfinished", "save"]

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})\.pt")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.tmp")


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.stem[5:]), reverse=True)


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint in one step, then remove all but the newest ``keep``.

    OSError, naming the file, where the writing failed: the former checkpoints are then all there.
    """
    path = folder / f"step-{step:08d}.pt"
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save({"format": FORMAT, "step": step, **state}, file)
    for old in listed(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def remove_unfinished(folder: Path) -> None:
    """Remove the files that a killed run left half written in a folder that is its own."""
    for entry in folder.iterdir():
        if _UNFINISHED.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest checkpoint that can be read, on the CPU, or None where there is none; and what is wrong with others.

    ValueError where there are checkpoints and none can be read.
    """
    damaged: list[str] = []
    for path in listed(folder):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # what a damaged file raises changes between releases of torch
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            damaged.append(f"{path}: damaged ({os.path.getsize(path)} bytes): {reason}")
            continue
        if state.get("format") != FORMAT:
            raise ValueError(f"{path}: got a checkpoint of format {state.get('format')}, this zoo reads {FORMAT}")
        return state, damaged
    if damaged:
        raise ValueError("no checkpoint can be read; remove them to begin anew\n" + "\n".join(damaged))
    return None, []
