"""Units: what is one, that it computes what its modules do, and what takes it apart again, at each call."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.layers
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations
from torchvision.ops.misc import MLP

import zoo
from support.calls import Calls
from zoo.coverage import coverage
from zoo.layers import note_fallback, register_layer
from zoo.layers._fallback import fallback_listeners
from zoo.layers.units import FusedParent, chain_of, inside_units, units_in
from zoo.swap import patch, unpatch


def ran(model: nn.Module, *inputs: Any) -> list[str]:
    with Calls() as calls:
        model(*inputs)
    return calls.names


def sequential(act: nn.Module | None = None, *, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), act or nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4))


class Timm(timm.layers.Mlp):
    """A subclass that leaves the forward alone."""


class Named(nn.Sequential):
    """As torchvision's blocks are."""


UNITS: dict[str, tuple[Callable[[], nn.Module], list[tuple[str, ...]]]] = {
    "sequential": (sequential, [("0", "1", "2", "3")]),
    "without a dropout": (lambda: nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)), [("0", "1", "2")]),
    "a subclass": (lambda: Named(*sequential(nn.ReLU())), [("0", "1", "2", "3")]),
    "within others": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.ReLU()),
        [("1", "2", "3")],
    ),
    "two in a row": (
        lambda: nn.Sequential(*sequential(), nn.Tanh(), nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 4)),
        [("0", "1", "2", "3"), ("5", "6", "7")],
    ),
    "a Linear is in one only": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)),
        [("0", "1", "2")],
    ),
    "timm": (lambda: timm.layers.Mlp(4, 8), [("fc1", "act", "drop1", "norm", "fc2")]),
    "timm, of tanh": (
        lambda: timm.layers.Mlp(4, 8, act_layer=timm.layers.get_act_layer("gelu_tanh"), bias=(True, False)),
        [("fc1", "act", "drop1", "norm", "fc2")],
    ),
    "a subclass of timm's": (lambda: Timm(4, 8, act_layer=nn.SiLU), [("fc1", "act", "drop1", "norm", "fc2")]),
    "torchvision": (lambda: MLP(4, [8, 4], activation_layer=nn.GELU, inplace=None), [("0", "1", "2", "3")]),
    "torchvision, in place": (lambda: MLP(4, [8, 8, 4], inplace=True), [("0", "1", "2", "3")]),
}


@pytest.mark.parametrize("what", UNITS)
def test_what_is_a_unit(what: str) -> None:
    make, units = UNITS[what]
    assert list(units_in(make())) == units


NONE: dict[str, Callable[[], nn.Module]] = {
    "one Linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "no activation": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    "a norm before it": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4)),
    "a norm after it": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 4)),
    "convolutions": lambda: timm.layers.Mlp(4, 8, use_conv=True),
    "a gate": lambda: timm.layers.GluMlp(4, 8),
    "a list": lambda: nn.ModuleList(sequential()),
}


@pytest.mark.parametrize("what", NONE)
def test_what_is_none(what: str) -> None:
    assert list(units_in(NONE[what]())) == []


def test_a_parent_that_does_more_than_call_its_children_has_none() -> None:
    class Adds(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return input + super().forward(input)

    class Backwards(nn.Sequential):
        def __iter__(self) -> Any:
            return reversed(list(self._modules.values()))

    class Called(nn.Sequential):
        def __call__(self, input: Tensor) -> Tensor:
            return 2 * super().__call__(input)

    class Another(timm.layers.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    for parent in (Adds(*sequential()), Backwards(*sequential()), Called(*sequential()), Another(4, 8)):
        assert chain_of(parent) is None and not list(units_in(parent)) and patch(parent, "mlp").swapped == ()
    own = sequential()
    own.forward = lambda input: input  # type: ignore[method-assign]
    assert chain_of(own) is None


def test_a_timm_of_another_version_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.drop1(self.act(self.fc1(x)))))

    forward.__module__, forward.__qualname__ = "timm.layers.mlp", "Mlp.forward"
    monkeypatch.setattr(timm.layers.Mlp, "forward", forward)
    assert chain_of(timm.layers.Mlp(4, 8)) is None


# it computes the same


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = model(leaf)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item,union-attr]


@pytest.mark.parametrize("what", UNITS)
@pytest.mark.parametrize("linears", [True, False], ids=["zoo's Linears", "torch's"])
def test_values_and_gradients_in_one_operator(what: str, linears: bool) -> None:
    make, units = UNITS[what]
    stock = make()
    model, x = copy.deepcopy(stock), torch.randn(3, 5, 4)
    if linears:
        patch(model)
    report = patch(model, "mlp")
    assert report.ok and len(report.swapped) == len(units) and isinstance(model, FusedParent)
    for got, want in zip(outcome(model, x), outcome(stock, x), strict=True):
        torch.testing.assert_close(got, want)
    alone = sum(isinstance(m, nn.Linear) for m in model.modules()) - 2 * len(units)
    assert sorted(ran(model, x)) == ["linear"] * alone * linears + ["mlp"] * len(units)


@pytest.mark.parametrize(
    ("name", "options", "unit", "size"),
    [
        ("torchvision/convnext_tiny", {}, "features.1.0.block.3-5", 32),
        ("torchvision/swin_t", {}, "features.1.0.mlp.0-3", 32),
        ("torchvision/vit_b_16", {"image_size": 32}, "encoder.layers.encoder_layer_0.mlp.0-3", 32),
        ("timm/vit_tiny_patch16_224", {"img_size": 32, "depth": 2}, "blocks.1.mlp", 32),
        ("timm/mixer_s32_224", {"img_size": 64}, "blocks.0.mlp_tokens", 64),
        ("timm/test_convnext", {"conv_mlp": False}, "stages.0.blocks.0.mlp", 64),
    ],
)
def test_real_models(name: str, options: dict[str, Any], unit: str, size: int) -> None:
    torch.manual_seed(0)
    model = zoo.create(name, custom_linear=True, num_classes=3, **options).eval()
    stock = zoo.create(name, num_classes=3, **options).eval()
    stock.load_state_dict(model.state_dict())
    assert list(model.state_dict()) == list(stock.state_dict())
    x = torch.randn(2, 3, size, size)
    zoo.parity(model, stock, x, gradients=True).raise_for_failure()
    report = coverage(model, x)
    assert report.ok and {m.status for m in report.modules} == {"custom"}
    assert unit in [u.name for u in report.units] and {u.status for u in report.units} == {"as one"}
    unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_a_classifier_with_dropout_in_eval_mode() -> None:
    model = torchvision.models.vgg11(num_classes=4).classifier.eval()
    assert patch(model, "mlp").swapped == ("0-3",)
    assert ran(model, torch.randn(1, 25088)) == ["mlp"]


# what takes it apart


@pytest.fixture
def reasons() -> Any:
    """Why units ran as their modules."""
    told: list[str] = []

    def tell(module: nn.Module, reason: str) -> None:
        if isinstance(module, FusedParent):
            told.append(reason)

    fallback_listeners.append(tell)
    yield told
    fallback_listeners.remove(tell)


def fused(model: nn.Module | None = None) -> Any:
    model = timm.layers.Mlp(4, 8) if model is None else model
    patch(model)
    patch(model, "mlp").raise_for_failure()
    return model


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "with kwargs": lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["fc1", "act", "drop1", "norm", "fc2"])
def test_a_hook_that_comes_later_fires_and_one_that_goes_leaves_a_unit(
    kind: str, name: str, reasons: list[str]
) -> None:
    model, x, fired = fused(), torch.randn(3, 4, requires_grad=True), []
    before = outcome(model, x.detach())
    assert ran(model, x) == ["mlp"]
    handle = HOOKS[kind](model.get_submodule(name), lambda *a: fired.append(1))
    assert ran(model, x) == ["linear", "linear"] and reasons == [f"{name} has a hook"]
    fired.clear()
    for got, want in zip(outcome(model, x.detach()), before, strict=True):
        torch.testing.assert_close(got, want)
    assert fired == [1]
    handle.remove()
    assert ran(model, x) == ["mlp"]


def test_a_hook_on_all_modules_is_heeded(reasons: list[str]) -> None:
    model, x, seen = fused(), torch.randn(3, 4), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        assert ran(model, x) == ["linear", "linear"]
    finally:
        handle.remove()
    assert seen.count("Linear[zoo]") == 2 and reasons == ["a hook is registered on all modules"]
    backward = nn.modules.module.register_module_full_backward_hook(lambda *a: None)
    try:
        assert ran(model, x) == ["linear", "linear"]
    finally:
        backward.remove()
    assert ran(model, x) == ["mlp"]


def weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.fc1)


def old_weight_norm(model: Any) -> None:
    del model.fc1._parameters["weight"]
    model.fc1.weight = torch.ones(8, 4)


def own_forward(model: Any) -> None:
    model.fc2.forward = lambda x: 2 * F.linear(x, model.fc2.weight)


def another_layer(model: Any) -> None:
    model.fc2 = nn.Linear(8, 4, dtype=torch.bfloat16)


def another_activation(model: Any) -> None:
    model.act = nn.Tanh()


def a_norm(model: Any) -> None:
    model.norm = nn.LayerNorm(8)


def other_linear(model: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model.fc1 = Doubled(4, 8)


CHANGES = {
    weight_norm: "fc1 is parametrized: its weight or bias is computed",
    old_weight_norm: "fc1 is parametrized: its weight or bias is computed",
    own_forward: "a forward of its own was set on fc2",
    another_activation: "its activation act is a Tanh",
    a_norm: "norm is a LayerNorm",
    other_linear: "fc1 is a Doubled with a forward of its own",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_later_is_what_runs(change: Callable[[Any], None], reasons: list[str]) -> None:
    model, x = fused(), torch.randn(3, 4)
    stock = copy.deepcopy(model)
    unpatch(stock)
    torch.manual_seed(1)
    change(model)
    torch.manual_seed(1)
    change(stock)
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), stock(x))
    assert reasons == [CHANGES[change]] and "mlp" not in ran(model, x)


def test_of_two_types_the_modules_run_and_say_so_themselves(reasons: list[str]) -> None:
    model = fused()
    another_layer(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(3, 4))
    assert reasons == ["fc1 is torch.float32 on cpu, and fc2 is torch.bfloat16 on cpu"]
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 4))


def test_another_module_of_the_same_kind_may_take_a_place() -> None:
    model, x = fused(sequential()), torch.randn(3, 4)
    model[1], model[3] = nn.SiLU(), nn.Linear(8, 4)
    assert ran(model, x) == ["mlp"]
    torch.testing.assert_close(model(x), model[3](F.silu(model[0](x))))


def test_a_sequence_that_gains_and_loses_modules(reasons: list[str]) -> None:
    model, x = fused(sequential()), torch.randn(3, 4)
    model.append(nn.Linear(4, 2))
    torch.testing.assert_close(model(x), model[4](model[3](F.gelu(model[0](x)))))
    assert ran(model, x) == ["mlp"] and not reasons
    assert ran(model[:2], x) == ["linear"] and reasons == ["0 to 3 are not called in a row"]
    del model[2]
    torch.testing.assert_close(model(x), model[3](model[2](F.gelu(model[0](x)))))
    assert reasons[1:] == ["2 is a Linear[zoo]"]  # a sequence renumbers what is left


@pytest.mark.parametrize("make", [lambda p: sequential(dropout=p), lambda p: timm.layers.Mlp(4, 8, drop=p)])
def test_a_dropout_that_drops_runs_as_it_would(make: Callable[[float], nn.Module], reasons: list[str]) -> None:
    stock = make(0.5)
    model, x = fused(copy.deepcopy(stock)), torch.randn(64, 4)
    for got, want in zip(outcome(model, x), outcome(stock, x), strict=True):
        torch.testing.assert_close(got, want)
    assert len(reasons) == 1 and reasons[0].endswith("drops values in training")
    assert ran(model.eval(), x) == ["mlp"] and ran(model.train(), x) == ["linear", "linear"]
    drop = next(m for m in model.modules() if isinstance(m, nn.Dropout))
    drop.p = 0.0
    assert ran(model, x)[0] == "mlp"


def test_inputs_of_other_kinds_go_to_the_modules(reasons: list[str]) -> None:
    class Told(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    model = sequential()
    patch(model, "mlp")
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    assert [len(t) for t in model(ragged).unbind()] == [2, 3]
    model(torch.randn(2, 4).as_subclass(Told))
    assert reasons == ["its input is nested", "its input is a Told"]
    assert model(input=torch.randn(2, 4)).shape == (2, 4)
    with pytest.raises(TypeError):
        model(torch.randn(2, 4), torch.randn(2, 4))


def test_a_weight_that_brings_its_own_linear(reasons: list[str]) -> None:
    class Sevens(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                return torch.full((len(args[0]), 8), 7.0)
            return super().__torch_function__(func, types, args, kwargs or {})

    model = fused()
    model.fc1.weight = nn.Parameter(model.fc1.weight.detach().as_subclass(Sevens))
    expected = model.fc2(F.gelu(torch.full((2, 8), 7.0)))
    reasons.clear()
    torch.testing.assert_close(model(torch.ones(2, 4)), expected)
    assert reasons[0] == "the weight of fc1 is a Sevens, which brings its own linear"


# what torch does to modules


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("make", [lambda: timm.layers.Mlp(4, 8), sequential])
def test_fullgraph_compile(make: Callable[[], nn.Module], autocast: bool) -> None:
    torch._dynamo.reset()
    model = fused(make())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for n in (3, 7):
        x = torch.randn(n, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            eager, made = outcome(model, x), outcome(compiled, x)
        assert made[0].dtype == (torch.bfloat16 if autocast else torch.float32)
        for got, want in zip(made, eager, strict=True):
            torch.testing.assert_close(got, want)
    x = torch.randn(3, 4)
    before = compiled(x)
    next(model.children()).register_forward_hook(lambda module, args, output: 2 * output)
    assert not torch.allclose(compiled(x), before)


@pytest.mark.parametrize("strict", [True, False])
def test_export_holds_the_operator(strict: bool) -> None:
    model = fused(nn.Sequential(timm.layers.Mlp(4, 8), sequential())).eval()
    x = torch.randn(3, 4)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
    assert [str(n.target) for n in program.graph.nodes].count("zoo.mlp.default") == 2
    more = torch.randn(9, 4)
    torch.testing.assert_close(program.module()(more), model(more))
    assert set(program.state_dict) == set(model.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_traced_and_symbolically_traced() -> None:
    for make in (lambda: timm.layers.Mlp(4, 8), sequential):
        model, x = fused(make()), torch.randn(3, 4)
        graph = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(graph(x), model(x))
        assert sum(node.op == "call_module" for node in graph.graph.nodes) >= 4
        traced = torch.jit.trace(model, x)
        torch.testing.assert_close(traced(x), model(x))
        assert str(traced.inlined_graph).count("zoo::mlp") == 1


def test_checkpointing_functional_calls_and_per_sample_gradients() -> None:
    stock = timm.layers.Mlp(4, 8)
    model, x = fused(copy.deepcopy(stock)), torch.randn(3, 4, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    (got,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(stock(x).sum(), x)
    torch.testing.assert_close(got, want)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert functional_call(model, zeros, x).eq(0).all()

    def per_sample(module: nn.Module) -> Any:
        params = {name: p.detach() for name, p in module.named_parameters()}
        return vmap(grad(lambda p, s: functional_call(module, p, (s,)).square().sum()), (None, 0))(params, x.detach())

    torch.testing.assert_close(per_sample(model), per_sample(stock))


def test_the_gradients_of_parameters_reach_their_hooks_as_in_ddp(tmp_path: Path) -> None:
    import torch.distributed as dist

    stock, x = timm.layers.Mlp(4, 8), torch.randn(3, 4)
    model = fused(copy.deepcopy(stock))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert "mlp" in ran(wrapped, x)
        for got, want in zip(outcome(wrapped, x), outcome(stock, x), strict=True):
            torch.testing.assert_close(got, want)
    finally:
        dist.destroy_process_group()


# the parent stays what it was


def everything(model: nn.Module) -> Any:
    return [
        (name, id(module), {key: id(value) for key, value in module.__dict__.items()})
        for name, module in model.named_modules(remove_duplicate=False)
    ] + list(model.state_dict())


@pytest.mark.parametrize("make", [lambda: timm.layers.Mlp(4, 8), sequential, lambda: MLP(4, [8, 4])])
def test_nothing_but_the_class_changes(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make(), nn.ReLU())
    before, classes = everything(model), [type(m) for m in model.modules()]
    patch(model, "mlp").raise_for_failure()
    assert everything(model)[0][2].keys() - before[0][2].keys() == {"_zoo_policy"}
    assert everything(model)[1:] == before[1:] and isinstance(model[0], classes[1])
    assert patch(model, "mlp").swapped == patch(model, "mlp").swapped
    unpatch(model)
    assert everything(model) == before and [type(m) for m in model.modules()] == classes


def test_copies_and_pickles_are_units_and_can_be_unpatched() -> None:
    model, x = fused(nn.Sequential(timm.layers.Mlp(4, 8), sequential())), torch.randn(3, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is type(model[0]) and ran(twin, x) == ["mlp", "mlp"]
        assert twin[0].fc1.weight is not model[0].fc1.weight
        torch.testing.assert_close(twin(x), model(x))
        unpatch(twin)
        assert type(twin[0]) is timm.layers.Mlp and type(twin[1]) is nn.Sequential
    assert ran(model, x) == ["mlp", "mlp"]


def test_a_whole_model_loads_in_a_fresh_process(tmp_path: Path) -> None:
    torch.save(fused(), tmp_path / "m.pt")
    script = "import torch, sys; m = torch.load(sys.argv[1], weights_only=False); print(type(m).__name__, m.zoo_units)"
    command = [sys.executable, "-c", script, str(tmp_path / "m.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.stdout.startswith("Mlp[zoo] {'fc1': ('fc1', 'act', 'drop1', 'norm', 'fc2')}"), done.stderr


def test_which_modules_are_inside_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), timm.layers.Mlp(4, 8), nn.Sequential(*sequential(), nn.ReLU()))
    assert inside_units(model) == set()
    fused(model)
    mlp, row = model[1], model[2]
    assert inside_units(model) == {mlp.fc1, mlp.act, mlp.drop1, mlp.norm, mlp.fc2, *row[:4]}


# the layer


def test_a_layer_of_ones_own_and_the_linears_it_stands_for() -> None:
    calls = []

    @register_layer("mlp", "mine")
    def mine(input: Tensor, weight1: Tensor, bias1: Any, weight2: Tensor, bias2: Any, activation: str) -> Tensor:
        calls.append((activation, bias1 is None, bias2 is None))
        return F.linear(F.gelu(F.linear(input, weight1, bias1)), weight2, bias2) + 1

    @register_layer("linear", "mine")
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias) + 7

    stock = timm.layers.Mlp(4, 8, bias=(True, False))
    model, x = copy.deepcopy(stock), torch.randn(3, 4)
    patch(model, "mlp", layer="mine").raise_for_failure()
    torch.testing.assert_close(model(x), stock(x) + 1)
    assert calls == [("gelu", False, True)] and repr(model).startswith("Mlp[mine](")
    patch(model, layer="mine")
    torch.testing.assert_close(model(x), stock(x) + 1)
    assert patch(model, "mlp").skipped == {"": "fc1 is a Linear[mine] with a forward of its own"}
    patch(model)
    patch(model, "mlp").raise_for_failure()
    torch.testing.assert_close(model(x), stock(x))
    with pytest.raises(ValueError, match="unknown mlp layer 'yours'; known: mine, zoo"):
        patch(model, "mlp", layer="yours")


def test_a_linear_layer_of_ones_own_takes_a_unit_of_zoos_apart(reasons: list[str]) -> None:
    @register_layer("linear", "plus one")
    def plus_one(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias) + 1

    model, x = timm.layers.Mlp(4, 8), torch.randn(3, 4)
    stock = copy.deepcopy(model)
    patch(model, "mlp")
    patch(model, layer="plus one")
    torch.testing.assert_close(model(x), F.linear(F.gelu(stock.fc1(x) + 1), stock.fc2.weight, stock.fc2.bias) + 1)
    assert reasons == ["fc1 is a Linear[plus one] with a forward of its own"]


def test_what_is_told_while_nothing_listens() -> None:
    note_fallback(fused(), "nobody hears it")
