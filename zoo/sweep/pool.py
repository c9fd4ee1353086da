"""Several workers that take models from one queue, the largest first, as far as memory reaches."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from zoo.sweep.rows import SweepRow, Task
from zoo.sweep.worker import Worker

__all__ = ["examined"]


def examined(
    tasks: Iterable[Task],
    *,
    processes: int,
    time_limit: float,
    until: float | None = None,
    need: Callable[[Task], int],
    room: int,
    begun: Callable[[str], object] = lambda name: None,
) -> Generator[SweepRow]:
    """The rows of models, each as soon as it is known.

    With one process in the order given. With several the largest begin, and a model that ran out of memory or of time
    beside the others, or whose process died, is looked at again when all are done, with nothing beside it, and lean.

    Args:
        processes: how many workers.
        time_limit: seconds for one model.
        until: on the clock of ``time.monotonic``: no model begins later.
        need: what a model takes of ``room``. One that takes more than there is runs alone.
        begun: is told a model's name when a worker takes it.
    """
    given = list(tasks)
    if processes > 1:
        given.sort(key=need, reverse=True)
    starved: list[Task] = []
    for task, row in _together(given, processes, time_limit, _Queue(given, need=need, room=room, until=until), begun):
        if processes > 1 and row.failure is not None and row.failure.starved:
            starved.append(dataclasses.replace(task, lean=True))
        else:
            yield row
    with Worker() as alone:
        for task in starved:
            if until is not None and time.monotonic() >= until:
                return
            begun(task.name)
            yield alone.examine(task, time_limit=time_limit)


def _together(
    tasks: list[Task], processes: int, time_limit: float, shared: _Queue, begun: Callable[[str], object]
) -> Generator[tuple[Task, SweepRow]]:
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    workers = [Worker(share=processes) for _ in range(min(processes, len(tasks)))]
    threads = [
        threading.Thread(target=_work, args=(w, shared, events, time_limit), name="zoo-sweep", daemon=True)
        for w in workers
    ]
    try:
        for thread in threads:
            thread.start()
        at_work = len(threads)
        while at_work:
            what, value = events.get()
            if what == "begun":
                begun(value)
            elif what == "row":
                yield value
            elif what == "raised":
                raise value
            else:
                at_work -= 1
    finally:
        shared.close()
        for worker, thread in zip(workers, threads, strict=True):
            while thread.is_alive():
                worker.kill()
                thread.join(0.05)


def _work(worker: Worker, shared: _Queue, events: queue.SimpleQueue[tuple[str, Any]], time_limit: float) -> None:
    try:
        with worker:
            while (task := shared.take()) is not None:
                events.put(("begun", task.name))
                try:
                    row = worker.examine(task, time_limit=time_limit)
                finally:
                    shared.done(task)
                events.put(("row", (task, row)))
    except BaseException as error:  # to be raised where the rows are waited for
        events.put(("raised", error))
    events.put(("left", None))


class _Queue:
    """Hands out what fits beside what is under way, in order."""

    def __init__(self, tasks: list[Task], *, need: Callable[[Task], int], room: int, until: float | None) -> None:
        self._waiting = [(task, need(task)) for task in tasks]
        self._under_way: dict[str, int] = {}
        self._room, self._until, self._closed = room, until, False
        self._changed = threading.Condition()

    def take(self) -> Task | None:
        """The next model, as soon as there is room for it; None when none will come."""
        with self._changed:
            while self._waiting and not self._closed:
                left = None if self._until is None else self._until - time.monotonic()
                if left is not None and left <= 0:
                    break
                room = self._room - sum(self._under_way.values())
                for index, (task, need) in enumerate(self._waiting):
                    if need <= room or not self._under_way:
                        del self._waiting[index]
                        self._under_way[task.name] = need
                        return task
                self._changed.wait(left)
            return None

    def done(self, task: Task) -> None:
        with self._changed:
            del self._under_way[task.name]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
