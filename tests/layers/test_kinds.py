"""Layers of other kinds than Linear: registered, patched in, counted, stored and taken out again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.layers
import torch
import torch.nn.functional as F
import torchvision.models.convnext
from torch import Tensor, nn

import zoo
from zoo.layers.kinds import call_of, stock_kind


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    """The arguments, but for the tensors, that the layers "mine" were called with."""
    seen: list[tuple[Any, ...]] = []

    @zoo.register_layer("layer_norm", "mine")
    def norm(input: Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Tensor:
        seen.append(("layer_norm", tuple(normalized_shape), weight is None, bias is None, eps))
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    @zoo.register_layer("conv2d", "mine")
    def conv(input: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
        seen.append(("conv2d", stride, padding, dilation, groups))
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)

    return seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.norm = nn.LayerNorm(8, eps=1e-3)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x).mean((2, 3))))


def test_patched_counted_and_undone(calls: list[tuple[Any, ...]]) -> None:
    model, x = Block(), torch.randn(2, 3, 8, 8)
    before, keys, parameters = model(x), list(model.state_dict()), [id(p) for p in model.parameters()]
    report = zoo.patch(model, "layer_norm", layer="mine", example=x)
    assert report.ok and report.proven and report.swapped == ("norm",)
    assert zoo.patch(model, "conv2d", layer="mine").swapped == ("conv",)
    calls.clear()
    assert torch.equal(model(x), before)
    assert calls == [("conv2d", (2, 2), (1, 1), (1, 1), 1), ("layer_norm", (8,), False, False, 1e-3)]
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == parameters

    covered = zoo.coverage(model, x)
    assert covered.ok and [(m.name, m.kind, m.status) for m in covered.modules] == [
        ("conv", "conv2d", "custom"),
        ("norm", "layer_norm", "custom"),
        ("head", "linear", "skipped"),
    ]
    assert covered.modules[2].reason == "no patch is for linear layers"
    assert covered.modules[0].flops == covered.custom_flops == 2 * (2 * 8 * 4 * 4) * (3 * 3 * 3)
    zoo.unpatch(model)
    assert {type(m) for m in model.modules()} == {Block, nn.Conv2d, nn.LayerNorm, nn.Linear}
    assert [m.kind for m in zoo.coverage(model, x).modules] == ["linear"]


def test_gradients_and_a_layer_without_parameters(calls: list[tuple[Any, ...]]) -> None:
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    for shape, options in (((2, 6), {}), ((6,), {"bias": False}), ((6,), {"elementwise_affine": False})):
        module = nn.LayerNorm(shape, **options, dtype=torch.float64)
        runs = []
        for patched in (False, True):
            if patched:
                assert zoo.patch(module, "layer_norm", layer="mine").ok
            leaf = x.clone().requires_grad_()
            runs.append(torch.autograd.grad(module(leaf).square().sum(), [leaf, *module.parameters()]))
        assert all(map(torch.equal, *runs))
    assert [call[1:4] for call in calls] == [((2, 6), False, False), ((6,), False, True), ((6,), True, True)]


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, (3, 1), padding=(2, 1), padding_mode="circular", groups=2, dilation=2),
    ],
    ids=["same", "reflect", "circular"],
)
def test_a_convolutions_function_gets_what_torch_gives_its_own(module: nn.Conv2d) -> None:
    x = torch.randn(2, 4, 7, 8)
    assert torch.equal(F.conv2d(*call_of("conv2d")(module, x)), module(x))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: timm.layers.LayerNorm(6), (3, 5, 6)),
        (lambda: timm.layers.LayerNorm2d(6), (3, 6, 4, 4)),
        (lambda: torchvision.models.convnext.LayerNorm2d(6), (3, 6, 4, 4)),
    ],
    ids=["timm", "timm2d", "torchvision2d"],
)
def test_known_layer_norms_with_a_forward_of_their_own(
    calls: list[tuple[Any, ...]], module: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x = module(), torch.randn(shape)
    before = model(x)
    assert zoo.patch(model, "layer_norm", layer="mine", example=x).swapped == ("",)
    calls.clear()
    assert torch.equal(model(x), before) and len(calls) == 1
    assert zoo.coverage(model, x).modules[0].status == "custom"
    zoo.unpatch(model)
    assert torch.equal(model(x), before) and stock_kind(model) == "layer_norm"


def test_others_are_left_alone_until_they_are_registered(calls: list[tuple[Any, ...]]) -> None:
    class Shifted(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return 1 + F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    class Standardized(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Any) -> Tensor:
            return super()._conv_forward(input, weight / weight.std(), bias)

    norm, conv = Shifted(6), Standardized(3, 4, 3)
    for module, kind in ((norm, "layer_norm"), (conv, "conv2d")):
        assert "has a forward of its own" in zoo.patch(module, kind, layer="mine").skipped[""]
    with pytest.raises(ValueError, match="is a conv2d layer, for which there are no adapters"):
        zoo.register_adapter(Standardized)
    with pytest.raises(ValueError, match=r"no method of .* calls torch.nn.functional.layer_norm"):
        zoo.register_adapter(type("Plain", (nn.LayerNorm,), {"forward": lambda self, x: x}))
    zoo.register_adapter(Shifted)
    x = torch.randn(3, 6)
    before = norm(x)
    assert zoo.patch(norm, "layer_norm", layer="mine").ok
    assert torch.equal(norm(x), before) and calls


def test_the_encoders_fast_path_reads_both_kinds(calls: list[tuple[Any, ...]]) -> None:
    x = torch.randn(2, 5, 32)
    for kinds in (("linear", "layer_norm"), ("layer_norm", "linear")):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval()
        before = model(x)
        classes = [type(m) for m in model.modules()]
        for kind in kinds:
            assert zoo.patch(model, kind, layer={"linear": "zoo", "layer_norm": "mine"}[kind], example=x).ok
        assert {m.status for m in zoo.coverage(model, x).modules} == {"custom"}
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        zoo.unpatch(model)
        assert [type(m) for m in model.modules()] == classes


def test_create_keeps_to_it_and_a_checkpoint_too(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    model = zoo.create("timm/vit_tiny_patch16_224", depth=1, custom_linear=["head"], layers={"layer_norm": "mine"})
    x = torch.randn(1, 3, 224, 224)
    covered = zoo.coverage(model, x)
    custom = [m.name for m in covered.modules if m.status == "custom"]
    assert custom == ["blocks.0.norm1", "blocks.0.norm2", "norm", "head"]
    file = tmp_path / "model.safetensors"
    zoo.save_checkpoint(model, file)
    again = zoo.load(file)
    assert [m.name for m in zoo.coverage(again, x).modules if m.status == "custom"] == custom
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="unknown layer_norm layer 'zoo'"):
        zoo.patch(Block(), "layer_norm")
    with pytest.raises(ValueError, match=r"must take \(input, normalized_shape, weight, bias, eps\)"):
        zoo.register_layer("layer_norm", "three")(lambda input, weight, bias: input)
    with pytest.raises(ValueError, match="expected a subclass of LayerNorm or a function"):
        zoo.register_layer("layer_norm", "linear")(zoo.layers.Linear)
    with pytest.raises(ValueError, match="unknown layer_norm layer 'mine'"):
        zoo.create("resnet18", layers={"layer_norm": "mine"})
