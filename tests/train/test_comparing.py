"""Stock and custom side by side, and a custom layer that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zoo
from zoo.checkpoint import load
from zoo.train import CompareReport, TrainConfig, compare
from zoo.train.comparing import curve_of
from zoo.train.log import read_log

CONFIG = TrainConfig(model="mlp", data="digits", device="cpu", epochs=2, batch_size=64)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompareReport, list[tuple[int, int, str]]]:
    folder, seen = tmp_path_factory.mktemp("compare") / "both", []
    report = compare(CONFIG, folder, watch=lambda *told: seen.append(told))
    return folder, report, seen


def test_both_are_trained_alike(done: Any) -> None:
    folder, report, seen = done
    assert report.ok
    assert (report.stock.layers, report.custom.layers) == ("stock", "custom")
    assert (report.first_steps, report.difference <= 1e-4) == (20, True)
    assert abs(report.stock.accuracy - report.custom.accuracy) <= 0.02
    assert report.stock.accuracy > 0.8
    for layers, kind in (("stock", torch.nn.Linear), ("custom", zoo.layers.Linear)):
        first = load(folder / layers / "final.safetensors")[0]
        assert isinstance(first, kind) and isinstance(first, zoo.layers.Linear) == (layers == "custom")
    assert [step for step, _, _ in seen] == list(range(1, 89))
    assert {steps for _, steps, _ in seen} == {88}
    assert seen[0][2].startswith("stock: epoch 1/2") and seen[44][2].startswith("custom: epoch 1/2")


def test_both_curves_are_in_the_log_and_in_the_summary(done: Any) -> None:
    folder, report, _ = done
    lines = read_log(folder / "log.jsonl")
    for layers, curve in (("stock", report.stock_curve), ("custom", report.custom_curve)):
        assert curve == curve_of(folder / layers / "log.jsonl")
        assert [line[f"{layers}_loss"] for line in lines if line["event"] == "step"] == list(curve.losses)
        assert [line[f"{layers}_accuracy"] for line in lines if line["event"] == "epoch"] == list(curve.accuracies)
    assert report.stock_curve.evaluated == (22, 44)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads(report.to_json())
    assert summary["ok"] and summary["custom"]["accuracy"] == report.custom.accuracy
    text = str(report)
    assert f"{report.stock_curve.accuracies[0]:.2%}" in text
    assert "losses of the first 20 steps are equal" in text


def test_a_finished_comparison_is_only_read_again(done: Any) -> None:
    folder, report, _ = done
    again = compare(CONFIG, folder, resume=True)
    assert (again.stock.images, again.custom.images) == (0, 0)
    assert (again.stock_curve, again.custom_curve, again.ok) == (report.stock_curve, report.custom_curve, True)


@pytest.mark.parametrize("autocast", ["none", "bf16"])
def test_a_wrong_layer_is_found_and_with_autocast_not_judged(tmp_path: Path, autocast: str) -> None:
    right = zoo.ops.linear

    def wrong(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return right(x, *args, **options) * 1.05

    config = TrainConfig(**{**CONFIG.to_dict(), "epochs": 1, "autocast": autocast, "options": {"hidden": [32]}})
    with patch("zoo.layers.linear.linear", wrong):
        report = compare(config, tmp_path / "both")
    assert report.difference > 1e-4
    assert report.ok == (autocast == "bf16")
    assert ("part by" if autocast == "none" else "with autocast this is not judged") in str(report)
