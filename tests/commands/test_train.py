"""``zoo train`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from zoo.checkpoint import load
from zoo.cli import app
from zoo.commands import train as command
from zoo.train import TrainConfig, TrainReport, read_config

QUICK = ("--epochs", "1", "--batch-size", "256", "--device", "cpu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments])


def test_a_run_from_its_beginning_to_its_resume(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    result = run("mlp", "--data", "digits", "--out", folder, *QUICK, "-o", "dropout=0.1", "--custom-linear", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["ok"], report["layers"], report["steps"], report["resumed_from"]) == (True, "custom", 5, None)
    assert load(tmp_path / "run" / "final.safetensors")[2].p == 0.1
    again = run("mlp", "--data", "digits", "--out", folder, *QUICK, "-o", "dropout=0.1", "--custom-linear")
    assert again.exit_code == 1
    assert "there is a run already; resume it (--resume)" in again.stderr.replace("\n", " ")
    resumed = run("--config", f"{folder}/config.toml", "--out", folder, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "5 steps, resumed from step 5" in resumed.stdout
    assert "mlp, custom layers, on digits, on cpu" in resumed.stdout


def test_stock_beside_custom(tmp_path: Path) -> None:
    result = run("mlp", "--data", "digits", "--out", str(tmp_path / "run"), *QUICK, "--compare", "torch")
    assert result.exit_code == 0, result.output
    assert "losses of the first 5 steps are equal" in result.stdout
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "custom",
        "log.jsonl",
        "stock",
        "summary.json",
    ]


def test_every_setting_is_an_option_and_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def fake(config: TrainConfig, folder: Path, **others: Any) -> TrainReport:
        given.update(config=config, folder=folder, resume=others["resume"])
        return TrainReport("m", "d", "stock", "cpu", 1, None, 0, 0.0, 0.5, 0.5, 0.5, 1, 0, str(folder))

    monkeypatch.setattr(command, "train", fake)
    settings = {
        "weights": "w.pth",
        "size": 64,
        "epochs": 3,
        "batch_size": 32,
        "accumulate": 2,
        "optimizer": "sgd",
        "lr": 0.5,
        "weight_decay": 0.1,
        "momentum": 0.8,
        "schedule": "step",
        "warmup_epochs": 1,
        "min_lr": 0.01,
        "decay_epochs": 2,
        "decay_rate": 0.3,
        "clip_grad": 2.0,
        "label_smoothing": 0.2,
        "mixup": 0.4,
        "cutmix": 1.0,
        "ema": 0.9,
        "autocast": "bf16",
        "device": "cuda:1",
        "workers": 3,
        "seed": 7,
        "on_corrupt": "replace",
        "checkpoint_every": 11,
        "keep_last": 5,
        "log_every": 9,
        "strategy": "tp",
        "data": "fashion_mnist:/some/where",
    }
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags = ("--custom-linear", "--channels-last", "--reset-head", "--compile", "--sync-bn")
    flags += ("--grad-checkpointing", "--tensorboard")
    result = run("timm/vit_tiny_patch16_224", *words, *flags, "-o", "depth=2", "--resume")
    assert result.exit_code == 0, result.output
    whole = {**settings, "model": "timm/vit_tiny_patch16_224", "options": {"depth": 2}}
    whole |= {flag.removeprefix("--").replace("-", "_"): True for flag in flags}
    assert given["config"] == TrainConfig(**whole)
    assert set(whole) == set(TrainConfig(model="m", data="d").to_dict()) | {
        name for name, value in vars(TrainConfig(model="m", data="d")).items() if value is None
    }
    assert (given["folder"], given["resume"]) == (Path("runs/timm-vit_tiny_patch16_224"), True)

    file = tmp_path / "run.toml"
    file.write_text('model = "mlp"\ndata = "digits"\nepochs = 7\nlr = 0.25\n[options]\ndropout = 0.1\nhidden = [9]\n')
    run("--config", str(file), "--lr", "0.125", "-o", "dropout=0.5", "--out", "x")
    expected = {**read_config(file), "lr": 0.125, "options": {"dropout": 0.5, "hidden": [9]}}
    assert (given["config"], given["folder"]) == (TrainConfig(**expected), Path("x"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 1, "model: got none; name it, as zoo train mlp"),
        (["mlp"], 1, "data: got none"),
        (["mlp", "--data", "nowhere"], 1, "data 'nowhere'"),
        (["mlp", "--data", "digits", "--epochs", "0"], 1, "epochs: got 0"),
        (["mlp", "--data", "digits", "--schedule", "plateau"], 1, "unknown schedule"),
        (["mlp", "--data", "digits", "--config", "none.toml"], 1, "none.toml: there is no such file"),
        (["mlp", "--data", "digits", "--compare", "torch", "--custom-linear"], 1, "trains both"),
        (["mlp", "--data", "digits", "--compare", "jax"], 2, "Usage"),
        (["mlp", "--data", "digits", "--epochs", "many"], 2, "Usage"),
    ],
)
def test_arguments_of_the_wrong_form(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
