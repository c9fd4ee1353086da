from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torchvision
from torch import nn

from zoo.models import torchvision as door
from zoo.registry import build

ONE_OF_EACH_CLASS = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_16",
]
VALUES = {  # that differ from what the model has anyway, where a value is needed
    "num_classes": 3,
    "image_size": 32,
    "input_size": (448, 448),
    "dropout": 0.5,
    "width_mult": 1.0,
    "reduced_tail": True,
    "dilated": True,
}


def test_the_80_classifiers():
    names = door.names()
    assert len(names) == 80
    assert {"resnet18", "vit_b_16", "swin_v2_t"} <= set(names)
    assert "fcn_resnet50" not in names


@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_the_options_that_are_offered_are_taken(name):
    options = door.options(name)
    assert "num_classes" in options
    assert not options & {"weights", "progress", "block_setting", "features", "layers"}
    defaults = _defaults(name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # init_weights=None, said aloud
        build(f"torchvision/{name}", {option: VALUES.get(option, defaults.get(option)) for option in options})


def _defaults(name: str) -> dict[str, object]:
    model_class = inspect.signature(torchvision.models.get_model_builder(name)).return_annotation
    return {p.name: p.default for p in inspect.signature(model_class).parameters.values()}


@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_an_option_that_is_not_offered_is_refused(name):
    # MobileNetV3 and ConvNeXt would drop it without a word.
    for option in ("nonsense", "weights", "pretrained"):
        with pytest.raises(TypeError, match=rf"torchvision/{name}.*'{option}'.*num_classes"):
            build(f"torchvision/{name}", {option: None})


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("densenet121", "growth_rate"),
        ("efficientnet_b7", "norm_layer"),
        ("efficientnet_v2_s", "last_channel"),
        ("mnasnet0_5", "alpha"),
        ("resnext50_32x4d", "groups"),
        ("squeezenet1_1", "version"),
        ("swin_t", "stochastic_depth_prob"),
        ("swin_v2_t", "block"),
        ("vgg11", "features"),
        ("wide_resnet50_2", "width_per_group"),
    ],
)
def test_what_the_name_fixes_is_no_option(name, option):
    with pytest.raises(TypeError, match=rf"torchvision/{name}.*'{option}'"):
        build(f"torchvision/{name}", {option: 1})


def test_options_reach_the_model():
    with torch.device("meta"):
        assert build("torchvision/mobilenet_v3_small", {"num_classes": 7}).classifier[-1].out_features == 7
        assert build("torchvision/vit_b_16", {"image_size": 32}).image_size == 32
        narrow = build("torchvision/mobilenet_v3_small", {"width_mult": 0.5})
        wide = build("torchvision/mobilenet_v3_small", {})
    assert _size(narrow) < _size(wide) / 2


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_no_warning_and_the_initialisation_of_torchvision(name):
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("error")
        build(f"torchvision/{name}", {})
    if name == "googlenet":
        torch.manual_seed(0)
        model = build("torchvision/googlenet", {})
        torch.manual_seed(0)
        theirs = torchvision.models.googlenet(init_weights=True)
        for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["regnet_y_128gf", "regnet_x_400mf"])
def test_regnets_build_without_memory(name):
    with torch.device("meta"):
        model = build(f"torchvision/{name}", {})
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if name == "regnet_x_400mf":
        shapes = {key: tensor.shape for key, tensor in torchvision.models.get_model(name).state_dict().items()}
        assert {key: tensor.shape for key, tensor in model.state_dict().items()} == shapes
