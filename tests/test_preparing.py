from __future__ import annotations

import pytest
import torch

import zoo
from zoo.preparing import channels_of, choose_device, make, options_from, real_inputs, resized, side_of


def test_choose_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("zoo.ops._library.CUDA_LOADED", True)
    assert choose_device("auto").type == "cuda"
    assert choose_device("cuda:1").index == 1
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        choose_device("cuda:2")
    monkeypatch.setattr("zoo.ops._library.CUDA_LOADED", False)
    assert choose_device("auto").type == "cpu"  # a GPU that zoo cannot use
    monkeypatch.setattr("zoo.ops._library.CUDA_LOADED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    for wrong in ("gpu", "mps", "meta", ""):
        with pytest.raises(ValueError, match=f"device '{wrong}'"):
            choose_device(wrong)


def test_options_from() -> None:
    assert options_from(["a=1", "b=[2, 3]", "c=true", "d=gelu", "e=x=y"]) == {
        "a": 1,
        "b": [2, 3],
        "c": True,
        "d": "gelu",
        "e": "x=y",
    }
    for wrong in ("a", "=1", "a b=1"):
        with pytest.raises(ValueError, match="KEY=VALUE"):
            options_from([wrong])


def test_make_is_repeatable_and_refuses_options() -> None:
    one, other = (make("mlp", {"hidden": [4]}, device="cpu") for _ in range(2))
    assert torch.equal(one[0].weight, other[0].weight)
    with pytest.raises(ValueError, match="'depth'"):
        make("mlp", {"depth": 3}, device="cpu")


def test_fresh_weights_hide_nothing() -> None:
    """Mixer's head begins as zeros, ConvNeXt's branches with a factor of 1e-6."""
    for name, constant in (("timm/mixer_s32_224", "head.weight"), ("timm/test_convnext", "stages.0.blocks.0.gamma")):
        torch.manual_seed(0)
        plain, made = zoo.create(name, num_classes=2), make(name, {"num_classes": 2}, device="cpu")
        assert plain.get_parameter(constant).unique().numel() == 1
        assert made.get_parameter(constant).std() > 0.2
        random = [key for key, p in plain.named_parameters() if p.unique().numel() > 1]
        assert len(random) > 10
        for key in random:  # as its library initialises it
            assert torch.equal(plain.get_parameter(key), made.get_parameter(key))


def test_given_weights_are_left_alone() -> None:
    made = make("mlp", {}, device="cpu", weights="mlp.digits")
    assert zoo.check_state_dict(made, zoo.create("mlp", weights="mlp.digits")).ok
    for a, b in zip(made.parameters(), zoo.create("mlp", weights="mlp.digits").parameters(), strict=True):
        assert torch.equal(a, b)


def test_real_inputs_fit_the_model() -> None:
    for name, options, shape in (
        ("mlp", {}, (8, 1, 28, 28)),
        ("mlp", {"in_features": 64}, (8, 1, 8, 8)),
        ("resnet18", {}, (2, 3, 224, 224)),
        ("resnet18", {"in_chans": 1}, (2, 1, 224, 224)),
        ("torchvision/inception_v3", {"init_weights": False}, (2, 3, 299, 299)),
        ("timm/vit_tiny_patch16_384", {}, (2, 3, 384, 384)),
    ):
        with torch.device("meta"):
            model = zoo.create(name, **options)
        inputs = real_inputs(name, model)
        assert inputs.shape == shape, name
        assert inputs.std() > 0.1  # a picture, not a blank
        assert not torch.equal(inputs[0], inputs[1])


def test_side_and_channels() -> None:
    assert side_of(784) == 28
    with pytest.raises(ValueError, match="in_features=785"):
        side_of(785)
    assert channels_of(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Conv2d(5, 2, 1))) == 5
    assert channels_of(torch.nn.Linear(2, 2)) == 1


def test_resized_takes_one_image_or_several() -> None:
    images = torch.rand(2, 3, 8, 8)
    both = resized(images, 16)
    assert both.shape == (2, 3, 16, 16)
    assert torch.equal(resized(images[1], 16), both[1])
