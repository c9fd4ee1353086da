"""Ranks on GPUs, one each, by NCCL: split models, training, and what a model on the second GPU leaves on the first.

One GPU: the same code with a single rank. What needs two GPUs is skipped there, with the reason.
"""

import os
import subprocess
import sys

import pytest
import torch

from support import sharded, training
from support.ranks import run_on
from zoo.isolation import cudnn_set
from zoo.train import TrainConfig, train
from zoo.train.log import read_log

GPUS = torch.cuda.device_count()
RANKS = min(GPUS, 2)
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
CASES = [(kind, way) for kind in ("perceptron", "transformer") for way in ("ddp", "fsdp", "tensor_parallel")]
FIELDS = {
    "model": "mlp",
    "data": "digits",
    "device": "cuda",
    "options": {"hidden": [256, 256]},
    "custom_linear": True,
    "epochs": 2,
    "batch_size": 128,
    "ema": 0.9,
    "clip_grad": 1.0,
    "log_every": 1,
    "checkpoint_every": 7,
}


def test_split_models_compute_the_same_by_the_operator():
    """Outputs and gradients by the parity rule, and no product of torch's own among what ran."""
    for wrong in run_on(RANKS, sharded.all_compared, CASES, gpus=True):
        assert not wrong, "\n".join(wrong)


def losses(folder):
    return [line["loss"] for line in read_log(folder / "log.jsonl") if line["event"] == "step"]


AUTOCASTS = {"none": 1e-4, "bf16": 2e-2}
"""And how far a loss may be off."""
STRATEGIES = ("ddp", "fsdp", "tp")
WITH_BATCH_NORMS = {
    **FIELDS,
    "model": "resnet18",
    "options": {},
    "size": 32,
    "ema": None,
    "epochs": 1,
    "optimizer": "sgd",
}


def trained(folder):
    """All that two GPUs train here, in the order of what is most to be known."""
    torch.backends.cudnn.allow_tf32 = False  # its errors of 1e-3 are others for half a batch
    for autocast in AUTOCASTS:
        for strategy in STRATEGIES:
            fields, where = {**FIELDS, "autocast": autocast, "strategy": strategy}, f"{folder}/{strategy}-{autocast}"
            training.go(fields, where, False, 16)
            assert training.go(fields, where, True).resumed_from == 14
    for sync in (True, False):
        training.go({**WITH_BATCH_NORMS, "sync_bn": sync}, f"{folder}/{sync}")


@two_gpus
def test_two_gpus_take_the_steps_of_one(tmp_path):
    """Broken off and gone on with, too. With sync_bn also those of a model with batch norms; without, each GPU
    normalizes its own half."""
    run_on(2, trained, tmp_path, gpus=True)
    for autocast, off in AUTOCASTS.items():
        whole = train(TrainConfig(**FIELDS, autocast=autocast), tmp_path / f"one-{autocast}")
        want = losses(tmp_path / f"one-{autocast}")
        for strategy in STRATEGIES:
            where = tmp_path / f"{strategy}-{autocast}"
            assert losses(where)[:20] == pytest.approx(want[:20], rel=off), f"{strategy} {autocast}"
            accuracy = [line for line in read_log(where / "log.jsonl") if line["event"] == "epoch"][-1]
            assert accuracy["accuracy"] == pytest.approx(whole.accuracy, abs=0.02), f"{strategy} {autocast}"
    with cudnn_set(allow_tf32=False):  # as in trained()
        train(TrainConfig(**WITH_BATCH_NORMS), tmp_path / "one")
    want = losses(tmp_path / "one")[:5]
    off = {
        sync: max(abs(a - b) for a, b in zip(losses(tmp_path / sync), want, strict=False)) for sync in ("True", "False")
    }
    assert off["True"] < 0.2 * off["False"], off  # convolutions round otherwise for half a batch


@two_gpus
@pytest.mark.parametrize("model", ["mlp", "timm/test_vit"])
def test_a_model_on_the_second_gpu_leaves_nothing_on_the_first(model):
    """Patched, trained for a step under autocast and without, by a unit of two Linears too."""
    code = f"""
import torch, zoo
from zoo.tensor_files import on_host
model = zoo.create({model!r}, num_classes=10, device="cuda:1")
zoo.patch(model)
zoo.patch(model, "mlp")
x = torch.randn(*((8, 784) if {model!r} == "mlp" else (8, 3, 160, 160)), device="cuda:1")
for dtype in (torch.float32, torch.bfloat16):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        model(x).square().mean().backward()
torch.cuda.synchronize(1)
assert zoo.coverage(model, x).ok
on_host(list(model.parameters()))  # as a checkpoint takes them
assert not torch._C._cuda_hasPrimaryContext(0), "a context on GPU 0"
assert torch.cuda.memory_reserved(0) == torch.cuda.memory_allocated(0) == 0
assert torch.cuda.memory_allocated(1) > 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torchrun(tmp_path):
    """As many ranks as there are GPUs, at most two, from the command line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    asked = ["mlp", "--data", "digits", "--epochs", "3", "--device", "cuda", "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run(
        [*command, "-m", "zoo.train", *asked, "--strategy", "fsdp"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=120,
    )
    said = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"  # of torchrun and of its ranks
    assert done.returncode == 0, said
    assert done.stdout.count('"accuracy"') == 1, said
    assert read_log(tmp_path / "run" / "log.jsonl")[0]["ranks"] == RANKS
