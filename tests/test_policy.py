"""Rules as data, and where the policy lies."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from zoo.policy import Rule, forget, policy_of, remember, rules_from

ZOO = Rule("linear", "zoo")


class Head(nn.Module):
    """A model with reset_classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def reset_classifier(self, classes: int) -> None:
        self.head = nn.Linear(2, classes)


@pytest.mark.parametrize("only", [None, "head", (), ("a.*", "b"), ["c"]])
def test_a_rule_goes_through_json(only: Any) -> None:
    rule = Rule("linear", "mine", only)
    assert Rule.from_json(json.loads(json.dumps(rule.to_json()))) == rule
    assert rules_from([rule.to_json(), ZOO.to_json()]) == (rule, ZOO)
    assert hash(rule) is not None and (rule.only is None or not isinstance(rule.only, list))


def test_a_predicate_cannot_be_stored_and_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="cannot be stored; patch with a list of globs"):
        Rule("linear", "zoo", lambda name, module: True).to_json()


@pytest.mark.parametrize("only", ["tail", "", 3, True, {"a"}])
def test_an_only_of_the_wrong_form(only: Any) -> None:
    with pytest.raises(ValueError, match=r"only must be None \(all\), \"head\", a list of globs .*; got"):
        Rule("linear", "zoo", only)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"kind": "linear", "layer": "zoo"},
        {"kind": "linear", "layer": "zoo", "only": None, "more": 1},
        {"kind": 1, "layer": "zoo", "only": None},
        {"kind": "linear", "layer": None, "only": None},
        {"kind": "linear", "layer": "zoo", "only": "x"},
        {"kind": "linear", "layer": "zoo", "only": [1]},
    ],
)
def test_other_data_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"a layer rule|only"):
        Rule.from_json(data)


def test_rules_are_kept_in_order_and_once() -> None:
    model = nn.Sequential()
    assert policy_of(model) == ()
    for rule in (ZOO, Rule("linear", "mine"), ZOO):
        remember(model, rule)
    assert policy_of(model) == (ZOO, Rule("linear", "mine"))
    assert policy_of(copy.deepcopy(model)) == policy_of(pickle.loads(pickle.dumps(model))) == policy_of(model)


def test_forget_takes_all_policies_of_a_model_and_its_parts() -> None:
    model = nn.Sequential(Head(), nn.Sequential())
    before = [type(m) for m in model.modules()], [sorted(m.__dict__) for m in model.modules()]
    for part in (model, *model):
        remember(part, ZOO)
    assert type(model[0]) is not Head and isinstance(model[0], Head)
    forget(model)
    assert ([type(m) for m in model.modules()], [sorted(m.__dict__) for m in model.modules()]) == before


def test_the_class_that_keeps_a_policy_looks_like_the_original() -> None:
    model = Head()
    remember(model, ZOO)
    remember(model, Rule("linear", "zoo", "head"))
    assert type(model).__mro__.count(Head) == 1 and type(model).__name__ == "Head"
    assert type(model).__qualname__ == Head.__qualname__ and type(model).__module__ == Head.__module__
    assert type(model).__doc__ == Head.__doc__ and repr(model) == repr(Head())


def test_the_policy_lies_on_the_model_inside_wrappers() -> None:
    core = nn.Sequential(nn.Linear(2, 2))
    model = torch.compile(nn.DataParallel(core))
    remember(model, ZOO)
    assert policy_of(core) == policy_of(model) == (ZOO,) and "_zoo_policy" not in model.__dict__
    forget(model)
    assert policy_of(core) == ()
