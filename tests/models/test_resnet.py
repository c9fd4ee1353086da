from __future__ import annotations

import copy
import functools

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import resnet as theirs

from zoo.models.resnet import BasicBlock, Bottleneck, ResNet
from zoo.registry import build

NAMES = [
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
KEYS = {"resnet18": 122, "resnet34": 218, "resnet50": 320, "resnet101": 626, "resnet152": 932, "wide_resnet50_2": 320}
IMAGES = (2, 3, 40, 40)


def layout(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in model.state_dict().items()]


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    for key, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def small(**options) -> ResNet:
    return ResNet(Bottleneck, (1, 2, 1, 1), num_classes=7, **options)


def small_theirs(**options) -> nn.Module:
    return theirs.ResNet(theirs.Bottleneck, [1, 2, 1, 1], num_classes=7, **options)


def step(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Logits, gradients and buffers after one forward and backward in training mode."""
    model.train().zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_all_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_keys_order_and_shapes_are_torchvisions(name):
    with torch.device("meta"):
        ours, reference = build(name, {}), torchvision.models.get_model(name)
    assert layout(ours) == layout(reference)
    assert len(ours.state_dict()) == KEYS.get(name, 626 if "101" in name else 320)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in reference.named_parameters()]


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_a_seed_gives_torchvisions_weights_and_outputs(name):
    torch.manual_seed(3)
    ours = build(name, {})
    after = torch.rand(())
    torch.manual_seed(3)
    reference = torchvision.models.get_model(name)
    assert torch.equal(after, torch.rand(()))
    assert_same_state(ours, reference)
    images = torch.randn(IMAGES)
    with torch.no_grad():
        assert torch.equal(ours.eval()(images), reference.eval()(images))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_init_residual": True},
        {"groups": 4, "width_per_group": 24},
        {"replace_stride_with_dilation": [False, True, True]},
        {"replace_stride_with_dilation": (True, False, True)},
        {"norm_layer": functools.partial(nn.GroupNorm, 8)},
        {"norm_layer": functools.partial(nn.BatchNorm2d, momentum=0.5, eps=1e-3)},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_in_torchvision(options):
    torch.manual_seed(5)
    ours = small(**options)
    torch.manual_seed(5)
    reference = small_theirs(**options)
    assert_same_state(ours, reference)
    with torch.no_grad():  # zero weights would hide the branches
        for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
            other.copy_(one.add_(0.01))
    images = torch.randn(IMAGES)
    assert_all_equal(step(ours, images), step(reference, images))


def test_basic_blocks_train_as_torchvisions_do_and_zero_init():
    torch.manual_seed(1)
    ours = ResNet(BasicBlock, (2, 1, 1, 1), num_classes=3, zero_init_residual=True)
    torch.manual_seed(1)
    reference = theirs.ResNet(theirs.BasicBlock, [2, 1, 1, 1], num_classes=3, zero_init_residual=True)
    assert_same_state(ours, reference)
    assert not ours.layer1[0].bn2.weight.any()
    images = torch.randn(IMAGES)
    assert_all_equal(step(ours, images), step(reference, images))


def test_weights_load_strictly_both_ways():
    ours, reference = small(), small_theirs()
    reference.load_state_dict(ours.state_dict())
    assert_same_state(ours, reference)
    fresh = small()
    fresh.load_state_dict(reference.state_dict())
    assert_same_state(fresh, reference)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"groups": 2}, "groups=2"),
        ({"width_per_group": 32}, "width_per_group=32"),
        ({"replace_stride_with_dilation": [False, False, True]}, "not dilated"),
        ({"replace_stride_with_dilation": [False, True]}, "3 booleans"),
        ({"global_pool": "max"}, "'avg'"),
        ({"num_classes": -1}, "num_classes=-1"),
        ({"num_classes": True}, "num_classes=True"),
        ({"global_pool": ""}, "num_classes=0"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused(options, word):
    # A dilated stage needs a second block for the dilation to show.
    with pytest.raises(ValueError, match=word), torch.device("meta"):
        ResNet(BasicBlock, (1, 1, 2, 2), **options)


def test_the_name_fixes_its_groups_and_width():
    with torch.device("meta"):
        assert build("resnext50_32x4d", {}).layer1[0].conv2.groups == 32
        with pytest.raises(TypeError, match="'groups'"):
            build("resnext50_32x4d", {"groups": 1})


def test_input_channels():
    model = small(in_chans=1)
    assert model.conv1.weight.shape == (64, 1, 7, 7)
    assert model.eval()(torch.zeros(1, 1, 32, 32)).shape == (1, 7)


def test_features_and_head_make_the_forward():
    model, images = small().eval(), torch.randn(IMAGES)
    with torch.no_grad():
        features = model.forward_features(images)
        assert features.shape == (2, model.num_features, 2, 2)
        vector = model.forward_head(features, pre_logits=True)
        assert vector.shape == (2, model.head_hidden_size)
        assert torch.equal(vector, features.mean((2, 3)))
        assert torch.equal(model.get_classifier()(vector), model(images))
        assert torch.equal(model.forward_head(features), model(images))


def test_reset_classifier():
    model = small().double().eval()
    conv = model.conv1.weight.clone()
    model.reset_classifier(4)
    assert model.num_classes == 4
    assert model.fc.weight.shape == (4, 2048)
    assert model.fc.weight.dtype == torch.float64
    assert not model.fc.training
    assert torch.equal(model.conv1.weight, conv)
    images = torch.randn(IMAGES).double()
    model.reset_classifier(0)
    assert model(images).shape == (2, 2048)
    assert isinstance(model.get_classifier(), nn.Identity)
    model.reset_classifier(0, "")
    assert model(images).shape == (2, 2048, 2, 2)
    with pytest.raises(ValueError, match="num_classes=0"):
        model.reset_classifier(5)  # the pooling is still off
    assert model.num_classes == 0
    model.reset_classifier(5, "avg")
    assert model(images).shape == (2, 5)
    with torch.device("meta"):
        empty = small()
    empty.reset_classifier(2)
    assert empty.fc.weight.is_meta


def test_built_without_a_classifier():
    model = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=0, global_pool="").eval()
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 512, 2, 2)
    assert not [key for key in model.state_dict() if key.startswith("fc")]


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_gradient_checkpointing_changes_nothing_but_memory(block):
    plain = ResNet(block, (2, 1, 1, 1), num_classes=3)
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    buffers = list(saving.buffers())
    for images in (torch.randn(IMAGES), torch.randn(IMAGES)):
        assert_all_equal(step(plain, images), step(saving, images))
    assert int(saving.layer4[0].bn1.num_batches_tracked) == 2
    assert all(one is other for one, other in zip(saving.buffers(), buffers, strict=True))
    for model in (plain, saving):
        model.eval()
    images = torch.randn(IMAGES)
    assert torch.equal(plain(images), saving(images))
    saving.set_grad_checkpointing(False)
    assert not saving.grad_checkpointing


def test_gradient_checkpointing_keeps_less_for_backward():
    model, images = small(), torch.randn(IMAGES)

    def kept() -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(images)
        return sum(sizes)

    everything = kept()
    model.set_grad_checkpointing()
    assert kept() < everything / 2


def test_gradient_checkpointing_with_a_frozen_norm_and_after_an_error():
    model = small(norm_layer=functools.partial(nn.BatchNorm2d, momentum=None))  # a plain average over all batches
    model.set_grad_checkpointing()
    frozen, kept = model.layer3[0].bn2.eval(), list(model.buffers())
    before = frozen.running_mean.clone()
    logits = model(torch.randn(IMAGES))
    counted = [buffer.clone() for buffer in kept]
    logits.sum().backward()
    assert_all_equal(list(model.buffers()), counted)
    assert torch.equal(frozen.running_mean, before)

    logits = model(torch.randn(IMAGES))
    model.layer2[0].conv3.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits.sum().backward()
    assert all(one is other for one, other in zip(model.buffers(), kept, strict=True))


def test_hooks_on_stages_see_the_features():
    model, seen = small().eval(), []
    model.layer4.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model(torch.zeros(1, 3, 32, 32))
    assert seen == [(1, 2048, 1, 1)]


def test_compiles_without_a_graph_break_and_keeps_the_statistics():
    plain = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3)
    model = copy.deepcopy(plain)
    model.set_grad_checkpointing()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    images = torch.randn(IMAGES)
    logits = compiled(images)
    logits.square().sum().backward()
    expected = step(plain, images)
    got = [logits.detach(), *(p.grad for p in model.parameters()), *model.buffers()]
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one)
