"""Ranks that train together: the steps of one process, its checkpoints, and what they leave when one dies."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from support import training
from support.ranks import outcomes, run_on
from zoo import checkpoint
from zoo.factory import create
from zoo.train import TrainConfig, ranks, run, train
from zoo.train.checkpoints import listed
from zoo.train.comparing import STEP_TOLERANCE
from zoo.train.data import batches_to_test, open_data, share
from zoo.train.log import read_log
from zoo.train.ranks import Ranks
from zoo.train.split_checkpoints import _Reader
from zoo.train.strategies import tensor_plan

CPU = torch.device("cpu")
# all that a checkpoint holds, and what is of the whole batch: a norm, a mixture, an average
FIELDS: dict[str, Any] = {
    "model": "mlp",
    "data": "digits",
    "device": "cpu",
    "options": {"hidden": [32, 24]},
    "custom_linear": True,
    "epochs": 2,
    "batch_size": 64,
    "accumulate": 2,
    "warmup_epochs": 1,
    "clip_grad": 1.0,
    "mixup": 0.3,
    "ema": 0.9,
    "checkpoint_every": 5,
    "log_every": 1,
}
STRATEGIES = ["ddp", "fsdp", "tp"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load(folder / "final.safetensors").state_dict())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_log(folder / "log.jsonl") if line["event"] in ("step", "epoch")]


def assert_same_run(got: Path, expected: Path) -> None:
    """The same steps but for rounding, and as many lines in the log."""
    assert [(line["event"], line["step"]) for line in lines(got)] == [
        (line["event"], line["step"]) for line in lines(expected)
    ]
    for one, other in zip(lines(got), lines(expected), strict=True):
        assert one.keys() == other.keys()
        for name in {"loss", "lr", "accuracy", "raw"} & other.keys():
            assert one[name] == pytest.approx(other[name], rel=STEP_TOLERANCE), (name, one["step"])
    want = weights(expected)
    for name, tensor in weights(got).items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(TrainConfig(**FIELDS), folder)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_take_the_steps_of_one(alone: Path, tmp_path: Path, strategy: str) -> None:
    """Broken off on two ranks, gone on with on one, and the other way round: the run of one process all the same."""
    fields = {**FIELDS, "strategy": strategy}
    assert run_on(2, training.go, fields, tmp_path / "to-one", False, 13) == [None, None]
    assert [path.name for path in listed(tmp_path / "to-one" / "checkpoints")] == ["step-00000011", "step-00000010"]
    assert train(TrainConfig(**FIELDS), tmp_path / "to-one", resume=True).resumed_from == 11
    assert_same_run(tmp_path / "to-one", alone)
    assert [path.name for path in listed(tmp_path / "to-one" / "checkpoints")] == [
        "step-00000022.pt",
        "step-00000020.pt",
    ]
    assert training.go(FIELDS, str(tmp_path / "to-two"), stop=13) is None
    reports = run_on(2, training.go, fields, tmp_path / "to-two", True)
    assert [report.resumed_from for report in reports] == [11, 11]
    assert reports[0].accuracy == reports[1].accuracy == lines(alone)[-1]["accuracy"]
    assert_same_run(tmp_path / "to-two", alone)


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES])
def test_resumed_on_as_many_ranks_to_the_bit(tmp_path: Path, strategy: str) -> None:
    """Dropout, too: each rank's random numbers are in the checkpoint."""
    dropout = {"hidden": [32, 24], "dropout": 0.0 if strategy == "tp" else 0.2}
    fields = {**FIELDS, "strategy": strategy, "options": dropout}
    run_on(2, training.go, fields, tmp_path / "whole")
    run_on(2, training.go, fields, tmp_path / "broken", False, 13)
    run_on(2, training.go, fields, tmp_path / "broken", True)
    assert (tmp_path / "broken" / "final.safetensors").read_bytes() == (
        tmp_path / "whole" / "final.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(("rank", "at"), [(1, "step"), (0, "write"), (1, "write"), (0, "rename")])
def test_a_dead_rank_leaves_the_last_checkpoint(alone: Path, tmp_path: Path, rank: int, at: str) -> None:
    folder = tmp_path / "run"
    answers = outcomes(2, training.die, FIELDS, folder, rank, at)
    assert answers[rank] == (False, f"it died with exit code {-signal.SIGKILL}")
    assert f"RankGone: rank {1 - rank}: another rank has died" in answers[1 - rank][1]
    assert "the last checkpoint is as it was: start all ranks again with --resume" in answers[1 - rank][1]
    last = {"step": "step-00000011", "write": "step-00000005", "rename": "step-00000005"}[at]
    assert listed(folder / "checkpoints")[0].name == last
    assert train(TrainConfig(**FIELDS), folder, resume=True).resumed_from == int(last[5:])
    assert not [path for path in (folder / "checkpoints").iterdir() if path.suffix == ".tmp"]
    assert_same_run(folder, alone)


def test_an_error_of_rank_0_is_one_everywhere(alone: Path) -> None:
    for rank, (ok, text) in enumerate(outcomes(2, training.go, FIELDS, alone)):
        assert not ok and "there is a run already; resume it (--resume)" in text, rank


def test_a_table_of_contents_brings_no_code(tmp_path: Path) -> None:
    run_on(2, training.go, FIELDS, tmp_path / "run", False, 6)
    (found,) = listed(tmp_path / "run" / "checkpoints")

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'owned'}",)

    (found / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"posix.system, which has no place there"):
        _Reader(found).read_metadata()
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        train(TrainConfig(**FIELDS), tmp_path / "run", resume=True)
    assert not (tmp_path / "owned").exists()


# By torchrun


def torchrun(*arguments: str, script: tuple[str, ...] = ("-m", "zoo.train")) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=300
    )


QUICK = ("mlp", "--data", "digits", "--epochs", "1", "--batch-size", "128", "--device", "cpu")


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    done = torchrun(*QUICK, "--out", str(tmp_path / "run"), "--strategy", "fsdp", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 11  # printed once
    start = read_log(tmp_path / "run" / "log.jsonl")[0]
    assert (start["ranks"], start["strategy"]) == (2, "fsdp")
    again = torchrun(*QUICK, "--out", str(tmp_path / "run"), script=("-m", "zoo", "train"))
    assert (again.returncode, again.stdout) == (1, "")
    assert "there is a run already; resume it (--resume)" in again.stderr
    # the first rank that ends is named; torchrun ends (SIGTERM) one that is on its way, and none aborts
    assert "exitcode  : 1 " in again.stderr.split("Root Cause")[-1] and "SIGABRT" not in again.stderr


@pytest.mark.slow
def test_torchrun_where_a_rank_dies(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(
        f"""
import os, signal
from zoo.train import TrainConfig, train

def watch(step, steps, text):
    if step == 13 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

train(TrainConfig(**{FIELDS!r}), {str(tmp_path / "run")!r}, watch=watch)
"""
    )
    done = torchrun(script=(str(script),))
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert listed(tmp_path / "run" / "checkpoints")[0].name == "step-00000011"
    assert train(TrainConfig(**FIELDS), tmp_path / "run", resume=True).resumed_from == 11


@pytest.mark.parametrize("strategy", ["ddp", "tp"])
def test_a_rank_whose_work_is_done_ends_well(tmp_path: Path, strategy: str) -> None:
    """A thread of gloo that waits for Python's lock aborts a process that ends, in most runs where none waits for it.

    The model that still lives, and DTensor's caches, hold the group.
    """
    script = tmp_path / "leaving.py"
    script.write_text(
        f"""
import sys, torch, zoo
import torch.distributed as dist
from zoo.train.ranks import _gloo_threads, joined
from zoo.train.strategies import spread

with joined("cpu") as ranks:
    model = spread(zoo.create("mlp"), {strategy!r}, ranks)
    model(torch.randn(4, 1, 28, 28)).sum().backward()
    sys.setswitchinterval(1000)  # Python's lock is given up where Python waits, and nowhere else
    for tensor in [torch.ones(1000) for _ in range(20)]:
        dist.all_reduce(tensor)
    assert _gloo_threads() or sys.platform != "linux"  # by the name that torch gives them
"""
    )
    done = torchrun(script=(str(script),))
    assert done.returncode == 0, done.stderr


# Without ranks


@pytest.mark.skipif(sys.platform != "linux", reason="the names and states of threads are Linux's")
def test_threads_that_do_collectives_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started, enough, done, over = (threading.Event() for _ in range(4))

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
        started.set()
        while not enough.is_set():
            pass
        done.set()
        over.wait()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    thread, later = threading.Thread(target=work), threading.Timer(0.3, enough.set)
    thread.start()
    try:
        assert started.wait(60)
        later.start()
        ranks._leave(at_most=60)
        assert done.is_set()
    finally:
        later.cancel()
        enough.set()
        over.set()
        thread.join()


def test_what_is_seen_of_a_thread_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps at two looks, and has not run between. One that could run, and does not get to, is not at rest."""
    looks = iter([("R", "1"), ("R", "1"), ("S", "2"), ("S", "3"), ("S", "3"), ("never", "looked at")])
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(ranks, "_gloo_threads", lambda: {"1": next(looks)})
    ranks._leave(at_most=600)
    assert list(looks) == [("never", "looked at")]


def test_a_thread_that_never_rests_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(10_000))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(ranks, "_gloo_threads", lambda: {"1": ("S", str(next(looks)))})
    ranks._leave(at_most=0.05)  # a look is a millisecond apart
    assert 2 <= next(looks) < 9_999


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_each_image_is_tested_once(parts: int) -> None:
    config = TrainConfig(model="mlp", data="digits", batch_size=100)
    tests = open_data("digits").test(create("mlp", device="meta"), config)
    seen, counts = [], set()
    for index in range(parts):
        found = list(batches_to_test(tests, config, (index, parts)))
        counts.add(len(found))
        seen += [images[labels >= 0].flatten(1) for images, labels in found]
    assert len(counts) == 1  # FSDP's ranks wait for each other in every batch
    assert len(torch.cat(seen)) == len(tests) == 360
    whole = torch.cat([images.flatten(1) for images, _ in batches_to_test(tests, config)])
    assert torch.equal(torch.cat(seen).unique(dim=0), whole.unique(dim=0))


@pytest.mark.parametrize(("size", "parts"), [(12, 1), (12, 2), (12, 3), (6, 2), (10, 5)])
def test_shares_of_a_batch(size: int, parts: int) -> None:
    batch = numpy.stack([numpy.zeros(size, int), numpy.arange(size)], axis=1)
    shares = [share(batch, (index, parts))[:, 1].tolist() for index in range(parts)]
    assert sorted(image for part in shares for image in part) == list(range(size))
    assert {len(part) for part in shares} == {size // parts}
    if size // parts % 2 == 0:  # mixup's pairs are those of the whole batch
        for part in shares:
            assert [a + b for a, b in zip(part, reversed(part), strict=True)] == [size - 1] * len(part)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 7}, "batch_size: got 7 for 2 ranks, expected a multiple of 2"),
        ({"batch_size": 6, "mixup": 0.2}, "expected a multiple of 4, since mixup mixes pairs"),
        ({"sync_bn": True}, "sync_bn: torch's SyncBatchNorm runs on GPUs alone"),
        ({"strategy": "tp", "autocast": "fp16"}, "GradScaler takes no model that tp splits"),
    ],
)
def test_what_several_ranks_cannot_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run._check(TrainConfig(model="mlp", data="digits", **fields), Ranks(0, 2, CPU))
    run._check(TrainConfig(model="mlp", data="digits", **fields), Ranks(0, 1, CPU))


def test_what_tensor_parallel_splits() -> None:
    assert list(tensor_plan(create("mlp", device="meta"))) == ["0", "3"]
    assert list(tensor_plan(create("mlp", hidden=[8, 8, 8], device="meta"))) == ["0", "3", "6", "9"]
    assert tensor_plan(create("mlp", dropout=0.1, device="meta")) == {}
    assert tensor_plan(create("resnet18", device="meta")) == {}
    vit = tensor_plan(create("timm/test_vit", custom_linear=True, device="meta"))
    assert list(vit)[:2] == ["blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]
    assert len(vit) == 2 * 6
    softmax = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1), torch.nn.Linear(4, 4))
    assert tensor_plan(softmax) == {}  # its values are not of one place each


def test_nothing_to_split_is_refused(tmp_path: Path) -> None:
    fields = {**FIELDS, "strategy": "tp", "options": {"hidden": []}}
    for ok, text in outcomes(2, training.go, fields, tmp_path):
        assert not ok and "strategy 'tp': the model has no two Linears with an activation between" in text
