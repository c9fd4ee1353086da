"""Losses and accuracies for TensorBoard, which is no dependency of zoo's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Board"]


class Board:
    """Writes the numbers of a run's log as curves. ``begin``: what lies behind this step is written again."""

    def __init__(self, folder: Path, *, begin: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=begin + 1)

    @staticmethod
    def check() -> None:
        """ValueError where the package is missing."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"tensorboard: the package is not here ({error}); pip install tensorboard, or leave the option out"
            ) from error

    def write(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        """The numbers among the fields, as ``step/loss`` or ``epoch/accuracy``."""
        for name, value in fields.items():
            if isinstance(value, (int, float)) and name != "epoch":
                self.writer.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        """Write what is still in memory."""
        self.writer.close()
