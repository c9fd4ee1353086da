"""Which models are swept, and into which file. The real worker is tested in test_worker.py and tests/commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zoo.sweep import pool
from zoo.sweep.lines import read
from zoo.sweep.rows import Failure, SweepRow, Task, failed
from zoo.sweep.running import chosen_models, sweep


class Fake:
    """A worker that takes notes; it is interrupted, or finds a failure, where it is told."""

    def __init__(self, *, failing: str = "", interrupted_at: str = "") -> None:
        self.failing, self.interrupted_at = failing, interrupted_at
        self.tasks: list[Task] = []
        self.limits: set[float] = set()
        self.left = 0

    def __call__(self, *, share: int = 1) -> Fake:
        return self

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.left += 1

    def kill(self) -> None: ...

    def examine(self, task: Task, *, time_limit: float) -> SweepRow:
        if task.name == self.interrupted_at:
            raise KeyboardInterrupt
        self.tasks.append(task)
        self.limits.add(time_limit)
        return failed(task, Failure("run", "no") if task.name == self.failing else None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(pool, "Worker", fake)
    return fake


def test_globs() -> None:
    assert chosen_models(["wide_resnet*", "resnet18"]) == ["wide_resnet50_2", "wide_resnet101_2", "resnet18"]
    assert chosen_models(["resnet18", "resnet1*"]) == ["resnet18", "resnet101", "resnet152"]
    with pytest.raises(ValueError, match="no model matches 'resnet19'"):
        chosen_models(["resnet18", "resnet19"])


def test_shards_are_a_partition() -> None:
    everything = chosen_models(["torchvision/*"])
    shards = [chosen_models(["torchvision/*"], shard=f"{k}/7") for k in range(1, 8)]
    assert sorted(name for shard in shards for name in shard) == sorted(everything)
    assert shards[2] == everything[2::7]
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0", "-1/3", ""):
        with pytest.raises(ValueError, match="expected k/n with k from 1 to n"):
            chosen_models(["mlp"], shard=wrong)


def test_what_is_asked_of_each(worker: Fake) -> None:
    seen: list[tuple[int, int]] = []

    def watch(under_way: Sequence[str], done: int, total: int) -> None:
        seen.append((done, total))

    options: dict[str, Any] = {"on": "data", "device": "cuda:1", "gradients": False, "small": True}
    found = sweep(["mlp", "resnet18"], **options, max_parameters=5, time_limit=7.0, command="the command", watch=watch)
    assert worker.tasks == [Task(name, **options, max_parameters=5) for name in ("mlp", "resnet18")]
    assert worker.limits == {7.0}
    assert seen[-1] == (2, 2) and set(seen) <= {(0, 2), (1, 2), (2, 2)}
    assert (found.ok, found.command, [row.name for row in found.rows]) == (True, "the command", ["mlp", "resnet18"])


def test_a_failure_fails_the_report(worker: Fake) -> None:
    worker.failing = "mlp"
    found = sweep(["mlp", "resnet18"])
    assert not found.ok
    assert [row.ok for row in found.rows] == [False, True]


def test_an_interrupted_run_is_taken_up_again(worker: Fake, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    globs = ["mlp", "resnet18", "resnet34"]
    worker.interrupted_at = "resnet18"
    with pytest.raises(KeyboardInterrupt):
        sweep(globs, on="meta", out=file)
    assert worker.left >= 1
    assert [row.name for row in read(file)] == ["mlp"]
    worker.interrupted_at, worker.tasks = "", []
    found = sweep(globs, on="meta", out=file)
    assert [task.name for task in worker.tasks] == ["resnet18", "resnet34"]
    assert (found.resumed, [row.name for row in found.rows]) == (1, globs)
    assert [row.name for row in read(file)] == globs
    worker.tasks = []
    assert sweep(["resnet18"], on="meta", out=file).resumed == 1  # what else is in the file is not in the report
    assert worker.tasks == []
    assert sweep(["resnet18"], on="meta", out=file, resume=False).resumed == 0
    assert [row.name for row in read(file)] == ["resnet18"]


def test_what_the_time_did_not_reach_is_left_for_the_next_call(
    worker: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, globs = tmp_path / "out.jsonl", ["mlp", "resnet18", "resnet34"]
    examine = worker.examine

    def slow(task: Task, *, time_limit: float) -> SweepRow:
        time.sleep(0.2)
        return examine(task, time_limit=time_limit)

    monkeypatch.setattr(worker, "examine", slow)
    found = sweep(globs, on="meta", out=file, time_budget=0.1)
    assert ([row.name for row in found.rows], found.left, found.ok) == (["mlp"], 2, True)  # what began was finished
    assert str(found).endswith("1 model, all well; 2 left, as the time was up: resume with the same command")
    found = sweep(globs, on="meta", out=file, time_budget=60)
    assert (len(found.rows), found.resumed, found.left) == (3, 1, 0)


def test_two_sweeps_do_not_share_a_file(worker: Fake, tmp_path: Path) -> None:
    """The second would take off what it thinks a cut-off line of the first."""
    file = tmp_path / "out.jsonl"

    def second(under_way: Sequence[str], done: int, total: int) -> None:
        with pytest.raises(ValueError, match="another process is sweeping into this file; wait for its end, or take"):
            sweep(["resnet18"], on="meta", out=file, resume=False)

    assert sweep(["mlp"], on="meta", out=file, watch=second).ok
    assert [row.name for row in read(file)] == ["mlp"]
    assert sweep(["resnet18"], on="meta", out=file).ok  # it is let go of


def test_processes_share_the_models(worker: Fake, tmp_path: Path) -> None:
    file, globs = tmp_path / "out.jsonl", ["mlp", "resnet*"]
    found = sweep(globs, on="meta", out=file, processes=3)
    names = chosen_models(globs)
    assert [row.name for row in found.rows] == names  # whatever the order in which they were looked at
    assert sorted(row.name for row in read(file)) == sorted(task.name for task in worker.tasks) == sorted(names)


def test_arguments_of_the_wrong_form(worker: Fake) -> None:
    with pytest.raises(ValueError, match="expected 'data' or 'meta'"):
        sweep(["mlp"], on="cpu")
    with pytest.raises(ValueError, match="expected more than 0 seconds"):
        sweep(["mlp"], time_limit=0)
    with pytest.raises(ValueError, match="time_budget=0: expected more than 0 seconds"):
        sweep(["mlp"], time_budget=0)
    for wrong in (0, -1, True, 2.0, "2"):
        with pytest.raises(ValueError, match="expected a number of processes, 1 or more"):
            sweep(["mlp"], processes=wrong)  # type: ignore[arg-type]
    assert worker.tasks == []
