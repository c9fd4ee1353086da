"""A run's settings: refused where they cannot be meant, and the same after a way through TOML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from zoo.train import TrainConfig, read_config, write_config
from zoo.train.config import FREE, differences

LEAST = {"model": "mlp", "data": "digits"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs: got 0, expected at least 1"),
        ({"epochs": 1.5}, "epochs: got 1.5, expected int"),
        ({"epochs": True}, "epochs: got True, expected int"),
        ({"lr": 0}, "lr: got 0.0, expected more than 0"),
        ({"lr": float("nan")}, "lr: got nan, expected float"),
        ({"lr": "fast"}, "lr: got 'fast', expected float"),
        ({"ema": 1}, "ema: got 1.0, expected between 0 and 1"),
        ({"label_smoothing": 1.0}, "label_smoothing: got 1.0"),
        ({"clip_grad": -1}, "clip_grad: got -1.0"),
        ({"checkpoint_every": 0}, "checkpoint_every: got 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"model": None}, "model: got None, expected str"),
        ({"options": [1]}, r"options: got \[1\]"),
        ({"schedule": "plateau"}, "unknown schedule 'plateau'; known: cosine"),
        ({"autocast": "bfloat16"}, "unknown autocast 'bfloat16'"),
        ({"on_corrupt": "skip"}, "unknown on_corrupt 'skip'"),
        ({"strategy": "pipeline"}, "unknown strategy 'pipeline'; known: ddp, fsdp, tp"),
        ({"warmup_epochs": 10}, "warmup_epochs: got 10, expected fewer than the 10 epochs"),
        ({"schedule": "none", "warmup_epochs": 1}, "has no warm-up"),
        ({"mixup": 0.2, "batch_size": 33}, "batch_size: got 33, expected an even number"),
    ],
)
def test_what_cannot_be_meant(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{**LEAST, **wrong})


def test_through_toml(tmp_path: Path) -> None:
    odd = 'a "quoted"\\path\n\t\x7f\u2028 Ü 😀'
    options = {"hidden": [64, 32], "dropout": 0.25, "on": True, "name": odd, "deep": {"er": [1]}, "x.y": 1e-7}
    config = TrainConfig(**{**LEAST, "data": odd}, options=options, ema=0.99, lr=1, checkpoint_every=3)
    write_config(config, tmp_path / "run.toml")
    assert TrainConfig(**read_config(tmp_path / "run.toml")) == config
    assert config.lr == 1.0
    assert type(config.lr) is float


def test_a_value_that_toml_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"norm: <object .*> cannot be written as TOML"):
        write_config(TrainConfig(**LEAST, options={"norm": object()}), tmp_path / "run.toml")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_config(tmp_path / "none.toml")
    file = tmp_path / "run.toml"
    file.write_text("epochs = = 3")
    with pytest.raises(ValueError, match=r"run.toml: not a TOML file"):
        read_config(file)
    file.write_text("epoch = 3")
    with pytest.raises(ValueError, match=r"unknown field of .*run.toml 'epoch'; did you mean epochs"):
        read_config(file)


def test_what_a_resumed_run_may_change() -> None:
    config = TrainConfig(**LEAST)
    changed = {"device": "cuda", "workers": 2, "checkpoint_every": 7, "keep_last": 9, "log_every": 1}
    changed |= {"tensorboard": True, "strategy": "fsdp"}
    assert set(changed) == set(FREE)
    assert differences(dataclasses.replace(config, **changed), config) == []
    assert differences(dataclasses.replace(config, seed=1, ema=0.5), config) == [
        "ema: got 0.5, the run has None",
        "seed: got 1, the run has 0",
    ]
