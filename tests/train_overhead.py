"""What zoo.train adds to a bare PyTorch loop, on two cores: ``python tests/train_overhead.py``; exit code 1 if over 3%.

Both train the same model with the same optimizer on the same images, which are as many as Fashion-MNIST's; the bare
loop does nothing else: it takes rows of a tensor, as fast as torch can, and logs, schedules, checks and saves nothing.
The two take turns every few steps, in one process, so that both meet the same machine; the overhead is the median of
the ratios of neighbouring blocks. Evaluations and checkpoints are in neither.

Where others use the machine, ``--cpu-time`` counts the seconds of this process's one thread instead.
"""

from __future__ import annotations

import itertools
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import zoo
from zoo import data
from zoo.train import TrainConfig, train
from zoo.train.run import FIRST_STEPS

BLOCK = 10
"""Steps of a turn."""
LIMIT = 0.03
IMAGES = 60_000
CASES = {
    "mlp, batch 256": {"batch_size": 256, "epochs": 5},
    "the same, average and clipping": {"batch_size": 256, "epochs": 5, "ema": 0.99, "clip_grad": 1.0},
}
SHOWN = {
    "mlp, batch 64": {"batch_size": 64, "epochs": 1},
    "no time, batch 256": {"options": {"hidden": [4]}, "batch_size": 256, "epochs": 5},
}
"""Steps of so little work that a few dozen microseconds are more than the limit; they are not judged."""

clock = time.process_time if "--cpu-time" in sys.argv else time.perf_counter


def write_images(folder: Path) -> None:
    """Noise in files like Fashion-MNIST's. What can be learned would end in denormal numbers, which take their time."""
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", IMAGES), ("t10k", 360)):
        pixels = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        head = struct.pack(">IIII", 0x803, count, 28, 28), struct.pack(">II", 0x801, count)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head[0] + pixels.numpy().tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head[1] + labels.numpy().tobytes())


def bare_steps(config: TrainConfig) -> Iterator[None]:
    """A loop that does nothing but train, a step at a time."""
    torch.manual_seed(0)
    model = zoo.create(config.model, num_classes=10, **config.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(config.ema or 0)
    )
    part = data.fashion_mnist(config.data.partition(":")[2], train=True)
    images, labels = part.data.unsqueeze(1).float().div_(255), part.targets
    whole = len(images) // config.batch_size * config.batch_size
    while True:
        for rows in torch.randperm(len(images))[:whole].split(config.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(images.index_select(0, rows)), labels.index_select(0, rows)).backward()
            if config.clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
            optimizer.step()
            if config.ema is not None:
                average.update_parameters(model)
            yield


def blocks(config: TrainConfig) -> tuple[list[float], list[float]]:
    """Seconds of a step of the bare loop and of zoo's, by block."""
    bare, times = bare_steps(config), ([], [])
    in_epoch = IMAGES // config.batch_size
    begun = 0.0

    def watch(step: int, steps: int, text: str) -> None:
        nonlocal begun
        now = clock()
        if step % BLOCK:
            return
        # of the block that ends here: the first steps have a line of the log each, and an epoch's end is no step
        inside = step > FIRST_STEPS + BLOCK and (step - 1) // in_epoch == (step - BLOCK - 1) // in_epoch
        if inside and step % in_epoch >= BLOCK:
            times[1].append((now - begun) / BLOCK)
        begin = clock()
        for _ in itertools.islice(bare, BLOCK):
            pass
        if inside and step % in_epoch >= BLOCK:
            times[0].append((clock() - begin) / BLOCK)
        begun = clock()

    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder, "run"), watch=watch)
    return times


def main() -> int:
    torch.set_num_threads(1 if "--cpu-time" in sys.argv else 2)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        print(f"{'case':31} {'blocks':>6} {'bare us':>8} {'added us':>8} {'overhead':>9}   quartiles")
        for name, fields in {**CASES, **SHOWN}.items():
            config = TrainConfig(model="mlp", data=f"fashion_mnist:{folder}", device="cpu", **fields)  # type: ignore[arg-type]
            plain, mine = blocks(config)
            added = statistics.median(b - a for a, b in zip(plain, mine, strict=True))
            low, middle, high = statistics.quantiles([b / a - 1 for a, b in zip(plain, mine, strict=True)], n=4)
            failed += middle > LIMIT and name in CASES
            bare_us = f"{statistics.median(plain) * 1e6:8.0f} {added * 1e6:8.0f}"
            print(f"{name:31} {len(plain):6} {bare_us} {middle:9.1%}   {low:.1%} to {high:.1%}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
