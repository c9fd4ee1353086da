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
from zoo.train import TrainConfig, train
from zoo.train.log import read_log

GPUS = torch.cuda.device_count()
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


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=two_gpus)])
def test_split_models_compute_the_same_by_the_operator(ranks):
    """Outputs and gradients by the parity rule, and no product of torch's own among what ran."""
    for wrong in run_on(ranks, sharded.all_compared, CASES, gpus=True):
        assert not wrong, "\n".join(wrong)


def losses(folder):
    return [line["loss"] for line in read_log(folder / "log.jsonl") if line["event"] == "step"]


def trained(fields, folder):
    for strategy in ("ddp", "fsdp", "tp"):
        training.go({**fields, "strategy": strategy}, f"{folder}/{strategy}", False, 16)
        assert training.go({**fields, "strategy": strategy}, f"{folder}/{strategy}", True).resumed_from == 14


@two_gpus
@pytest.mark.parametrize("autocast", ["none", "bf16"])
def test_two_gpus_take_the_steps_of_one(tmp_path, autocast):
    """Broken off and gone on with, too."""
    fields = {**FIELDS, "autocast": autocast}
    whole = train(TrainConfig(**fields), tmp_path / "one")
    run_on(2, trained, fields, tmp_path, gpus=True)
    for strategy in ("ddp", "fsdp", "tp"):
        want = losses(tmp_path / "one")
        assert losses(tmp_path / strategy)[:20] == pytest.approx(want[:20], rel=1e-4 if autocast == "none" else 2e-2)
        accuracy = [line for line in read_log(tmp_path / strategy / "log.jsonl") if line["event"] == "epoch"][-1]
        assert accuracy["accuracy"] == pytest.approx(whole.accuracy, abs=0.02)


@two_gpus
def test_batch_norms_over_both_gpus(tmp_path):
    """With sync_bn two GPUs take the steps of one; without, each normalizes its own half."""
    fields = {**FIELDS, "model": "resnet18", "options": {}, "size": 32, "ema": None, "epochs": 1, "optimizer": "sgd"}
    train(TrainConfig(**fields), tmp_path / "one")
    for sync in (True, False):
        run_on(2, training.go, {**fields, "sync_bn": sync}, tmp_path / str(sync), gpus=True)
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
model = zoo.create({model!r}, num_classes=10, device="cuda:1")
zoo.patch(model)
zoo.patch(model, "mlp")
x = torch.randn(*((8, 784) if {model!r} == "mlp" else (8, 3, 160, 160)), device="cuda:1")
for dtype in (torch.float32, torch.bfloat16):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        model(x).square().mean().backward()
torch.cuda.synchronize(1)
assert zoo.coverage(model, x).ok
assert not torch._C._cuda_hasPrimaryContext(0), "a context on GPU 0"
assert torch.cuda.memory_reserved(0) == torch.cuda.memory_allocated(0) == 0
assert torch.cuda.memory_allocated(1) > 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torchrun(tmp_path):
    """As many ranks as there are GPUs, at most two, from the command line."""
    ranks = min(GPUS, 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    asked = ["mlp", "--data", "digits", "--epochs", "3", "--device", "cuda", "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run(
        [*command, "-m", "zoo.train", *asked, "--strategy", "fsdp"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count('"accuracy"') == 1, f"{done.stdout}\n{done.stderr}"
    assert read_log(tmp_path / "run" / "log.jsonl")[0]["ranks"] == ranks
