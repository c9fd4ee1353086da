from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from zoo.commands.check import CheckReport, check
from zoo.layers import registry


def run(name: str, **given: Any) -> CheckReport:
    return check(
        name, **{"against": None, "weights": None, "gradients": False, "device": "cpu", "options": {}, **given}
    )


def test_own_resnet_against_torchvision() -> None:
    report = run("resnet18", options={"num_classes": 3})
    assert report.ok
    assert (report.reference, report.state_dict.keys) == ("torchvision/resnet18", 122)
    assert report.swap is not None
    assert (report.swap.swapped, report.swap.proven) == (("fc",), True)
    assert report.parity is not None
    assert [entry.shape for entry in report.parity.entries] == [(2, 3)]
    assert report.parity.weights_differ == ()
    text = str(report)
    assert "state dict agrees with torchvision/resnet18" in text
    assert text.endswith("resnet18 with custom layers is what torchvision/resnet18 is")


def test_own_resnet_against_timm() -> None:
    report = run("resnet18", against="timm", options={"num_classes": 3, "in_chans": 1})
    assert report.ok
    assert report.reference == "timm/resnet18"


def test_a_door_is_compared_with_its_own_library() -> None:
    report = run("timm/mixer_s32_224", options={"num_classes": 2})
    assert report.ok
    assert report.reference == "timm/mixer_s32_224"
    assert report.swap is not None
    assert len(report.swap.swapped) == 8 * 4 + 1
    assert report.parity is not None
    assert report.parity.entries[0].exact_norm > 0.1


def test_mlp_against_torchvisions_building_block() -> None:
    report = run("mlp", gradients=True, options={"in_features": 49, "hidden": [16], "activation": "gelu_tanh"})
    assert report.ok
    assert report.reference == "torchvision.ops.MLP"
    assert report.parity is not None
    assert report.parity.entries[0].shape == (8, 10)


def test_weights_from_a_file_reach_both(tmp_path: Path) -> None:
    for name, options in (("mlp", {"in_features": 16}), ("resnet18", {"num_classes": 2})):
        torch.manual_seed(1)
        path = tmp_path / f"{name}.safetensors"
        model = zoo.create(name, **options)
        zoo.save_checkpoint(model, path)
        report = run(name, weights=str(path), options=options)
        assert report.ok
        assert report.parity is not None
        assert report.parity.weights_differ == ()


def test_models_of_other_keys_are_not_compared_further() -> None:
    report = run("timm/test_convnext", against="timm")
    assert report.ok
    report = run("timm/convnext_tiny", against="torchvision", options={"num_classes": 2})
    assert not report.ok
    assert report.state_dict.missing
    assert (report.swap, report.parity) == (None, None)
    assert "outputs not compared" in str(report)
    assert str(report).endswith("is NOT what torchvision/convnext_tiny is")
    data = json.loads(report.to_json())
    assert (data["ok"], data["swap"], data["parity"]) == (False, None, None)
    assert data["state_dict"]["ok"] is False


@pytest.mark.parametrize("gradients", [False, True])
def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    def wrong(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y + 0.1 * (y - y.detach()) if gradients else y * 1.001

    monkeypatch.setattr(zoo.layers.Linear, "forward", wrong)
    report = run("mlp", gradients=gradients)
    assert not report.ok
    assert report.state_dict.ok
    data = json.loads(report.to_json())
    assert (data["ok"], data["parity"]["ok"], data["swap"]["ok"]) == (False, False, True)
    if gradients:
        assert run("mlp", gradients=False).ok  # only the gradients are wrong


def test_a_wrong_layer_behind_a_small_branch_weight_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(input: torch.Tensor, weight1: torch.Tensor, *others: Any) -> torch.Tensor:
        y = right(input, weight1, *others)
        return y * 1.01 if len(weight1) == first else y

    first = zoo.create("timm/test_convnext").get_submodule("stages.0.blocks.0.mlp.fc1").out_features
    right = registry.get_layer("mlp", "zoo")
    monkeypatch.setitem(registry._layers, ("mlp", "zoo"), wrong)
    report = run("timm/test_convnext", options={"num_classes": 2})
    assert not report.ok
    assert report.parity is not None
    assert report.parity.first_divergence is not None
    assert report.parity.first_divergence.name.startswith("stages.0.blocks.0.mlp")


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="timm has no mlp"):
        run("mlp", against="timm")
    with pytest.raises(ValueError, match="IMAGENET1K_V1"):
        run("resnet18", weights="IMAGENET1K_V9")
    with pytest.raises(ValueError, match="'nonsense'"):
        run("resnet18", options={"nonsense": 1})
    with pytest.raises(ValueError, match="no square"):
        run("mlp", options={"in_features": 50})
