"""State dicts compared: every kind of difference, and wrappers and prefixes that are none."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zoo.factory import create
from zoo.report import CheckFailed
from zoo.state_dict import check_state_dict, compare, plain_names, raw_keys, state_of, strip_prefixes, unwrap
from zoo.tensor_files import write_tensors


def _net() -> nn.Sequential:
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), fc=nn.Linear(4, 5)))


class _Innocent(nn.Module):
    """Children that are really called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.body = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})
        self.head = nn.Linear(2, 2)


def test_equal_models_agree() -> None:
    report = check_state_dict(_net(), _net())
    assert report.ok and report.keys == 9 and report.order is None and not report.absent
    report.raise_for_failure()
    assert str(report) == "state dict agrees with Sequential (9 keys)"


@pytest.mark.parametrize("kind", ["module", "mapping", "pth", "safetensors"])
def test_differences_are_named_on_the_right_side(tmp_path: Path, kind: str) -> None:
    model, other = _net(), _net()
    model.extra = nn.Linear(1, 1, bias=False)
    del model.fc._parameters["bias"]
    other.fc.weight = nn.Parameter(torch.zeros(7, 4))
    other.bn.running_mean = other.bn.running_mean.double()
    reference = {
        "module": lambda: other,
        "mapping": other.state_dict,
        "pth": lambda: write_tensors(tmp_path / "a.pth", other.state_dict()),
        "safetensors": lambda: str(write_tensors(tmp_path / "a.safetensors", other.state_dict())),
    }[kind]()
    report = check_state_dict(model, reference)
    assert not report.ok
    assert report.missing == ("fc.bias",) and report.unexpected == ("extra.weight",)
    assert {pair.key: (str(pair.got), str(pair.expected)) for pair in report.mismatched} == {
        "fc.weight": ("(5, 4) float32", "(7, 4) float32"),
        "bn.running_mean": ("(4,) float32", "(4,) float64"),
    }
    with pytest.raises(CheckFailed, match=r"fc\.weight: got \(5, 4\) float32, expected \(7, 4\) float32"):
        report.raise_for_failure()
    data = json.loads(report.to_json())
    assert data["ok"] is False and data["missing"] == ["fc.bias"]
    assert data["mismatched"][0]["expected"] == {"shape": [4], "dtype": "float64"}
    for words in ("missing (1): fc.bias", "unexpected (1): extra.weight", "mismatched (2):"):
        assert words in str(report)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "dtype"])
def test_each_difference_alone_fails(change: str) -> None:
    model = _net()
    state = dict(model.state_dict())
    if change == "missing":
        state["more"] = torch.zeros(1)
    elif change == "unexpected":
        del state["fc.bias"]
    elif change == "shape":
        state["fc.bias"] = state["fc.bias"][None]
    else:
        state["fc.bias"] = state["fc.bias"].half()
    assert not check_state_dict(model, state).ok


def test_only_the_counters_of_batchnorm_may_be_absent() -> None:
    model, state = _net(), _net().state_dict()
    del state["bn.num_batches_tracked"]
    report = check_state_dict(model, state)
    assert report.ok and report.absent == ("bn.num_batches_tracked",) and "allowed: 1" in str(report)
    model.bn.num_batches_tracked = None
    report = check_state_dict(model, _net())
    assert report.ok and report.absent == ("bn.num_batches_tracked",)
    state["bn.num_batches_tracked"] = torch.zeros(())  # there, but of another dtype
    assert not check_state_dict(_net(), state).ok
    for name in ("running_mean", "running_var", "weight", "bias"):
        state = _net().state_dict()
        del state[f"bn.{name}"]
        assert not check_state_dict(_net(), state).ok, name


def test_order_counts_against_a_module_alone(tmp_path: Path) -> None:
    model, other = nn.Module(), nn.Module()
    for name in ("a", "b", "c", "d"):
        model.register_buffer(name, torch.zeros(2))
    for name in ("a", "c", "b", "d"):
        other.register_buffer(name, torch.zeros(2))
    report = check_state_dict(model, other)
    assert report.order is not None and not report.ok
    assert (report.order.position, report.order.got, report.order.expected, report.order.moved) == (1, "b", "c", 2)
    assert "order: 2 keys stand elsewhere, first at 1: got b, expected c" in str(report)
    for reference in (other.state_dict(), write_tensors(tmp_path / "a.pth", other.state_dict())):
        report = check_state_dict(model, reference)
        assert report.order is not None and report.order.moved == 2 and report.ok and "(allowed)" in str(report)
    report = check_state_dict(_net(), write_tensors(tmp_path / "a.safetensors", _net().state_dict()))
    assert report.ok and report.order is None  # the format sorts the keys
    del other.c  # a key less shifts nothing
    assert check_state_dict(model, other).order is None


def test_a_large_difference_is_short() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(200)])
    other = nn.Sequential(*[nn.Linear(3, 3) for _ in range(200)])
    for report in (check_state_dict(model, other), check_state_dict(model, {"x": torch.ones(1)})):
        assert len(str(report)) < 1500 and "… and 392 more" in str(report) and "0.weight" in str(report)
    assert len(check_state_dict(model, other).mismatched) == 400


def test_values_are_not_compared() -> None:
    assert check_state_dict(_net(), _net().state_dict()).ok


@pytest.mark.parametrize("reference", [3, None, [torch.ones(1)]])
def test_another_reference_is_a_value_error(reference: object) -> None:
    with pytest.raises(ValueError, match="expected a module, a mapping, a path, 'torchvision' or 'timm'"):
        check_state_dict(_net(), reference)  # type: ignore[arg-type]


def test_a_library_needs_a_model_with_a_name() -> None:
    with pytest.raises(ValueError, match=r"'torchvision' needs a model of zoo\.create, got a Sequential"):
        check_state_dict(_net(), "torchvision")


def test_an_entry_that_is_no_tensor_is_named() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"step": 1}

    with pytest.raises(ValueError, match=r"0\._extra_state is dict, expected a tensor"):
        check_state_dict(nn.Sequential(Extra(1, 1)), _net())


# The model of the same name in another library


@pytest.mark.parametrize(
    ("name", "options", "library"),
    [
        ("resnet18", {}, "torchvision"),
        ("resnet18", {"num_classes": 3}, "timm"),
        ("resnext50_32x4d", {"num_classes": 7, "zero_init_residual": True}, "torchvision"),
        ("timm/resnet50", {"num_classes": 2}, "torchvision"),
        ("torchvision/regnet_x_400mf", {}, "torchvision"),
        ("timm/vit_tiny_patch16_224", {"img_size": 32, "depth": 1}, "timm"),
        ("mlp", {}, "torchvision"),
        ("mlp", {"in_features": 5, "hidden": [4, 3, 2], "num_classes": 6, "dropout": 0.5}, "torchvision"),
        ("mlp", {"num_classes": 0}, "torchvision"),
    ],
)
def test_a_library_is_a_reference(name: str, options: dict[str, Any], library: str) -> None:
    model = create(name, device="meta", **options)
    report = check_state_dict(torch.compile(model, backend="eager"), library)
    assert report.ok and report.strict_order and report.order is None and report.keys == len(model.state_dict()), report
    assert library in str(report)
    model.register_buffer("surplus", torch.zeros(1))
    assert check_state_dict(model, library).unexpected == ("surplus",)


def test_the_reference_has_the_options_of_the_model() -> None:
    model = create("resnet18", num_classes=5, device="meta")
    model.fc = nn.Linear(512, 9, device="meta")
    (first, _) = check_state_dict(model, "torchvision").mismatched
    assert str(first) == "fc.weight: got (9, 512) float32, expected (5, 512) float32"
    model.reset_classifier(9)
    assert check_state_dict(model, "torchvision").ok
    assert len(check_state_dict(create("mlp", dtype=torch.float64), "torchvision").mismatched) == 6


def test_making_the_reference_leaves_random_numbers_alone() -> None:
    model = create("mlp")
    torch.manual_seed(3)
    check_state_dict(model, "torchvision")
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize(
    ("name", "options", "library", "reason"),
    [
        ("timm/vit_tiny_patch16_224", {}, "torchvision", "unknown torchvision model 'vit_tiny_patch16_224'"),
        ("resnet18", {"in_chans": 1}, "torchvision", "torchvision/resnet18 is no reference for resnet18.*in_chans"),
        ("mlp", {}, "timm", "unknown timm model 'mlp'"),
    ],
)
def test_a_library_without_the_model_says_so(name: str, options: dict[str, Any], library: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_state_dict(create(name, device="meta", **options), library)  # type: ignore[arg-type]


# Wrappers


def _wrapped(model: nn.Module) -> dict[str, nn.Module]:
    return {
        "compile": torch.compile(model, backend="eager"),
        "parallel": nn.DataParallel(model),
        "both": nn.DataParallel(torch.compile(model, backend="eager")),
        "the other way": torch.compile(nn.DataParallel(model), backend="eager"),
    }


@pytest.mark.parametrize("name", ["compile", "parallel", "both", "the other way"])
def test_wrappers_are_seen_through(name: str) -> None:
    model = _Innocent()
    wrapped = _wrapped(model)[name]
    assert unwrap(wrapped) is model
    assert check_state_dict(wrapped, model).ok and check_state_dict(model, wrapped).ok
    assert list(state_of(wrapped)) == list(model.state_dict())
    assert check_state_dict(model, wrapped.state_dict()).ok


def test_distributed_models_are_seen_through(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = _Innocent()
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert unwrap(wrapped) is model and check_state_dict(wrapped, model).ok
        assert list(state_of(wrapped)) == list(model.state_dict())
    finally:
        torch.distributed.destroy_process_group()


def test_wrappers_around_inner_modules() -> None:
    plain = nn.Sequential(_Innocent(), nn.Sequential(_Innocent(), nn.Linear(2, 2)))
    model = copy.deepcopy(plain)
    model[1][0] = torch.compile(model[1][0], backend="eager")
    model[1] = nn.DataParallel(torch.compile(model[1], backend="eager"))
    assert list(state_of(model)) == list(plain.state_dict()) and check_state_dict(model, plain).ok
    assert raw_keys(model)["1.0.module.weight"] == "1.module._orig_mod.0._orig_mod.module.weight"
    assert list(raw_keys(model).values()) == list(model.state_dict())
    assert plain_names(model)("1.module._orig_mod.") == "1."


def test_a_wrapped_module_of_several_names() -> None:
    shared = torch.compile(nn.Linear(2, 2), backend="eager")
    assert list(state_of(nn.Sequential(shared, shared))) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_state_is_the_tensors_themselves() -> None:
    model = nn.Linear(2, 2)
    assert state_of(model)["weight"] is model.weight


# Prefixes

_names = st.lists(
    st.lists(st.sampled_from(["module", "_orig_mod", "fc", "weight", "0"]), min_size=1, max_size=4).map(".".join),
    min_size=1,
    max_size=6,
    unique=True,
)
_prefixes = st.lists(st.sampled_from(["module.", "_orig_mod."]), max_size=4).map("".join)


@settings(max_examples=150, deadline=None)
@given(names=_names, prefix=_prefixes)
def test_whatever_is_put_in_front_comes_off(names: list[str], prefix: str) -> None:
    tensors = {name: torch.tensor(index) for index, name in enumerate(names)}
    stripped, taken = strip_prefixes({prefix + name: tensor for name, tensor in tensors.items()}, names)
    assert stripped == tensors and list(stripped) == names and taken == prefix


@settings(max_examples=150, deadline=None)
@given(names=_names, known=_names)
def test_a_prefix_comes_off_only_where_more_then_match(names: list[str], known: list[str]) -> None:
    tensors = {name: torch.tensor(index) for index, name in enumerate(names)}
    stripped, taken = strip_prefixes(tensors, known)
    assert [taken + name for name in stripped] == names and [*stripped.values()] == [*tensors.values()]
    before, after = (len(set(known) & set(keys)) for keys in (names, stripped))
    assert after > before if taken else after == before


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_innocent_names_stay(prefix: str) -> None:
    model = _Innocent()
    state = {prefix + key: value for key, value in model.state_dict().items()}
    report = check_state_dict(model, {"state_dict": state, "epoch": 1})
    assert report.ok and report.prefix == prefix and (not prefix or repr(prefix) in str(report))


def test_a_prefix_that_not_every_key_has_stays() -> None:
    state = {"module.weight": torch.ones(1), "bias": torch.ones(1)}
    assert strip_prefixes(state, ["weight", "bias"]) == (state, "")


def test_other_prefixes_stay() -> None:
    state = {f"backbone.{key}": value for key, value in _net().state_dict().items()}
    report = check_state_dict(_net(), state)
    assert not report.ok and len(report.missing) == 8 and report.prefix == ""


def test_compare_takes_things_as_they_are() -> None:
    tensors = {"a": torch.ones(2)}
    assert compare(tensors, tensors, reference="x").ok
    assert compare({"module.a": torch.ones(2)}, tensors, reference="x").missing == ("a",)


def test_lazy_parameters_are_told() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"0\.weight is a lazy parameter without a shape; run the model once"):
        check_state_dict(model, nn.Sequential(nn.Linear(2, 2)))
