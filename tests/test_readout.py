"""Many numbers with one wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoo import parity
from zoo.isolation import undisturbed
from zoo.preparing import make
from zoo.readout import equalities, numbers


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket.__name__ in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
        return func(*args, **(kwargs or {}))


def test_numbers_are_what_tolist_gives() -> None:
    tensors = [torch.arange(6).reshape(2, 3), torch.tensor(True), torch.tensor(0.5), torch.empty(0), torch.ones(2, 0)]
    tensors += [torch.tensor([2.5, float("inf")]), torch.tensor(7)]
    assert numbers(tensors) == [tensor.tolist() for tensor in tensors]
    assert numbers(iter([])) == []


@pytest.mark.parametrize("equal_nan", [False, True])
def test_equalities_are_those_of_one_by_one(equal_nan: bool) -> None:
    x, nan = torch.randn(3), torch.tensor([1.0, float("nan")])
    pairs = [(x, x.clone()), (x, x + 1), (x, x[:2]), (x, x.double()), (nan, nan), (x[:0], x[:0])]
    pairs += [(torch.arange(3), torch.arange(3)), (x.reshape(1, 3), x), (nan, torch.tensor([2.0, float("nan")]))]

    def naive(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=equal_nan)

    assert equalities(pairs, equal_nan=equal_nan) == [naive(a, b) for a, b in pairs]


def test_waits_do_not_grow_with_the_model() -> None:
    """On a GPU that others use each wait takes milliseconds, and a model has hundreds of tensors."""

    def counts(depth: int) -> list[int]:
        blocks = [nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)) for _ in range(depth)]
        model = nn.Sequential(*blocks).eval()
        with Waits() as judged:
            parity(model, model, torch.randn(2, 2, 3, 3), gradients=True)
        with Waits() as run, undisturbed(model):
            model(torch.randn(2, 2, 3, 3))
        return [judged.count, run.count]

    assert counts(12) == counts(2)


def test_waits_are_counted() -> None:
    with Waits() as waits:
        bool((torch.ones(3) == 1).all())
        torch.equal(torch.ones(3), torch.ones(3))
    assert waits.count == 2


def test_making_a_model_waits_once() -> None:
    with Waits() as waits:
        model = make("resnet18", {}, device="cpu")
    assert waits.count == 0
    assert all((p != p.flatten()[0]).any() for p in model.parameters())  # none is constant
