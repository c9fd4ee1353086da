"""One process at a time trains into a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked"]

_held: set[int] = set()


def _let_go() -> None:
    # Else a worker that outlives its run, killed, would hold the lock in its place.
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, which exists. The system lets go of it when this process ends, however it ends.

    ValueError where another process holds it. A file system that knows no locks is no reason to fail.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: another process is training into this folder; wait for its end, or name another folder"
            ) from None
        except OSError:
            pass
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)
