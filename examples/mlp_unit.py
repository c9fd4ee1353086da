"""What the unit `mlp` adds to single Linears: a model in training as torch has it, with zoo's Linears one by one, and
with Linear, activation, Linear as one layer.

    python examples/mlp_unit.py --json mlp-unit.json

The three take turns, block by block in a random order, from the same weights and data; a speedup is the median over
the blocks, with its 95% interval. Peak memory is what a step allocates beside the model. The file is written after each
model.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zoo
from zoo.bench.model import batches_for
from zoo.bench.timing import Ratio, WallClock, finish, race
from zoo.tensor_files import replacing

MODELS = "timm/vit_base_patch16_224,timm/mixer_b16_224,timm/convnext_tiny"
KINDS = ("stock", "linear", "mlp")


@dataclass
class Row:
    model: str
    units: int
    images_per_second: dict[str, float]
    peak_bytes: dict[str, int]
    over_linear: Ratio  # of the unit
    over_stock: Ratio


def stepper(model: nn.Module, data: list[tuple[Tensor, Tensor]], dtype: str) -> Callable[[int], tuple[Tensor]]:
    """A step of training on the data's batch i, counted round."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(i: int) -> tuple[Tensor]:
        images, labels = data[i % len(data)]
        with torch.autocast(images.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)

    return step


def peak(step: Callable[[int], tuple[Tensor]], device: torch.device) -> int:
    """Bytes, 0 on a CPU."""
    step(0)  # gradients, choices of kernels
    if device.type != "cuda":
        return 0
    finish(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step(0)
    finish(device)
    return torch.cuda.max_memory_allocated(device) - before


def measured(name: str, batch: int, dtype: str, blocks: int, steps: int, device: torch.device) -> Row:
    torch.manual_seed(0)
    models = {kind: zoo.create(name, device=device) for kind in KINDS}
    for model in models.values():
        model.load_state_dict(models["stock"].state_dict())
    data = batches_for(name, models["stock"], batch, 224, device)
    models["stock"].train()
    zoo.patch(models["linear"], "linear")
    zoo.patch(models["mlp"], "linear")
    units = len(zoo.patch(models["mlp"], "mlp").swapped)
    step_of = {kind: stepper(model, data, dtype) for kind, model in models.items()}
    peaks = {kind: peak(step, device) for kind, step in step_of.items()}
    timing = race(WallClock(step_of, sets=steps, device=device), repeats=blocks)
    rates = {kind: batch * 1e6 / timing.median(kind) for kind in KINDS}
    return Row(name, units, rates, peaks, timing.speedup("mlp", over="linear"), timing.speedup("mlp", over="stock"))


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = MODELS,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="bf16 (autocast) or f32.")] = "bf16",
    blocks: Annotated[int, typer.Option(min=2, help="Of each kind.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Of a block.")] = 8,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Train models with stock Linears, with zoo's, and with zoo's units, and report rates and memory."""
    if dtype not in ("bf16", "f32"):
        raise typer.BadParameter(f"dtype: got {dtype!r}, expected bf16 or f32")
    place = torch.device(device)
    on = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    facts = {"device": on, "torch": torch.__version__, "zoo": zoo.__version__, "batch": batch, "dtype": dtype}
    table = Table(
        "model", "units", *KINDS, "over linear", "over stock", "peak", title=f"images/s, batch {batch}, {dtype}"
    )
    rows = []
    for name in models.split(","):
        row = measured(name, batch, dtype, blocks, steps, place)
        rows.append(asdict(row))
        gc.collect()
        rates = [f"{row.images_per_second[kind]:,.0f}" for kind in KINDS]
        ratios = [f"{r.value:.2f}x ({r.low:.2f}-{r.high:.2f})" for r in (row.over_linear, row.over_stock)]
        memory = " / ".join(f"{row.peak_bytes[kind] / 2**30:.2f}" for kind in KINDS) + " GiB"
        table.add_row(name, str(row.units), *rates, *ratios, memory)
        if json_file is not None:
            with replacing(json_file) as temporary:
                temporary.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
