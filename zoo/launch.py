"""What torchrun, or a launcher like it, says to the processes that it starts. Needs no torch."""

from __future__ import annotations

import os

__all__ = ["launched", "rank"]

_SAID = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def launched() -> bool:
    """Whether this process is one of several that shall join."""
    return all(name in os.environ for name in _SAID)


def rank() -> int:
    """Its number among them; 0 is the one that writes and prints what is written and printed once."""
    return int(os.environ["RANK"]) if launched() else 0
