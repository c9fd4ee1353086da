"""Which units of a model run as one: the plan, the choice, what is said of the others, and what coverage saw."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zoo
from zoo.coverage import coverage
from zoo.fusing import places_of, plan_units
from zoo.layers import register_layer, registry
from zoo.layers.units import FusedParent
from zoo.parity import parity
from zoo.policy import NOT_SELECTED, Rule
from zoo.swap import apply_rules, patch, policy_of, unpatch

ALL = Rule("mlp", "zoo")


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mlp = timm.layers.Mlp(4, 8, **options)
        self.tail = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x + self.mlp(x))


def model(blocks: int = 1, **options: Any) -> Any:
    return nn.Sequential(*(Block(**options) for _ in range(blocks)))


def test_the_names_of_units() -> None:
    assert list(places_of(model(2))) == ["0.mlp", "0.tail.0-3", "1.mlp", "1.tail.0-3"]
    assert list(places_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0-2"]
    assert list(places_of(timm.layers.Mlp(4, 8))) == [""]


def test_nothing_is_changed_by_a_plan() -> None:
    net = model()
    made = plan_units(net, ALL, strict=True)
    assert list(made.units) == list(made.places) == ["0.mlp", "0.tail.0-3"] and made.skipped == {}
    assert not any(isinstance(m, FusedParent) for m in net.modules())
    assert plan_units(net, ALL, strict=True, but=[net[0].mlp]).skipped == {"0.mlp": NOT_SELECTED}


def hook(net: Any) -> None:
    net[0].mlp.act.register_forward_hook(lambda *a: None)


def shared_linear(net: Any) -> None:
    net[0].other = net[0].mlp.fc2


def shared_activation(net: Any) -> None:
    net[0].tail[1] = net[0].mlp.act = nn.ReLU()


def parametrized(net: Any) -> None:
    parametrizations.weight_norm(net[0].mlp.fc1)


def own_forward(net: Any) -> None:
    net[0].mlp.fc1.forward = lambda x: x


def two_dtypes(net: Any) -> None:
    net[0].mlp.fc2.double()


def another_dtype(net: Any) -> None:
    for linear in (net[0].mlp.fc1, net[0].mlp.fc2):
        linear.weight = nn.Parameter(linear.weight.to(torch.complex64))


def another_activation(net: Any) -> None:
    net[0].mlp.act = nn.Hardswish()


def a_subclass_of_the_activation(net: Any) -> None:
    class Louder(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    net[0].mlp.act = Louder()


def a_norm(net: Any) -> None:
    net[0].mlp.norm = nn.LayerNorm(8)


def own_linear(net: Any) -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    net[0].mlp.fc2 = Noisy(8, 4)


PREVENTED = {
    hook: "act has a hook",
    shared_linear: "fc2 is used elsewhere, too",
    shared_activation: "act is used elsewhere, too",
    parametrized: "fc1 is parametrized: its weight or bias is computed",
    own_forward: "a forward of its own was set on fc1",
    two_dtypes: "fc1 is torch.float32 on cpu, and fc2 is torch.float64 on cpu",
    another_dtype: "the dtype torch.complex64 of fc1 is none of",
    another_activation: "its activation act is a Hardswish",
    a_subclass_of_the_activation: "its activation act is a Louder",
    a_norm: "norm is a LayerNorm",
    own_linear: "fc2 is a Noisy with a forward of its own",
}


@pytest.mark.parametrize("change", PREVENTED, ids=lambda change: change.__name__)
def test_what_prevents_it_is_said_by_the_swap_and_by_coverage(change: Callable[[Any], None]) -> None:
    net = model()
    change(net)
    report = patch(net, "mlp")
    assert report.skipped["0.mlp"].startswith(PREVENTED[change])
    assert not report.ok and report.skipped["0.mlp"] in str(report)
    assert type(net[0].mlp) is timm.layers.Mlp
    if change not in (two_dtypes, another_dtype, own_forward):
        units = {u.name: u for u in coverage(net.eval(), torch.randn(2, 4)).units}
        assert (units["0.mlp"].status, units["0.mlp"].reason) == ("skipped", report.skipped["0.mlp"])
        assert units["0.mlp"].layer is None and not units["0.mlp"].calls


def test_a_parent_that_is_there_twice_is_one_unit() -> None:
    net = model()
    net.append(net[0])
    assert patch(net, "mlp").swapped == ("0.mlp", "0.tail.0-3") and patch(net, "mlp").ok


# selection


@pytest.mark.parametrize(
    ("only", "swapped"),
    [
        (None, ["0.mlp", "0.tail.0-3", "1.mlp", "1.tail.0-3"]),
        (["*.mlp"], ["0.mlp", "1.mlp"]),
        (["1.*"], ["1.mlp", "1.tail.0-3"]),
        (["1.mlp.fc1", "1.mlp.fc2", "0.mlp.fc1"], ["1.mlp"]),
        (["0.tail.0-3"], ["0.tail.0-3"]),
        (lambda name, module: module.out_features != 8, []),
        (lambda name, module: name.startswith("0.mlp") and isinstance(module, nn.Linear), ["0.mlp"]),
    ],
)
def test_only_selects_by_the_units_name_or_by_both_linears(only: Any, swapped: list[str]) -> None:
    net = model(2)
    report = patch(net, "mlp", only=only)
    assert list(report.swapped) == swapped and report.ok
    assert [n for n, m in net.named_modules() if isinstance(m, FusedParent)] == [
        n.removesuffix(".0-3") for n in swapped
    ]


def test_what_selects_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mlp layer 'fc'"):
        patch(model(), "mlp", only=["fc"])
    with pytest.raises(ValueError, match=r"the model's classifier '0\.tail\.4' is no mlp layer"):
        patch(model(), "mlp", only="head")


def test_a_second_patch_adds_to_the_first() -> None:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)
    )
    assert patch(net, "mlp", only=["4-6"]).swapped == ("4-6",)
    assert patch(net, "mlp", only=["0-2"]).swapped == ("0-2", "4-6")
    assert list(net.zoo_units) == ["0", "4"] and patch(net, "mlp").swapped == ("0-2", "4-6")
    assert policy_of(net) == (Rule("mlp", "zoo", ("4-6",)), Rule("mlp", "zoo", ("0-2",)), ALL)
    unpatch(net)
    assert type(net) is nn.Sequential and not policy_of(net)


# custom_linear


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({"custom_linear": True}, ["blocks.0.mlp", "blocks.1.mlp"]),
        ({"custom_linear": ["blocks.1.*"]}, ["blocks.1.mlp"]),
        ({"custom_linear": ["*.fc1"]}, []),
        ({"custom_linear": ["head"]}, []),
        ({"custom_linear": lambda name, module: "0.mlp" in name}, ["blocks.0.mlp"]),
        ({"custom_linear": "head"}, []),
        ({"custom_linear": False}, []),
        ({"layers": {"linear": "zoo"}}, []),
        ({"layers": {"mlp": "zoo"}}, ["blocks.0.mlp", "blocks.1.mlp"]),
        ({"custom_linear": True, "layers": {"linear": "mine"}}, []),
        ({"custom_linear": True, "layers": {"linear": "mine", "mlp": "mine"}}, ["blocks.0.mlp", "blocks.1.mlp"]),
    ],
)
def test_custom_linear_makes_units_where_both_linears_are_zoos(options: dict[str, Any], units: list[str]) -> None:
    @register_layer("linear", "mine")
    def mine(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    register_layer("mlp", "mine")(lambda x, w1, b1, w2, b2, activation: F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2))
    net = zoo.create("timm/vit_tiny_patch16_224", depth=2, img_size=32, num_classes=3, **options)
    assert [name for name, module in net.named_modules() if isinstance(module, FusedParent)] == units


def test_units_outlive_files_copies_and_new_heads(tmp_path: Any) -> None:
    net = zoo.create("timm/vit_tiny_patch16_224", depth=1, img_size=32, num_classes=3, custom_linear=True).eval()
    x = torch.randn(1, 3, 32, 32)
    zoo.save_checkpoint(net, tmp_path / "m.safetensors")
    for twin in (zoo.load(tmp_path / "m.safetensors").eval(), copy.deepcopy(net)):
        assert [u.status for u in coverage(twin, x).units] == ["as one"]
        torch.testing.assert_close(twin(x), net(x))
    net.reset_classifier(5)
    assert net(x).shape == (1, 5) and coverage(net, x).ok and isinstance(net.blocks[0].mlp, FusedParent)


def test_a_policy_makes_units_of_what_is_new() -> None:
    net = model()
    patch(net, "mlp")
    net[0].mlp = timm.layers.Mlp(4, 8)
    units = {u.name: u for u in coverage(net, torch.randn(2, 4)).units}
    assert units["0.mlp"].status == "skipped" and "patch again" in units["0.mlp"].reason
    apply_rules(net, policy_of(net))
    assert isinstance(net[0].mlp, FusedParent)


# coverage


def test_both_linears_count_as_run_through_zoo() -> None:
    net, x = model().eval(), torch.randn(2, 5, 4)
    patch(net)
    before = coverage(net, x)
    patch(net, "mlp")
    report = coverage(net, x)
    assert report.ok and report.share == 1 and not before.units
    assert [(m.name, m.status, m.layer, m.calls) for m in report.modules] == [
        (m.name, "custom", "zoo", 1) for m in before.modules
    ]
    assert [m.flops for m in report.modules] == [m.flops for m in before.modules]
    assert (report.flops, report.custom_flops) == (before.flops, before.custom_flops)
    assert [(u.name, u.kind, u.status, u.layer, u.calls, u.apart) for u in report.units] == [
        ("0.mlp", "mlp", "as one", "zoo", 1, {}),
        ("0.tail.0-3", "mlp", "as one", "zoo", 1, {}),
    ]
    assert "5 custom; 2 of 2 units as one" in str(report)
    assert json.loads(report.to_json())["units"][0]["status"] == "as one"


def test_stock_linears_in_a_unit_run_through_its_layer() -> None:
    net, x = model().eval(), torch.randn(2, 4)
    patch(net, "mlp")
    report = coverage(net, x)
    got = {m.name: (m.status, m.layer) for m in report.modules}
    assert got == {
        "0.mlp.fc1": ("custom", "zoo"),
        "0.mlp.fc2": ("custom", "zoo"),
        "0.tail.0": ("custom", "zoo"),
        "0.tail.3": ("custom", "zoo"),
        "0.tail.4": ("skipped", None),
    }
    assert report.ok and report.share == 1 - 2 * 2 * 4 * 2 / report.flops


def test_a_kernel_without_a_formula_counts_as_the_linears() -> None:
    register_layer("mlp", "opaque")(lambda x, w1, b1, w2, b2, activation: x.new_zeros(*x.shape[:-1], len(w2)))
    net, x = timm.layers.Mlp(4, 8), torch.randn(2, 4)
    patch(net, "mlp", layer="opaque")
    report = coverage(net, x)
    assert [m.flops for m in report.modules] == [2 * 2 * 4 * 8] * 2 and report.share == 1
    assert {m.layer for m in report.modules} == {"opaque"}


def test_units_that_ran_apart_say_why_and_how_often() -> None:
    net, x = model(), torch.randn(2, 4)
    patch(net)
    patch(net, "mlp")
    net[0].mlp.fc1.register_forward_hook(lambda *a: None)
    report = coverage(net.train(), x)
    assert report.ok and report.share == 1 and {m.status for m in report.modules} == {"custom"}
    mlp, tail = report.units
    assert (mlp.status, mlp.apart) == ("apart", {"fc1 has a hook": 1})
    assert (tail.status, tail.apart) == ("apart", {"2 drops values in training": 1})
    assert "  0.mlp: apart: fc1 has a hook (1 of 1 calls)" in str(report).splitlines()
    net[0].forward = lambda x: x
    assert [u.status for u in coverage(net, x).units] == ["never called"] * 2


def test_a_unit_that_lost_a_module() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 4)
    patch(net, "mlp")
    del net[2]
    (unit,) = coverage(net, x).units
    assert (unit.name, unit.status, unit.apart) == ("0-2", "apart", {"0 to 2 are not called in a row": 1})


def test_what_the_linears_fell_back_to_is_still_heard() -> None:
    class Answers(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    net, x = model().eval(), torch.randn(2, 4)
    patch(net)
    patch(net, "mlp")
    net[0].mlp.fc1.weight = nn.Parameter(net[0].mlp.fc1.weight.detach().as_subclass(Answers))
    report = coverage(net, x)
    assert {m.name: m.status for m in report.modules}["0.mlp.fc1"] == "fell back"
    mlp, tail = report.units
    assert mlp.apart == {"the weight of fc1 is a Answers, which brings its own linear": 1}
    assert tail.apart == {"its input is a Answers": 1}


# a probe


def test_a_probe_shows_what_runs_as_one() -> None:
    net, x = model(), torch.randn(2, 4)
    report = patch(net, "mlp", example=x)  # its dropout keeps it apart in training alone
    assert report.ok and report.proven and report.swapped == ("0.mlp", "0.tail.0-3")
    assert net.training and not torch.is_inference_mode_enabled()


class Steps(nn.Module):
    """Calls the modules of a sequence itself."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), timm.layers.Mlp(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.mlp(x)


def test_a_probe_puts_back_what_nobody_calls() -> None:
    net, x = Steps(), torch.randn(2, 4)
    before = patch(net, "mlp").swapped
    assert before == ("steps.0-2", "mlp")
    report = patch(net, "mlp", example=x)
    assert report.skipped == {"steps.0-2": "not called in the probe forward in training or eval mode"}
    assert type(net.steps) is nn.Sequential and isinstance(net.mlp, FusedParent)


def test_a_probe_that_fails_leaves_the_model_as_it_was() -> None:
    net = model()
    with pytest.raises(ValueError, match="example: the model does not take it"):
        patch(net, "mlp", example=(torch.randn(2, 4),) * 2)
    assert not any(isinstance(m, FusedParent) for m in net.modules()) and not policy_of(net)

    @register_layer("mlp", "breaks")
    def breaks(input: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any, activation: str) -> Tensor:
        raise RuntimeError("no such chip")

    with pytest.raises(ValueError, match=r"example: the layer swapped in at '0\.mlp' failed in training mode: .*chip"):
        patch(net, "mlp", layer="breaks", example=torch.randn(2, 4))
    assert not any(isinstance(m, FusedParent) for m in net.modules())


# parity


def sabotaged(forward: float, backward: float) -> Callable[..., Tensor]:
    right = registry.get_layer("mlp", "zoo")

    def layer(*args: Any) -> Tensor:
        y = right(*args)
        return y * forward if backward == 1 else y + (y * backward - y) - (y * backward - y).detach()

    return layer


@pytest.mark.parametrize(("forward", "backward"), [(1.01, 1.0), (1.0, 1.01)], ids=["forward", "backward"])
def test_parity_judges_units_as_units(forward: float, backward: float) -> None:
    register_layer("mlp", "wrong")(sabotaged(forward, backward))
    torch.manual_seed(0)
    stock = model(act_layer=nn.ReLU).eval()
    net, x = copy.deepcopy(stock), torch.randn(32, 4)
    patch(net, "mlp", layer="wrong", only=["0.mlp"])
    report = parity(net, stock, x, gradients=True)
    assert not report.ok and report.first_divergence is not None
    # hooks on the modules of a unit would have let them run instead, right as they are
    assert report.first_divergence.name == ("0.mlp.drop2" if backward == 1 else "0.mlp.fc2.weight")
    patch(net, "mlp", only=["0.mlp"])
    parity(net, stock, x, gradients=True).raise_for_failure()
