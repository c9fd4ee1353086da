"""The smallest real job: an MLP learns to read digits, once on torch's Linear and once on zoo's.

    python examples/mnist_mlp.py                                # the best data set that is here
    python examples/mnist_mlp.py --data fashion_mnist --epochs 10
    python examples/mnist_mlp.py --layers custom                # one of the two alone

The network is 784-256-256-10: three Linears with ReLU between them, and nothing else, so that almost all of its time is
spent in what zoo replaces. MNIST or Fashion-MNIST is used where its files are (`zoo.data` says where it looks); without
them, the 1,797 digits of 8x8 pixels that come with scikit-learn, enlarged to 28x28.

Both networks begin with equal weights and see equal batches in equal order. If the custom Linear is right, losses and
accuracies are equal but for rounding; the times then tell whether it is worth having.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torchvision.datasets import MNIST

import zoo
from zoo import data as sets


class Data(str, Enum):
    auto = "auto"
    mnist = "mnist"
    fashion_mnist = "fashion_mnist"
    digits = "digits"


class Layers(str, Enum):
    both = "both"
    stock = "stock"
    custom = "custom"


Split = tuple[Tensor, Tensor]
"""Images (N, 784) in [0, 1] and labels (N)."""


def load(choice: Data) -> tuple[str, Split, Split]:
    """The name of the data set, its training part and its test part."""
    for name, dataset in (("mnist", sets.mnist), ("fashion_mnist", sets.fashion_mnist)):
        if choice in (Data.auto, name):
            try:
                return name, flat(dataset(train=True)), flat(dataset(train=False))
            except FileNotFoundError:
                if choice == name:
                    raise
    parts = (sets.digits(train=True).tensors, sets.digits(train=False).tensors)
    train, test = ((F.interpolate(images, (28, 28), mode="bilinear").flatten(1), labels) for images, labels in parts)
    return "digits", train, test


def flat(dataset: MNIST) -> Split:
    """All images of MNIST or Fashion-MNIST at once: they fit into memory, and a loader would be slower than the MLP."""
    return dataset.data.flatten(1).float() / 255, dataset.targets


def train(model: nn.Module, data: Split, *, epochs: int, batch_size: int, say: Callable[[str], None]) -> float:
    """Train in place, and return the seconds that the steps took."""
    images, labels = data
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    F.cross_entropy(model(images[:batch_size]), labels[:batch_size]).backward()  # sets up what a first call sets up
    seconds = 0.0
    for epoch in range(1, epochs + 1):
        batches = torch.randperm(len(images), generator=order).to(images.device).split(batch_size)
        total = torch.zeros((), device=images.device)
        started = clock(images.device)
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        elapsed = clock(images.device) - started
        seconds += elapsed
        say(f"epoch {epoch}: mean loss {total.item() / len(batches):.4f}, {elapsed:.2f} s")
    return seconds


def clock(device: torch.device) -> float:
    """The time, when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(
    data: Data = Data.auto,
    layers: Layers = Layers.both,
    epochs: Annotated[int | None, typer.Option(min=1, help="By default 4, and 20 of the few digits.")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 128,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train the MLP with stock and custom Linears, and compare loss, accuracy and time."""
    name, train_set, test_set = load(data)
    train_set, test_set = (tuple(part.to(device) for part in split) for split in (train_set, test_set))
    print(f"{name}: {len(train_set[0]):,} images to train, {len(test_set[0]):,} to test, on {device}")
    epochs = epochs or (20 if name == "digits" else 4)
    for kind in ("stock", "custom") if layers is Layers.both else (layers.value,):
        torch.manual_seed(0)
        model = zoo.create("mlp", custom_linear=kind == "custom").to(device)
        print(f"\n{kind} Linears")
        seconds = train(model, train_set, epochs=epochs, batch_size=batch_size, say=print)
        accuracy = sets.accuracy(model, [test_set])
        print(f"{kind}: test accuracy {accuracy:.2%}, trained in {seconds:.2f} s")


if __name__ == "__main__":
    typer.run(main)
