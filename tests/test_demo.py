from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import zoo
from zoo import demo as module
from zoo.demo import STEP_TOLERANCE, DemoReport, Speed, Training, demo, speed_of, train_side_by_side

CPU = torch.device("cpu")


REAL = {name: getattr(module, name) for name in ("check", "EPOCHS", "LEARNED")}


@pytest.fixture(scope="module")
def report() -> Iterator[DemoReport]:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield demo(device="cpu")


def shrink(patch: pytest.MonkeyPatch) -> None:
    """The demo in small: the mlp in the place of resnet50, on digits, and three epochs."""

    def check_mlp(name: str, **given: Any) -> Any:
        assert name == "resnet50"
        return REAL["check"]("mlp", **given)

    patch.setattr(module, "check", check_mlp)
    patch.setattr(module, "EPOCHS", 3)
    patch.setattr(module, "LEARNED", 0.8)


def test_demo_proves_and_trains(report: DemoReport) -> None:
    assert report.failures == ()
    assert report.ok
    assert report.check.reference == "torchvision.ops.MLP"
    assert report.check.swap is not None
    assert (report.check.swap.swapped, report.check.swap.proven) == (("0", "3", "6"), True)
    assert report.check.parity is not None
    assert {entry.kind for entry in report.check.parity.entries} == {"output", "gradient"}
    assert report.first_steps <= STEP_TOLERANCE
    assert report.stock.accuracy > 0.8
    assert len(report.stock.seconds) == 3
    assert min(report.stock.seconds + report.custom.seconds) > 0


@pytest.mark.slow
def test_the_demo_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in REAL.items():
        monkeypatch.setattr(module, name, value)
    report = demo()
    assert report.failures == ()
    assert report.check.reference == "torchvision/resnet50"
    assert report.check.state_dict.keys == 320
    assert report.check.parity is not None
    assert report.check.parity.entries[0].shape == (2, 1000)  # both photographs
    assert len(report.check.parity.entries) == 1 + 161 + 1  # output, parameters, the images
    assert report.seconds < 180


def test_demo_in_text(report: DemoReport) -> None:
    lines = str(report).splitlines()
    assert lines[-1].startswith("VERDICT: the custom Linear computes what torch's does")
    for run, label in ((report.stock, "torch (stock)"), (report.custom, "zoo (custom)")):
        row = next(line for line in lines if label in line)
        for text in (f"{run.final_loss:.5f}", f"{run.accuracy:.2%}", f"{sum(run.seconds):.2f} s"):
            assert text in row
    failed = replace(report, first_steps=1.0)
    assert str(failed).splitlines()[-1].startswith("VERDICT: FAILED: the losses part")


def test_demo_as_json(report: DemoReport) -> None:
    data = json.loads(report.to_json())
    assert data["ok"] is True
    assert data["failures"] == []
    assert data["check"]["ok"] is True
    assert data["check"]["parity"]["ok"] is True
    assert data["custom"]["accuracy"] == report.custom.accuracy
    assert data["custom"]["final_loss"] == pytest.approx(sum(report.custom.losses[-23:]) / 23)
    assert data["stock"]["seconds"] == list(report.stock.seconds)
    assert set(data["speed"]) == {"ratio", "low", "high"}


def test_training_is_what_a_plain_loop_does() -> None:
    """The naive twin: the same training, written out."""
    stock, custom = train_side_by_side(CPU, epochs=2)
    torch.manual_seed(module.SEED)
    model = zoo.create("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, labels = zoo.data.digits(train=True).tensors
    images = F.interpolate(images, (28, 28), mode="bilinear")
    F.cross_entropy(model(images[:64]), labels[:64]).backward()
    order, losses = torch.Generator().manual_seed(module.SEED), []
    for _ in range(2):
        for batch in torch.randperm(len(images), generator=order).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert stock.losses == pytest.approx(losses, rel=1e-5)
    assert custom.losses == pytest.approx(losses, rel=1e-4)
    test, answers = zoo.data.digits(train=False).tensors
    right = model(F.interpolate(test, (28, 28), mode="bilinear")).argmax(1) == answers
    assert stock.accuracy == pytest.approx(right.double().mean().item(), abs=1 / 360)


def test_digits_are_real() -> None:
    images, labels = load_digits(return_X_y=True)
    both = [zoo.data.digits(train=train).tensors for train in (True, False)]
    assert sum(len(split[0]) for split in both) == len(images) == 1797
    assert sum(int(split[1].sum()) for split in both) == int(labels.sum())


def test_custom_training_runs_the_custom_layer_and_stock_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    models, real = {}, module.create

    def keep(name: str, *, custom_linear: bool) -> torch.nn.Module:
        models[custom_linear] = real(name, custom_linear=custom_linear)
        return models[custom_linear]

    monkeypatch.setattr(module, "create", keep)
    train_side_by_side(CPU, epochs=1)
    x = torch.zeros(2, 784)
    assert zoo.coverage(models[True], x).share == 1.0
    assert zoo.coverage(models[False], x).share == 0.0


def forward_off(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight, self.bias) * 1.01


def backward_off(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, self.weight, self.bias)
    return y + 0.1 * (y - y.detach())


def not_a_number(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight, self.bias) * torch.nan


@pytest.mark.parametrize("wrong", [forward_off, backward_off, not_a_number])
def test_a_wrong_layer_is_caught_by_both_parts(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(module, "EPOCHS", 2)
    monkeypatch.setattr(zoo.layers.Linear, "forward", wrong)
    report = demo(device="cpu")
    assert not report.ok
    assert "resnet50 is not what torchvision.ops.MLP is" in report.failures
    assert any(text.startswith("the losses part in the first 20 steps") for text in report.failures)
    json.loads(report.to_json())


def test_failures_name_what_failed(report: DemoReport) -> None:
    worse = replace(report.custom, accuracy=report.stock.accuracy - 0.03)
    assert replace(report, custom=worse).failures == ("the accuracies differ by over 2%",)
    unlearned = Training("custom", report.stock.losses, 0.1, (1.0,) * 3, 2.3)
    both = replace(report, stock=replace(unlearned, layers="stock"), custom=unlearned)
    assert both.failures == ("the stock MLP did not learn the digits", "the custom MLP did not learn the digits")


def test_speed() -> None:
    assert speed_of([2.0] * 4, [1.0] * 4) == Speed(2.0, 2.0, 2.0)
    noisy = speed_of([1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 1.0, 2.0])
    assert noisy.low < 1 < noisy.high
    assert str(noisy).startswith("no difference in speed that this run could show")
    assert str(Speed(2.0, 1.9, 2.1)).startswith("custom trained 2.00 times as fast")
    assert str(Speed(0.5, 0.4, 0.6)).startswith("custom trained 2.00 times SLOWER")


def test_demo_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "check", lambda *a, **k: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        demo(device="cpu", say=said.append)
    assert said[0].startswith("resnet50")
    with pytest.raises(ValueError, match="device 'gpu'"):
        demo(device="gpu")
