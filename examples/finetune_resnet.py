"""Fine-tuning that survives being killed: checkpoints, and a resume that ends where the uninterrupted run ends.

    python examples/finetune_resnet.py runs/digits              # run it, kill it, run it again
    python examples/finetune_resnet.py runs/photos --weights IMAGENET1K_V1

A resnet18 that knows other classes learns the ten digits. What it knows comes from `--weights`: torchvision's names (a
download), or a file. Without, the script first trains a base on the digits 0 to 4 alone, so that all of it runs from
what is on the disk. The classifier then has the wrong shape, and `reset_head=True` says that this, and only this, may
differ; its Linear, the new one, is swapped for zoo's.

After each epoch two files are written. `epoch-N.safetensors` is the model, self-describing: `zoo.load` rebuilds it,
custom head included, from that file alone. `epoch-N.training.pt` is what else the training needs: the states of
optimizer and schedule. It is written last, under another name first, so an epoch counts only if all of it is on the
disk; older epochs are deleted after that. The order of the images depends on the epoch's number and nothing else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import zoo
from zoo.data import accuracy, digits

BATCH = 64

Split = tuple[Tensor, Tensor]


def load(*, train: bool, images: int | None, classes: int = 10) -> Split:
    """The first ``images`` digits of the first ``classes`` classes, as colour images (N, 3, 32, 32) in [0, 1]."""
    grey, labels = digits(train=train).tensors
    chosen = (labels < classes).nonzero().flatten()[:images]
    colour = F.interpolate(grey[chosen], (32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    return colour.contiguous(), labels[chosen]


def train_epoch(model: nn.Module, data: Split, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    """One pass over the images in the order of that epoch. Returns the mean loss."""
    images, labels = data
    model.train()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    losses = []
    for batch in order[: len(order) // BATCH * BATCH].split(BATCH):  # whole batches: BatchNorm fails on one image
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def train_base(path: Path, data: Split) -> None:
    """A resnet18 that tells 0 to 4 apart: what we fine-tune when no other weights are at hand."""
    torch.manual_seed(0)
    model = zoo.create("resnet18", num_classes=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loss = train_epoch(model, data, optimizer, epoch=0)
    zoo.save_checkpoint(model, path)
    print(f"trained a base on the digits 0 to 4 (mean loss {loss:.3f}): {path}", flush=True)


def save(folder: Path, epoch: int, model: nn.Module, training: dict[str, object]) -> None:
    """Keep this epoch, then delete the others."""
    zoo.save_checkpoint(model, folder / f"epoch-{epoch}.safetensors", metadata={"epoch": epoch})
    unfinished = folder / "training.tmp"
    torch.save(training, unfinished)
    os.replace(unfinished, folder / f"epoch-{epoch}.training.pt")
    for path in folder.glob("epoch-*"):
        if not path.name.startswith(f"epoch-{epoch}."):
            path.unlink()


def last_epoch(folder: Path) -> int:
    """The newest epoch that is complete, or 0."""
    names = (re.fullmatch(r"epoch-(\d+)\.training\.pt", path.name) for path in folder.iterdir())
    return max((int(name[1]) for name in names if name), default=0)


def main(
    folder: Annotated[Path, typer.Argument(help="Where checkpoints go, and are looked for.")],
    weights: Annotated[str | None, typer.Option(help="What to fine-tune: a name of weights, or a file.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    images: Annotated[int, typer.Option(min=BATCH, help="Train on so many of the 1,437 digits.")] = 704,
) -> None:
    """Fine-tune a resnet18 on digits; called again with the same folder, go on where it stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    data = load(train=True, images=images)
    done = last_epoch(folder)
    if done:
        model = zoo.load(folder / f"epoch-{done}.safetensors")
        print(f"resumed after epoch {done}", flush=True)
    else:
        base = folder / "base.safetensors"
        if weights is None and not base.exists():
            train_base(base, load(train=True, images=images, classes=5))
        torch.manual_seed(0)
        model = zoo.create("resnet18", weights=weights or base, num_classes=10, reset_head=True, custom_linear="head")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    if done:
        training = torch.load(folder / f"epoch-{done}.training.pt", weights_only=True)
        optimizer.load_state_dict(training["optimizer"])
        schedule.load_state_dict(training["schedule"])
    for epoch in range(done + 1, epochs + 1):
        loss = train_epoch(model, data, optimizer, epoch)
        schedule.step()
        save(folder, epoch, model, {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
        print(f"epoch {epoch} of {epochs}: mean loss {loss:.4f}", flush=True)
    test_images, labels = load(train=False, images=None)
    batches = list(zip(test_images.split(BATCH), labels.split(BATCH), strict=True))
    print(f"test accuracy {accuracy(model, batches):.2%}: {folder / f'epoch-{epochs}.safetensors'}")


if __name__ == "__main__":
    typer.run(main)
