from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import nn

from zoo.models.head import head_names
from zoo.registry import build


def meta(library, name, **options):
    with torch.device("meta"):
        return library(name, **options)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("alexnet", ("classifier.6",)),
        ("convnext_tiny", ("classifier.2",)),
        ("densenet121", ("classifier",)),
        ("efficientnet_b0", ("classifier.1",)),
        ("maxvit_t", ("classifier.5",)),
        ("mnasnet0_5", ("classifier.1",)),
        ("mobilenet_v2", ("classifier.1",)),
        ("mobilenet_v3_small", ("classifier.3",)),
        ("regnet_x_400mf", ("fc",)),
        ("resnet18", ("fc",)),
        ("shufflenet_v2_x0_5", ("fc",)),
        ("squeezenet1_0", ("classifier.1",)),
        ("swin_t", ("head",)),
        ("vgg11", ("classifier.6",)),
        ("vit_b_16", ("heads.head",)),
        ("googlenet", ("fc", "aux1.fc2", "aux2.fc2")),
        ("inception_v3", ("fc", "AuxLogits.fc")),
    ],
)
def test_torchvision(name, names):
    with torch.device("meta"):
        model = build(f"torchvision/{name}", {"num_classes": 7})
    assert head_names(model) == names
    for head in names:
        assert model.get_submodule(head).weight.shape[0] == 7


def test_torchvision_without_auxiliary_heads():
    with torch.device("meta"):
        assert head_names(build("torchvision/googlenet", {"aux_logits": False})) == ("fc",)
    model = meta(torchvision.models.get_model, "resnet18")
    model.fc = nn.Identity()
    assert head_names(model) == ("fc",)


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("resnet18", {}, ("fc",)),
        ("resnet18", {"num_classes": 0}, ("fc",)),
        ("vit_tiny_patch16_224", {}, ("head",)),
        ("convnext_atto", {}, ("head.fc",)),
        ("deit_tiny_distilled_patch16_224", {}, ("head", "head_dist")),
        ("crossvit_tiny_240", {}, ("head.0", "head.1")),
        ("volo_d1_224", {}, ("head", "aux_head")),
        ("resnet18", {"features_only": True}, ()),
    ],
)
def test_timm(name, options, names):
    assert head_names(meta(timm.create_model, name, **options)) == names


def test_zoos_own():
    assert head_names(build("mlp", {})) == ("6",)
    assert head_names(build("mlp", {"num_classes": 0, "hidden": [3]})) == ("3",)
    with torch.device("meta"):
        assert head_names(build("resnet18", {})) == ("fc",)
        assert head_names(build("resnet18", {"num_classes": 0})) == ("fc",)


def test_others():
    assert head_names(nn.Linear(2, 3)) == ("",)
    assert head_names(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == ("1.0",)
    assert head_names(nn.Conv2d(1, 1, 1)) == ()
    assert head_names(nn.Sequential()) == ()
    assert head_names(nn.ModuleDict({"head": nn.Linear(1, 1), "tail": nn.Linear(1, 1)})) == ("head",)
    assert head_names(nn.ModuleDict({"header": nn.Linear(1, 1), "fc": nn.Linear(1, 1)})) == ("fc",)

    class Asked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.ReLU())
            self.second = nn.Linear(1, 1)
            self.fc = nn.Linear(1, 1)

        def get_classifier(self):
            return self.answer

    model = Asked()
    for answer, names in (
        (model.first, ("first.1",)),
        (nn.ModuleList([model.second, model.first]), ("first.1", "second")),
        ((model.second,), ("second",)),
        (None, ("fc",)),
        ("fc", ("fc",)),
    ):
        object.__setattr__(model, "answer", answer)
        assert head_names(model) == names
