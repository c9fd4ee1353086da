"""Several workers and one queue, with real processes that do what they are told."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from support.sweeping import behave
from zoo.sweep import pool
from zoo.sweep.pool import examined
from zoo.sweep.rows import Failure, SweepRow, Task, failed
from zoo.sweep.worker import Worker


@pytest.fixture
def behaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", functools.partial(Worker, behave))


def rows(names: list[str], *, processes: int = 2, folder: Path | None = None, **options: Any) -> list[SweepRow]:
    options = {"time_limit": 60.0, "need": lambda task: 0, "room": 1, **options}
    tasks = [Task(name, options={"folder": str(folder)}) for name in names]
    return list(examined(tasks, processes=processes, **options))


@pytest.mark.usefixtures("behaving")
def test_a_model_whose_process_died_is_looked_at_again_alone(tmp_path: Path) -> None:
    begun: list[str] = []
    found = rows(["dies once", "one"], folder=tmp_path, begun=begun.append)
    assert [(row.name, row.ok) for row in found] == [("one", True), ("dies once", True)]
    assert sorted(begun[:2]) == ["dies once", "one"] and begun[2:] == ["dies once"]


@pytest.mark.usefixtures("behaving")
def test_an_interrupt_ends_all_processes() -> None:
    tasks = [Task(name) for name in ("one", "hangs", "hangs too")]
    found = examined(tasks, processes=2, time_limit=60.0, need=lambda task: 0, room=1)
    assert next(found).name in ("one", "hangs too")
    begun = time.monotonic()
    found.close()  # as an exception between two rows does
    assert time.monotonic() - begun < 30  # "hangs" would for 60
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zoo-sweep")]


class Beside:
    """A worker that notes what is looked at together."""

    lock = threading.Lock()
    now: ClassVar[list[str]] = []
    most: ClassVar[list[tuple[str, ...]]] = []
    order: ClassVar[list[str]] = []

    def __init__(self, *, share: int = 1) -> None: ...

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None: ...

    def kill(self) -> None: ...

    def examine(self, task: Task, *, time_limit: float) -> SweepRow:
        with self.lock:
            self.now.append(task.name)
            self.order.append(f"{task.name}, lean" if task.lean else task.name)
            self.most.append(tuple(sorted(self.now)))
        time.sleep(1.2 if task.name == "slow" else 0.05)
        with self.lock:
            self.now.remove(task.name)
        wrong = {"starved": Failure("run", "no memory", starved=True), "wrong": Failure("run", "no")}
        return failed(task, wrong.get(task.name))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> type[Beside]:
    monkeypatch.setattr(pool, "Worker", Beside)
    for notes in (Beside.now, Beside.most, Beside.order):
        notes.clear()
    return Beside


SIZES = {"3": 3, "5": 5, "8": 8, "1": 1, "20": 20, "2": 2}


def test_no_more_at_once_than_there_is_room_for(beside: type[Beside]) -> None:
    found = rows(list(SIZES), processes=4, need=lambda task: SIZES[task.name], room=10)
    assert sorted(row.name for row in found) == sorted(SIZES)
    assert beside.order[0] == "20"  # the largest, and as it has no room it is alone
    for together in beside.most:
        assert sum(SIZES[name] for name in together) <= 10 or together == ("20",)
    assert any(len(together) > 1 for together in beside.most)


def test_one_process_keeps_the_order(beside: type[Beside]) -> None:
    rows(list(SIZES), processes=1, need=lambda task: SIZES[task.name], room=10)
    assert beside.order == list(SIZES)


def test_one_that_was_alone_is_not_looked_at_again(beside: type[Beside]) -> None:
    assert [row.ok for row in rows(["starved"], processes=1)] == [False]
    assert beside.order == ["starved"]


def test_one_that_was_short_of_something_is_looked_at_again_last(beside: type[Beside]) -> None:
    found = rows(["starved", "wrong", "2"])
    assert (len(found), found[-1].name, found[-1].ok) == (3, "starved", False)  # alone too
    assert (beside.order.count("starved"), beside.order.count("wrong")) == (1, 1)  # what is wrong is not
    assert beside.order[-1] == "starved, lean" and beside.most[-1] == ("starved",)


def test_nothing_begins_after_the_time(beside: type[Beside]) -> None:
    assert rows(list(SIZES), until=time.monotonic()) == []
    assert beside.order == []
    assert len(rows(["slow", "2"], processes=1, until=time.monotonic() + 1.0)) == 1


def test_what_is_to_be_looked_at_again_is_left_where_the_time_is_up(beside: type[Beside]) -> None:
    found = rows(["starved", "slow"], until=time.monotonic() + 1.0)
    assert [row.name for row in found] == ["slow"]  # so that the next call does it
    assert beside.order.count("starved") == 1


def test_no_models() -> None:
    assert rows([]) == []
