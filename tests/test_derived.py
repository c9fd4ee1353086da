"""Classes made at run time: pickled as what they were made from, and taken out from under others."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch import nn

from zoo.derived import Derived, derive, original_class, without


class Marked(Derived):
    zoo_mark: str


class Other(Derived):
    pass


def marked(base: type[nn.Module], mark: str) -> type[nn.Module]:
    return derive(f"{base.__name__}<{mark}>", (Marked, base), base, (marked, mark), zoo_mark=mark)


def other(base: type[nn.Module]) -> type[nn.Module]:
    return derive(base.__name__, (Other, base), base, (other,))


def test_instances_are_copied_and_pickled_as_made_over_again() -> None:
    model = nn.Linear(2, 2)
    model.__class__ = other(marked(nn.Linear, "x"))
    model.note = "kept"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model, 0))):
        assert type(twin).__mro__[1] is Other and twin.zoo_mark == "x" and twin.note == "kept"
        assert type(twin).zoo_base.zoo_base is nn.Linear and twin.weight.equal(model.weight)
    assert type(model).__doc__ == nn.Linear.__doc__ and type(model).__module__ == nn.Linear.__module__


def test_without_takes_one_layer_out_of_a_stack() -> None:
    stack = other(marked(nn.Linear, "x"))
    assert without(nn.Linear, Marked) is nn.Linear
    assert without(marked(nn.Linear, "x"), Marked) is nn.Linear
    assert without(stack, Other).__bases__ == (Marked, nn.Linear)
    below = without(stack, Marked)
    assert below.__bases__ == (Other, nn.Linear) and below.zoo_base is nn.Linear and below.__name__ == "Linear"


def test_the_original_is_under_all_that_was_made_over_it() -> None:
    assert original_class(nn.Linear) is nn.Linear
    assert original_class(other(marked(nn.Linear, "x"))) is nn.Linear
    by_others = type("Extra", (marked(nn.Linear, "x"),), {})
    assert original_class(by_others) is by_others


def test_without_rebuilds_a_class_that_others_made_over_it() -> None:
    base = marked(nn.Linear, "x")
    extra: dict[str, Any] = {"answer": lambda self: 42}
    made_over = type("Extra" + base.__name__, (base,), extra)
    model = nn.Linear(2, 2)
    model.__class__ = made_over
    model.__class__ = without(made_over, Marked)
    assert model.answer() == 42 and type(model).__bases__ == (nn.Linear,) and type(model).__name__ == "ExtraLinear"


def test_a_class_made_over_a_derived_one_sees_to_its_own_pickling() -> None:
    model = nn.Linear(2, 2)
    model.__class__ = type("Unnamed", (marked(nn.Linear, "x"),), {})
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(model)
