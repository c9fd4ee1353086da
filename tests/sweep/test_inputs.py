from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.factory import create
from zoo.sweep.inputs import input_shape, random_inputs, smallest_shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (784,)),
        ("resnet18", (3, 224, 224)),
        ("torchvision/resnet18", (3, 224, 224)),
        ("torchvision/inception_v3", (3, 299, 299)),
        ("torchvision/vit_h_14", (3, 224, 224)),  # its first weights are for 518 pixels, the model as built is not
        ("torchvision/swin_v2_t", (3, 256, 256)),
        ("timm/test_vit", (3, 160, 160)),
    ],
)
def test_the_models_own_size(name: str, shape: tuple[int, ...]) -> None:
    assert input_shape(name, create(name, device="meta")) == shape


def test_users_models() -> None:
    assert input_shape("mine", nn.Sequential(nn.Flatten(), nn.Linear(6, 2))) == (6,)
    assert input_shape("mine", nn.Sequential(nn.Conv2d(4, 8, 3, groups=2))) == (4, 224, 224)
    with pytest.raises(ValueError, match="mine: it has neither a convolution nor a Linear"):
        input_shape("mine", nn.Sequential(nn.ReLU()))


def test_the_smallest_size() -> None:
    picky = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AvgPool2d(60), nn.BatchNorm2d(2))
    picky.train()
    before = picky[2].running_mean.clone()
    assert smallest_shape(picky.eval(), (3, 224, 224)) == (3, 64, 64)
    assert torch.equal(picky[2].running_mean, before)
    assert smallest_shape(nn.Sequential(nn.AvgPool2d(500)), (3, 224, 224)) == (3, 224, 224)
    assert smallest_shape(nn.Sequential(nn.Conv2d(3, 2, 1)), (3, 24, 24)) == (3, 24, 24)
    assert smallest_shape(nn.Linear(5, 2), (5,)) == (5,)
    fixed = create("timm/test_vit", device="meta")
    assert smallest_shape(fixed, (3, 160, 160)) == (3, 160, 160)


def test_inputs_are_the_same_each_time() -> None:
    one = random_inputs(2, (3, 4, 5), torch.device("cpu"))
    assert one.shape == (2, 3, 4, 5)
    assert torch.equal(one, random_inputs(2, (3, 4, 5), torch.device("cpu")))
    assert random_inputs(1, (7,), torch.device("meta")).is_meta
