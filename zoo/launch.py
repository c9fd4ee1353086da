"""What torchrun, or a launcher like it, says to the processes that it starts. Needs no torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["launched", "rank", "run_and_leave"]

_SAID = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def launched() -> bool:
    """Whether this process is one of several that shall join."""
    return all(name in os.environ for name in _SAID)


def rank() -> int:
    """Its number among them; 0 is the one that writes and prints what is written and printed once."""
    return int(os.environ["RANK"]) if launched() else 0


def run_and_leave(work: Callable[[], object]) -> NoReturn:
    """Run ``work``, then end the process with the exit code that Python would give it, and without its shutdown.

    After a run that is split by DTensor, torch's caches of layouts, one a thread, hold the process group that has been
    destroyed: gloo's threads outlive it, and are taken down with Python in no order, which at times aborts a process
    whose work is done and fails the whole launch.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by whoever read it
            stream.flush()
    os._exit(code)
