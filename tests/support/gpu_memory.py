"""Tests that need most of a GPU's memory take turns, where several processes run them."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def memory_in_turn() -> Iterator[None]:
    """One process of this machine at a time; nothing that this one has cached is held before and after."""
    with Path(tempfile.gettempdir(), "zoo-tests-gpu-memory.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            torch.cuda.empty_cache()
