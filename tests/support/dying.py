"""A training run in a process of its own that dies by SIGKILL at a chosen point."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from zoo.train import TrainConfig, train

SERVER = multiprocessing.get_context("forkserver")
"""Its children are copies of a process that has imported all this, so that each begins in milliseconds."""
SERVER.set_forkserver_preload(["zoo.train", "pytest", "sklearn.datasets", "sklearn.model_selection", "torch._dynamo"])


def process(config: TrainConfig, folder: Path, at: str = "end", count: int = 0) -> Any:
    """The process, not yet started. It dies at the ``count``-th of what ``at`` names: see :func:`work`."""
    return SERVER.Process(target=work, args=(config.to_dict(), str(folder), at, count))


def work(fields: dict[str, Any], folder: str, at: str, count: int) -> None:
    """Train, and die after a ``step``, in the middle of a ``write`` of a checkpoint, or ``before`` or ``after`` a file
    takes its place; at the ``end``: not at all."""
    torch.set_num_threads(1)
    seen = dict.fromkeys(("step", "write", "before", "after"), 0)
    replace, save = os.replace, torch.save

    def passed(point: str) -> bool:
        seen[point] += 1
        return point == at and seen[point] == count

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def replacing(source: Any, target: Any) -> None:
        if passed("before"):
            die()
        replace(source, target)
        if passed("after"):
            die()

    def saving(content: Any, file: Any) -> None:
        if passed("write"):
            file.write(b"PK\x03\x04 half of it")
            file.flush()
            die()
        save(content, file)

    def watch(step: int, steps: int, text: str) -> None:
        if passed("step"):
            die()

    with patch("os.replace", replacing), patch("torch.save", saving):
        train(TrainConfig(**fields), folder, resume=True, watch=watch)
