"""The training loop on a GPU, by the code of the CPU: it learns, resumes and compares."""

from pathlib import Path

import pytest
import torch

import zoo
from zoo.tensor_files import on_host
from zoo.train import TrainConfig, compare, train
from zoo.train.run import FIRST_STEPS

CONFIG = {"model": "mlp", "data": "digits", "device": "cuda", "epochs": 3, "batch_size": 128, "custom_linear": True}


@pytest.mark.parametrize("autocast", ["none", "bf16", "fp16"])
def test_a_run_broken_off_goes_on(tmp_path: Path, autocast: str) -> None:
    config = TrainConfig(**CONFIG, options={"dropout": 0.1}, autocast=autocast, ema=0.8, checkpoint_every=5)
    whole = train(config, tmp_path / "whole")

    def stop(step: int, steps: int, text: str) -> None:
        if step == 17:
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        train(config, tmp_path / "broken", watch=stop)
    resumed = train(config, tmp_path / "broken", resume=True)
    assert (resumed.resumed_from, resumed.steps) == (15, whole.steps)
    assert whole.accuracy > 0.8
    # a GPU's sums may come in another order
    assert abs(resumed.accuracy - whole.accuracy) <= 0.02
    assert resumed.loss == pytest.approx(whole.loss, rel=1e-2)
    assert next(zoo.load(tmp_path / "broken" / "best.safetensors").parameters()).device.type == "cpu"


def test_random_numbers_of_the_gpu_are_kept() -> None:
    from zoo.train.randomness import rng_state, seeded, set_rng_state

    device = torch.device("cuda")
    state = rng_state(device)
    expected = torch.rand(3, device=device)
    with seeded(1, 2, 3):
        pass
    set_rng_state(state, device)
    assert torch.equal(torch.rand(3, device=device), expected)


def test_stock_and_custom_begin_alike(tmp_path: Path) -> None:
    report = compare(TrainConfig(**{**CONFIG, "custom_linear": False}), tmp_path / "both")
    report.raise_for_failure()
    assert abs(report.stock.accuracy - report.custom.accuracy) <= 0.03


def test_small_images_lie_on_the_gpu_and_are_the_same_as_on_the_host() -> None:
    from zoo.train.data import open_data, training_batches

    config = TrainConfig(**CONFIG)
    batches = {}
    for device in ("cpu", "cuda"):
        images = open_data("digits").train(zoo.create("mlp", device=device), config)
        found = list(training_batches(images, config, start=0, steps_per_epoch=11))
        assert (
            {batch.images.device.type for batch in found} == {batch.labels.device.type for batch in found} == {device}
        )
        batches[device] = found
    for host, here in zip(batches["cpu"], batches["cuda"], strict=True):
        assert torch.equal(host.images, here.images.cpu()) and torch.equal(host.labels, here.labels.cpu())


@pytest.mark.parametrize("model", ["mlp", "timm/test_vit"])
def test_a_step_does_not_wait_for_the_gpu(tmp_path: Path, model: str) -> None:
    """Between two lines of the log: what is in the queue of a GPU is the work of steps to come."""
    fields = {"log_every": 1000, "ema": 0.9, "clip_grad": 1.0, "warmup_epochs": 1, "autocast": "bf16"}

    def watched(step: int, steps: int, text: str) -> None:
        torch.cuda.set_sync_debug_mode("error" if FIRST_STEPS < step < 32 else "default")

    try:
        train(TrainConfig(**{**CONFIG, **fields, "model": model, "batch_size": 32}), tmp_path / "run", watch=watched)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_saved_is_what_is_on_the_gpu(tmp_path: Path) -> None:
    """Small tensors and large ones, of any strides."""
    tensors = [
        torch.randn(300, 400, device="cuda").t(),
        torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        torch.randn(2048, 1024, device="cuda"),
        torch.arange(5, device="cuda"),
        torch.ones(3),
    ]
    for tensor, here in zip(tensors, on_host(tensors), strict=True):
        assert here.device.type == "cpu" and here.stride() == tensor.stride() and torch.equal(here, tensor.cpu())
