"""How a model scales over GPUs, with torch's Linears and with zoo's, in one run.

    torchrun --standalone --nproc-per-node 4 examples/ddp_scaling.py --json scaling.json

On 1, 2, 4, ... of the GPUs that torchrun was given, `DistributedDataParallel` trains a ResNet-50 and a ViT-B in bf16
autocast, each GPU on a batch of 64 random images. Stock and custom take turns, block by block, so that both meet the
same clocks; a rate is the median over the blocks, of the slowest GPU in each. The efficiency is the rate over that of
one GPU times their number. The file is written after each model. Exit code 1 where zoo's efficiency at the largest
number is under stock's (by more than `--slack`).

Without torchrun, or with `--device cpu`, the same script runs small: one process, or gloo.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from zoo.preparing import channels_of, input_side, transform_for
from zoo.tensor_files import replacing
from zoo.train.ranks import Ranks, joined

KINDS = ("stock", "custom")


def counts(size: int) -> list[int]:
    """1, 2, 4, ... and the whole."""
    return sorted({2**power for power in range(size.bit_length()) if 2**power <= size} | {size})


def stepper(name: str, kind: str, group: Any, gpus: int, ranks: Ranks, batch: int, dtype: str) -> Callable[[], None]:
    """A step of training on this rank: forward, backward with the gradients' averages, optimizer."""
    torch.manual_seed(0)
    model = zoo.create(name, custom_linear=kind == "custom", device=ranks.device)
    side = input_side(model, transform_for(name, model, None)) or 224
    images = torch.randn(batch, channels_of(model), side, side, device=ranks.device)
    runner: nn.Module = model
    if gpus > 1:
        own = [ranks.device] if ranks.device.type == "cuda" else None
        runner = DistributedDataParallel(model, device_ids=own, process_group=group, gradient_as_bucket_view=True)
    with torch.no_grad():
        classes = model(images[:2]).shape[1]
    labels = torch.randint(classes, (batch,), device=ranks.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(ranks.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.cross_entropy(runner(images), labels)
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], steps: int, group: Any, ranks: Ranks) -> float:
    """Of a step: the mean over a block, on the slowest rank."""

    def wait() -> None:
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)

    wait()
    if group is not None:
        dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    took = torch.tensor((time.perf_counter() - begin) / steps, device=ranks.device)
    if group is not None:
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return float(took)


def measured(
    name: str, gpus: int, group: Any, ranks: Ranks, batch: int, dtype: str, blocks: int, steps: int
) -> dict[str, list[float]]:
    """Images a second of all GPUs together, by kind, one number a block."""
    step_of = {kind: stepper(name, kind, group, gpus, ranks, batch, dtype) for kind in KINDS}
    for step in step_of.values():
        seconds(step, steps, group, ranks)  # choices of kernels, buckets, clocks
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for block in range(blocks):
        for kind in KINDS if block % 2 else reversed(KINDS):
            rates[kind].append(gpus * batch / seconds(step_of[kind], steps, group, ranks))
    return rates


def rows_of(name: str, by_gpus: dict[int, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row for each number of GPUs and kind: rate, quartiles, efficiency."""
    rows = []
    for gpus, rates in by_gpus.items():
        for kind in KINDS:
            rate, alone = statistics.median(rates[kind]), statistics.median(by_gpus[1][kind])
            low, _, high = (
                statistics.quantiles(rates[kind], n=4, method="inclusive")
                if len(rates[kind]) > 1
                else (rate, rate, rate)
            )
            row = {"model": name, "gpus": gpus, "layers": kind, "images_per_second": rate, "quartiles": [low, high]}
            rows.append({**row, "efficiency": rate / (gpus * alone)})
    return rows


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "resnet50,timm/vit_base_patch16_224",
    batch: Annotated[int, typer.Option(min=1, help="Images a GPU.")] = 64,
    dtype: Annotated[str, typer.Option(help="bf16 (autocast) or f32.")] = "bf16",
    blocks: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Of a block.")] = 12,
    slack: Annotated[float, typer.Option(help="By how much zoo's efficiency may be under stock's.")] = 0.01,
    device: str = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Train on 1, 2, 4, ... GPUs with stock and custom Linears, and report rates and efficiencies."""
    if dtype not in ("bf16", "f32"):
        raise typer.BadParameter(f"dtype: got {dtype!r}, expected bf16 or f32")
    with joined(device) as ranks:
        if ranks.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        # all ranks make all groups, whether they are in them or not
        groups = {gpus: dist.new_group(list(range(gpus))) if gpus > 1 else None for gpus in counts(ranks.size)}
        rows: list[dict[str, Any]] = []
        for name in models.split(","):
            by_gpus = {}
            for gpus, group in groups.items():
                if ranks.rank < gpus:
                    by_gpus[gpus] = measured(name, gpus, group, ranks, batch, dtype, blocks, steps)
                if ranks.several:
                    dist.barrier()
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
            if ranks.leads:
                rows += rows_of(name, by_gpus)
                if json_file is not None:
                    write(rows, ranks, batch, dtype, json_file)
        failed = report(rows, ranks, batch, dtype, slack) if ranks.leads else False
    raise typer.Exit(1 if failed else 0)


def write(rows: list[dict[str, Any]], ranks: Ranks, batch: int, dtype: str, file: Path) -> None:
    on = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    facts = {"device": on, "torch": torch.__version__, "zoo": zoo.__version__, "batch": batch, "dtype": dtype}
    with replacing(file) as temporary:
        temporary.write_text(json.dumps({**facts, "ranks": ranks.size, "rows": rows}, indent=2) + "\n")


def report(rows: list[dict[str, Any]], ranks: Ranks, batch: int, dtype: str, slack: float) -> bool:
    """Print the table; whether zoo scales worse than stock anywhere."""
    table = Table("model", "GPUs", "layers", "images/s", "efficiency", title=f"batch {batch} a GPU, {dtype}")
    for row in rows:
        rate, share = f"{row['images_per_second']:,.0f}", f"{row['efficiency']:.1%}"
        table.add_row(row["model"], str(row["gpus"]), row["layers"], rate, share)
    Console().print(table)
    at_most = {(row["model"], row["layers"]): row["efficiency"] for row in rows if row["gpus"] == ranks.size}
    worse = [name for name, kind in at_most if at_most[name, "custom"] < at_most[name, "stock"] - slack]
    for name in sorted(set(worse)):
        print(f"{name}: zoo's efficiency on {ranks.size} GPUs is under stock's")
    return bool(worse)


if __name__ == "__main__":
    typer.run(main)
