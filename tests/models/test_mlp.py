from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import MLP as TheirMLP

from zoo.models.mlp import MLP
from zoo.registry import build


def test_the_default_is_784_256_256_10():
    model = build("mlp", {})
    linears = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert linears == [(784, 256), (256, 256), (256, 10)]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "3.weight", "3.bias", "6.weight", "6.bias"]


@pytest.mark.parametrize("hidden", [(), (5,), (8, 6, 4)])
def test_seeds_weights_and_outputs_are_torchvisions(hidden):
    torch.manual_seed(2)
    ours = MLP(in_features=12, hidden=hidden, num_classes=3)
    torch.manual_seed(2)
    theirs = TheirMLP(12, [*hidden, 3])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    fresh = MLP(in_features=12, hidden=list(hidden), num_classes=3)
    fresh.load_state_dict(theirs.state_dict())
    for shape in ((4, 12), (2, 5, 12), (12,), (0, 12)):
        x = torch.randn(shape)
        assert torch.equal(fresh(x), theirs(x))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
    ],
)
def test_activations(name, function):
    model = MLP(in_features=6, hidden=[5], num_classes=2, activation=name)
    x = torch.randn(3, 6)
    assert torch.equal(model(x), model[3](function(model[0](x))))


@pytest.mark.parametrize("shape", [(3, 1, 4, 6), (3, 4, 6), (3, 24), (3, 2, 3, 4), (0, 1, 4, 6)])
def test_images_are_flattened(shape):
    model = MLP(in_features=24, hidden=[5], num_classes=2)
    x = torch.randn(shape)
    assert torch.equal(model(x), model(x.flatten(1)))
    assert model(x).shape == (shape[0], 2)


def test_an_image_with_a_side_of_in_features_is_an_image():
    model = MLP(in_features=4, hidden=[], num_classes=2)
    assert model(torch.zeros(3, 1, 1, 4)).shape == (3, 2)
    with pytest.raises(ValueError, match="in_features=16"):
        model(torch.zeros(3, 1, 4, 4))
    assert model(torch.zeros(3, 7, 4)).shape == (3, 7, 2)  # three dimensions are vectors where they can be


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 100), (5,), ()])
def test_other_sizes_are_refused_with_both(shape):
    with pytest.raises(ValueError, match="784") as caught:
        build("mlp", {})(torch.zeros(shape))
    assert str(shape) in str(caught.value)
    assert f"in_features={math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)}" in str(caught.value)


def test_dropout_spares_the_logits():
    model = MLP(in_features=4, hidden=[6], num_classes=3, dropout=1.0)
    assert torch.equal(model(torch.randn(2, 4)), model[-1].bias.expand(2, 3))
    assert not torch.equal(model.eval()(torch.randn(2, 4)), model[-1].bias.expand(2, 3))


def test_features_head_and_reset():
    model = MLP(in_features=4, hidden=[6, 5], num_classes=3).double().eval()
    x = torch.randn(2, 1, 2, 2).double()
    features = model.forward_features(x)
    assert features.shape == (2, model.num_features) == (2, model.head_hidden_size)
    assert torch.equal(model.forward_head(features, pre_logits=True), features)
    assert torch.equal(model.forward_head(features), model(x))
    assert model.get_classifier() is model[6]
    model.reset_classifier(7)
    assert model.num_classes == 7
    assert model(x).shape == (2, 7)
    assert not model[6].training
    model.reset_classifier(0)
    assert torch.equal(model(x), features)
    with pytest.raises(ValueError, match="global_pool='avg'"):
        model.reset_classifier(7, "avg")
    assert model.num_classes == 0


def test_built_without_a_classifier():
    model = MLP(in_features=4, hidden=[6], num_classes=0)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), model[0](x).relu())
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"'swish'.*silu"):
        MLP(activation="swish")


def test_gradient_checkpointing_changes_nothing_but_memory():
    plain = MLP(in_features=8, hidden=[64, 64], num_classes=3, dropout=0.5)
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    x = torch.randn(5, 8)

    def step(model: nn.Module) -> tuple[list[torch.Tensor], int]:
        sizes: list[int] = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            logits = model(x)
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad for p in model.parameters())], sum(sizes)

    expected, everything = step(plain)
    got, kept = step(saving)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
    assert kept < everything / 2
    saving.set_grad_checkpointing(False)
    assert step(saving)[1] == everything


def test_compiles_without_a_graph_break():
    model = MLP(in_features=12, hidden=[5], num_classes=3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 1, 3, 4)
    assert torch.equal(compiled(x), model(x))
