"""The plan of a swap, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import register_adapter
from zoo.planning import plan, runs
from zoo.policy import Rule
from zoo.swap import patch

ALL = Rule("linear", "zoo")


def _plan(model: nn.Module, rule: Rule = ALL, **options: Any) -> Any:
    return plan(model, rule, strict=True, **options)


class Pair(nn.Module):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.packed = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False) if dtype else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a.weight), self.b.weight)


def test_parents_and_the_layers_that_need_them() -> None:
    register_adapter(Pair)
    model = nn.Sequential(Pair(), nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 4))
    made = _plan(model)
    attention = model[2].self_attn
    assert made.parents == {
        model[0]: ["0.a", "0.b"],
        attention: ["2.self_attn.out_proj"],
        model[2]: ["2.self_attn.out_proj", "2.linear1", "2.linear2"],
    }
    assert list(made.layers) == list(made.modules) and made.skipped == {} == made.past
    assert all(type(m) in (Pair, nn.Linear) for m in (model[0], model[1], model[0].a)), "nothing is changed"


def test_what_is_skipped_takes_with_it_what_cannot_be_without_it() -> None:
    register_adapter(Pair)
    model = nn.Sequential(Pair(), Pair())
    made = _plan(model)
    assert made.skip({"0.a": "why"}) == [model[0].a, model[0].b, model[0]]
    assert list(made.layers) == ["1.a", "1.b"] and list(made.parents) == [model[1]]
    assert made.skipped["0.b"].endswith("and 0.a is left alone: why")
    assert made.skip({"1.a": "why"}, settled=[model[1]]) == [model[1].a] and list(made.layers) == ["1.b"]


def test_a_parent_whose_own_weight_no_layer_takes_is_not_adapted() -> None:
    register_adapter(Pair)
    made = _plan(Pair(torch.float8_e4m3fn))
    assert made.layers == {} == made.parents
    assert "its own packed is a Parameter of torch.float8_e4m3fn; pass example=" in made.skipped["a"]
    assert _plan(Pair(torch.bfloat16)).skipped == {}


def test_doubtful_layers_are_in_the_plan_of_a_probe() -> None:
    model = Pair()
    assert _plan(model).layers == {}
    made = _plan(model, probed=True)
    assert list(made.layers) == ["a", "b"] and set(made.past) == {model.a, model.b} and made.parents == {}


def test_modules_that_are_to_be_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert list(_plan(model, but=[model[0]]).layers) == ["1"]


def test_what_runs_a_rules_layer() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 4)
    modules = (model, model.self_attn, model.self_attn.out_proj, model.linear1)
    assert not any(runs(module, ALL) for module in modules)
    patch(model)
    assert all(runs(module, ALL) for module in modules)
    assert not any(runs(module, Rule("linear", "other")) for module in (*modules, nn.ReLU()))
