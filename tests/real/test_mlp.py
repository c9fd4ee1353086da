"""The MLP trained with stock and with custom layers, over five seeds, on real digits: the same accuracy."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import zoo
from zoo.data import accuracy, digits

SEEDS, EPOCHS = range(5), 12


def trained(seed: int, *, custom: bool) -> float:
    """Test accuracy after training; a seed fixes the weights and the order of the data."""
    torch.manual_seed(seed)
    model = zoo.create("mlp", in_features=64, hidden=[128, 128], num_classes=10, custom_linear=custom)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(digits(train=True), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return accuracy(model, DataLoader(digits(train=False), batch_size=360))


def test_five_seeds_reach_the_same_accuracy() -> None:
    stock, custom = ([trained(seed, custom=c) for seed in SEEDS] for c in (False, True))
    print(f"stock {stock}, custom {custom}")
    assert min(stock) > 0.93 and min(custom) > 0.93
    spread = max(statistics.stdev(stock), 1 / 360)
    assert abs(statistics.mean(custom) - statistics.mean(stock)) <= spread, (stock, custom)
