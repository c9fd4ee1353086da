"""Which models are swept, and into which file. The real worker is tested in test_worker.py and tests/commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from zoo.sweep import running
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

    def __call__(self) -> Fake:
        return self

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.left += 1

    def examine(self, task: Task, *, time_limit: float) -> SweepRow:
        if task.name == self.interrupted_at:
            raise KeyboardInterrupt
        self.tasks.append(task)
        self.limits.add(time_limit)
        return failed(task, Failure("run", "no") if task.name == self.failing else None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(running, "Worker", fake)
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
    seen: list[Sequence[str]] = []

    def progress(names: Sequence[str]) -> Iterable[str]:
        seen.append(names)
        return iter(names)

    options: dict[str, Any] = {"on": "data", "device": "cuda:1", "gradients": False, "small": True}
    found = sweep(
        ["mlp", "resnet18"], **options, max_parameters=5, time_limit=7.0, command="the command", progress=progress
    )
    assert worker.tasks == [Task(name, **options, max_parameters=5) for name in ("mlp", "resnet18")]
    assert (worker.limits, seen, worker.left) == ({7.0}, [["mlp", "resnet18"]], 1)
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
    assert worker.left == 1
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


def test_arguments_of_the_wrong_form(worker: Fake) -> None:
    with pytest.raises(ValueError, match="expected 'data' or 'meta'"):
        sweep(["mlp"], on="cpu")
    with pytest.raises(ValueError, match="expected more than 0 seconds"):
        sweep(["mlp"], time_limit=0)
    assert worker.tasks == []
