from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from zoo.commands.accuracy import AccuracyReport, Grey, _Watch, compare


def run(name: str, **given: Any) -> AccuracyReport:
    usual = {"data": "digits", "weights": None, "limit": None, "batch_size": 64, "size": None, "device": "cpu"}
    return compare(name, **{**usual, "options": {}, **given})


def test_trained_mlp_on_digits() -> None:
    report = run("mlp", weights="mlp.digits", batch_size=100)
    images, labels = zoo.data.digits(train=False).tensors
    stated = (zoo.create("mlp", weights="mlp.digits").eval()(images).argmax(1) == labels).double().mean().item()
    assert report.ok
    assert report.stock_top1 == report.custom_top1 == pytest.approx(stated)
    assert (report.images, report.changed, report.unexplained) == (360, 0, 0)
    assert report.swap.swapped == ("0", "3", "6")
    assert min(report.stock_seconds, report.custom_seconds) > 0
    text = str(report)
    assert "mlp, weights mlp.digits, on 360 images of digits, on cpu" in text
    assert f"{stated:.2%}" in text
    assert text.endswith("parity holds: every prediction is the same")
    data = json.loads(report.to_json())
    assert (data["ok"], data["parity"]["ok"], data["swap"]["ok"]) == (True, True, True)


def test_grey_images_fit_other_models() -> None:
    report = run("resnet18", limit=24, batch_size=12, size=32)
    assert (report.ok, report.images) == (True, 24)


def test_limit_takes_from_all_of_the_set() -> None:
    """In a folder, one class comes after the other; the first few would be of one class."""
    seen: list[int] = []
    real = zoo.commands.accuracy.top1
    with pytest.MonkeyPatch.context() as patch:

        def keep(models: Any, loader: Any, **given: Any) -> Any:
            seen.extend(loader.dataset.indices)
            return real(models, loader, **given)

        patch.setattr("zoo.commands.accuracy.top1", keep)
        assert run("mlp", weights="mlp.digits", limit=10).images == 10
    assert seen == [i * 36 for i in range(10)]


def test_folder_of_photographs(tmp_path: Path) -> None:
    for index, photo in enumerate(zoo.data.photos().values()):
        (tmp_path / str(index)).mkdir()
        photo.save(tmp_path / str(index) / "photo.png")
    torch.manual_seed(0)
    model = zoo.create("resnet18", num_classes=2)
    path = tmp_path.parent / "two.safetensors"
    zoo.save_checkpoint(model, path)
    report = run("resnet18", data=str(tmp_path), weights=str(path), options={"num_classes": 2})
    assert report.ok
    transform = zoo.data.eval_transform("resnet18")
    images = torch.stack([transform(photo) for photo in zoo.data.photos().values()])
    with torch.no_grad():
        right = model.eval()(images).argmax(1) == torch.tensor([0, 1])
    assert report.stock_top1 == right.double().mean().item()


def test_fashion_mnist(fashion_mnist_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_DATA", str(fashion_mnist_root))
    report = run("mlp", data="fashion_mnist", limit=100)
    assert (report.ok, report.images, report.data) == (True, 100, "fashion_mnist")
    torch.manual_seed(0)
    images = zoo.data.fashion_mnist(train=False)
    model = zoo.preparing.make("mlp", {}, device="cpu").eval()
    pixels = images.data[::100].float() / 255
    right = model(pixels.flatten(1)).argmax(1) == images.targets[::100]
    assert report.stock_top1 == pytest.approx(right.double().mean().item())


@pytest.mark.parametrize("factor", [1.01, -1.0, float("nan")])
def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setattr(zoo.layers.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * factor)
    report = run("mlp", weights="mlp.digits")
    assert not report.ok
    assert str(report).splitlines()[-1].startswith("parity does NOT hold")
    json.loads(report.to_json())


def test_a_layer_wrong_beyond_the_first_images_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if len(x) <= 8 else y.flip(-1)

    monkeypatch.setattr(zoo.layers.Linear, "forward", wrong)
    report = run("mlp", weights="mlp.digits")
    assert report.parity.ok
    assert report.unexplained > 100
    assert not report.ok
    assert f"{report.changed} of 360 predictions differ, {report.unexplained} by more than rounding" in str(report)


class Fixed(nn.Module):
    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_only_a_tie_may_change() -> None:
    stock = Fixed([[1.0, 0.0], [0.5, 0.49], [0.0, 1.0], [0.5, 0.49]])
    custom = Fixed([[1.0, 0.0], [0.49, 0.5], [1.0, 0.0], [0.5, 0.49]])
    watch = _Watch(tie=0.02)
    with watch.on(stock, custom):
        for model in (stock, custom):
            model(torch.zeros(4))
    assert (watch.changed, watch.unexplained) == (2, 1)
    assert not stock._forward_hooks
    assert not stock._forward_pre_hooks
    broken = Fixed([[float("nan")] * 2] * 4)
    watch = _Watch(tie=0.02)
    with watch.on(broken, stock):
        for model in (broken, stock):
            model(torch.zeros(4))
    assert watch.unexplained == watch.changed > 0


def test_grey_images() -> None:
    digits = zoo.data.digits(train=False)
    image, label = digits[5]
    as_is, same = Grey(digits, side=None, channels=1)[5]
    assert torch.equal(as_is, image)
    assert same == int(label)
    large, _ = Grey(digits, side=28, channels=3)[5]
    assert large.shape == (3, 28, 28)
    assert torch.equal(large[0], large[2])
    assert torch.equal(large[:1], F.interpolate(image[None], (28, 28), mode="bilinear")[0])


def test_data_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'nowhere'.*digits"):
        run("mlp", data="nowhere")
    with pytest.raises(ValueError, match="zoo check mlp"):
        run("mlp", data="photos")
    with pytest.raises(ValueError, match="--size"):
        run("mlp", data=str(tmp_path), size=8)
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="FashionMNIST"):
        run("mlp", data="fashion_mnist")
