"""The adapted parents against the stock ones: outputs, attention weights, gradients, and what runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)

import zoo
from zoo.coverage import coverage
from zoo.parity import parity
from zoo.swap import patch, unpatch

# torch's products with a weight; attention's products of activations are bmm and scaled_dot_product_attention
PRODUCTS = {"linear", "addmm", "mm", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"}


class Products(TorchDispatchMode):
    """Counts zoo's linears, and the products that torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.zoos, self.torchs = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.zoos += func.namespace == "zoo"
        self.torchs += func.namespace == "aten" and func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# MultiheadAttention


def _masks(draw: Any, length: int, source: int, batch: int | None, heads: int) -> dict[str, Any]:
    """Masks of each kind, in which no query is left without a key."""
    kind = draw(st.sampled_from([None, "bool", "float", "each head", "causal"]))
    padding = draw(st.sampled_from([None, "bool", "float"]))
    mask: Tensor | None = None
    if kind == "bool":
        mask = (torch.rand(length, source) < 0.3).index_fill(1, torch.tensor(0), False)
    elif kind == "float":
        mask = torch.randn(length, source)
    elif kind == "each head":
        mask = torch.randn((batch or 1) * heads, length, source)
    elif kind == "causal":
        mask = torch.ones(length, source, dtype=torch.bool).triu(1)
    pad: Tensor | None = None
    if padding is not None:
        shape = (source,) if batch is None else (batch, source)
        pad = (torch.rand(shape) < 0.3).index_fill(-1, torch.tensor(0), False)
        pad = torch.zeros(shape).masked_fill(pad, -30.0) if padding == "float" else pad
    return {"attn_mask": mask, "key_padding_mask": pad, "is_causal": kind == "causal"}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_attention_with_every_option(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    draw = data.draw
    flag = st.booleans()
    sizes = draw(st.sampled_from([(None, None), (6, 10), (None, 6)]))
    heads, batch_first = draw(st.sampled_from([1, 2])), draw(flag)
    stock = nn.MultiheadAttention(
        8,
        heads,
        dropout=draw(st.sampled_from([0.0, 0.4])),
        bias=draw(flag),
        add_bias_kv=draw(flag),
        add_zero_attn=draw(flag),
        kdim=sizes[0],
        vdim=sizes[1],
        batch_first=batch_first,
    )
    for p in stock.parameters():
        nn.init.normal_(p, std=0.3)
    model = copy.deepcopy(stock)
    assert patch(model).swapped == ("out_proj",)

    of_itself, batch = sizes == (None, None) and draw(flag), draw(st.sampled_from([None, 2]))
    length, source = 3, 3 if of_itself else 4

    def sequence(length: int, width: int) -> Tensor:
        if batch is None:
            return torch.randn(length, width)
        return torch.randn(*((batch, length) if batch_first else (length, batch)), width)

    query = sequence(length, 8)
    key, value = (query, query) if of_itself else (sequence(source, sizes[0] or 8), sequence(source, sizes[1] or 8))
    options = _masks(draw, length, source, batch, heads)
    options |= {"need_weights": draw(flag), "average_attn_weights": draw(flag)}
    training = draw(flag)
    results: list[Any] = []
    for module in (model, stock):
        inputs = [t.clone().requires_grad_() for t in ([query] if of_itself else [query, key, value])]
        torch.manual_seed(1)  # for the dropout
        with torch.set_grad_enabled(training):
            output, weights = module.train(training)(*(inputs * 3)[:3], **options)
            if training:
                (output.square().sum() + (0 if weights is None else weights.square().sum())).backward()
        grads = [t.grad for t in (*inputs, *module.parameters())]
        results.append((output.detach(), None if weights is None else weights.detach(), grads))
    same(*results)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_transformer_layers(norm_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Transformer(8, 2, 1, 1, 16, dropout=0.3, batch_first=True, norm_first=norm_first).train(training)
    model, src, tgt = copy.deepcopy(stock), torch.randn(2, 4, 8), torch.randn(2, 3, 8)
    patch(model).raise_for_failure()
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    results: list[Any] = []
    for module in (model, stock):
        torch.manual_seed(1)
        with torch.set_grad_enabled(training), Products() as products:
            output = module(src, tgt, tgt_mask=mask, tgt_is_causal=True)
        results.append(output.detach())
        assert (products.torchs == 0, products.zoos > 0) == ((True, True) if module is model else (False, False))
    same(*results)


# attention with windows, and timm's with a bias of three parts


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", [ShiftedWindowAttention, ShiftedWindowAttentionV2])
def test_windows_of_odd_sizes_with_dropout(cls: type[nn.Module], bias: bool, shift: int) -> None:
    torch.manual_seed(0)
    options = {"qkv_bias": bias, "proj_bias": bias, "attention_dropout": 0.3, "dropout": 0.3}
    stock = cls(8, [2, 2], [shift, shift], 2, **options)
    model, x = copy.deepcopy(stock), torch.randn(2, 5, 3, 8)
    assert {"qkv", "proj"} <= set(patch(model).swapped)
    results: list[Any] = []
    for module in (model, stock):
        torch.manual_seed(1)
        output = module(x)
        output.square().sum().backward()
        results.append((output.detach(), [p.grad for p in module.parameters()]))
    same(*results)


def _vit() -> tuple[nn.Module, Tensor]:
    return torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=3), torch.randn(2, 3, 32, 32)


def _swin(**options: Any) -> tuple[nn.Module, Tensor]:
    model = SwinTransformer([2, 2], 8, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=3, **options)
    return model, torch.randn(2, 3, 32, 32)


def _timm(name: str, size: int, **options: Any) -> tuple[nn.Module, Tensor]:
    return timm.create_model(name, img_size=size, num_classes=3, **options), torch.randn(2, 3, size, size)


# of each: how often it runs the operator in a forward
MODELS: dict[str, tuple[int, Callable[[], tuple[nn.Module, Tensor]]]] = {
    "torchvision vit": (5, _vit),
    "torchvision swin": (10, _swin),
    "torchvision swin_v2": (14, lambda: _swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)),
    "beit": (5, lambda: _timm("beit_base_patch16_224", 32, depth=1, embed_dim=16, num_heads=2)),
    "eva02": (5, lambda: _timm("eva02_tiny_patch14_224", 28, depth=1, embed_dim=24, num_heads=2)),
    "timm swinv2": (
        14,
        lambda: _timm("swinv2_tiny_window8_256", 32, depths=(1, 1), embed_dim=8, num_heads=(2, 2), window_size=4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_at_parity_and_no_product_with_a_weight_is_left_to_torch(name: str) -> None:
    torch.manual_seed(0)
    calls, make = MODELS[name]
    stock, x = make()
    model = copy.deepcopy(stock)
    patch(model).raise_for_failure()
    parity(model, stock, x, gradients=True).raise_for_failure()
    for training in (True, False):
        with torch.set_grad_enabled(training), Products() as products:
            model.train(training)(x)
        assert (products.zoos, products.torchs) == (calls, 0)
        report = coverage(model, x)
        assert report.ok and {m.status for m in report.modules} == {"custom"}
        assert sum(m.flops for m in report.modules) == report.custom_flops
    for twin in (copy.deepcopy(model), model):
        unpatch(twin)
        assert [type(m) for m in twin.modules()] == [type(m) for m in stock.modules()]
        assert [sorted(m.__dict__) for m in twin.modules()] == [sorted(m.__dict__) for m in stock.modules()]


@pytest.mark.parametrize("name", MODELS)
def test_compiled_and_exported_whole(name: str) -> None:
    torch.manual_seed(0)
    calls, make = MODELS[name]
    model, x = make()
    expected = model.eval()(x)
    patch(model)
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(sum("zoo" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    same(torch.compile(model, backend=backend, fullgraph=True)(x), expected)
    program = torch.export.export(model, (x,))
    found.append(sum("zoo" in str(node.target) for node in program.graph.nodes))
    assert found == [calls, calls]
    same(program.module()(x), expected)


def test_features_are_extracted_from_a_swin_as_before() -> None:
    torch.manual_seed(0)
    model, x = _swin()
    expected = create_feature_extractor(model.eval(), ["features.1"])(x)["features.1"]
    patch(model)
    extractor = create_feature_extractor(model, ["features.1"])
    with Products() as products:
        same(extractor(x)["features.1"], expected)
    assert products.zoos > 0


def test_under_autocast_and_vmap() -> None:
    torch.manual_seed(0)
    stock, x = _swin()
    model = copy.deepcopy(stock)
    patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), stock(x), rtol=3e-2, atol=3e-2)
    attention = nn.MultiheadAttention(8, 2)
    y, expected = torch.randn(5, 3, 2, 8), copy.deepcopy(attention)
    patch(attention)
    same(torch.func.vmap(lambda q: attention(q, q, q)[0])(y), torch.stack([expected(q, q, q)[0] for q in y]))


def test_averaged_copies_keep_it() -> None:
    from timm.utils import ModelEmaV3
    from torch.optim.swa_utils import AveragedModel

    model, x = _vit()
    patch(model)
    for average in (AveragedModel(model), ModelEmaV3(model)):
        with Products() as products:
            average(x)
        assert (products.zoos, products.torchs) == (5, 0)


# NaFlexViT, whose patches may be of another size than its weight was made for


def _embeds(*, interpolates: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return timm.models.naflexvit.NaFlexEmbeds(
        patch_size=4,
        embed_dim=8,
        proj_type="linear",
        pos_embed=None,
        class_token=False,
        enable_patch_interpolator=interpolates,
    ).eval()


@pytest.mark.parametrize("side", [2, 3, 4, 6])
def test_patches_of_any_size(side: int) -> None:
    stock = _embeds()
    model = copy.deepcopy(stock)
    keys = list(model.state_dict())
    assert patch(model).swapped == ("proj",)
    x, places = torch.randn(2, 5, side, side, 3), torch.zeros(2, 5, 2, dtype=torch.long)
    with Products() as products:
        got = model(x, patch_coord=places)[0]
    assert products.zoos == 1  # and torch's may resample the weight
    same(got, stock(x, patch_coord=places)[0])
    for module in (model, stock):
        module(x, patch_coord=places)[0].square().sum().backward()
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        same(mine.grad, theirs.grad)
    (layer,) = coverage(model, x, places).modules
    assert (layer.status, layer.fault, layer.calls) == ("custom", False, 1)
    assert layer.flops == 2 * 2 * 5 * 8 * side * side * 3  # of the weight that was made, not of the one it was made of
    assert patch(model).swapped == ("proj",)  # again
    copied = copy.deepcopy(model)
    same(copied(x, patch_coord=places)[0], got)
    unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()] and list(model.state_dict()) == keys


def test_images_and_flat_patches_go_through_its_linear() -> None:
    for interpolates in (True, False):
        stock = _embeds(interpolates=interpolates)
        model = copy.deepcopy(stock)
        assert patch(model).swapped == ("proj",)
        for args in ((torch.randn(1, 3, 8, 8),), (torch.randn(1, 5, 48), torch.zeros(1, 5, 2, dtype=torch.long))):
            same(model(*args)[0], stock(*args)[0])
            (layer,) = coverage(model, *args).modules
            assert (layer.status, layer.calls) == ("custom", 1)


def test_an_embedding_with_another_interpolator_is_left_alone() -> None:
    class Other(type(_embeds().patch_interpolator)):  # type: ignore[misc]
        """May do anything with a weight."""

    model = _embeds()
    model.patch_interpolator.__class__ = Other
    (reason,) = patch(model).skipped.values()
    assert reason.startswith("NaFlexEmbeds.forward reads its weight past its forward")


def test_a_layer_that_cannot_run_on_a_given_weight_is_not_put_there() -> None:
    @zoo.register_layer("linear", "picky naflex")
    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return -super().forward(input) if self.training else super().forward(input)

    (reason,) = patch(_embeds(), layer="picky naflex").skipped.values()
    assert "asks whether its module is in training" in reason
    assert patch(_embeds(interpolates=False), layer="picky naflex").swapped == ("proj",)


@pytest.mark.parametrize("name", ["encoding", "timm/beit_base_patch16_224"])
def test_a_checkpoint_rebuilds_it_from_the_file_alone(name: str, tmp_path: Path) -> None:
    @zoo.register_model
    def encoding(*, num_classes: int = 3) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(8, num_classes))

    torch.manual_seed(0)
    options: dict[str, int] = {}
    x = torch.randn(2, 3, 8)
    if name != "encoding":
        options, x = {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2}, torch.randn(1, 3, 32, 32)
    model = zoo.create(name, custom_linear=True, **options).eval()
    zoo.save_checkpoint(model, tmp_path / "model.safetensors")
    again = zoo.load(tmp_path / "model.safetensors").eval()
    assert torch.equal(again(x), model(x)) and [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert coverage(again, x).ok and {m.status for m in coverage(again, x).modules} == {"custom"}
