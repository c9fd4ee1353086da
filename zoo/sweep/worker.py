"""The process that looks at the models: one that fails, hangs or takes all memory takes only this process with it."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zoo.sweep.rows import Failure, SweepRow, Task, failed

__all__ = ["Ended", "Worker"]

Look = Callable[..., Any]
"""``look(task, note=...)``, where ``note`` is to be told each step; its answer has the property ``ok``."""

START_LIMIT = 300.0
"""Seconds that a process may take to import everything."""

LEAVE_LIMIT = 5.0
"""Seconds that an idle process may take to end by itself."""


class Ended(Exception):
    """The process gave no answer; the text says how it ended, ``step`` where it was."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


class Worker:
    """Looks at one model after the other in a process of its own; a new one after each failure.

    ``look`` is what it does there, a function that can be pickled; :func:`zoo.sweep.examining.examine` unless told.
    ``share`` is how many such processes there are, which share the cores.
    """

    def __init__(self, look: Look | None = None, *, share: int = 1) -> None:
        self._look, self._share = look, share
        # spawned: a copy of this process would share its CUDA context and its threads' locks
        self._context = multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._idle = False
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-sweep-")
        self._said = Path(self._folder.name, "output.txt")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def examine(self, task: Task, *, time_limit: float) -> SweepRow:
        """The row of a model. One that outlasts ``time_limit``, in seconds, or ends the process, has failed."""
        begun = time.monotonic()
        try:
            return self.ask(task, time_limit=time_limit)
        except Ended as end:
            return failed(task, Failure(end.step, str(end), starved=True), {"in all": time.monotonic() - begun})

    def kill(self) -> None:
        """End the process at once; whoever waits for its answer, in another thread, is told that it ended."""
        process = self._process
        if process is not None and process.pid is not None:
            process.kill()

    def ask(self, task: Any, *, time_limit: float, heard: Callable[[str], object] = lambda step: None) -> Any:
        """What ``look`` makes of a task; it has the property ``ok``. ``heard`` is told each step as it comes.

        Raises:
            Ended: nothing came within ``time_limit``, in seconds, or the process ended.
        """
        step = "start"
        try:
            connection = self._started()
            self._idle = False
            connection.send(task)
            step, begun = "build", time.monotonic()
            while connection.poll(max(0.0, begun + time_limit - time.monotonic())):
                what, value = connection.recv()
                if what == "row":
                    self._idle = True
                    if not value.ok:
                        self._stop()
                    return value
                step = value
                heard(step)
            message = f"not done after {time_limit:g} s"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            message = self._how_it_ended()
        self._stop()
        raise Ended(step, message)

    def _started(self) -> Connection:
        if self._process is not None and not self._process.is_alive():  # it died idle: not this model's fault
            self._stop()
        if self._connection is not None:
            return self._connection
        self._connection, other = self._context.Pipe()
        self._process = self._context.Process(
            target=_serve, args=(other, str(self._said), self._look, self._share), daemon=True
        )
        with _deaf_to_interrupts():
            self._process.start()
        other.close()  # so that the end of the process is the end of the pipe
        if not self._connection.poll(START_LIMIT):
            raise EOFError
        self._connection.recv()
        return self._connection

    def _how_it_ended(self) -> str:
        assert self._process is not None
        self._process.join(5.0)
        code = self._process.exitcode
        if code is None:
            return f"its process was not ready after {START_LIMIT:g} s"
        lines = self._said.read_text(encoding="utf-8", errors="replace").split("\n") if self._said.exists() else []
        last = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = " (the system was out of memory, most likely)" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{memory}{last}"
        return f"its process ended with exit code {code}{last}"

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            if self._idle:  # it ends by itself, and leaves no semaphore behind
                self._process.join(LEAVE_LIMIT)
            self._process.kill()
            self._process.join()
        self._process = self._connection = None
        self._idle = False


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process that begins inside does not hear Ctrl-C, from its start: that is the parent's, who ends it."""
    resource_tracker.ensure_running()  # which would open the ears again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, said: str, look: Look | None, share: int) -> None:
    """The process: a task in; the steps, then the row out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where memory runs out, this is what has to go
    os.environ["ZOO_WORKER_FOLDER"] = str(Path(said).parent)  # for files that go where this process is killed
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    if share > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // share))
    if look is None:
        from zoo.sweep.examining import examine

        look = examine
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send(("ready", ""))
        while True:
            row = look(connection.recv(), note=lambda step: connection.send(("step", step)))
            connection.send(("row", row))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
