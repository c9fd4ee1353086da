"""One process at a time writes into a folder or a file."""

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
def locked(path: Path, *, doing: str, remedy: str) -> Iterator[None]:
    """Hold a folder or file, which exists. The system lets go of it when this process ends, however it ends.

    ValueError where another process holds it, for ``doing`` the same. A file system that knows no locks is no reason to
    fail.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another process is {doing}; wait for its end, or {remedy}") from None
        except OSError:
            pass
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)
