from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from zoo import registry
from zoo.commands.info import describe
from zoo.sweep.fields import ModelFields


def test_own_resnet() -> None:
    info = describe("resnet50", options={})
    assert info.parameters == 25_557_032
    assert info.linear_parameters == 2048 * 1000 + 1000
    assert (info.head, info.swapped, info.skipped) == (("fc",), ("fc",), {})
    assert "num_classes=1000" in info.options
    assert "block" not in " ".join(info.options)  # fixed by the name
    assert info.weights["torchvision"][:2] == ("IMAGENET1K_V1", "IMAGENET1K_V2")
    assert "a1_in1k" in info.weights["timm"]
    text = str(info)
    assert "25,557,032, 8.0% of them in Linears" in text
    assert "1, 1 swapped by custom_linear=True (fc)" in text


def test_figures() -> None:
    info = describe("resnet50", options={})
    assert info.fields is not None
    assert (info.fields.input, info.fields.reference) == ((3, 224, 224), "torchvision/resnet50")
    assert info.fields.linear_flops == info.fields.custom_flops == 2 * 2048 * 1000
    text = " ".join(str(info).split())
    assert "input 3 x 224 x 224" in text
    assert "0.1% of them in Linears, 0.1% run through custom layers (zoo " in text
    assert json.loads(info.to_json())["fields"]["flops"] == info.fields.flops


def test_figures_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> ModelFields:
        return ModelFields(name, None, None, 3, 1, 1, None, None, None, "zoo 1", why="it needs values")

    monkeypatch.setattr("zoo.commands.info.fields_of", unknown)
    text = " ".join(str(describe("mlp", options={})).split())
    assert "input not known FLOPs not known: it needs values reference none" in text


def test_options_change_the_model() -> None:
    info = describe("mlp", options={"in_features": 4, "hidden": [3], "num_classes": 2})
    assert info.fields is None  # those that are stored are of the model without options
    assert info.parameters == 4 * 3 + 3 + 3 * 2 + 2
    assert info.weights == {"zoo": ("mlp.digits", "mlp.fashion_mnist")}


def test_what_is_left_alone_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x @ self.one.weight.T)

    monkeypatch.setitem(registry._builders, "reads", Reads)
    info = describe("reads", options={})
    assert (info.swapped, list(info.skipped)) == (("two",), ["one"])
    assert "reads its weight past its forward" in info.skipped["one"]
    assert "1 left alone (one)" in " ".join(str(info).split())
    info = describe("torchvision/vit_b_16", options={})
    assert (len(info.swapped), info.skipped) == (37, {})
    assert "image_size" in info.options
    assert set(info.weights) == {"torchvision"}


def test_timm() -> None:
    info = describe("timm/resnet18", options={})
    assert info.options == ()
    assert "what timm.create_model takes" in str(info)
    assert set(info.weights) == {"timm"}
    assert json.loads(info.to_json())["model_class"] == "timm.models.resnet.ResNet"


def test_a_model_without_linears() -> None:
    info = describe("torchvision/squeezenet1_0", options={})
    assert (info.linear_parameters, info.swapped, info.skipped) == (0, (), {})


def test_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 6.4 GB of weights is described in passing."""
    before = torch.get_default_dtype()
    info = describe("timm/vit_giant_patch14_224", options={})
    assert info.parameters > 1e9
    assert torch.get_default_dtype() is before
