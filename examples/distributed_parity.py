"""Whether a model that several GPUs train together computes what one GPU computes.

    torchrun --standalone --nproc-per-node 2 examples/distributed_parity.py --json parity.json

All ranks take one step of a ResNet-50 and of a ViT-B with zoo's Linears, spread in each way that zoo.train knows: DDP
and FSDP2, where each rank has a part of the batch, and tensor parallel, where each has a part of the layers. The logits
and all gradients are judged by the parity rule: their error against float64 on one GPU with the whole batch, beside the
error that the stock model has on one GPU, in float32 and in bf16 autocast. Batch norms use their running statistics, as
a part of a batch has others than the whole. Exit code 1 where a tensor is further off than the rule allows.

The file is written after each row. Without torchrun, or with `--device cpu`, the same script runs small.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zoo
from zoo.judging import Measure, judge, measure
from zoo.passes import jittered
from zoo.preparing import channels_of, input_side, transform_for
from zoo.tables import columns, console
from zoo.tensor_files import replacing
from zoo.train.ranks import Ranks, joined
from zoo.train.strategies import spread, tensor_plan

STRATEGIES = ("ddp", "fsdp", "tp")
AGAIN = 4
"""More runs of stock, on images moved by half a rounding: the largest of its errors is what is honest."""
EPS = {"f32": torch.finfo(torch.float32).eps, "bf16": torch.finfo(torch.bfloat16).eps}

Values = dict[str, dict[str, Tensor]]
Measures = dict[str, dict[str, Measure]]


def step(runner: nn.Module, images: Tensor, labels: Tensor, dtype: str, parts: int = 1, part: int = 0) -> Values:
    """The logits of all images and the gradients of their mean loss, whole; a rank is given its part of the batch."""
    size = len(images) // parts
    own = slice(part * size, (part + 1) * size)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=dtype == "bf16"):
        logits = runner(images[own])
        loss = F.cross_entropy(logits, labels[own])
    loss.backward()
    logits = logits.detach().contiguous()
    if parts > 1:
        gathered = [torch.empty_like(logits) for _ in range(parts)]
        dist.all_gather(gathered, logits)
        logits = torch.cat(gathered)
    return {"logits": {"": logits}, "gradient": gradients(runner)}


def gradients(runner: nn.Module) -> dict[str, Tensor]:
    found = {name.removeprefix("module."): p.grad for name, p in runner.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def measures(values: Values, exact: Values) -> Measures:
    return {
        kind: {name: measure(tensor, exact[kind][name]) for name, tensor in named.items()}
        for kind, named in values.items()
    }


def largest(a: Measures, b: Measures) -> Measures:
    return {kind: {name: m.at_least(b[kind][name]) for name, m in named.items()} for kind, named in a.items()}


def rows_of(name: str, ranks: Ranks, batch: int, dtypes: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each dtype and way of spreading: the worst tensor of each kind, as a multiple of its limit."""
    torch.manual_seed(0)
    stock = zoo.create(name, device=ranks.device).eval()
    side = input_side(stock, transform_for(name, stock, None)) or 224
    images = torch.randn(batch * ranks.size, channels_of(stock), side, side, device=ranks.device)
    with torch.no_grad():
        classes = stock(images[:1]).shape[1]
    labels = torch.randint(classes, (len(images),), device=ranks.device)
    exact = step(copy.deepcopy(stock).double(), images.double(), labels, "f64")
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        honest = measures(step(copy.deepcopy(stock), images, labels, dtype), exact)
        for _ in range(AGAIN):
            moved = jittered(images, generator, EPS[dtype])
            honest = largest(honest, measures(step(copy.deepcopy(stock), moved, labels, dtype), exact))
        for strategy in STRATEGIES:
            row: dict[str, Any] = {"model": name, "dtype": dtype, "strategy": strategy, "ranks": ranks.size}
            if strategy == "tp" and not tensor_plan(stock):
                yield {**row, "ok": None, "reason": "no two Linears with an activation between them to split"}
                continue
            custom = copy.deepcopy(stock)
            zoo.patch(custom)
            runner = spread(custom, strategy, ranks) if ranks.several else custom
            parts = (1, 0) if strategy == "tp" else (ranks.size, ranks.rank)
            got = measures(step(runner, images, labels, dtype, *parts), exact)
            entries = [entry for kind in got for entry in judge(kind, got[kind], honest[kind])]
            worst = max(entries, key=lambda entry: entry.excess)
            row |= {"tensors": len(entries), "worst": worst.name or worst.kind, "of_limit": round(worst.excess, 3)}
            row |= {"logits_error": got["logits"][""].error, "stock_logits_error": honest["logits"][""].error}
            yield {**row, "ok": all(entry.ok for entry in entries), "reason": worst.reason}
            del custom, runner, got


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "resnet50,timm/vit_base_patch16_224",
    batch: Annotated[int, typer.Option(min=1, help="Images a GPU.")] = 8,
    dtypes: Annotated[str, typer.Option(help="Of f32, bf16 (autocast).")] = "f32,bf16",
    device: str = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Compare a step of several GPUs with the same step of one."""
    asked = dtypes.split(",")
    if not set(asked) <= set(EPS):
        raise typer.BadParameter(f"dtypes: got {dtypes!r}, expected f32, bf16 or both")
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32 in convolutions, too
    rows: list[dict[str, Any]] = []
    with joined(device) as ranks:
        on = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
        facts = {"device": on, "torch": torch.__version__, "zoo": zoo.__version__, "batch": batch, "ranks": ranks.size}
        for name in models.split(","):
            for row in rows_of(name, ranks, batch, asked):
                # each rank has whole tensors, and judges them: all must be right
                said = ranks.gathered(row)
                rows.append(next((one for one in said if one["ok"] is False), row))
                if ranks.leads and json_file is not None:
                    with replacing(json_file) as temporary:
                        temporary.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
        if ranks.leads:
            show(rows, facts)
    raise typer.Exit(1 if any(row["ok"] is False for row in rows) else 0)


def show(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    right = ("logits' error", "stock's on one", "worst of its limit")
    table = columns("model", "dtype", "way", *right, "verdict", right=right)
    for row in rows:
        cells = ["", "", ""]
        if row["ok"] is not None:
            cells = [f"{row['logits_error']:.1e}", f"{row['stock_logits_error']:.1e}", f"{row['of_limit']:.0%}"]
        verdict = {True: "right", False: f"WRONG: {row.get('worst')}:", None: "untested:"}[row["ok"]]
        said = f"{verdict} {row['reason']}".strip()
        table.add_row(row["model"], row["dtype"], row["strategy"], *cells, said)
    print(f"{facts['ranks']} ranks, {facts['device']}, {facts['batch']} images each")
    console().print(table)


if __name__ == "__main__":
    typer.run(main)
