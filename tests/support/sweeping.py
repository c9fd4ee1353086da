"""What the worker of a sweep is given to do in tests; here, as its process must be able to import it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zoo.sweep.rows import SweepRow, Task, failed


def behave(task: Task, *, note: Callable[[str], None]) -> SweepRow:
    """Does what the task is called."""
    note("run")
    if task.name == "hangs":
        time.sleep(60)
    if task.name == "crashes":
        print("something went wrong", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if task.name == "is interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    if task.name == "dies once" and _first_time(task):
        os.kill(os.getpid(), signal.SIGKILL)
    print("chatter")
    return failed(task, None, {"process": os.getpid()})


def _first_time(task: Task) -> bool:
    marker = Path(task.options["folder"], task.name)
    known = marker.exists()
    marker.touch()
    return not known
