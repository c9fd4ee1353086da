"""Models on the meta device whose constructors need values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo import registry
from zoo.commands.info import describe
from zoo.meta_device import build_on_meta, held_tensors, without_values
from zoo.sweep.examining import examine
from zoo.sweep.rows import Task


def depths() -> list[int]:
    """As timm's RegNets find theirs."""
    return torch.unique(torch.tensor([2, 3, 3]), return_counts=True)[1].tolist()


def rates() -> list[float]:
    """As timm's drop paths find theirs."""
    return [rate.item() for rate in torch.linspace(0, 0.5, 2)]


def drawn() -> list[float]:
    """What no rule of given values foresees."""
    return [0.1 * float(torch.rand(()).item() < 2), 0.5]


class Needs(nn.Module):
    """Reads values while it is built; it has a buffer, a tie, and tensors outside of both."""

    values: Callable[[], list[float]]

    def __init__(self, *, num_classes: int = 4, width: int = 5) -> None:
        super().__init__()
        self.rates = type(self).values()
        self.conv, self.drop = nn.Conv2d(3, width, 3), nn.Dropout(self.rates[0] / 10)
        self.inner, self.fc = nn.Linear(width, width, bias=False), nn.Linear(width, num_classes)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.inner.weight
        self.register_buffer("steps", torch.arange(float(width)))
        self.kept, self.scales = torch.tensor([1.0]), {"one": [torch.full((1,), 2.0)]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.conv(x)).relu().mean((-1, -2)) + self.steps
        return self.fc(self.again(self.inner(x)) * self.kept * self.scales["one"][0])


@pytest.fixture(params=[depths, rates, drawn])
def needs(request: pytest.FixtureRequest) -> Iterator[type[Needs]]:
    needs = type("Needs", (Needs,), {"values": staticmethod(request.param)})
    registry.register_model("needs")(needs)
    yield needs
    registry._builders.pop("needs")


def test_they_are_built_without_values(needs: type[Needs]) -> None:
    with torch.device("meta"), pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        needs()
    model = zoo.create("needs", device="meta", num_classes=7)
    assert type(model) is needs and model.rates == zoo.create("needs").rates  # type: ignore[attr-defined]
    assert len(held_tensors(model)) == 8 and all(tensor.is_meta for tensor in held_tensors(model))
    assert model.again.weight is model.inner.weight and model.fc.weight.shape == (7, 5)  # type: ignore[union-attr]
    assert list(model.state_dict()) == list(zoo.create("needs").state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.device("meta"):
        assert zoo.create("needs").fc.weight.is_meta  # type: ignore[union-attr]


def test_random_numbers_go_on(needs: type[Needs]) -> None:
    before = torch.get_rng_state()
    zoo.create("needs", device="meta")
    assert torch.equal(torch.get_rng_state(), before)


def test_their_files_load(needs: type[Needs], tmp_path: Path) -> None:
    model = zoo.create("needs", custom_linear=True)
    path = zoo.save_checkpoint(model, tmp_path / "a.safetensors")
    loaded = zoo.load(path)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_they_are_described_and_swept(needs: type[Needs]) -> None:
    info = describe("needs", options={})
    assert (info.parameters, info.swapped) == (5 * 27 + 5 + 25 + 24, ("inner", "fc", "again"))
    for on in ("meta", "data"):
        row = examine(Task("needs", on=on, small=True))
        assert row.ok, row
        assert (row.on, row.parameters, row.custom_flops) == (on, info.parameters, 2 * (25 + 25 + 20))


def test_other_errors_are_raised_at_once() -> None:
    calls = []

    def build() -> nn.Module:
        calls.append(torch.get_default_device().type)
        raise ValueError("no such width of a metaformer")

    with torch.device("meta"), pytest.raises(ValueError, match="no such width"):
        build_on_meta(build)
    assert calls == ["meta"]


def test_an_error_may_be_its_own_cause() -> None:
    def build() -> nn.Module:
        error = ValueError("no such width")
        raise error from error

    with torch.device("meta"), pytest.raises(ValueError, match="no such width"):
        build_on_meta(build)


def test_builds_that_fail_draw_no_random_numbers() -> None:
    def build() -> nn.Module:
        torch.rand(3, device="cpu")
        return nn.Dropout(float(torch.rand(()).item()))

    before = torch.get_rng_state()
    with torch.device("meta"):
        build_on_meta(build)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_copied_is_as_it_was_built() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.lock, self.kept = nn.Linear(2, 2), threading.Lock(), torch.ones(2, device="cpu")

    with torch.device("meta"):
        model = build_on_meta(Locked)
    assert model.fc.weight.is_meta and not model.kept.is_meta  # type: ignore[union-attr]


def test_what_modules_hold() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    model.kept = {"a": [torch.ones(1), (torch.ones(2), 3)], 1: None}
    model.kept["itself"] = model.kept
    model.again = [model.kept["a"], model[0].weight]
    assert len(held_tensors(model)) == 6
    copied = without_values(model)
    assert copied.kept["itself"] is copied.kept and copied.again[1] is copied[0].weight
    assert copied.kept["a"][1][0].is_meta and not model.kept["a"][1][0].is_meta


def test_what_no_device_can_build_says_so_itself() -> None:
    def build() -> nn.Module:
        if torch.get_default_device().type != "meta":
            raise ValueError("depth 0")
        return nn.Linear(2, int(torch.rand(()).item()))

    with torch.device("meta"), pytest.raises(ValueError, match="depth 0"):
        build_on_meta(build)
    assert torch.get_default_device().type == "cpu"


def test_a_copy_without_values_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].requires_grad_(False)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0])
    model(torch.randn(3, 2))  # the weight is a result now, which deepcopy refuses
    copied = without_values(model)
    assert all(tensor.is_meta for tensor in held_tensors(copied))
    for one, other in zip(copied.parameters(), model.parameters(), strict=True):
        assert (one.shape, one.requires_grad) == (other.shape, other.requires_grad)
    assert not any(tensor.is_meta for tensor in held_tensors(model))
    assert list(copied.state_dict()) == list(model.state_dict())
