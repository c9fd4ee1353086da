"""FLOPs counted: torch's own formulas, those that it lacks, and zoo's operators as torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zoo import ops
from zoo.flops import FlopCounter


def count(run: Callable[[], object]) -> int:
    with FlopCounter() as counter:
        run()
    return counter.total


R = torch.randn
BACKWARD = torch.ops.zoo.linear_backward
MLP_BACKWARD = torch.ops.zoo.mlp_backward


@pytest.mark.parametrize(
    ("zoos", "torchs"),
    [
        (lambda: ops.linear(R(2, 5, 4), R(3, 4), R(3)), lambda: F.linear(R(2, 5, 4), R(3, 4), R(3))),
        (lambda: ops.linear(R(4), R(3, 4)), lambda: F.linear(R(4), R(3, 4))),
        (lambda: ops.linear(R(2, 4), R(3, 4), R(3), activation="gelu"), lambda: F.linear(R(2, 4), R(3, 4), R(3))),
        (lambda: ops.linear_input_grad(R(2, 5, 3), R(3, 4)), lambda: R(2, 5, 3) @ R(3, 4)),
        (lambda: ops.linear_weight_grad(R(10, 3), R(10, 4)), lambda: R(3, 10) @ R(10, 4)),
        (
            lambda: BACKWARD(R(5, 3), None, R(5, 4), R(3, 4), "none", True, True, True)[0],
            lambda: (R(5, 3) @ R(3, 4), R(3, 5) @ R(5, 4))[0],
        ),
        (lambda: BACKWARD(R(5, 3), None, None, R(3, 4), "none", True, False, True)[0], lambda: R(5, 3) @ R(3, 4)),
        (lambda: BACKWARD(R(5, 3), None, R(5, 4), None, "none", False, True, True)[1], lambda: R(3, 5) @ R(5, 4)),
        (
            lambda: ops.mlp(R(2, 5, 4), R(6, 4), R(6), R(3, 6), None, activation="gelu"),
            lambda: F.linear(F.linear(R(2, 5, 4), R(6, 4)), R(3, 6)),
        ),
        (
            lambda: MLP_BACKWARD(
                R(5, 3), R(5, 6), R(5, 6), R(5, 4), R(6, 4), R(3, 6), "gelu", True, True, True, True, True
            )[0],
            lambda: (R(5, 3) @ R(3, 6), R(3, 5) @ R(5, 6), R(5, 6) @ R(6, 4), R(6, 5) @ R(5, 4))[0],
        ),
        (
            lambda: MLP_BACKWARD(R(5, 3), R(5, 6), None, None, None, None, "gelu", False, False, False, True, True)[0],
            lambda: R(3, 5) @ R(5, 6),
        ),
        (
            lambda: MLP_BACKWARD(R(5, 3), None, R(5, 6), None, None, R(3, 6), "gelu", False, False, True, False, True)[
                0
            ],
            lambda: R(5, 3) @ R(3, 6),
        ),
        (lambda: ops.matmul(R(2, 5, 4), R(2, 4, 3)), lambda: R(2, 5, 4) @ R(2, 4, 3)),
        (lambda: ops.matmul(R(5, 4), R(4)), lambda: R(5, 4) @ R(4)),
    ],
)
def test_zoos_operators_count_as_torchs(zoos: Callable[[], Tensor], torchs: Callable[[], Tensor]) -> None:
    assert count(zoos) == count(torchs) > 0


def test_forward_and_backward_of_a_linear() -> None:
    def run(linear: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: linear(R(6, 4).requires_grad_(), R(3, 4).requires_grad_(), R(3)).sum().backward()

    assert count(run(ops.linear)) == count(run(F.linear)) == 3 * 2 * 6 * 4 * 3


def test_it_counts_what_torchs_counter_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(2 * 49, 5))

    def run() -> None:
        model(R(2, 3, 8, 8)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        run()
    assert count(run) == counter.get_total_flops() > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention(device: str) -> None:
    q, k, v = R(2, 3, 5, 8, device=device), R(2, 3, 7, 8, device=device), R(2, 3, 7, 8, device=device)
    assert count(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * 2 * 3 * 5 * 7 * (8 + 8)


@pytest.mark.parametrize("masked", [False, True])
def test_the_encoders_fast_path_counts_as_the_slow_one(masked: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
        x, mask = R(2, 3, 8), torch.tensor([[False, False, masked], [False] * 3])
        with torch.no_grad():
            fast = count(lambda: model(x, src_key_padding_mask=mask))
        lengths = [2, 3] if masked else [3, 3]
        per_row = 2 * (3 * 8 * 8 + 8 * 8 + 2 * 8 * 16)
        assert fast == 2 * sum(n * per_row + 4 * n * n * 8 for n in lengths)
        if not masked:
            assert fast == count(lambda: model(x))


def test_multi_head_attentions_fast_path_counts_as_the_slow_one() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), R(2, 3, 8)
    slow = count(lambda: model(x, x, x))
    with torch.no_grad():
        assert count(lambda: model(x, x, x)) == slow == 2 * (3 * (2 * 4 * 8 * 8) + 4 * 3 * 3 * 8)


def test_vectors_and_recurrent_networks() -> None:
    assert count(lambda: R(5, 4) @ R(4)) == count(lambda: torch.addmv(R(5), R(5, 4), R(4))) == 2 * 5 * 4
    assert count(lambda: R(4) @ R(4)) == 2 * 4
    lstm, x = nn.LSTM(4, 6, num_layers=2, bidirectional=True), R(3, 2, 4)
    weights = sum(p.numel() for p in lstm.parameters() if p.dim() == 2)
    assert count(lambda: lstm(x)) == 2 * 3 * 2 * weights


def test_inference_mode_counts_the_same() -> None:
    with torch.inference_mode():
        assert count(lambda: F.linear(R(2, 5, 4), R(3, 4), R(3))) == 2 * 10 * 12
        assert count(lambda: ops.linear(R(2, 5, 4), R(3, 4), R(3))) == 2 * 10 * 12
