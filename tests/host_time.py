"""Host time of a patched Linear beside nn.Linear's, on the CPU: ``python tests/host_time.py``; exit code 1 if too long.

Interleaved, medians of the ratio over rounds. With small layers it is the host's time that is measured; the large one
tells that the product itself takes as long.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from zoo.layers import Linear

ROUNDS = 25


def microseconds(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / calls / 1e3


def forward_backward(layer: nn.Linear, x: Tensor) -> None:
    layer(x).sum().backward()
    layer.weight.grad = layer.bias.grad = None


def inference(layer: nn.Linear, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    print(f"{'case':34} {'stock µs':>9} {'zoo µs':>9} {'ratio':>6} {'limit':>6}")
    for shape, run, calls, limit in (
        ((1, 8, 8), inference, 1000, 1.4),
        ((1, 8, 8), forward_backward, 300, 1.4),
        ((256, 2048, 1000), inference, 2, 1.03),
    ):
        rows, width, features = shape
        x = torch.randn(rows, width)
        layers = [nn.Linear(width, features), Linear(width, features)]
        layers[1].load_state_dict(layers[0].state_dict())
        times: list[list[float]] = [[], []]
        for turn in range(ROUNDS + 2):
            for which in (0, 1) if turn % 2 else (1, 0):
                times[which].append(microseconds(partial(run, layers[which], x), calls))
        stock, mine = (t[2:] for t in times)
        ratio = statistics.median(b / a for a, b in zip(stock, mine, strict=True))
        failed += ratio > limit
        name = f"{shape} {run.__name__.replace('_', ' + ')}"
        print(f"{name:34} {statistics.median(stock):9.1f} {statistics.median(mine):9.1f} {ratio:6.2f} {limit:6.2f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
