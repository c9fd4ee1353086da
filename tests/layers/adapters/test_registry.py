"""Which classes have an adapter, what can be registered, and that a patched parent is the parent it was."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zoo
from zoo.coverage import coverage
from zoo.layers import Linear, note_fallback, register_layer
from zoo.layers.adapters import adapter_of, registry, rewritten, routes
from zoo.layers.kinds import KINDS, functional_of, stock_of
from zoo.layers.patched import Patched
from zoo.layers.registry import custom_layer
from zoo.policy import Rule
from zoo.swap import patch, policy_of, unpatch

PLUS_ONE = "plus one"


@pytest.fixture(autouse=True)
def _plus_one() -> None:
    register_layer("linear", PLUS_ONE)(lambda input, weight, bias: F.linear(input, weight, bias) + 1)


class Reads(nn.Module):
    """Calls one of its layers and reads the weights of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.called = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.project(x)) + F.linear(x, self.k.weight, self.shift)

    def project(self, x: Tensor) -> Tensor:
        return helper(x, self.q)


def helper(x: Tensor, layer: nn.Linear) -> Tensor:
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


class Static(nn.Module):
    """Leaves the arithmetic to a static method and to one of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.a.weight) + self.scale(x, self.b.weight)

    @staticmethod
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    @classmethod
    def scale(cls, x: Tensor, weight: Tensor) -> Tensor:
        return len(cls.__name__) / len(cls.__name__) * F.linear(x, weight)


class Joined(nn.Module):
    """Multiplies by the weights of two layers at once, and by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 2), nn.Linear(4, 6)
        self.extra = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        both = F.linear(x, torch.cat([self.q.weight, self.k.weight]), torch.cat([self.q.bias, self.k.bias]))
        return F.linear(both, self.extra)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * F.linear(input, self.weight, self.bias)


def state(model: nn.Module) -> Any:
    named = [(name, id(m), type(m), sorted(m.__dict__)) for name, m in model.named_modules()]
    return named, list(model.state_dict()), [id(p) for p in model.parameters()]


# the table


@pytest.mark.parametrize("name", registry._KNOWN)
def test_each_known_class_is_there_and_changes(name: str) -> None:
    module, _, cls_name = name.rpartition(".")
    cls = getattr(importlib.import_module(module), cls_name)
    for kind in KINDS:
        adapter = adapter_of(cls, kind)
        assert adapter is (registry._KNOWN[name] if kind in registry._KNOWN[name].kinds else None)
        if adapter is None or adapter.asks or adapter.through:
            continue
        methods, _ = rewritten(cls, Linear if kind == "linear" else stock_of(kind), kind)
        assert methods["forward"] is not cls.forward
        reaches = cls is not nn.TransformerEncoderLayer  # of it only the fast path goes past its layers
        assert (functional_of(kind) in registry._reached(cls, kind)) is reaches


def test_a_subclass_or_an_instance_with_a_forward_of_its_own_is_not_known() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Same(nn.MultiheadAttention):
        pass

    plain, instance = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    instance.forward = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert adapter_of(plain) is not None
    for module in (Own(8, 2), Same(8, 2), instance):
        assert adapter_of(module) is None
    report = patch(Own(8, 2))
    assert report.swapped == () and "reads its weight past its forward" in report.skipped["out_proj"]


# registering


def test_a_registered_class_runs_the_layer_and_says_which_weights_it_ran_on() -> None:
    assert patch(Reads()).swapped == ("called",)
    assert zoo.register_adapter(Reads) is Reads
    model, x = Reads(), torch.randn(3, 4)
    stock, before = copy.deepcopy(model), state(model)
    assert patch(model).swapped == ("q", "k", "called") and isinstance(model, Reads) and routes(model)
    assert repr(model).startswith("Reads[zoo](")
    for m in (model, stock):
        m(x).square().sum().backward()
    torch.testing.assert_close(model(x), stock(x))
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    report = coverage(model, x)
    assert report.ok and report.share == 1 and [m.calls for m in report.modules] == [1, 1, 1]
    assert [m.flops for m in report.modules] == [2 * 3 * 4 * 4] * 3
    unpatch(model)
    assert state(model)[1:] == before[1:] and [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_static_methods_and_those_of_the_class_are_run_with_the_layer() -> None:
    zoo.register_adapter(Static)
    model, x = Static(), torch.randn(2, 4)
    expected = model(x)
    patch(model, layer=PLUS_ONE).raise_for_failure()
    torch.testing.assert_close(model(x), expected + 2)
    assert coverage(model, x).share == 1


def test_a_weight_made_of_several_and_one_of_the_parents_own_count_with_the_layers() -> None:
    zoo.register_adapter(Joined)
    model, x = Joined(), torch.randn(5, 4)
    stock = copy.deepcopy(model)
    patch(model).raise_for_failure()
    torch.testing.assert_close(model(x), stock(x))
    with torch.no_grad():
        report = coverage(model, x)
    q, k = report.modules
    assert report.ok and report.share == 1 and (q.calls, k.calls) == (1, 1)
    assert (q.flops, k.flops) == (2 * 5 * 4 * 2 + 2 * 5 * 8 * 3, 2 * 5 * 4 * 6)


def test_a_linear_with_a_forward_of_its_own_keeps_it_around_the_layer() -> None:
    x = torch.randn(3, 4)
    assert "has a forward of its own" in patch(nn.Sequential(Scaled(4, 4))).skipped["0"]
    zoo.register_adapter(Scaled)
    model = nn.Sequential(Scaled(4, 4))
    expected = model(x)
    assert patch(model).swapped == ("0",) and custom_layer(model[0], "linear") == "zoo"
    torch.testing.assert_close(model(x), expected)
    report = coverage(model, x)
    assert report.ok and report.share == 1 and report.modules[0].calls == 1 and report.flops == 2 * 3 * 4 * 4
    assert patch(model, layer=PLUS_ONE).swapped == ("0",)
    torch.testing.assert_close(model(x), expected + 3)
    unpatch(model)
    assert type(model[0]) is Scaled


class Louder(nn.MultiheadAttention):
    """A subclass with a forward of its own, around that of its base."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(x, x, x)[0]


class Cautious(nn.TransformerEncoderLayer):
    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(src.clamp(-1, 1), *args, **kwargs)


@pytest.mark.parametrize("make", [lambda: Louder(8, 2, batch_first=True), lambda: Cautious(8, 2, 16, batch_first=True)])
def test_a_registered_subclass_of_a_known_class_keeps_its_forward_around_that(make: Any) -> None:
    for cls in (Louder, Cautious):
        zoo.register_adapter(cls)
    model, x = nn.Sequential(make()).eval(), torch.randn(2, 3, 8)
    stock = copy.deepcopy(model)
    patch(model).raise_for_failure()
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-5)
        report = coverage(model, x)
    assert report.ok and {m.status for m in report.modules} == {"custom"}
    twin = pickle.loads(pickle.dumps(model))
    unpatch(twin)
    assert type(twin[0]) is type(stock[0]) and isinstance(model[0], Patched)


def test_a_subclass_of_linear_may_leave_the_arithmetic_to_its_base() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    zoo.register_adapter(Doubled)
    model, x = Doubled(4, 4), torch.randn(2, 4)
    expected = model(x)
    patch(model, layer=PLUS_ONE).raise_for_failure()
    torch.testing.assert_close(model(x), expected + 2)


class OwnArithmetic(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t()


class NeverLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.fc.weight


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (nn.Linear(2, 2), "expected a class of modules, got Linear"),
        (int, "expected a class of modules, got <class 'int'>"),
        (nn.MultiheadAttention, r"torch\.nn\.modules\.activation\.MultiheadAttention is registered already"),
        (OwnArithmetic, r"no method of .*OwnArithmetic calls torch\.nn\.functional\.linear"),
        (NeverLinear, r"no method of .*NeverLinear calls torch\.nn\.functional\.linear"),
    ],
)
def test_what_is_refused(what: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.register_adapter(what)


def test_a_class_is_registered_once() -> None:
    zoo.register_adapter(Reads)
    with pytest.raises(ValueError, match="Reads is registered already"):
        zoo.register_adapter(Reads)


# which layer, and of which weights


def test_the_layer_that_was_asked_for_is_what_runs() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    stock = copy.deepcopy(model)
    patch(model, layer=PLUS_ONE)
    with torch.no_grad():
        stock.in_proj_bias += 1
        stock.out_proj.bias += 1
        torch.testing.assert_close(model(x, x, x)[0], stock(x, x, x)[0], rtol=1e-4, atol=1e-5)
        patch(model)
        assert policy_of(model) == (Rule("linear", PLUS_ONE), Rule("linear", "zoo"))
        stock.in_proj_bias -= 1
        stock.out_proj.bias -= 1
        torch.testing.assert_close(model(x, x, x)[0], stock(x, x, x)[0], rtol=1e-4, atol=1e-5)


def test_a_layer_that_tells_of_its_fallbacks_is_heard() -> None:
    @register_layer("linear", "tells")
    class Tells(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if self.weight.shape[0] == 24:
                note_fallback(self, "24 rows")
            return super().forward(input)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    model = Attends()
    patch(model, layer="tells")
    (entry,) = coverage(model, torch.randn(3, 2, 8)).modules
    assert entry.status == "fell back" and entry.fallbacks == {"24 rows": 1}


def test_layers_that_need_a_module_of_their_own_are_refused_with_the_reason() -> None:
    @register_layer("linear", "packs")
    class Packs(nn.Linear):
        def adopt(self) -> None:
            self.times = 1

        def forward(self, input: Tensor) -> Tensor:
            return self.times * super().forward(input)

    report = patch(nn.TransformerEncoderLayer(8, 2, 16), layer="packs")
    assert report.swapped == ("linear1", "linear2")
    assert "and the layer 'packs' keeps things of its own in the module" in report.skipped["self_attn.out_proj"]
    zoo.register_adapter(Scaled)
    assert "and the layer 'packs' keeps things" in patch(Scaled(2, 2), layer="packs").skipped[""]


def test_a_quantised_weight_falls_back_and_says_so() -> None:
    class Quantised(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    zoo.register_adapter(Reads)
    model = Reads()
    patch(model)
    model.q.weight = nn.Parameter(model.q.weight.detach().as_subclass(Quantised))
    report = {m.name: m for m in coverage(model, torch.ones(1, 4)).modules}
    assert report["q"].status == "fell back" and report["k"].status == "custom"


def test_the_weights_that_a_parent_reads_go_together() -> None:
    zoo.register_adapter(Reads)
    model = Reads()
    report = patch(model, only=["q", "called"])
    assert report.swapped == ("called",) and not isinstance(model, Patched)
    assert report.skipped["k"] == "not selected by only"
    assert report.skipped["q"] == (
        "Reads runs one layer for all the weights that it reads, and k is left alone: not selected by only"
    )
    assert patch(model, only=["q", "k"]).swapped == ("q", "k", "called")
    assert patch(model, layer=PLUS_ONE, only=["q"]).swapped == () and model.zoo_layer == "zoo"
    parametrizations.weight_norm((other := Reads()).q)
    skipped = patch(other).skipped
    assert "parametrized" in skipped["q"] and "q is left alone: parametrized" in skipped["k"]


def test_a_patch_of_more_leaves_what_is_adapted() -> None:
    zoo.register_adapter(Reads)
    model = nn.Sequential(Reads(), nn.Linear(4, 4))
    patch(model, only=["0.q", "0.k"])
    model[0].k = nn.Linear(4, 4, bias=False)
    assert "patch again" in {m.name: m.reason for m in coverage(model, torch.ones(1, 4)).modules}["0.k"]
    report = patch(model, only=["1"])
    assert report.swapped == ("0.q", "1") and isinstance(model[0], Patched)
    assert patch(model).ok and coverage(model, torch.ones(1, 4)).ok


def test_the_encoder_layers_own_linears_can_be_chosen_alone() -> None:
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    report = patch(model, only=["linear1"])
    assert report.swapped == ("linear1",) and type(model.self_attn) is nn.MultiheadAttention
    with torch.no_grad():
        assert {m.name for m in coverage(model, x).modules if m.status == "custom"} == {"linear1"}
    unpatch(model)
    assert type(model) is nn.TransformerEncoderLayer


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.a.weight, self.a.bias)
        return F.linear(x, self.b.weight) if self.idle else x


def test_a_probe_leaves_out_what_is_idle_and_puts_back_a_parent_with_nothing_left() -> None:
    zoo.register_adapter(Flagged)
    model = Flagged()
    report = patch(model, example=torch.ones(1, 4))
    assert report.swapped == ("a",) and "not called in the probe" in report.skipped["b"] and isinstance(model, Patched)

    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fc = Flagged(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    never = Never()
    assert patch(never, example=torch.ones(1, 4)).swapped == ("fc",) and type(never.inner) is Flagged


# the parent stays what it was


def test_hooks_fire_as_before() -> None:
    model, x, log = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8), []
    model.register_forward_pre_hook(lambda *a: log.append("pre"))
    model.register_forward_hook(lambda *a: log.append("post"))
    model.out_proj.register_forward_hook(lambda *a: log.append("never: its parent does not call it"))
    patch(model)
    model(x, x, x)
    assert log == ["pre", "post"]


def test_copies_and_pickles_are_adapted_and_can_be_unpatched() -> None:
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    expected = model(x, x, x)[0]
    patch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model) and twin.in_proj_weight is not model.in_proj_weight
        torch.testing.assert_close(twin(x, x, x)[0], expected)
        unpatch(twin)
        assert type(twin) is nn.MultiheadAttention and isinstance(model, Patched)


def test_a_whole_model_loads_in_a_fresh_process(tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    patch(model)
    torch.save(model, tmp_path / "m.pt")
    script = "import torch, sys; print(type(torch.load(sys.argv[1], weights_only=False).self_attn).__name__)"
    command = [sys.executable, "-c", script, str(tmp_path / "m.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.stdout.strip() == "MultiheadAttention[zoo]", done.stderr


def test_a_pickle_of_a_parent_that_is_not_registered_there_says_so() -> None:
    zoo.register_adapter(Reads)
    model = Reads()
    patch(model)
    data = pickle.dumps(model)
    del registry._registered[Reads]
    name = re.escape(f"{Reads.__module__}.Reads")
    with pytest.raises(ValueError, match=f"no adapter is registered for {name}; register it with zoo.register_adapter"):
        pickle.loads(data)


def test_a_parametrization_over_an_adapted_parent_stays_through_unpatch() -> None:
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    patch(model)
    parametrizations.weight_norm(model, "in_proj_weight")
    expected = model(x, x, x)[0]
    assert patch(model).ok and isinstance(model, Patched)
    unpatch(model)
    assert not isinstance(model, Patched) and type(model).__name__ == "ParametrizedMultiheadAttention"
    torch.testing.assert_close(model(x, x, x)[0], expected)


def test_threads_run_stock_and_adapted_parents_side_by_side() -> None:
    torch.manual_seed(0)
    stock, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    model = copy.deepcopy(stock)
    patch(model, layer=PLUS_ONE)
    expected, failures = {id(m): m(x, x, x)[0].detach() for m in (stock, model)}, []

    def work(module: nn.Module) -> None:
        try:
            for _ in range(50):
                assert torch.equal(module(x, x, x)[0], expected[id(module)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(m,)) for m in (stock, model, stock, model)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not torch.allclose(expected[id(stock)], expected[id(model)])


def test_a_patch_that_fails_puts_parents_back_too() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    before = state(model)
    with pytest.raises(ValueError, match="example: the model does not take it"):
        patch(model, example=torch.randn(2, 3, 7))
    assert state(model) == before
    patch(model, example=torch.randn(2, 3, 8)).raise_for_failure()


def test_a_new_head_leaves_the_parents_adapted() -> None:
    import timm

    model = timm.create_model("beit_base_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, num_classes=3)
    patch(model)
    kinds = [type(m) for m in model.blocks.modules()]
    model.reset_classifier(5)
    report = coverage(model, torch.randn(1, 3, 32, 32))
    assert report.ok and {m.status for m in report.modules} == {"custom"}
    assert [type(m) for m in model.blocks.modules()] == kinds and model.head.out_features == 5
