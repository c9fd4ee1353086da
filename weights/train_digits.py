"""Train the `mlp` on scikit-learn's digits and write weights/mlp.digits.safetensors: the recipe of that checkpoint.

    python weights/train_digits.py

The data are the 1,797 digits of 8x8 pixels that come with scikit-learn, as 64 values in [0, 1]; 80% of each class
train, the rest measures. Seed, split and number of threads are fixed: the same machine and torch give the same file.
Prints the entry for index.toml.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import zoo

NAME = "mlp.digits"
OPTIONS = {"in_features": 64, "hidden": [256, 256], "num_classes": 10}
SEED, EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 0, 40, 64, 1e-3, 1e-2


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (1437, 64) in [0, 1], test images (360, 64), and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=SEED, stratify=labels)
    train, test, train_labels, test_labels = (torch.from_numpy(part) for part in parts)
    return train.float(), test.float(), train_labels, test_labels


def train(epochs: int = EPOCHS) -> nn.Module:
    """The trained model, in eval mode."""
    torch.manual_seed(SEED)
    images, _, labels, _ = digits()
    model = zoo.create("mlp", **OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the 360 test digits that the model names rightly."""
    _, images, _, labels = digits()
    return (model(images).argmax(1) == labels).double().mean().item()


def main() -> None:
    torch.set_num_threads(1)
    model = train()
    file = Path(__file__).with_name(f"{NAME}.safetensors")
    zoo.save_checkpoint(model, file, metadata={"dataset": "scikit-learn digits", "accuracy": accuracy(model)})
    sys.stdout.write(f'''\
["{NAME}"]
model = "mlp"
options = {{ {", ".join(f"{key} = {value}" for key, value in OPTIONS.items())} }}
file = "{file.name}"
sha256 = "{hashlib.sha256(file.read_bytes()).hexdigest()}"
dataset = "scikit-learn digits: 1,797 grey images of 8x8 pixels, as 64 values in [0, 1]"
split = "train_test_split(test_size=0.2, random_state={SEED}, stratify=labels): 1,437 train, 360 test"
recipe = {{ command = "python weights/train_digits.py", seed = {SEED}, epochs = {EPOCHS}, batch = {BATCH}, \
optimizer = "AdamW, learning rate {LEARNING_RATE}, cosine to 0, weight decay {WEIGHT_DECAY}" }}
metrics = {{ accuracy = {accuracy(model):.4f} }}
license = "MIT"
''')


if __name__ == "__main__":
    main()
