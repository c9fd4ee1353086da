"""Patch, coverage and unpatch on real models: what is reported as swapped runs, and nothing is left behind.

Whole models run on the meta device, which computes shapes alone; small ones of the same blocks run for real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.models.beit import Attention as BeitAttention
from torch import Tensor, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

from zoo.coverage import coverage
from zoo.swap import patch, unpatch

# source, name, swapped, skipped
MODELS = [
    ("torchvision", "vit_b_16", 37, 0),
    ("torchvision", "swin_t", 52, 0),
    ("torchvision", "swin_v2_t", 76, 0),
    ("torchvision", "squeezenet1_1", 0, 0),
    ("torchvision", "googlenet", 5, 0),
    ("timm", "vit_tiny_patch16_224", 49, 0),
    ("timm", "beit_base_patch16_224", 49, 0),
    ("timm", "eva02_tiny_patch14_224", 48, 0),
    ("timm", "swinv2_tiny_window8_256", 76, 0),
    ("timm", "levit_128s", 48, 0),
    ("timm", "mobilenetv3_small_100", 1, 0),
]


def _build(source: str, name: str) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        if source == "timm":
            model = timm.create_model(name)
            return model, torch.empty(2, *model.default_cfg["input_size"])
        options = {"init_weights": False} if name == "googlenet" else {}
        return torchvision.models.get_model(name, **options), torch.empty(2, 3, 224, 224)


def _state(model: nn.Module) -> Any:
    named = [(name, id(m), type(m), sorted(m.__dict__)) for name, m in model.named_modules()]
    return named, list(model.state_dict()), [id(p) for p in model.parameters()]


@pytest.mark.parametrize(("source", "name", "swapped", "skipped"), MODELS)
def test_what_is_reported_runs_and_the_rest_is_named(source: str, name: str, swapped: int, skipped: int) -> None:
    model, x = _build(source, name)
    before = _state(model)
    report = patch(model)
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert set(report.swapped) | set(report.skipped) == linears and not set(report.swapped) & set(report.skipped)
    assert all(report.skipped.values())
    ran: set[str] = set()
    for training in (True, False):
        with torch.set_grad_enabled(training):
            seen = coverage(model.train(training), x)
        assert seen.ok, seen
        ran |= {m.name for m in seen.modules if m.status == "custom"}
    assert ran == set(report.swapped), "each runs in training or in eval mode"
    unpatch(model)
    assert _state(model) == before
    assert (len(report.swapped), len(report.skipped)) == (swapped, skipped)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


def _attention() -> tuple[nn.Module, Tensor]:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Wrapped(attention, lambda m, x: m(x, x, x)[0]), torch.randn(2, 3, 8)


def _encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(2, 3, 8)


def _torchvision_vit() -> tuple[nn.Module, Tensor]:
    return torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=3), torch.randn(2, 3, 32, 32)


def _beit(**options: Any) -> tuple[nn.Module, Tensor]:
    return BeitAttention(8, num_heads=2, qkv_bias=True, **options), torch.randn(2, 3, 8)


def _timm(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    size = options.pop("size", 32)
    return timm.create_model(name, num_classes=3, **options), torch.randn(2, 3, size, size)


def _mixer() -> tuple[nn.Module, Tensor]:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=3, img_size=32, num_blocks=1, embed_dim=16), torch.randn(2, 3, 32, 32)


SMALL: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "attention": _attention,
    "encoder": _encoder,
    "torchvision vit": _torchvision_vit,
    "torchvision swin": lambda: (ShiftedWindowAttention(8, [2, 2], [0, 0], 2), torch.randn(1, 4, 4, 8)),
    "beit": _beit,
    "beit, separate": lambda: _beit(qkv_bias_separate=True),
    "vit": lambda: _timm("vit_tiny_patch16_224", depth=1, embed_dim=12, img_size=32),
    "mixer": _mixer,
}


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_outputs_and_gradients_stay_and_all_that_is_swapped_runs(name: str, probed: bool) -> None:
    torch.manual_seed(0)
    model, x = SMALL[name]()
    stock = copy.deepcopy(model)
    report = patch(model, example=x if probed else None)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            a, b = model.train(training)(x), stock.train(training)(x)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            seen = {m.name: m.status for m in coverage(model, x).modules}
        assert {n for n, status in seen.items() if status == "custom"} == set(report.swapped)
        if training:
            for out in (a, b):
                out.square().sum().backward()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


class OwnBeit(BeitAttention):
    """A class that no adapter knows, with the forward of one that is known."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


def test_a_probe_shows_that_a_doubtful_layer_runs() -> None:
    x = torch.randn(2, 3, 8)
    model: nn.Module = OwnBeit(8, num_heads=2, qkv_bias=True, qkv_bias_separate=True)
    assert "qkv" in patch(copy.deepcopy(model)).skipped and "qkv" in patch(model, example=x).swapped
    model = OwnBeit(8, num_heads=2, qkv_bias=True)
    assert "qkv" in patch(model, example=x).skipped


def test_the_fast_path_is_told_by_the_probe() -> None:
    layer, x = OwnEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)
    report = patch(nn.TransformerEncoder(layer, 2), example=x)
    assert report.swapped == () and "in eval mode" in report.skipped["layers.0.linear1"]


def test_fused_heads_are_lost_and_told() -> None:
    model, x = timm.create_model("levit_128s", num_classes=3), torch.randn(1, 3, 224, 224)
    patch(model)
    model = timm.utils.reparameterize_model(model.eval(), inplace=True)
    seen = coverage(model, x)
    assert not seen.ok and all("patch again" in m.reason for m in seen.modules)
    assert patch(model).ok and coverage(model, x).ok
