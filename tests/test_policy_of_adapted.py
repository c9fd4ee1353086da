"""Models whose parents were adapted, and what is done to models: they stay exact, and what was swapped runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

import zoo
from zoo.layers.patched import Patched


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.flatten(1)[:, :48].unflatten(1, (4, 12))).mean(1))


def _swin(**options: Any) -> nn.Module:
    return SwinTransformer([2, 2], 16, [1, 1], [2, 2], [4, 4], num_classes=5, **options)


def _timm(name: str, **options: Any) -> nn.Module:
    return timm.create_model(name, num_classes=5, **{"embed_dim": 32, "depth": 1, "num_heads": 2, **options})


# what builds it, the side of its images, and Linears for LoRA
MODELS: dict[str, tuple[Callable[[], nn.Module], int, list[str]]] = {
    "encoder": (Encoding, 32, ["linear1"]),
    "swin": (_swin, 32, ["fc1", "head"]),
    "swin v2": (lambda: _swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2), 32, ["head"]),
    "beit": (lambda: _timm("beit_base_patch16_224", img_size=32), 32, ["fc1"]),
    "eva": (lambda: _timm("eva02_tiny_patch14_336", img_size=28), 28, ["fc2"]),
    "timm swin v2": (
        lambda: _timm(
            "swinv2_tiny_window8_256",
            img_size=64,
            window_size=2,
            depths=(1, 1),
            embed_dim=16,
            num_heads=(1, 1),
            depth=None,
        ),
        64,
        ["fc1"],
    ),
    "timm linear": (lambda: timm.create_model("mobilenetv3_small_050", num_classes=5), 32, ["classifier"]),
    "naflex": (lambda: _timm("naflexvit_base_patch16_gap"), 32, ["embeds.proj", "fc1"]),
}


@pytest.fixture(params=MODELS)
def three(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Tensor, list[str]]:
    """A patched model, its stock twin, an input, and the names of Linears for LoRA."""
    make, side, targets = MODELS[request.param]
    torch.manual_seed(0)
    stock = make().eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # none of them zero
    model = copy.deepcopy(stock)
    assert not zoo.patch(model).skipped
    return model, stock, torch.randn(2, 3, side, side), targets


def same(model: nn.Module, stock: nn.Module, x: Tensor) -> zoo.CoverageReport:
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-5)
    return zoo.coverage(model, x)


def _prune(linear: nn.Module) -> None:
    prune.l1_unstructured(linear, "weight", 0.5)


WAYS: list[Callable[[nn.Module], nn.Module]] = [
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    lambda model: ModelEmaV3(model).module,
    lambda model: AveragedModel(model).module,
    lambda model: model.bfloat16().float(),
]


def test_copies_of_all_sorts(three: Any) -> None:
    model, stock, x, _ = three
    for way in WAYS:
        gone, want = way(model), way(stock)
        found = same(gone, want, x)
        assert found.ok and {m.status for m in found.modules} == {"custom"}
        zoo.unpatch(gone)
        assert not any(isinstance(module, Patched) for module in gone.modules())
        same(gone, want, x)
        model = zoo.patch(model) and model  # the last one changes the model itself


def test_a_new_head(three: Any) -> None:
    model, _, x, _ = three
    if not hasattr(model, "reset_classifier"):
        pytest.skip("a model that has no such method")
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    found = zoo.coverage(model, x)
    assert found.ok and {m.status for m in found.modules} == {"custom"}


def test_lora_on_top(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's fast path would read the weight under a LoRA, and leave the LoRA out
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    peft = pytest.importorskip("peft")
    model, stock, x, targets = three
    names = [name for name, module in stock.named_modules() if isinstance(module, nn.Linear)]
    wrapped, want = (
        peft.get_peft_model(m, peft.LoraConfig(target_modules=targets, r=2)).eval() for m in (model, stock)
    )
    with torch.no_grad():
        for one in (wrapped, want):
            torch.manual_seed(1)
            for name, parameter in one.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(std=0.1)
    found = same(wrapped, want, x)
    custom = {m.name.replace(".base_layer", "").removeprefix("base_model.model.") for m in found.modules if m.layer}
    assert custom == set(names) and found.ok
    found = same(wrapped.merge_and_unload(), want.merge_and_unload(), x)
    assert found.ok and {m.status for m in found.modules} == {"custom"}


@pytest.mark.parametrize("make", [parametrizations.spectral_norm, parametrizations.weight_norm, _prune])
def test_weights_that_are_computed(three: Any, make: Callable[[nn.Module], Any]) -> None:
    model, stock, x, _ = three
    for one in (model, stock):
        torch.manual_seed(1)
        for module in [m for m in one.modules() if isinstance(m, nn.Linear)]:
            make(module)
        one.eval()
    found = same(model, stock, x)
    assert found.ok and {m.status for m in found.modules} == {"custom"}
    zoo.unpatch(model)
    assert same(model, stock, x).custom_flops == 0


def test_quantised_weights_bring_their_own_product(three: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, stock, x, _ = three
    for one in (model, stock):
        quantization.quantize_(one, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        try:
            stock(x)
        except IndexError:  # torchao does not take F.linear(x, weight=...), as some attentions call it
            assert torch.isfinite(model(x)).all()
            return
    found = same(model, stock, x)
    assert not found.ok and all(
        m.status == "fell back" and "brings its own linear" in str(m.fallbacks)
        for m in found.modules
        if "Tensor" in type(stock.get_parameter(f"{m.name}.weight")).__name__
    )
