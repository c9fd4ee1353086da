"""Stock and custom layers, trained from the same seed on the same images in the same order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo.tensor_files import replacing
from zoo.train.config import TrainConfig
from zoo.train.log import read_log
from zoo.train.report import CompareReport, Curve
from zoo.train.run import FIRST_STEPS, Watch, train

__all__ = ["STEP_TOLERANCE", "compare"]

STEP_TOLERANCE = 1e-4
"""Of a loss in float32 over the first steps, relative; later, training magnifies rounding."""


def compare(
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    watch: Watch = lambda step, steps, text: None,
    say: Callable[[str], None] = lambda text: None,
) -> CompareReport:
    """Train with torch's Linears in ``folder/stock``, with zoo's in ``folder/custom``, and set them side by side.

    ``folder/log.jsonl`` has both curves, a line for each step that both logged, and ``folder/summary.json`` the report.
    Args and errors as those of zoo.train.train.
    """
    where = Path(folder)
    reports, curves = {}, {}
    for layers in ("stock", "custom"):
        own = dataclasses.replace(config, custom_linear=layers == "custom")

        def both(step: int, steps: int, text: str, layers: str = layers) -> None:
            done = step if layers == "stock" else steps + step
            watch(done, 2 * steps, text and f"{layers}: {text}")

        reports[layers] = train(own, where / layers, resume=resume, watch=both, say=say)
        curves[layers] = curve_of(where / layers / "log.jsonl")
    with replacing(where / "log.jsonl") as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in _joined(curves)), encoding="utf-8")
    first = [pair for pair in _pairs(curves, "steps", "losses") if pair[0] <= FIRST_STEPS]
    report = CompareReport(
        stock=reports["stock"],
        custom=reports["custom"],
        stock_curve=curves["stock"],
        custom_curve=curves["custom"],
        first_steps=len(first),
        difference=max(abs(custom - stock) / max(abs(stock), 1e-12) for _, stock, custom in first),
        tolerance=STEP_TOLERANCE if config.autocast == "none" else None,
    )
    with replacing(where / "summary.json") as temporary:
        temporary.write_text(report.to_json() + "\n", encoding="utf-8")
    return report


def curve_of(log: Path) -> Curve:
    """The losses and accuracies in the log of a run."""
    lines = read_log(log)
    losses = [(line["step"], line["loss"]) for line in lines if line.get("event") == "step"]
    accuracies = [(line["step"], line["accuracy"]) for line in lines if line.get("event") == "epoch"]
    return Curve(
        steps=tuple(step for step, _ in losses),
        losses=tuple(loss for _, loss in losses),
        evaluated=tuple(step for step, _ in accuracies),
        accuracies=tuple(accuracy for _, accuracy in accuracies),
    )


def _pairs(curves: dict[str, Curve], steps: str, values: str) -> list[tuple[int, float, float]]:
    stock, custom = (
        dict(zip(getattr(curves[layers], steps), getattr(curves[layers], values), strict=True))
        for layers in ("stock", "custom")
    )
    return [(step, stock[step], custom[step]) for step in stock if step in custom]


def _joined(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    return [
        {"event": event, "step": step, f"stock_{name}": stock, f"custom_{name}": custom}
        for event, steps, values, name in (
            ("step", "steps", "losses", "loss"),
            ("epoch", "evaluated", "accuracies", "accuracy"),
        )
        for step, stock, custom in _pairs(curves, steps, values)
    ]
