"""Checkpoints: what is saved loads, what does not fit changes nothing, and a file alone makes its model again."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn

from zoo.checkpoint import load, load_checkpoint, read_metadata, save_checkpoint
from zoo.factory import create
from zoo.registry import spec_of
from zoo.swap import patch, policy_of

KINDS = ("pth", "safetensors")


def _net(classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes))


def _random(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model with values that no initialisation gives."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.fill_(seed)
    return model


def _snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def _equal(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    own = model.state_dict()
    return own.keys() == state.keys() and all(
        own[key].dtype == state[key].dtype and torch.equal(own[key], state[key]) for key in own
    )


def _refused(model: nn.Module, source: Any, match: str, **options: Any) -> str:
    """Loading raises, and nothing in the model has changed: neither values nor the tensors themselves."""
    before, tensors = _snapshot(model), {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(ValueError, match=match) as caught:
        load_checkpoint(model, source, **options)
    assert _equal(model, before) and tensors == {k: id(t) for k, t in model.state_dict(keep_vars=True).items()}
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loads(tmp_path: Path, kind: str) -> None:
    source, target = _random(_net()), _net()
    path = save_checkpoint(source, tmp_path / f"a.{kind}")
    report = load_checkpoint(target, path)
    assert _equal(target, _snapshot(source))
    assert report.ok and report.loaded == 9
    assert (report.fresh, report.absent, report.converted, report.prefix) == ((), (), (), "")
    assert str(report) == f"9 tensors loaded from {path}"


def test_a_torch_file_is_for_everyone(tmp_path: Path) -> None:
    model = create("resnet18", num_classes=3)
    content = torch.load(save_checkpoint(model, tmp_path / "a.pth"), weights_only=True)
    assert list(content) == list(model.state_dict())
    assert content._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    other = torchvision.models.resnet18(num_classes=3)
    other.load_state_dict(content, strict=True)
    assert _equal(other, content)


def test_a_mapping_loads_too() -> None:
    source, target = _random(_net()), _net()
    load_checkpoint(target, {"epoch": 1, "model": source.state_dict()})
    assert _equal(target, _snapshot(source))
    _refused(target, {}, "the given state dict: does not fit the model")


# Prefixes and wrappers


class _Innocent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.body = nn.ModuleDict({"module": nn.Linear(2, 2)})
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_come_off_where_they_are_prefixes(tmp_path: Path, kind: str, prefix: str) -> None:
    state = {prefix + key: tensor for key, tensor in _random(_Innocent()).state_dict().items()}
    path = tmp_path / f"a.{kind}"
    torch.save(state, path) if kind == "pth" else save_file(state, path)
    target = _Innocent()
    assert load_checkpoint(target, path).prefix == prefix
    assert _equal(target, {key.removeprefix(prefix): tensor for key, tensor in state.items()} if prefix else state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", ["compile", "parallel", "inner"])
def test_wrapped_models_save_and_load_plain_names(tmp_path: Path, kind: str, wrap: str) -> None:
    def wrapped(model: nn.Module) -> nn.Module:
        if wrap == "inner":
            model.body = torch.compile(model.body, backend="eager")  # type: ignore[assignment]
            return model
        return torch.compile(model, backend="eager") if wrap == "compile" else nn.DataParallel(model)

    source = _random(_Innocent())
    state = _snapshot(source)
    path = save_checkpoint(wrapped(source), tmp_path / f"a.{kind}")
    content = torch.load(path, weights_only=True) if kind == "pth" else load_file(path)
    assert set(content) == set(state)
    if kind == "pth":
        assert content._metadata == _Innocent().state_dict()._metadata  # type: ignore[attr-defined]
    target = wrapped(_Innocent())
    load_checkpoint(target, path)
    assert all(torch.equal(a, b) for a, b in zip(target.state_dict().values(), state.values(), strict=True))


def test_averaged_weights_are_chosen_by_key(tmp_path: Path) -> None:
    raw, averaged = _random(_net(), 1), _random(_net(), 2)
    path = tmp_path / "a.pth"
    torch.save({"state_dict": raw.state_dict(), "state_dict_ema": averaged.state_dict(), "epoch": 3}, path)
    target = _net()
    _refused(target, path, r"a\.pth: holds 2 sets of weights, state_dict, state_dict_ema; choose one with key=")
    load_checkpoint(target, path, key="state_dict_ema")
    assert _equal(target, _snapshot(averaged))


# What does not fit


@pytest.mark.parametrize("kind", KINDS)
def test_every_difference_is_refused_and_told(tmp_path: Path, kind: str) -> None:
    source = _random(_net())
    source.more = nn.Linear(1, 1)
    source[0] = _random(nn.Conv2d(3, 6, 3))
    del source[1]._buffers["running_var"]
    text = _refused(_net(), save_checkpoint(source, tmp_path / f"a.{kind}"), rf"a\.{kind}: does not fit the model")
    for words in (
        "missing (1): 1.running_var",
        "unexpected (2): more.",
        "0.weight: got (6, 3, 3, 3) float32, expected (4, 3, 3, 3) float32",
        "0.bias: got (6,) float32, expected (4,) float32",
        "Build the model that the file was saved from",
    ):
        assert words in text, text
    assert "order" not in text


@pytest.mark.parametrize("drop", ["first", "last", "all", "rename"])
def test_a_part_is_not_enough(tmp_path: Path, drop: str) -> None:
    state = dict(_random(_net()).state_dict())
    changed = {
        "first": {key: tensor for key, tensor in state.items() if key != "0.weight"},
        "last": {key: tensor for key, tensor in state.items() if key != "3.bias"},
        "all": {},
        "rename": {f"backbone.{key}": tensor for key, tensor in state.items()},
    }[drop]
    torch.save(changed, tmp_path / "a.pth")
    _refused(_net(), tmp_path / "a.pth", "does not fit the model")


def test_numbers_and_integers_are_not_mixed() -> None:
    wrong = {"3.bias": torch.zeros(5, dtype=torch.int64), "1.num_batches_tracked": torch.tensor(1.0)}
    for key, tensor in wrong.items():
        _refused(_net(), {**_random(_net()).state_dict(), key: tensor}, rf"{key}: got .*, expected")


def test_one_element_does_not_become_a_scalar() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    _refused(model, {"scale": torch.tensor([2.0, 3.0])}, r"scale: got \(2,\) float32, expected \(\) float32")


@pytest.mark.parametrize("versions", [True, False])
def test_counters_may_be_missing(tmp_path: Path, versions: bool) -> None:
    source, target = _random(_net(), 1), _random(_net(), 2)
    state = source.state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state if versions else dict(state), tmp_path / "a.pth")
    report = load_checkpoint(target, tmp_path / "a.pth")
    assert report.absent == ("1.num_batches_tracked",) and "1 num_batches_tracked not in both" in str(report)
    assert report.loaded == 8 and target[1].num_batches_tracked == 2 and torch.equal(target[3].weight, source[3].weight)


def test_counters_may_be_superfluous() -> None:
    source, target = _random(_net(), 1), _random(_net(), 2)
    target[1].num_batches_tracked = None
    report = load_checkpoint(target, source.state_dict())
    assert report.absent == ("1.num_batches_tracked",) and report.loaded == 8
    assert torch.equal(target[1].running_var, source[1].running_var)


def test_keys_that_the_modules_convert_themselves(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict: Any, prefix: str, told: Any, *rest: Any) -> None:
            if f"{prefix}kernel" in state_dict:
                state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel").t()
            if told.get("version", 2) < 2:
                state_dict[f"{prefix}bias"] = -state_dict[f"{prefix}bias"]
            super()._load_from_state_dict(state_dict, prefix, told, *rest)

    kernel = torch.randn(3, 2)
    state = {"0.kernel": kernel, "0.bias": torch.ones(2), "1.weight": torch.ones(1, 2), "1.bias": torch.ones(1)}
    model = nn.Sequential(Renamed(3, 2), nn.Linear(2, 1))
    load_checkpoint(model, {f"module.{key}": tensor for key, tensor in state.items()})
    assert torch.equal(model[0].weight, kernel.t()) and torch.equal(model[1].weight, torch.ones(1, 2))
    versioned = OrderedDict(state)
    versioned._metadata = {"0": {"version": 1}}  # type: ignore[attr-defined]
    load_checkpoint(model, versioned)
    assert torch.equal(model[0].bias, -torch.ones(2))  # converted once
    assert "0.kernel" in state
    _refused(model, {**state, "surplus": torch.ones(1)}, "unexpected .*surplus")
    for key in ("1.bias", "0.bias"):
        _refused(model, {name: tensor for name, tensor in state.items() if name != key}, rf"missing .*{key}")
    _refused(model, {**state, "0.kernel": torch.randn(4, 2)}, "unexpected .*kernel")


class _Negated(nn.Linear):
    """Version 2 means by its weight what version 1 meant by the negative, under the same key."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, told: Any, *rest: Any) -> None:
        if told.get("version", 0) < 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, told, *rest)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_values_of_older_versions_are_converted(tmp_path: Path, prefix: str) -> None:
    source, target = nn.Sequential(nn.Sequential(_Negated(2, 2))), nn.Sequential(nn.Sequential(_Negated(2, 2)))
    inner = target[0][0]
    target[0] = torch.compile(target[0], backend="eager")
    weight = source[0][0].weight.detach()

    def loaded(path_or_state: Any) -> torch.Tensor:
        load_checkpoint(target, path_or_state)
        return inner.weight.detach()

    for kind in KINDS:
        assert torch.equal(loaded(save_checkpoint(source, tmp_path / f"a.{kind}")), weight)
    state = OrderedDict((prefix + key, tensor) for key, tensor in source.state_dict().items())
    assert torch.equal(loaded(state), weight)  # nothing is told: the present version
    for told in ({"version": 1}, {"version": 1, "assign_to_params_buffers": True}, {"version": 2}, {"version": "1"}, 3):
        state._metadata = {f"{prefix}0.0": told, "": {"version": 1}}  # type: ignore[attr-defined]
        path = tmp_path / "b.pth"
        torch.save({"model": state}, path)
        expected = -weight if isinstance(told, dict) and told["version"] == 1 else weight
        before = inner.weight
        assert torch.equal(loaded(path), expected) and inner.weight is before, told
    state._metadata = 3  # type: ignore[attr-defined]
    assert torch.equal(loaded(state), weight)


def test_torchvision_files_of_an_older_key_layout() -> None:
    options = {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
    source, target = (torchvision.models.VisionTransformer(**options) for _ in range(2))
    old = {}
    for key, tensor in _random(source).state_dict().items():
        old[key.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2.")] = tensor
    assert any("linear_1" in key for key in old)
    load_checkpoint(target, old)
    assert _equal(target, _snapshot(source))


# dtypes


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_floating_dtypes_are_converted_to_the_models(tmp_path: Path, stored: torch.dtype) -> None:
    source, target = _random(_net()).to(stored), _net()
    report = load_checkpoint(target, save_checkpoint(source, tmp_path / "a.safetensors"))
    assert report.converted == tuple(key for key in target.state_dict() if key != "1.num_batches_tracked")
    assert _equal(target, _snapshot(source.float()))


def test_a_conversion_that_would_overflow_is_refused() -> None:
    source = _random(_net())
    source[3].weight.data[0, 0] = 1e6
    _refused(_net().half(), source.state_dict(), r"3\.weight: 1 values of the float32 tensor do not fit .* float16")
    source[3].weight.data[0, :2] = torch.tensor([math.inf, math.nan])
    target = _net().half()
    load_checkpoint(target, source.state_dict())  # what is infinite already stays so
    assert torch.isinf(target[3].weight[0, 0]) and torch.isnan(target[3].weight[0, 1])


# Ties


class _Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("kind", KINDS)
def test_tied_parameters(tmp_path: Path, kind: str) -> None:
    source, target, untied = _random(_Tied()), _Tied(), _Tied(tied=False)
    path = save_checkpoint(source, tmp_path / f"a.{kind}")
    for model in (target, untied):
        load_checkpoint(model, path)
        assert _equal(model, _snapshot(source))
    assert target.head.weight is target.embed.weight
    for key in ("head.weight", "embed.weight"):  # other tools keep one of the two
        target = _Tied()
        load_checkpoint(target, {key: source.head.weight.detach()})
        assert torch.equal(target.head.weight, source.head.weight)
    state = dict(source.state_dict())
    _refused(_Tied(), {**state, "head.weight": torch.zeros(6, 3)}, "embed.weight and head.weight differ, but are one")
    state["embed.weight"] = state["head.weight"] = torch.full((6, 3), math.nan)
    load_checkpoint(_Tied(), {key: tensor.clone() for key, tensor in state.items()})


# Models that cannot be loaded into


def _on_meta() -> nn.Module:
    return _net().to("meta")


def _in_inference() -> nn.Module:
    with torch.inference_mode():
        return _net()


def _expanded() -> nn.Module:
    model = _net()
    model[3].bias = nn.Parameter(torch.zeros(1).expand(5))
    return model


def _lazy() -> nn.Module:
    return nn.Sequential(*_net()[:3], nn.LazyLinear(5))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_on_meta, "0.weight of the model is on the meta device.*; build the model on a real device before loading"),
        (_in_inference, "0.weight of the model was made under torch.inference_mode"),
        (_expanded, "3.bias of the model is expanded"),
        (_lazy, "3.weight of the model is a lazy parameter"),
    ],
)
def test_a_model_that_cannot_take_values_is_told(build: Callable[[], nn.Module], reason: str) -> None:
    model = build()
    before = None if model[0].weight.is_meta else model[0].weight.clone()
    with pytest.raises(ValueError, match=f"the given state dict: cannot be loaded, for {reason}"):
        load_checkpoint(model, _random(_net()).state_dict())
    assert before is None or torch.equal(before, model[0].weight)


def test_a_state_dict_without_values_is_told() -> None:
    _refused(_net(), _on_meta().state_dict(), "0.weight is on the meta device and has no values to load")


# The classifier


@pytest.mark.parametrize("kind", KINDS)
def test_another_classifier_is_refused_or_kept(tmp_path: Path, kind: str) -> None:
    source, target = _random(_net(5)), _random(_net(7), 2)
    path = save_checkpoint(source, tmp_path / f"a.{kind}")
    text = _refused(target, path, rf"a\.{kind}: does not fit the model")
    assert "3.weight: got (5, 4) float32, expected (7, 4) float32" in text and "reset_head=True" in text
    head = _snapshot(target[3])
    report = load_checkpoint(target, path, reset_head=True)
    assert report.fresh == ("3.weight", "3.bias") and report.loaded == 7 and "the head kept" in str(report)
    assert _equal(target[3], head) and _equal(target[:3], _snapshot(source[:3]))


def test_reset_head_keeps_one_that_would_fit() -> None:
    source, target = _random(_net()), _random(_net(), 2)
    head = _snapshot(target[3])
    load_checkpoint(target, source.state_dict(), reset_head=True)
    assert _equal(target[3], head) and _equal(target[0], _snapshot(source[0]))


def test_reset_head_loads_a_file_without_one() -> None:
    source, target = _random(_net()), _random(_net(), 2)
    state = {key: tensor for key, tensor in source.state_dict().items() if not key.startswith("3.")}
    assert "reset_head=True" in _refused(target, state, "missing")
    load_checkpoint(target, state, reset_head=True)
    assert _equal(target[0], _snapshot(source[0]))


def test_reset_head_loads_into_a_model_without_one() -> None:
    source, target = create("mlp"), create("mlp", num_classes=0)
    assert "reset_head=True" in _refused(target, source.state_dict(), "unexpected")
    assert load_checkpoint(target, source.state_dict(), reset_head=True).fresh == ()
    assert torch.equal(target[0].weight, source[0].weight)


def test_reset_head_of_a_wrapped_model() -> None:
    source, target = _random(_net(5)), _net(7)
    target[3] = torch.compile(target[3], backend="eager")
    report = load_checkpoint(nn.DataParallel(target), source.state_dict(), reset_head=True)
    assert report.fresh == ("3.weight", "3.bias") and torch.equal(target[0].weight, source[0].weight)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_reset_head_is_strict_elsewhere(change: str) -> None:
    state = dict(_random(_net(7)).state_dict())
    if change == "missing":
        del state["0.bias"]
    elif change == "unexpected":
        state["4.weight"] = torch.ones(1)
    else:
        state["0.bias"] = torch.ones(1)
    _refused(_net(), state, "does not fit the model", reset_head=True)


def test_reset_head_needs_a_head() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    _refused(model, model.state_dict(), "reset_head=True, but Sequential has no classifier", reset_head=True)


# A file that describes itself


def _saved(tmp_path: Path, **options: Any) -> tuple[nn.Module, Path]:
    model = _random(create("mlp", num_classes=3, **options))
    return model, save_checkpoint(model, tmp_path / "a.safetensors")


def _altered(path: Path, **entries: str | None) -> Path:
    """The file with other entries in its header; None takes one out."""
    metadata = {key: text for key, text in {**read_metadata(path), **entries}.items() if text is not None}
    altered = path.with_name("altered.safetensors")
    save_file(load_file(path), altered, metadata=metadata)
    return altered


@pytest.mark.parametrize("name", ["mlp", "resnet18", "torchvision/mobilenet_v3_small", "timm/resnet18"])
def test_a_model_comes_back_from_its_file_alone(tmp_path: Path, name: str) -> None:
    source = _random(create(name, num_classes=3))
    model = load(save_checkpoint(source, tmp_path / "a.safetensors"))
    assert _equal(model, _snapshot(source)) and list(model.state_dict()) == list(source.state_dict())
    assert str(model) == str(source) and spec_of(model) == spec_of(source) and model.training
    assert policy_of(model) == ()


def test_the_layer_policy_comes_back(tmp_path: Path) -> None:
    source = create("mlp", num_classes=3)
    patch(source, "linear", only="head")
    model = load(save_checkpoint(_random(source), tmp_path / "a.safetensors"))
    assert policy_of(model) == policy_of(source) != ()
    kinds = [[type(module).__name__ for module in each.modules()] for each in (model, source)]
    assert kinds[0] == kinds[1] and kinds[0] != [type(module).__name__ for module in create("mlp").modules()]
    assert _equal(model, _snapshot(source))


def test_a_policy_of_a_part_comes_back(tmp_path: Path) -> None:
    source = create("timm/vit_tiny_patch16_224", num_classes=2, depth=2, embed_dim=12, img_size=32)
    patch(source.blocks[1], "linear")
    model = load(save_checkpoint(source, tmp_path / "a.safetensors"))
    assert str(model) == str(source)
    assert policy_of(model) == () and policy_of(model.blocks[1]) == policy_of(source.blocks[1]) != ()


def test_a_policy_by_function_is_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    model = create("mlp")
    patch(model, "linear", only=lambda name, module: module.out_features == 256)
    with pytest.raises(ValueError, match=r"a\.safetensors: mlp could not be rebuilt .*globs.* save as \.pth"):
        save_checkpoint(model, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
    load_checkpoint(create("mlp"), save_checkpoint(model, tmp_path / "a.pth"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    source = _random(create("mlp", dtype=dtype))
    assert _equal(load(save_checkpoint(source, tmp_path / "a.safetensors")), _snapshot(source))


def test_several_dtypes_come_back(tmp_path: Path) -> None:
    source = create("mlp")
    first, *_, last = [module for module in source.modules() if isinstance(module, nn.Linear)]
    first.half()
    last.double()
    assert _equal(load(save_checkpoint(source, tmp_path / "a.safetensors")), _snapshot(source))


def test_wrapped_models_describe_themselves(tmp_path: Path) -> None:
    source = create("mlp", num_classes=3)
    path = save_checkpoint(torch.compile(source, backend="eager"), tmp_path / "a.safetensors")
    assert _equal(load(path), _snapshot(source)) and spec_of(load(path)) == spec_of(source)


def test_the_header_is_plain_text(tmp_path: Path) -> None:
    model = create("mlp", num_classes=3, custom_linear="head")
    path = save_checkpoint(model, tmp_path / "a.safetensors", metadata={"epoch": 3, "note": "größer", "best": 0.5})
    header = read_metadata(path)
    assert header["epoch"] == "3" and header["note"] == "größer" and header["best"] == "0.5"
    assert json.loads(header["zoo_model"]) == {"name": "mlp", "options": {"num_classes": 3}}
    assert json.loads(header["zoo_policy"]) == {"": [{"kind": "linear", "layer": "zoo", "only": "head"}]}
    assert header["torch_version"] == torch.__version__ and header["format"] == "pt" and header["zoo_version"]


@pytest.mark.parametrize("key", ["zoo_model", "zoo_mine", "format", "torch_version", 3])
def test_zoos_own_header_entries_cannot_be_given(tmp_path: Path, key: Any) -> None:
    with pytest.raises(ValueError, match=rf"metadata key {key!r} is zoo's own, or no text"):
        save_checkpoint(nn.Linear(1, 1), tmp_path / "a.safetensors", metadata={key: "x"})


def test_metadata_is_never_dropped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata 'scores' is list, expected text or a number; use json\.dumps"):
        save_checkpoint(nn.Linear(1, 1), tmp_path / "a.safetensors", metadata={"scores": [1, 2]})
    with pytest.raises(ValueError, match=r"a\.pth: got metadata, .* save as \.safetensors"):
        save_checkpoint(nn.Linear(1, 1), tmp_path / "a.pth", metadata={"epoch": 1})
    assert not list(tmp_path.iterdir())


def test_files_that_do_not_say_what_they_hold(tmp_path: Path) -> None:
    for kind, words in {"safetensors": "does not say which model it holds", "pth": "a torch file does not say"}.items():
        path = save_checkpoint(_net(), tmp_path / f"a.{kind}")
        with pytest.raises(ValueError, match=rf"a\.{kind}: {words}.*zoo\.load_checkpoint\("):
            load(path)
    path = save_checkpoint(create("mlp"), tmp_path / "b.pth")
    with pytest.raises(ValueError, match=r"b\.pth: a torch file does not say"):
        load(path)
    with pytest.raises(FileNotFoundError, match=r"nope\.safetensors"):
        load(tmp_path / "nope.safetensors")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (None, "does not say which model it holds"),
        ("", "zoo_model is '', expected JSON"),
        ("{", "expected JSON"),
        ("[" * 100_000, "zoo_model has 100000 characters, expected at most"),
        ("[" * 50_000, "expected JSON"),
        ("[]", "expected an object with name and options"),
        ('{"name": "mlp"}', "expected an object with name and options"),
        ('{"name": "mlp", "options": {}, "weights": "x"}', "expected an object with name and options"),
        ('{"name": 3, "options": {}}', "expected text and an object"),
        ('{"name": "mlp", "options": []}', "expected text and an object"),
        ('{"name": "no_such_model", "options": {}}', "no_such_model"),
        ('{"name": "mlp", "options": {"nonsense": 1}}', "cannot be built with the options .*nonsense"),
        ('{"name": "mlp", "options": {"num_classes": "many"}}', "cannot be built"),
        ('{"name": "mlp", "options": {"num_classes": -1}}', "cannot be built"),
        ('{"name": "mlp", "options": {"num_classes": 1000000000000000}}', "are not those of the mlp"),
        ('{"name": "mlp", "options": {"num_classes": 1' + 40 * "0" + "}}", "cannot be built"),
        ('{"name": "mlp", "options": {"num_classes": 4}}', r"its tensors \('got'\) are not those of the mlp"),
        ('{"name": "resnet18", "options": {}}', "are not those of the resnet18"),
    ],
)
def test_a_header_is_not_trusted(tmp_path: Path, entry: str | None, reason: str) -> None:
    _, path = _saved(tmp_path)
    with pytest.raises(ValueError, match=rf"altered\.safetensors: .*{reason}"):
        load(_altered(path, zoo_model=entry))


@pytest.mark.parametrize(
    "option",
    ["weights", "device", "custom_linear", "reset_head", "name", "pretrained", "checkpoint_path", "pretrained_cfg"],
)
def test_a_header_cannot_make_create_read_elsewhere(tmp_path: Path, option: str) -> None:
    _, path = _saved(tmp_path)
    told = json.dumps({"name": "mlp", "options": {"num_classes": 3, option: "/etc/hosts"}})
    with pytest.raises(ValueError, match=rf"zoo_model has {option} among its options, which no model takes"):
        load(_altered(path, zoo_model=told))


@pytest.mark.parametrize("name", ["timm/hf-hub:timm/resnet18.a1_in1k", "timm/local-dir:/tmp", "hf-hub:x/y"])
def test_a_header_cannot_make_create_fetch(tmp_path: Path, name: str) -> None:
    _, path = _saved(tmp_path)
    with pytest.raises(ValueError, match=r"altered\.safetensors: "):
        load(_altered(path, zoo_model=json.dumps({"name": name, "options": {}})))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (None, "zoo_policy is '', expected JSON"),
        ("3", "zoo_policy is 3"),
        ("[]", "zoo_policy is"),
        ('{"": [3]}', "must be an object with kind, layer and only"),
        ('{"": [{"kind": "linear"}]}', "must be an object with kind, layer and only"),
        ('{"": [{"kind": "linear", "layer": "zoo", "only": 5}]}', "only must be None"),
        ('{"": [{"kind": "linear", "layer": "mine", "only": null}]}', "policy cannot be followed.*'mine'.*register"),
        ('{"nowhere": [{"kind": "linear", "layer": "zoo", "only": null}]}', "policy cannot be followed.*nowhere"),
    ],
)
def test_a_policy_is_not_trusted(tmp_path: Path, entry: str | None, reason: str) -> None:
    _, path = _saved(tmp_path)
    with pytest.raises(ValueError, match=rf"altered\.safetensors: .*{reason}"):
        load(_altered(path, zoo_policy=entry))


def test_a_model_that_was_changed_is_not_rebuilt_as_another(tmp_path: Path) -> None:
    source = create("mlp", num_classes=3)
    source.more = nn.Linear(1, 1)
    path = save_checkpoint(source, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"changed after zoo\.create, change it likewise and use zoo\.load_checkpoint"):
        load(path)
    target = copy.deepcopy(source)
    load_checkpoint(target, path)


def test_a_file_with_another_model_is_refused_by_create(tmp_path: Path) -> None:
    path = save_checkpoint(create("mlp", num_classes=5), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors: does not fit(.|\n)*\(5, 256\) float32, expected \(3, 256\)"):
        create("mlp", weights=path, num_classes=3)
    model = create("mlp", weights=str(path), num_classes=3, reset_head=True)
    first = next(iter(model.state_dict()))
    assert torch.equal(model.state_dict()[first], load_file(path)[first])


def test_only_weights_are_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    model = _net()
    state = model.state_dict()
    for name, content in {
        "whole": model,
        "args": {"state_dict": state, "args": argparse.Namespace(lr=1)},
        "evil": {"state_dict": state, "x": Evil()},
    }.items():
        torch.save(content, tmp_path / f"{name}.pth")
        _refused(_net(), tmp_path / f"{name}.pth", rf"{name}\.pth: .*unpickles nothing but weights")
    assert not (tmp_path / "pwned").exists()
