"""The process that models are looked at in, and what its end costs."""

from __future__ import annotations

import pytest

from support.sweeping import behave
from zoo.sweep.rows import Failure, SweepRow, Task, failed
from zoo.sweep.worker import Worker


def test_a_bad_model_costs_only_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with Worker(behave) as worker:

        def look(name: str, limit: float = 60.0) -> SweepRow:
            return worker.examine(Task(name), time_limit=limit)

        first, second = look("one"), look("is interrupted")
        assert first.ok and second.ok
        assert first.seconds["process"] == second.seconds["process"]  # one process for many models
        assert worker._process is not None
        worker._process.kill()  # as the system may where memory is short; the next model is not to blame
        worker._process.join()
        hung = look("hangs", limit=0.5)
        assert hung.name == "hangs" and hung.failure is not None
        assert (hung.failure.step, hung.failure.message) == ("run", "not done after 0.5 s")
        assert hung.failure.starved
        assert 0.5 <= hung.seconds["in all"] < 30  # it would hang for 60
        third = look("two")
        assert third.ok
        assert third.seconds["process"] != first.seconds["process"]
        process = worker._process
        crashed = look("crashes")
        assert crashed.failure is not None and crashed.failure.step == "run"
        assert crashed.failure.message == "its process was ended by SIGSEGV: something went wrong"
    assert process is not None and process.exitcode is not None
    assert capfd.readouterr() == ("", "")  # what libraries say there disturbs nothing


def test_an_idle_process_ends_by_itself() -> None:
    with Worker(behave) as worker:
        assert worker.examine(Task("one"), time_limit=60.0).ok
        process = worker._process
    assert process is not None and process.exitcode == 0


def test_after_a_failure_the_process_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that failed may leave anything behind."""
    row, stopped = failed(Task("one"), None), []

    class Connection:
        def send(self, task: Task) -> None: ...

        def poll(self, timeout: float) -> bool:
            return True

        def recv(self) -> tuple[str, SweepRow]:
            return "row", row

    with Worker() as worker:
        worker.kill()  # there is nothing to kill yet
        monkeypatch.setattr(worker, "_started", Connection)
        monkeypatch.setattr(worker, "_stop", lambda: stopped.append(row.name))
        assert worker.examine(Task("one"), time_limit=1) is row
        assert stopped == []
        row = failed(Task("one"), Failure("run", "no"))
        assert worker.examine(Task("one"), time_limit=1) is row
        assert stopped == ["one"]
