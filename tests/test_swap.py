"""Patch and unpatch: what is swapped, what is not and why, and that nothing else of the model changes."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from zoo.coverage import coverage
from zoo.layers import Linear, get_layer, registry
from zoo.layers.patched import Patched
from zoo.report import CheckFailed
from zoo.swap import Rule, SwapReport, apply_rules, patch, policy_of, unpatch


class CountZoo(TorchDispatchMode):
    """How often a zoo operator really ran."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func.namespace == "zoo"
        return func(*args, **(kwargs or {}))


def zoo_calls(model: nn.Module, *inputs: Any) -> int:
    with CountZoo() as count:
        model(*inputs)
    return count.n


def snapshot(model: nn.Module) -> Any:
    """Everything of a model that a patch may touch, to the level of objects and of what lies in each __dict__."""
    return [
        (
            name,
            id(module),
            type(module),
            {key: id(value) for key, value in module.__dict__.items()},
            [{key: id(value) for key, value in module.__dict__[store].items()} for store in STORES],
            set(module._non_persistent_buffers_set),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ] + list(model.state_dict())


STORES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def mlp(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8, **options), nn.ReLU(), nn.Linear(8, 3, **options))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


# what a swap keeps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_swapped_model_computes_the_same_and_zoo_runs(dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    stock, x = copy.deepcopy(model), torch.randn(5, 4, dtype=dtype)
    report = patch(model)
    assert report.swapped == ("0", "2") and report.skipped == {} and report.ok and not report.proven
    assert zoo_calls(model, x) == 2 and zoo_calls(stock, x) == 0
    torch.testing.assert_close(model(x), stock(x))
    for m in (model, stock):
        m(x).sum().backward()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_identity_is_kept_in_every_object() -> None:
    model = mlp()
    model[0].tag, model[2].weight.note = 7, "kept"
    model[0].weight.requires_grad_(False)
    model[2].eval()
    before = {
        name: (id(m), {k: id(v) for k, v in m.__dict__.items() if k != "zoo"}) for name, m in model.named_modules()
    }
    ids, keys = [id(p) for p in model.parameters()], list(model.state_dict())
    patch(model)
    after = {name: (id(m), {k: id(v) for k, v in m.__dict__.items()}) for name, m in model.named_modules()}
    after[""][1].pop("_zoo_policy")
    assert after == before and [id(p) for p in model.parameters()] == ids and list(model.state_dict()) == keys
    assert isinstance(model[0], Linear) and isinstance(model[0], nn.Linear) and model[0].tag == 7
    assert not model[0].weight.requires_grad and not model[2].training and model[2].weight.note == "kept"
    assert repr(model[0]) == "Linear[zoo](in_features=4, out_features=8, bias=True)"


def test_an_optimizer_made_before_the_patch_trains_the_model() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    patch(model)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_hooks_of_every_sort_still_fire() -> None:
    model, log = mlp(), []
    layer = model[2]
    layer.register_forward_pre_hook(lambda *a: log.append("pre"))
    layer.register_forward_pre_hook(lambda m, args, kwargs: log.append("pre kw"), with_kwargs=True)
    layer.register_forward_hook(lambda *a: log.append("forward"))
    layer.register_forward_hook(lambda m, args, out: out * 2)
    layer.register_full_backward_pre_hook(lambda *a: log.append("backward pre"))
    layer.register_full_backward_hook(lambda *a: log.append("backward"))
    layer.weight.register_hook(lambda g: log.append("grad"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
    layer.register_state_dict_pre_hook(lambda *a: log.append("state dict"))
    x = torch.randn(5, 4)
    expected = model(x)
    expected.sum().backward()
    model.state_dict()
    stock_log = log.copy()
    log.clear()
    patch(model)
    log.clear()
    y = model(x)
    y.sum().backward()
    model.state_dict()
    torch.testing.assert_close(y, expected)
    assert log == stock_log


def test_ties_and_aliases_are_kept() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.ModuleList([nn.Linear(3, 3)])})
    model["b"][0].weight = model["a"].weight
    model["c"] = model["a"]
    report = patch(model)
    assert report.swapped == ("a", "b.0") and model["c"] is model["a"] and model["b"][0].weight is model["a"].weight
    assert patch(copy.deepcopy(model), only=["c"]).swapped == ("a", "b.0")
    fresh = nn.ModuleDict({"a": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
    fresh["c"] = fresh["a"]
    assert patch(fresh, only=["c"]).swapped == ("a",), "a module is selected by each of its names"


def test_a_model_that_is_itself_a_linear() -> None:
    model = nn.Linear(3, 2)
    before = snapshot(model)
    report = patch(model)
    assert report.swapped == ("",) and isinstance(model, Linear) and "(the model itself)" not in str(report)
    unpatch(model)
    assert type(model) is nn.Linear and snapshot(model) == before


def test_a_model_without_linears_is_left_alone_quietly() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = patch(model)
    assert report == SwapReport("linear", "zoo", (), {}) and report.ok


# again, in part, and back


def test_patching_twice_changes_nothing() -> None:
    model = mlp()
    first = patch(model)
    before = snapshot(model)
    assert patch(model) == first and snapshot(model) == before


def test_partial_patches_add_up() -> None:
    model = mlp()
    report = patch(model, only=["0"])
    assert report.swapped == ("0",) and report.skipped == {"2": "not selected by only"} and report.ok
    report = patch(model, only=["2"])
    assert report.swapped == ("0", "2") and report.skipped == {}
    assert policy_of(model) == (Rule("linear", "zoo", ("0",)), Rule("linear", "zoo", ("2",)))


@pytest.mark.parametrize("times", [1, 2])
def test_unpatch_is_exact(times: int) -> None:
    model = nn.Sequential(Block(), nn.LayerNorm(4), nn.ModuleDict({"x": nn.Linear(4, 2)})["x"])
    model[0].fc1.register_forward_hook(lambda *a: None)
    before = snapshot(model)
    patch(model, only=["0.*"])
    patch(model)
    patch(model[0])
    for _ in range(times):
        unpatch(model)
        assert snapshot(model) == before and not policy_of(model)


def test_unpatch_leaves_what_was_built_as_zoo_and_what_was_never_patched() -> None:
    model = nn.Sequential(Linear(2, 2), nn.Linear(2, 2), nn.Conv2d(1, 1, 1))
    before = snapshot(model)
    unpatch(model)
    assert snapshot(model) == before
    assert patch(model).swapped == ("0", "1") and type(model[0]) is Linear
    unpatch(model)
    assert snapshot(model) == before


def test_another_layer_over_a_patched_model() -> None:
    @registry.register_layer("linear", "mine")
    def mine(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias) * 0 + 1

    model = mlp()
    before = snapshot(model)
    patch(model)
    report = patch(model, layer="mine", only=["2"])
    assert report.swapped == ("2",) and report.skipped == {"0": "not selected by only"}
    assert zoo_calls(model, torch.ones(1, 4)) == 1 and torch.equal(model(torch.ones(1, 4)), torch.ones(1, 3))
    assert isinstance(model[0], Linear) and not isinstance(model[2], Linear)
    assert patch(model).swapped == ("0", "2") and zoo_calls(model, torch.ones(1, 4)) == 2
    unpatch(model)
    assert snapshot(model) == before


def test_a_layer_derived_from_zoos_is_not_taken_for_it() -> None:
    @registry.register_layer("linear", "derived")
    class Derived(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    plain = model(x)
    patch(model, layer="derived")
    torch.testing.assert_close(model(x), plain + 1)
    patch(model, layer="zoo")
    torch.testing.assert_close(model(x), plain)
    built = nn.Sequential(Derived(2, 2))
    assert patch(built, layer="zoo").skipped == {"0": "it was built as the layer 'derived'"}


# which ones


def test_only_by_globs_predicate_and_head() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 2))
    assert patch(copy.deepcopy(model), only=["0.*", "*.fc2"]).swapped == ("0.fc1", "0.fc2", "1.fc2")
    assert patch(copy.deepcopy(model), only=lambda name, m: m.out_features == 8).swapped == ("0.fc1", "1.fc1")
    assert patch(copy.deepcopy(model), only="head").swapped == ("2",)
    none = patch(copy.deepcopy(model), only=lambda name, m: False)
    assert none.swapped == () and set(none.skipped.values()) == {"not selected by only"} and none.ok


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["0.fc3"], r"unknown linear layer '0.fc3'; known: 0.fc1, 0.fc2, 1.*must match a layer"),
        (["0.fc1", "nothing*"], r"unknown linear layer 'nothing\*'"),
        ([], r"only=\(\) selects nothing"),
        ("0.fc1", r"got '0.fc1'; a single glob goes into a list: \['0.fc1'\]"),
        (True, r"only must be None .*got True"),
        ([1], r"every glob must be a str"),
    ],
)
def test_an_only_that_selects_nothing_is_refused_and_changes_nothing(only: Any, message: str) -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        patch(model, only=only)
    assert snapshot(model) == before


def test_a_name_is_itself_also_where_it_looks_like_a_glob() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert patch(model, only=["a[0]"]).swapped == ("a[0]",)


def test_only_names_the_nearest_of_many() -> None:
    model = nn.Sequential(*(Block() for _ in range(10)))
    with pytest.raises(ValueError, match=r"'3.fc_1'; did you mean 3\.fc1"):
        patch(model, only=["3.fc_1"])


def test_head_of_a_model_without_a_linear_one_is_refused() -> None:
    with pytest.raises(ValueError, match="no classifier"):
        patch(nn.Sequential(nn.ReLU()), only="head")
    model = nn.Sequential(nn.Linear(2, 2))
    model.classifier = nn.Conv2d(1, 1, 1)
    with pytest.raises(ValueError, match="classifier 'classifier' is no linear layer"):
        patch(model, only="head")


def test_unknown_kinds_layers_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown kind of layer 'conv'; known: conv2d, layer_norm, linear, mlp"):
        patch(mlp(), "conv")
    with pytest.raises(ValueError, match=r"unknown linear layer 'zo'; known: zoo. register one with"):
        patch(mlp(), layer="zo")
    with pytest.raises(ValueError, match=r"model must be an nn\.Module, got dict"):
        patch({})  # type: ignore[arg-type]


# what is never replaced


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class NoForward(nn.Linear):
    def extra_repr(self) -> str:
        return "mine"


class OwnCall(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) + 1


def _instance_forward() -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x + 1  # type: ignore[method-assign]
    return layer


def _tensor_subclass() -> nn.Linear:
    class Quantised(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantised))
    return layer


def _no_weight() -> nn.Linear:
    layer = nn.Linear(2, 2)
    del layer.weight
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OwnForward(2, 2), r"its class [\w.]+OwnForward has a forward of its own"),
        (lambda: OwnCall(2, 2), r"its class [\w.]+OwnCall has a forward of its own"),
        (_instance_forward, "a forward of its own was set on this instance"),
        (lambda: nn.LazyLinear(2), "lazy: its first forward"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "its dtype torch.complex64 is none of"),
        (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "its dtype torch.float8_e4m3fn is none of"),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized: its weight is computed"),
        (lambda: parametrizations.spectral_norm(nn.Linear(2, 2)), "parametrized: its weight is computed"),
        (_tensor_subclass, "its weight is a .*Quantised"),
        (_no_weight, "it has no weight tensor"),
    ],
)
def test_what_cannot_be_swapped_is_named_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), make())
    before = snapshot(model)
    report = patch(model)
    assert report.swapped == ("0",) and list(report.skipped) == ["1"] and not report.ok
    assert re.match(reason, report.skipped["1"]), report.skipped
    assert f"  1: {report.skipped['1']}" in str(report)
    with pytest.raises(CheckFailed, match="1 of 2 linear layers run as 'zoo'"):
        report.raise_for_failure()
    unpatch(model)
    assert snapshot(model) == before


def test_a_subclass_without_a_forward_of_its_own_is_swapped_and_keeps_its_methods() -> None:
    model = nn.Sequential(NoForward(2, 2))
    assert patch(model).swapped == ("0",) and repr(model[0]) == "NoForward[zoo](mine)"
    assert isinstance(model[0], NoForward) and isinstance(model[0], Linear) and zoo_calls(model, torch.ones(1, 2)) == 1
    unpatch(model)
    assert type(model[0]) is NoForward


def test_a_lazy_layer_is_swapped_once_it_is_real() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    patch(model)
    model(torch.ones(1, 5))
    assert patch(model).swapped == ("0",) and zoo_calls(model, torch.ones(1, 5)) == 1


def test_weights_that_hooks_compute_are_used() -> None:
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normed = nn.utils.weight_norm(nn.Linear(4, 4))
    for layer in (normed, prune.random_unstructured(nn.Linear(4, 4), "weight", amount=0.5)):
        model = nn.Sequential(layer)
        expected, keys = model(x), list(model.state_dict())
        assert patch(model).swapped == ("0",) and zoo_calls(model, x) == 1
        torch.testing.assert_close(model(x), expected)
        model(x).sum().backward()
        assert list(model.state_dict()) == keys and all(p.grad is not None for p in model.parameters())
        unpatch(model)
        torch.testing.assert_close(model(x), expected)


def test_a_parametrization_after_the_patch_stays_through_unpatch() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    patch(model)
    parametrizations.orthogonal(model[0])
    x = torch.randn(2, 4)
    expected = F.linear(x, model[0].weight, model[0].bias)
    assert zoo_calls(model, x) == 1
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    unpatch(model)
    assert parametrize.is_parametrized(model[0]) and not isinstance(model[0], Linear)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    torch.testing.assert_close(model(x), expected)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), expected)


def test_a_parametrization_taken_off_a_patched_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    patch(model)
    patched = type(model[0])
    parametrizations.weight_norm(model[0])
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is patched


class Past(nn.Module):
    """Calls one of its layers and reads the weight of the other past its forward."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        self.called, self.read, self.separate = nn.Linear(4, 4), nn.Linear(4, 4), separate

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        return self.read(x) if self.separate else F.linear(x, self.read.weight, self.read.bias)


def test_a_weight_read_past_forward_is_skipped_and_said_so() -> None:
    report = patch(Past())
    assert report.swapped == ("called",)
    assert report.skipped["read"].startswith("Past.forward reads its weight past its forward; pass example=")


# with a probe


def test_a_probe_proves_a_doubtful_layer_or_puts_it_back() -> None:
    x = torch.randn(2, 4)
    report = patch(Past(separate=True), example=x)
    assert report.swapped == ("called", "read") and report.proven and "shown by a probe" in str(report)
    model = Past()
    report = patch(model, example=x)
    assert report.swapped == ("called",) and "into aten.t.default in training mode" in report.skipped["read"]
    assert type(model.read) is nn.Linear and "_zoo_adopted" not in model.read.__dict__


class CallsAndReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.fc.weight.square().sum()


def test_a_layer_that_is_called_and_whose_weight_is_used_besides_runs() -> None:
    assert patch(CallsAndReads(), example=torch.ones(2, 4)).swapped == ("fc",)
    model = CallsAndReads()
    patch(model, example=torch.ones(2, 4))
    assert coverage(model, torch.ones(2, 4)).ok


class InEvalPast(Past):
    """Hides the read from the source, and does it in eval mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        hidden = getattr(self.read, "wei" + "ght")
        return self.read(x) if self.training else F.linear(x, hidden, self.read._parameters["b" + "ias"])


def test_a_probe_finds_what_the_source_hides() -> None:
    model = InEvalPast()
    assert patch(copy.deepcopy(model)).swapped == ("called", "read"), "else this tests nothing"
    report = patch(model, example=torch.randn(2, 4))
    assert report.swapped == ("called",) and "in eval mode" in report.skipped["read"]


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.aux, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.main(x)
        return (y, self.aux(y)) if self.training else y


def test_a_layer_that_runs_in_training_alone_is_swapped_and_one_that_never_runs_is_not() -> None:
    model = Idle()
    patch(model)
    report = patch(model, example=torch.randn(2, 4))
    assert report.swapped == ("main", "aux") and type(model.never) is nn.Linear
    assert report.skipped == {"never": "not called in the probe forward in training or eval mode"}


def test_the_probe_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[1].eval()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    modes, rng = [m.training for m in model.modules()], torch.get_rng_state()
    patch(model, example=(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),))
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert modes == [m.training for m in model.modules()] and torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())


def test_a_training_forward_that_the_example_is_too_small_for_proves_eval_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    report = patch(model, example=torch.randn(1, 4))
    assert report.swapped == ("0",) and report.proven
    doubtful = nn.Sequential(Past(separate=True), nn.BatchNorm1d(4))
    assert "does not run in training mode" in patch(doubtful, example=torch.randn(1, 4)).skipped["0.read"]


class Takes(nn.Module):
    """A model of other inputs than one tensor."""

    def __init__(self, take: Callable[..., Tensor]) -> None:
        super().__init__()
        self.take, self.fc = take, nn.Linear(4, 2)

    def forward(self, *inputs: Any) -> Tensor:
        return self.fc(self.take(*inputs))


X = torch.ones(1, 4)


@pytest.mark.parametrize(
    ("take", "example"),
    [
        (lambda d: d["x"], {"x": X}),
        (lambda pair: pair[0] + pair[1], ((X, X),)),
        (lambda items: items[0], [X]),
        (lambda a, b: a + b, (X, X)),
    ],
)
def test_examples_of_every_form(take: Callable[..., Tensor], example: Any) -> None:
    assert patch(Takes(take), example=example).swapped == ("fc",)


@pytest.mark.parametrize("broken", ["model", "layer", "adopt", "keys"])
def test_a_patch_that_fails_leaves_the_model_as_it_was(broken: str) -> None:
    @registry.register_layer("linear", "earlier")
    class Earlier(nn.Linear):
        def adopt(self) -> None:
            self.cache = object()
            self.register_buffer("scale", torch.ones(1), persistent=False)

        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight, self.bias)

    @registry.register_layer("linear", "broken")
    class Broken(nn.Linear):
        def adopt(self) -> None:
            self.more = [1]
            self.register_buffer("packed", self.weight.detach().clone(), persistent=broken == "keys")
            if broken == "adopt" and self.out_features == 3:
                raise RuntimeError("cannot")

        def forward(self, input: Tensor) -> Tensor:
            if broken == "layer":
                raise RuntimeError("cannot")
            return F.linear(input, self.weight, self.bias)

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    patch(model, layer="earlier", only=["0"])
    model.train()
    before, buffers = snapshot(model), [b.clone() for b in model.buffers()]
    example = None if broken in ("adopt", "keys") else torch.ones(2, 5 if broken == "model" else 4)
    message = {
        "model": "example: the layer swapped in at '0' failed in training mode: RuntimeError",
        "layer": "example: the layer swapped in at '0' failed in training mode: RuntimeError: cannot",
        "adopt": "cannot",
        "keys": r"'broken': its adopt\(\) may only add .* but it touched 'packed'",
    }[broken]
    with pytest.raises((ValueError, RuntimeError), match=message):
        patch(model, layer="broken", example=example)
    assert snapshot(model) == before and all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    unpatch(model)
    assert all(type(m) in (nn.Sequential, nn.Linear, nn.BatchNorm1d) for m in model.modules())


def test_an_example_that_the_model_does_not_take() -> None:
    model = Takes(lambda d: d["x"])
    before = snapshot(model)
    with pytest.raises(ValueError, match="example: the model does not take it in eval mode: KeyError: 'x'") as caught:
        patch(model, example={"y": X})
    assert isinstance(caught.value.__cause__, KeyError) and snapshot(model) == before


def test_a_probe_would_initialise_lazy_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d())
    before = snapshot(model)
    with pytest.raises(ValueError, match="example: the model has lazy modules"):
        patch(model, example=X)
    assert snapshot(model) == before


# layers that bring something


def test_what_adopt_adds_is_there_while_patched_and_gone_after() -> None:
    @registry.register_layer("linear", "packs")
    class Packs(nn.Linear):
        def adopt(self) -> None:
            self.register_buffer("packed", self.weight.detach().t().contiguous(), persistent=False)
            self.times = 2

        def forward(self, input: Tensor) -> Tensor:
            return self.times * (input @ self.packed + self.bias)

    model, x = mlp(), torch.randn(2, 4)
    model.packed = "mine"
    before, keys, expected = snapshot(model), list(model.state_dict()), model[0](x)
    patch(model, layer="packs")
    torch.testing.assert_close(model[0](x), 2 * expected)
    assert list(model.state_dict()) == keys and dict(model[0].named_buffers())["packed"].shape == (4, 8)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x), model(x))
    for m in (model, twin):
        unpatch(m)
        torch.testing.assert_close(m[0](x), expected)
    assert snapshot(model) == before
    assert [sorted(m.__dict__) for m in twin.modules()] == [sorted(m.__dict__) for m in model.modules()]


@pytest.mark.parametrize("what", ["parameter", "module", "replaces", "deletes", "attribute"])
def test_an_adopt_that_touches_what_was_there_is_refused(what: str) -> None:
    @registry.register_layer("linear", "greedy")
    class Greedy(nn.Linear):
        def adopt(self) -> None:
            match what:
                case "parameter":
                    self.scale = nn.Parameter(torch.ones(1))
                case "module":
                    self.norm = nn.Identity()
                case "replaces":
                    self.weight = nn.Parameter(self.weight.detach().clone())
                case "deletes":
                    self.bias = None
                case "attribute":
                    self.in_features = [4]

        def forward(self, input: Tensor) -> Tensor:
            return input

    model = mlp()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"'greedy': its adopt\(\) may only add plain attributes .* but it touched"):
        patch(model, layer="greedy")
    assert snapshot(model) == before


# where the model goes


def is_zoo(module: nn.Module) -> bool:
    return isinstance(module, Linear) and isinstance(module, Patched)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: pickle.loads(pickle.dumps(m, 0)),
        saved_and_loaded,
    ],
    ids=["deepcopy", "pickle", "pickle 0", "torch.save"],
)
def test_copies_are_patched_and_can_be_unpatched(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = nn.Sequential(Block(), nn.Linear(4, 4)), torch.randn(2, 4)
    stock = copy.deepcopy(model)
    patch(model)
    twin = copied(model)
    assert is_zoo(twin[0].fc1) and is_zoo(twin[1]) and type(twin[1]) is type(model[1])
    assert policy_of(twin) == policy_of(model) and twin[1].weight is not model[1].weight
    torch.testing.assert_close(twin(x), stock(x))
    unpatch(twin)
    assert [type(m) for m in twin.modules()] == [type(m) for m in stock.modules()] and is_zoo(model[1])
    assert [sorted(m.__dict__) for m in twin.modules()] == [sorted(m.__dict__) for m in stock.modules()]


def test_a_shallow_copy_is_of_the_same_class_and_shares_the_parameters() -> None:
    layer = nn.Linear(2, 2)
    patch(layer)
    twin = copy.copy(layer)
    assert type(twin) is type(layer) and twin.weight is layer.weight and policy_of(twin) == policy_of(layer)


def test_a_whole_model_loads_in_a_fresh_process(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    patch(model, only=["0"])
    torch.save(model, tmp_path / "m.pt")
    script = (
        "import torch, sys; m = torch.load(sys.argv[1], weights_only=False); import zoo.layers as L; "
        "print(isinstance(m[0], L.Linear), isinstance(m[1], L.Linear), type(m[0]).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "m.pt")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.stdout.split() == ["True", "False", "Linear[zoo]"], done.stderr


def test_a_pickle_of_a_layer_that_is_not_registered_there_says_so() -> None:
    registry.register_layer("linear", "mine")(lambda input, weight, bias: input)
    model = nn.Sequential(nn.Linear(2, 2))
    patch(model, layer="mine")
    data = pickle.dumps(model)
    del registry._layers["linear", "mine"]
    with pytest.raises(ValueError, match="unknown linear layer 'mine'"):
        pickle.loads(data)


def test_ema_copies_keep_the_policy() -> None:
    from timm.utils import ModelEmaV3
    from torch.optim.swa_utils import AveragedModel

    model = mlp()
    patch(model)
    for average in (AveragedModel(model), ModelEmaV3(model)):
        assert is_zoo(average.module[0]) and policy_of(average.module) == policy_of(model)
        average.update_parameters(model) if isinstance(average, AveragedModel) else average.update(model)
        assert zoo_calls(average, torch.ones(1, 4)) == 2


def test_a_custom_reduce_is_respected() -> None:
    class Built(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width, self.head = width, nn.Linear(width, 2)

        def reset_classifier(self, classes: int) -> None:
            self.head = nn.Linear(self.width, classes)

        def __reduce__(self) -> Any:
            return Built, (self.width,), {"built": self.width, **self.__dict__}

    model = Built(3)
    patch(model)
    twin = copy.deepcopy(model)
    assert twin.built == 3 and type(twin) is type(model) and is_zoo(twin.head)


# new heads


def test_a_new_head_follows_the_policy() -> None:
    import timm

    model = timm.create_model("resnet18", num_classes=5)
    original = type(model)
    patch(model)
    assert type(model).__name__ == "ResNet" and isinstance(model, original)
    model.reset_classifier(7)
    assert is_zoo(model.fc) and model.fc.out_features == 7
    twin = copy.deepcopy(model)
    twin.reset_classifier(0)
    twin.reset_classifier(2)
    assert is_zoo(twin.fc) and pickle.loads(pickle.dumps(twin)).fc.out_features == 2
    unpatch(model)
    assert type(model) is original and type(model.fc) is nn.Linear
    model.reset_classifier(3)
    assert type(model.fc) is nn.Linear, "no policy any more"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def reset_classifier(self, classes: int) -> str:
        self.head = nn.Linear(4, classes)
        return "done"


@pytest.mark.parametrize(
    ("only", "follows"),
    [("head", True), (["he*"], True), (["body"], False), (None, True), (lambda n, m: n == "head", True)],
)
def test_a_new_head_follows_its_part_of_the_policy_and_the_rest_is_left_alone(only: Any, follows: bool) -> None:
    model = Net()
    patch(model, only=only)
    unpatched = nn.Linear(4, 4)
    model.body = unpatched
    assert model.reset_classifier(3) == "done" and is_zoo(model.head) is follows and type(model.body) is nn.Linear


def test_a_new_head_of_zoos_own_model() -> None:
    from zoo.registry import build

    model = build("resnet18", {"num_classes": 3})
    patch(model, only="head")
    model.reset_classifier(4)
    assert is_zoo(model.fc) and model(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


def test_a_new_head_of_a_compiled_model() -> None:
    model = torch.compile(Net())
    patch(model)
    model.reset_classifier(3)
    assert is_zoo(model._orig_mod.head)


def test_apply_rules_passes_over_globs_that_match_nothing() -> None:
    model = mlp()
    rules = (Rule("linear", "zoo", ("nothing",)), Rule("linear", "zoo", ("0",)))
    apply_rules(model, rules)
    assert is_zoo(model[0]) and type(model[2]) is nn.Linear and policy_of(model) == rules


# wrapped, compiled, traced, threaded


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [_ddp, nn.DataParallel, torch.compile])
@pytest.mark.parametrize("only", [None, ["2"], ["module.2"], ["_orig_mod.2"], "head"])
def test_a_wrapped_model_is_patched_inside(wrap: Callable[[nn.Module], nn.Module], only: Any) -> None:
    core = mlp()
    model = wrap(core)
    before = snapshot(core)
    prefix = "_orig_mod." if wrap is torch.compile else "module."
    if isinstance(only, list) and only[0] not in ("2", f"{prefix}2"):
        with pytest.raises(ValueError, match="unknown linear layer"):
            patch(model, only=only)
        return
    report = patch(model, only=only)
    assert report.swapped == ((f"{prefix}0", f"{prefix}2") if only is None else (f"{prefix}2",))
    assert is_zoo(core[2]) and policy_of(core) == policy_of(model) != ()
    if wrap is not torch.compile:
        x = torch.randn(3, 4)
        assert zoo_calls(model, x) == len(report.swapped)
        assert {m.name for m in coverage(model, x).modules if m.status == "custom"} == set(report.swapped)
        model(x).sum().backward()
        assert all(p.grad is not None for p in core.parameters())
    unpatch(model)
    assert snapshot(core) == before


def test_compiled_before_the_patch_and_after() -> None:
    x = torch.randn(3, 4)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    model = mlp()
    expected = model(x)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(x)
    assert not any("zoo" in name for name in graphs[-1])
    patch(model)
    torch.testing.assert_close(compiled(x), expected)
    assert any("zoo" in name for name in graphs[-1]), "a compiled model must notice the patch"
    unpatch(model)
    torch.testing.assert_close(compiled(x), expected)
    assert zoo_calls(model, x) == 0


def test_compiled_backward_through_a_patched_model() -> None:
    model, x = mlp(), torch.randn(3, 4)
    stock = copy.deepcopy(model)
    patch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for m in (compiled, stock):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_traced_and_symbolically_traced() -> None:
    model, x = mlp(), torch.randn(3, 4)
    expected = model(x)
    graph = torch.fx.symbolic_trace(mlp())
    assert patch(graph).swapped == ("0", "2") and zoo_calls(graph, x) == 2
    patch(model)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)
    program = torch.export.export(model, (x,))
    assert sum("zoo" in str(node.target) for node in program.graph.nodes) == 2
    torch.testing.assert_close(program.module()(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_jit_trace_holds_the_operator() -> None:
    model, x = mlp(), torch.randn(3, 4)
    expected = model(x)
    patch(model)
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), expected)
    assert str(traced.inlined_graph).count("zoo::linear") == 2


def test_in_inference_mode_and_under_autocast() -> None:
    with torch.inference_mode():
        assert patch(mlp(), example=torch.randn(3, 4)).swapped == ("0", "2")
    with torch.autocast("cpu", torch.bfloat16):
        assert patch(mlp(), example=torch.randn(3, 4)).swapped == ("0", "2")


def test_a_scripted_model_has_no_linears() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 2))
    report = patch(model, example=torch.randn(2, 4))
    assert report.swapped == ("1",) and zoo_calls(model, torch.randn(2, 4)) == 1


def test_threads_patch_models_of_their_own() -> None:
    models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))) for _ in range(4)]
    failures: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            for _ in range(5):
                assert len(patch(model, example=torch.ones(2, 4)).swapped) == 20
                unpatch(model)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and all(type(layer) is nn.Linear for model in models for layer in model)


def test_fully_sharded_after_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FSDP2 does to a module's class, without its process groups."""
    layer = nn.Linear(2, 2)
    patch(layer)

    class Sharded:
        def reshard(self) -> str:
            return "yes"

    layer.__class__ = type(f"FSDP{type(layer).__name__}", (Sharded, type(layer)), {})
    assert zoo_calls(layer, torch.ones(1, 2)) == 1 and patch(layer).swapped == ("",)
    unpatch(layer)
    assert layer.reshard() == "yes" and not isinstance(layer, Linear)  # type: ignore[operator]
    assert type(layer).__name__ == "FSDPLinear" and type(layer).__bases__ == (Sharded, nn.Linear)


# the report


def test_the_report_as_text_and_data() -> None:
    report = SwapReport("linear", "zoo", ("a",), {"": "lazy", "b": "not selected by only"})
    assert not report.ok and report.to_dict()["skipped"] == {"": "lazy", "b": "not selected by only"}
    assert str(report).splitlines() == [
        "1 of 3 linear layers run as 'zoo'",
        "  (the model itself): lazy",
        "  b: not selected by only",
    ]
    assert '"swapped"' in report.to_json()
    with pytest.raises(AttributeError):
        report.kind = "x"  # type: ignore[misc]


def test_get_layer_is_what_a_patched_module_runs() -> None:
    model = mlp()
    patch(model)
    assert isinstance(model[0], get_layer("linear", "zoo")) and zoo.layers.Linear is get_layer("linear", "zoo")
