"""What zoo.train adds to a bare PyTorch loop, on two cores: ``python tests/train_overhead.py``; exit code 1 if over 3%.

On a machine that others use as well, ``--cpu-time`` counts the seconds of this process's one thread instead.

Both train the same model with the same optimizer on as many batches of the same images; the bare loop does nothing
else: it takes rows of a tensor, and logs, schedules, checks and saves nothing. Evaluations and checkpoints are outside
of both times. What the loop adds to a step does not depend on the model, so it is measured with one that takes next to
no time, and set against a step of each case; the ratio of both loops, measured, says the same with the machine's noise.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

import zoo
from zoo import data
from zoo.preparing import resized
from zoo.train import TrainConfig, train

ROUNDS = 9
LIMIT = 0.03
CASES = {
    "mlp, batch 256": {"model": "mlp", "batch_size": 256, "epochs": 30},
    "resnet18 at 8x8, batch 128": {"model": "resnet18", "batch_size": 128, "epochs": 1},
}


clock = time.process_time if "--cpu-time" in sys.argv else time.perf_counter


def bare(config: TrainConfig) -> float:
    """Seconds of a loop that does nothing but train."""
    torch.manual_seed(0)
    model = zoo.create(config.model, num_classes=10, **config.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    images, labels = data.digits(train=True).tensors
    images = resized(images, 28) if config.model == "mlp" else images.expand(-1, 3, -1, -1).contiguous()
    whole = len(images) // config.batch_size * config.batch_size
    begin = clock()
    for _ in range(config.epochs):
        for rows in torch.randperm(len(images))[:whole].split(config.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return clock() - begin


def by_zoo(config: TrainConfig) -> float:
    with tempfile.TemporaryDirectory() as folder, patch("time.perf_counter", clock):
        return train(config, Path(folder, "run")).seconds


def a_step(config: TrainConfig, run: Callable[[TrainConfig], float]) -> float:
    return run(config) / (config.epochs * (1437 // config.batch_size))


def alternating(config: TrainConfig, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a step of the bare loop and of zoo's, by round; the first round warms up."""
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(a_step(config, (bare, by_zoo)[which]))
    return times[0][1:], times[1][1:]


def main() -> int:
    torch.set_num_threads(1 if "--cpu-time" in sys.argv else 2)
    tiny = TrainConfig(model="mlp", data="digits", device="cpu", batch_size=256, epochs=60, options={"hidden": [4]})
    plain, mine = alternating(tiny, ROUNDS)
    added = statistics.median(b - a for a, b in zip(plain, mine, strict=True))
    print(f"the loop adds {added * 1e6:.0f} us to a step, by a model that takes no time")
    print(f"{'case':28} {'bare ms':>8} {'overhead':>9}   {'both measured':>14}   quartiles")
    failed = 0
    for name, fields in CASES.items():
        config = TrainConfig(data="digits", device="cpu", **fields)  # type: ignore[arg-type]
        plain, mine = alternating(config, ROUNDS)
        step, ratios = statistics.median(plain), [b / a - 1 for a, b in zip(plain, mine, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        failed += added / step > LIMIT
        print(f"{name:28} {step * 1e3:8.2f} {added / step:9.1%}   {middle:14.1%}   {low:.1%} to {high:.1%}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
