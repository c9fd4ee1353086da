"""The arithmetic of Linears, counted whoever does it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.coverage import coverage
from zoo.sweep.products import LinearProducts

ROWS, IN, OUT = 6, 4, 3
PRODUCT = 2 * ROWS * IN * OUT


class Past(nn.Module):
    """Reads the weight of its Linear in the way it is told."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(IN, OUT)
        self.own = nn.Parameter(torch.randn(OUT, IN))
        self.register_buffer("mask", torch.ones(OUT, IN))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        return {
            "called": lambda: self.linear(x),
            "read": lambda: F.linear(x, weight),
            "transposed": lambda: x @ weight.t(),
            "sliced": lambda: torch.cat([F.linear(x, weight[:1]), F.linear(x, weight[1:])], -1),
            "concatenated": lambda: F.linear(x, torch.cat([weight, self.own]))[:, :OUT],
            "in double": lambda: F.linear(x.double(), weight.double()),
            "its own": lambda: F.linear(x, self.own),
            "masked": lambda: F.linear(x, weight * self.mask),
        }[self.how]()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("called", PRODUCT),
        ("read", PRODUCT),
        ("transposed", PRODUCT),
        ("sliced", PRODUCT),
        ("concatenated", 2 * PRODUCT),
        ("in double", PRODUCT),
        ("its own", 0),
        ("masked", 0),
    ],
)
def test_what_is_a_linears(how: str, expected: int, mode) -> None:
    model, x = Past(how), torch.randn(ROWS, IN)
    with mode(), LinearProducts(model) as counted:
        model(x)
    assert counted.products == expected
    assert counted.total >= PRODUCT


def test_around_coverage_it_counts_the_same() -> None:
    model, x = Past("read"), torch.randn(ROWS, IN)
    with LinearProducts(model) as counted:
        report = coverage(model, x)
    assert counted.products == report.flops == PRODUCT
    assert sum(module.flops for module in report.modules) == 0  # nothing reached the Linear's own forward


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_and_convolution(device: str) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, device=device).eval()
    x = torch.randn(2, 5, 8, device=device)
    with LinearProducts(attention) as counted:
        attention(x, x, x)
    assert counted.products == 2 * 10 * 8 * (3 * 8 + 8)
    assert counted.total == counted.products + 2 * 2 * (2 * 5 * 5 * 8)
    convolution = nn.Conv2d(3, 4, 1, device=device)
    with LinearProducts(convolution) as counted:
        convolution(torch.randn(1, 3, 5, 5, device=device))
    assert (counted.products, counted.total > 0) == (0, True)
