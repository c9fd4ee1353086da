"""Nested sequences in torch's transformer layers, against the stock ones with their fused fast path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from zoo.coverage import coverage
from zoo.swap import patch


def _sequences() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, 8) for n in (5, 2, 1)])


class Padded(nn.Module):
    """An encoder with a padding mask, which in eval mode makes nested sequences of its input."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= torch.tensor([5, 2, 1])[:, None]
        return self.encoder(x, src_key_padding_mask=padding)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_with_padding_runs_the_layer_and_gives_what_the_stock_one_does(training: bool) -> None:
    torch.manual_seed(0)
    stock = Padded(encoder()).train(training)
    model, x = copy.deepcopy(stock), torch.randn(3, 5, 8)
    patch(model).raise_for_failure()
    with torch.set_grad_enabled(training):
        expected = stock(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        report = coverage(model, x)
    assert (expected[1, 2:] == 0).all() != training, "else the stock one made no nested sequences"
    assert report.ok and {m.status for m in report.modules} == {"custom"}


@torch.no_grad()
def test_a_layer_takes_nested_sequences_and_returns_them() -> None:
    torch.manual_seed(0)
    stock = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    model, x = copy.deepcopy(stock), _sequences()
    patch(model)
    got, expected = model(x, None, src_key_padding_mask=None), stock(x)
    assert got.is_nested
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_to_nested_sequences_stays_with_torch_and_coverage_says_so() -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    stock = SelfAttention().eval()
    model, x = copy.deepcopy(stock), _sequences()
    patch(model)
    for a, b in zip(model(x).unbind(), stock(x).unbind(), strict=True):
        torch.testing.assert_close(a, b)
    (entry,) = coverage(model, x).modules
    assert entry.status == "never called" and "_native_multi_head_attention" in entry.reason and entry.fault
    assert coverage(model, torch.randn(2, 3, 8)).ok
