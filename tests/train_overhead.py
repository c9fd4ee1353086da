"""What zoo.train adds to a bare PyTorch loop, on two cores: ``python tests/train_overhead.py``; exit code 1 if over 3%.

On a machine that others use as well, ``--cpu-time`` counts the seconds of this process's one thread instead.

Both train the same model with the same optimizer on as many batches of the same images, which are as many as
Fashion-MNIST's; the bare loop does nothing else: it takes rows of a tensor, as fast as torch can, and logs, schedules,
checks and saves nothing. Evaluations and checkpoints are outside of both times. The two take turns; the overhead is the
median of the ratios, and it fails where it is surely over the limit: where three ratios in four are.

What the loop adds to a step does not depend on the model, so it is also measured with one that takes next to no time.
"""

from __future__ import annotations

import statistics
import struct
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
IMAGES = 60_000
CASES = {
    "mlp, batch 256": {"model": "mlp", "batch_size": 256},
    "mlp, batch 64": {"model": "mlp", "batch_size": 64},
    "resnet18 at 8x8, batch 128": {"model": "resnet18", "batch_size": 128, "data": "digits"},
}
NO_TIME = {"model": "mlp", "batch_size": 256, "options": {"hidden": [4]}}


clock = time.process_time if "--cpu-time" in sys.argv else time.perf_counter


def write_images(folder: Path) -> None:
    """The digits over and over, as files like Fashion-MNIST's."""
    for name, train_part, count in (("train", True, IMAGES), ("t10k", False, 360)):
        images, labels = data.digits(train=train_part).tensors
        rows = torch.arange(count) % len(images)
        pixels = resized(images, 28).mul(255).round().to(torch.uint8)[rows]
        head = struct.pack(">IIII", 0x803, count, 28, 28), struct.pack(">II", 0x801, count)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head[0] + pixels.numpy().tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head[1] + labels[rows].to(torch.uint8).numpy().tobytes())


def images_of(config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    if config.data == "digits":
        images, labels = data.digits(train=True).tensors
        return images.expand(-1, 3, -1, -1).contiguous(), labels
    part = data.fashion_mnist(config.data.partition(":")[2], train=True)
    return part.data.unsqueeze(1).float().div_(255), part.targets


def bare(config: TrainConfig) -> float:
    """Seconds of a step, in a loop that does nothing but train."""
    torch.manual_seed(0)
    model = zoo.create(config.model, num_classes=10, **config.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    images, labels = images_of(config)
    steps = len(images) // config.batch_size
    begin = clock()
    for _ in range(config.epochs):
        for rows in torch.randperm(len(images))[: steps * config.batch_size].split(config.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(images.index_select(0, rows)), labels.index_select(0, rows)).backward()
            optimizer.step()
    return (clock() - begin) / (steps * config.epochs)


def by_zoo(config: TrainConfig) -> float:
    with tempfile.TemporaryDirectory() as folder, patch("time.perf_counter", clock):
        report = train(config, Path(folder, "run"))
    return report.seconds / report.steps


def alternating(config: TrainConfig, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a step of the bare loop and of zoo's, by round; the first round warms up."""
    runs: tuple[Callable[[TrainConfig], float], ...] = (bare, by_zoo)
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(runs[which](config))
    return times[0][1:], times[1][1:]


def main() -> int:
    torch.set_num_threads(1 if "--cpu-time" in sys.argv else 2)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        common = {"data": f"fashion_mnist:{folder}", "device": "cpu", "epochs": 1}
        plain, mine = alternating(TrainConfig(**{**common, **NO_TIME}), ROUNDS)  # type: ignore[arg-type]
        added = statistics.median(b - a for a, b in zip(plain, mine, strict=True))
        print(f"the loop adds {added * 1e6:.0f} us to a step, by a model that takes no time")
        print(f"{'case':28} {'bare ms':>8} {'added':>7} {'overhead':>9}   quartiles")
        for name, fields in CASES.items():
            plain, mine = alternating(TrainConfig(**{**common, **fields}), ROUNDS)  # type: ignore[arg-type]
            step, ratios = statistics.median(plain), [b / a - 1 for a, b in zip(plain, mine, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            failed += low > LIMIT
            print(f"{name:28} {step * 1e3:8.2f} {added / step:7.1%} {middle:9.1%}   {low:.1%} to {high:.1%}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
