"""Host time of zoo's layers beside torch's: ``python tests/host_time.py [cpu|cuda] [FILE.json]``.

Small layers, whose host time is longer than what the device needs, in turn with the stock ones: medians over rounds,
and of the rounds' ratios. A round calls as many layers, each once, as in a model: one that is called again under
autocast has its parameters cast already. On a GPU it is not waited for between them. On the CPU one large layer tells
that the product itself takes as long. Exit code 1 where a ratio is over its limit.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import zoo
from zoo import ops
from zoo.layers import Linear
from zoo.machine import examine

ROUNDS = 31
ROOM = 40
"""Calls in a round on a GPU: less than its queue holds."""


class LinearGELU(Linear):
    """Both in one operator."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, activation="gelu")


def linear(width: int, features: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(width, features), Linear(width, features)


def linear_gelu(width: int, features: int) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(width, features), nn.GELU()), LinearGELU(width, features)


def mlp(width: int, features: int) -> tuple[nn.Module, nn.Module]:
    def parent() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(width, features), nn.GELU(), nn.Linear(features, width)))

    stock, mine = parent(), parent()
    zoo.patch(mine, "mlp")
    return stock, mine


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: a layer, what of it, and the ratio that is too much."""

    layer: Callable[[int, int], tuple[nn.Module, nn.Module]]
    phase: str
    limit: float
    autocast: bool = False
    shape: tuple[int, int, int] = (8, 16, 16)
    calls: int = 200


CASES = {
    "cpu": [
        Case(linear, "inference", 1.1),
        Case(linear, "forward", 1.1),
        Case(linear, "forward+backward", 1.4),
        Case(linear, "inference", 1.2, autocast=True),
        Case(linear, "forward+backward", 1.3, autocast=True),
        Case(mlp, "inference", 1.2),
        Case(mlp, "forward+backward", 1.2),
        Case(linear, "inference", 1.03, shape=(256, 2048, 1000), calls=2),
    ],
    "cuda": [
        Case(layer, phase, limit, autocast, (64, 768, 768), ROOM)
        for autocast in (False, True)
        for layer, limit in ((linear, 1.1), (linear_gelu, 0.8), (mlp, 1.0))
        for phase in ("inference", "forward", "forward+backward")
    ],
}


def microseconds(layers: list[nn.Module], x: Tensor, case: Case) -> float:
    """Of one call."""

    def call(layer: nn.Module) -> None:
        if case.phase != "forward+backward":
            layer(x)
            return
        y = layer(x.detach().requires_grad_())
        y.backward(y.detach())

    gradients = torch.no_grad() if case.phase == "inference" else torch.enable_grad()
    if x.is_cuda:
        torch.cuda.synchronize()
    with gradients, torch.autocast(x.device.type, torch.bfloat16, enabled=case.autocast):
        begin = time.perf_counter_ns()
        for layer in layers:
            call(layer)
        taken = time.perf_counter_ns() - begin
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return taken / len(layers) / 1e3


def timed(case: Case, device: str) -> tuple[float, float, float]:
    """Microseconds of the stock layer and of zoo's, and the ratio."""
    rows, width, features = case.shape
    leaf = torch.randn(rows, width, device=device).requires_grad_(case.phase != "inference")
    x = leaf * 1  # as in a model, where a layer's input was computed
    pairs = [case.layer(width, features) for _ in range(case.calls)]
    sides = [[layer.to(device) for layer in side] for side in zip(*pairs, strict=True)]
    times: list[list[float]] = [[], []]
    for turn in range(ROUNDS + 2):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(microseconds(sides[which], x, case))
    stock, mine = (t[2:] for t in times)
    return (
        statistics.median(stock),
        statistics.median(mine),
        statistics.median(b / a for a, b in zip(stock, mine, strict=True)),
    )


def main(device: str = "cpu", file: str | None = None) -> int:
    torch.set_num_threads(1)
    rows = []
    print(f"{'case':44} {'stock µs':>9} {'zoo µs':>9} {'ratio':>6} {'limit':>6}")
    for case in CASES[device]:
        stock, mine, ratio = timed(case, device)
        name = f"{case.layer.__name__} {case.shape} {case.phase}{', autocast' * case.autocast}"
        print(f"{name:44} {stock:9.1f} {mine:9.1f} {ratio:6.2f} {case.limit:6.2f}", flush=True)
        row = {"layer": case.layer.__name__, "shape": case.shape, "phase": case.phase, "autocast": case.autocast}
        rows.append({**row, "stock_us": stock, "zoo_us": mine, "ratio": ratio, "limit": case.limit})
    if file is not None:
        machine = dataclasses.asdict(examine(torch.device(device)))
        Path(file).write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row["ratio"] > row["limit"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
