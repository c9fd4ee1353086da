"""Nothing lost: a run killed with SIGKILL, at whatever point, ends with the bits of the run that was not."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.scheduler.scheduler import Scheduler

from support import dying
from zoo.checkpoint import load
from zoo.train import TrainConfig, run, train
from zoo.train.checkpoints import latest, listed
from zoo.train.log import read_log

CPU = {"device": "cpu", "model": "mlp", "data": "digits"}
# all that has a state: dropout (torch's numbers), mixup (numpy's), averages, a warm-up, moments, a sum of the loss
STATEFUL = TrainConfig(
    **CPU,
    options={"hidden": [32, 32], "dropout": 0.2},
    epochs=4,
    batch_size=32,
    accumulate=2,
    warmup_epochs=1,
    mixup=0.3,
    label_smoothing=0.1,
    ema=0.9,
    clip_grad=1.0,
    checkpoint_every=4,
    log_every=3,
)
DEATHS = 20


def lines(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without what the clock decides."""
    kept = [line for line in read_log(folder / "log.jsonl") if line["event"] in ("step", "epoch")]
    return [{name: value for name, value in line.items() if name != "images_per_second"} for line in kept]


def assert_equal(got: Any, expected: Any, where: str = "") -> None:
    """Equal in kind and to the bit, all the way down."""
    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            assert_equal(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_equal(one, other, f"{where}.{index}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), where
    else:
        assert got == expected, where


def assert_same_run(got: Path, expected: Path) -> None:
    for name in ("final.safetensors", "best.safetensors"):
        same = (got / name).read_bytes() == (expected / name).read_bytes()
        assert same, name  # not the bytes themselves: under CI pytest would write out how megabytes differ, for minutes
    states = [latest(folder / "checkpoints")[0] for folder in (got, expected)]
    assert_equal(*states)
    assert [path.name for path in listed(got / "checkpoints")] == [
        path.name for path in listed(expected / "checkpoints")
    ]
    same = lines(got) == lines(expected)
    assert same, "log.jsonl"


def killed_by_its_parent(config: TrainConfig, folder: Path, seconds: float) -> int:
    process = dying.process(config, folder)
    process.start()
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return int(process.exitcode)


def killed(config: TrainConfig, folder: Path, at: str, count: int) -> int:
    process = dying.process(config, folder, at, count)
    process.start()
    process.join(60)
    return int(process.exitcode)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the processes that die have it: with another number of threads a product may have other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing breaks off."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert killed(STATEFUL, folder, "end", 0) == 0
    return folder


def test_killed_twenty_times(whole: Path, tmp_path: Path) -> None:
    folder, chance, reached, deaths = tmp_path / "run-0", random.Random(0), set(), 0
    for attempt in range(3 * DEATHS):
        at = ("step", "write", "before", "after", "parent")[attempt % 5]
        if at == "parent":
            code = killed_by_its_parent(STATEFUL, folder, chance.uniform(0.02, 0.15))
        else:
            code = killed(STATEFUL, folder, at, chance.randint(5, 8) if at == "step" else chance.randint(1, 3))
        assert code in (-signal.SIGKILL, 0), at
        deaths += code == -signal.SIGKILL
        reached.add(len(lines(folder)) if (folder / "log.jsonl").exists() else 0)
        if code == 0 or deaths == DEATHS:  # a fast machine may reach the end before: then once more from the beginning
            assert killed(STATEFUL, folder, "end", 0) == 0
            assert_same_run(folder, whole)
            assert not [path for path in folder.rglob(".*") if path.suffix == ".tmp"]
            folder = tmp_path / f"run-{attempt + 1}"
        if deaths == DEATHS:
            break
    assert deaths == DEATHS
    assert len(reached) >= 5  # it got on between its deaths


@pytest.mark.parametrize("count", range(1, 7))
def test_killed_before_each_of_the_first_files(whole: Path, tmp_path: Path, count: int) -> None:
    """config.toml, log.jsonl, then checkpoints and best.safetensors: each is there whole or not at all."""
    assert killed(STATEFUL, tmp_path / "run", "before", count) == -signal.SIGKILL
    assert killed(STATEFUL, tmp_path / "run", "end", 0) == 0
    assert_same_run(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that died at step 30, two steps after its last checkpoint."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    assert killed(STATEFUL, folder, "step", 30) == -signal.SIGKILL
    return folder


@pytest.mark.parametrize("part", ["nothing", "model", "ema", "optimizer", "rng", "losses", "step"])
def test_each_part_of_a_checkpoint_counts(
    whole: Path, broken_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The saboteurs: where one part of the state does not come back, the comparison finds it."""
    folder, load_all = tmp_path / "run", run._Run.load
    shutil.copytree(broken_off, folder)

    def load_others(self: run._Run, state: dict[str, Any]) -> None:
        other = {"step": 27} if part == "step" else {} if part == "nothing" else {part: fresh(self)[part]}
        load_all(self, {**state, **other})

    monkeypatch.setattr(run._Run, "load", load_others)
    train(STATEFUL, folder, resume=True)
    if part == "nothing":
        assert_same_run(folder, whole)
    else:
        with pytest.raises(AssertionError):
            assert_same_run(folder, whole)


def fresh(of: run._Run) -> dict[str, Any]:
    """The state with which a run begins."""
    return copy.deepcopy(of.state())


def test_a_finished_run_stays_as_it_is(whole: Path) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*.safetensors")}
    report = train(STATEFUL, whole, resume=True)
    assert (report.steps, report.resumed_from, report.images) == (88, 88, 0)
    assert {path: path.read_bytes() for path in whole.rglob("*.safetensors")} == before
    assert report.accuracy == lines(whole)[-1]["accuracy"]


def test_best_and_final_rebuild_the_model(whole: Path) -> None:
    state = latest(whole / "checkpoints")[0]
    assert state is not None
    final = load(whole / "final.safetensors")
    assert_equal(dict(final.state_dict()), dict(state["ema"]))
    assert not torch.equal(state["ema"]["0.weight"], state["model"]["0.weight"])


def test_a_damaged_checkpoint_is_passed_over(whole: Path, tmp_path: Path) -> None:
    folder, said = tmp_path / "run", []
    shutil.copytree(whole, folder)
    newest, before = listed(folder / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:1000])
    report = train(STATEFUL, folder, resume=True, say=said.append)
    assert report.resumed_from == int(before.stem[5:])
    assert f"{newest}: damaged (1000 bytes)" in said[0]
    assert_same_run(folder, whole)
    for path in listed(folder / "checkpoints"):
        path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        train(STATEFUL, folder, resume=True)


def test_another_run_is_refused(whole: Path) -> None:
    with pytest.raises(ValueError, match="there is a run already; resume it"):
        train(STATEFUL, whole)
    other = TrainConfig(**{**STATEFUL.to_dict(), "lr": 0.5, "workers": 1})
    with pytest.raises(ValueError, match=r"another one; name another folder\nlr: got 0.5, the run has 0.001$"):
        train(other, whole, resume=True)


# The scaler and the schedule, in this process


def broken_off_at(step: int, config: TrainConfig, folder: Path) -> None:
    def stop(at: int, steps: int, text: str) -> None:
        if at == step:
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        train(config, folder, watch=stop)


@pytest.mark.parametrize("part", ["nothing", "scaler"])
def test_the_scaler_goes_on_where_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """One that begins too high, so that steps are left out, and then grows every few steps."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**24, growth_interval=5)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    config = TrainConfig(**CPU, autocast="fp16", epochs=2, batch_size=64, checkpoint_every=9, clip_grad=1.0)
    train(config, tmp_path / "whole")
    broken_off_at(16, config, tmp_path / "broken")
    state = latest(tmp_path / "broken" / "checkpoints")[0]
    assert state is not None
    assert state["scaler"]["scale"] < 2.0**24 and state["scaler"]["_growth_tracker"] > 0
    load_all = run._Run.load

    def load_others(self: run._Run, state: dict[str, Any]) -> None:
        load_all(self, {**state, **({} if part == "nothing" else {part: fresh(self)[part]})})

    monkeypatch.setattr(run._Run, "load", load_others)
    train(config, tmp_path / "broken", resume=True)
    if part == "nothing":
        assert_same_run(tmp_path / "broken", tmp_path / "whole")
    else:
        with pytest.raises(AssertionError):
            assert_same_run(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.parametrize(
    "schedule",
    [
        {"schedule": "cosine", "warmup_epochs": 1},
        {"schedule": "tanh"},
        {"schedule": "poly", "decay_rate": 2.0},
        {"schedule": "step", "decay_epochs": 1, "decay_rate": 0.5},
        {"schedule": "none"},
    ],
)
def test_the_schedule_goes_on_where_it_stood(tmp_path: Path, schedule: dict[str, Any]) -> None:
    """Broken off in the middle of an epoch, in the warm-up too."""
    config = TrainConfig(**CPU, options={"hidden": [8]}, epochs=3, batch_size=256, log_every=1, **schedule)
    config = dataclasses.replace(config, checkpoint_every=3, optimizer="sgd")
    train(config, tmp_path / "whole")
    for step in (3, 8):
        folder = tmp_path / f"broken-{step}"
        broken_off_at(step, config, folder)
        train(config, folder, resume=True)
        assert_same_run(folder, tmp_path / "whole")
    rates = [line["lr"] for line in lines(tmp_path / "whole") if line["event"] == "step"]
    assert len(set(rates)) > 2 or schedule["schedule"] == "none"


def test_a_schedule_that_begins_again_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saboteur: the rate is of the step since the break."""
    config = TrainConfig(**CPU, options={"hidden": [8]}, epochs=3, batch_size=256, checkpoint_every=3, log_every=1)
    train(config, tmp_path / "whole")
    broken_off_at(8, config, tmp_path / "broken")
    update = Scheduler.step_update
    monkeypatch.setattr(Scheduler, "step_update", lambda self, step: update(self, step - 6))
    train(config, tmp_path / "broken", resume=True)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "broken", tmp_path / "whole")
