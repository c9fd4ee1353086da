"""The scales that a sweep gives to batch norms, and what comes of having none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo.parity import ParityReport, parity
from zoo.passes import jittered
from zoo.sweep.batch_norms import set_scales

pytestmark = pytest.mark.usefixtures("one_thread")


class Gated(nn.Module):
    """Blocks whose gates saturate where nothing keeps the values small, as those of MaxViT's do."""

    def __init__(self, width: int = 32, blocks: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 1, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 48)
        for conv in self.convs:
            nn.init.normal_(conv.weight, std=1.0)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, gate in zip(self.convs, self.norms, self.gates, strict=True):
            y = norm(conv(x))
            x = x + y * gate(y.mean((-1, -2))).sigmoid()[..., None, None]
        return self.head(x.mean((-1, -2)))


def judged(model: nn.Module, x: Tensor) -> ParityReport:
    """Stock beside a copy with its weights moved by half an eps: both honest."""
    other = Gated().eval()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(jittered(p, generator, 2.0**-23))
    return parity(other, model, x, gradients=True)


def test_values_and_errors_stay_small() -> None:
    model, x = Gated().eval(), torch.randn(2, 32, 7, 7)
    before = judged(model, x)
    assert max(entry.reference_error for entry in before.entries) > 1e-3, "this case should be one"
    assert set_scales(model, x) == 12
    after = judged(model, x)
    assert after.ok and max(entry.reference_error for entry in after.entries) < 1e-5, after


def test_each_norm_has_that_of_what_comes_in() -> None:
    model, seen = Gated(blocks=3).eval(), []
    for norm in model.norms:
        norm.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    x = torch.randn(4, 32, 5, 5)
    keys, params = list(model.state_dict()), {n: p.clone() for n, p in model.named_parameters()}
    assert set_scales(model, x) == 3
    seen.clear()
    model(x)
    for norm, (values, output) in zip(model.norms, seen, strict=True):
        assert torch.allclose(norm.running_var, values.square().mean().expand(32), rtol=1e-5)
        assert torch.equal(norm.running_mean, torch.zeros(32))
        assert output.detach().square().mean().item() == pytest.approx(1, rel=1e-4)
    assert list(model.state_dict()) == keys and not any(norm._forward_pre_hooks for norm in model.norms)
    assert all(torch.equal(p, params[n]) for n, p in model.named_parameters())
    assert not any(module.training for module in model.modules())


def test_a_small_channel_is_not_blown_up() -> None:
    """On maps of one value, two images hardly differ: statistics of each channel would amplify that, layer by layer."""
    model, x = Gated().eval(), torch.randn(2, 32, 1, 1)
    x[1] = x[0] + 1e-3 * x[1]
    set_scales(model, x)
    report = judged(model, x)
    assert report.ok and max(entry.reference_error for entry in report.entries) < 1e-5, report


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_what_gives_no_scale(value: float) -> None:
    model = nn.BatchNorm1d(3).eval()
    assert set_scales(model, torch.full((2, 3), value)) == 0
    assert model.running_var.tolist() == [1.0] * 3


def test_norms_that_have_no_statistics_or_are_not_called() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3), nn.LayerNorm(3)).eval()
    model.spare = nn.BatchNorm1d(3)
    model.__class__ = type("First", (nn.Sequential,), {"forward": lambda self, x: self[2](self[1](self[0](x)))})
    assert set_scales(model, torch.randn(4, 3)) == 1
    assert torch.equal(model.spare.running_var, torch.ones(3))


def test_a_norm_whose_input_is_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).eval()
    model.__class__ = type("Named", (nn.Sequential,), {"forward": lambda self, x: self[0](input=x)})
    assert set_scales(model, torch.full((2, 3), 3.0)) == 1 and model[0].running_var.tolist() == [9.0] * 3


def test_hooks_go_when_the_model_fails() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(4, 4)).eval()
    with pytest.raises(RuntimeError):
        set_scales(model, torch.randn(2, 3))
    assert not model[0]._forward_pre_hooks
