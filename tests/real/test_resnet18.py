"""A resnet18 that torchvision's own code trained on Fashion-MNIST keeps its accuracy in zoo, swapped or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zoo
from zoo.data import fashion_mnist, top1

pytestmark = pytest.mark.slow

STEPS, BATCH, RATE = 60, 128, 0.05


def images_and_labels(root: Path, *, train: bool) -> TensorDataset:
    """Normalised images (N, 3, 28, 28), the three channels equal, and labels."""
    found = fashion_mnist(root, train=train)
    return TensorDataset(
        found.data[:, None].float().div(255).sub(0.286).div(0.353).expand(-1, 3, -1, -1), found.targets
    )


@pytest.fixture(scope="module")
def stock(fashion_mnist_root: Path) -> nn.Module:
    torch.manual_seed(0)
    images, labels = images_and_labels(fashion_mnist_root, train=True).tensors
    model = torchvision.models.resnet18(num_classes=10).to(memory_format=torch.channels_last)  # faster on a CPU
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for batch in torch.randperm(len(images)).split(BATCH)[:STEPS]:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    return model.to(memory_format=torch.contiguous_format).eval()


@pytest.fixture(scope="module")
def models(stock: nn.Module) -> dict[str, nn.Module]:
    """Stock, and zoo's with its weights, loaded strictly: without and with the custom Linear."""
    found = {"stock": stock}
    for name, custom in (("zoo", False), ("custom", True)):
        found[name] = zoo.create("resnet18", num_classes=10, custom_linear=custom).eval()
        assert found[name].load_state_dict(stock.state_dict(), strict=True) == ([], [])
    return found


@pytest.fixture(scope="module")
def held_out(fashion_mnist_root: Path) -> TensorDataset:
    found = images_and_labels(fashion_mnist_root, train=False)
    assert len(found) == 10_000
    return found


def test_the_state_dict_is_torchvisions(models: dict[str, nn.Module]) -> None:
    for name in ("zoo", "custom"):
        report = zoo.check_state_dict(models[name], models["stock"])
        assert report.ok, report
    assert isinstance(models["custom"].fc, zoo.layers.Linear) and not isinstance(models["zoo"].fc, zoo.layers.Linear)


def test_accuracy_is_kept(models: dict[str, nn.Module], held_out: TensorDataset) -> None:
    logits: dict[str, list[Tensor]] = {name: [] for name in models}
    hooks = [m.register_forward_hook(lambda _, __, out, n=n: logits[n].append(out)) for n, m in models.items()]
    found = top1(models, DataLoader(held_out, batch_size=500))
    for hook in hooks:
        hook.remove()
    assert found["stock"] > 0.7, found
    expected = torch.cat(logits["stock"])
    assert torch.equal(torch.cat(logits["zoo"]), expected) and found["zoo"] == found["stock"]
    assert abs(found["custom"] - found["stock"]) <= 1 / 10_000 + 1e-9
    got = torch.cat(logits["custom"])
    best, second = expected.topk(2).values.unbind(1)
    other = got.argmax(1) != expected.argmax(1)
    assert (best - second)[other].lt(2 * (got - expected).abs().max()).all(), "a prediction changed that was not a tie"


def test_logits_and_gradients_are_within_the_rule(models: dict[str, nn.Module], held_out: TensorDataset) -> None:
    images = held_out.tensors[0][:48]
    for name in ("zoo", "custom"):
        report = zoo.parity(models[name], models["stock"], images, gradients=True)
        assert report.ok and not report.weights_differ and not report.blank, report
