"""What ranks train together, to its end or to a death on the way. Run by support.ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from zoo.train import TrainConfig, TrainReport, train


class Stopped(Exception):
    """A run that was to end there."""


def go(fields: dict[str, Any], folder: str, resume: bool = False, stop: int | None = None) -> TrainReport | None:
    """Train; or leave after the step ``stop``, as Ctrl-C would, and return None."""

    def watch(step: int, steps: int, text: str) -> None:
        if step == stop:
            raise Stopped

    try:
        return train(TrainConfig(**fields), folder, resume=resume, watch=watch)
    except Stopped:
        return None


def die(fields: dict[str, Any], folder: str, rank: int, at: str) -> None:
    """Train until a rank kills itself: after step 12, or at the second checkpoint while its part is on the way
    (``write``) or, rank 0, before the folder gets its name (``rename``)."""
    write, rename, seen = FileSystemWriter.write_data, Path.rename, {"write": 0, "rename": 0}

    def passed(point: str) -> None:
        seen[point] += 1
        if point == at and seen[point] == 2 and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def writing(self: Any, *args: Any) -> Any:
        passed("write")
        return write(self, *args)

    def renaming(self: Path, target: Any) -> Any:
        if Path(target).name.startswith("step-"):
            passed("rename")
        return rename(self, target)

    def watch(step: int, steps: int, text: str) -> None:
        if at == "step" and step == 12 and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(FileSystemWriter, "write_data", writing), patch.object(Path, "rename", renaming):
        train(TrainConfig(**fields), folder, watch=watch)
