"""The process that models are looked at in, and what its end costs."""

from __future__ import annotations

import time

import pytest

from support.sweeping import behave
from zoo.sweep.rows import SweepRow, Task
from zoo.sweep.worker import Worker


def test_a_bad_model_costs_only_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with Worker(behave) as worker:

        def look(name: str, limit: float = 60.0) -> SweepRow:
            return worker.examine(Task(name), time_limit=limit)

        first, second = look("one"), look("is interrupted")
        assert first.ok and second.ok
        assert first.seconds["process"] == second.seconds["process"]  # one process for many models
        begun = time.monotonic()
        hung = look("hangs", limit=0.5)
        assert time.monotonic() - begun < 10
        assert hung.name == "hangs" and hung.failure is not None
        assert (hung.failure.step, hung.failure.message) == ("run", "not done after 0.5 s")
        assert hung.seconds["in all"] >= 0.5
        crashed = look("crashes")
        assert crashed.failure is not None and crashed.failure.step == "run"
        assert crashed.failure.message == "its process was ended by SIGSEGV: something went wrong"
        third = look("two")
        assert third.ok
        assert third.seconds["process"] != first.seconds["process"]
        process = worker._process
        failed = look("fails")
        assert failed.failure is not None and failed.failure.message == f"in process {third.seconds['process']}"
        assert worker._process is None  # one that failed may leave anything behind
    assert process is not None and process.exitcode is not None
    assert capfd.readouterr() == ("", "")  # what libraries say there disturbs nothing
