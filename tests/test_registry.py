from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from zoo import registry
from zoo.factory import create
from zoo.naming import natural_key
from zoo.registry import ModelSpec, build, list_models, options_of, register_model, resolve, spec_of

OWN = [
    "mlp",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]


@pytest.fixture(autouse=True)
def own_names_alone(monkeypatch):
    """What a test registers is gone after it; what other tests left does not show."""
    list_models(source="zoo")
    monkeypatch.setattr(registry, "_builders", {n: b for n, b in registry._builders.items() if n in OWN})


def test_zoos_own_in_natural_order():
    assert list_models(source="zoo") == OWN


def test_all_in_natural_order():
    names = list_models()
    assert names == sorted(names, key=natural_key)
    assert len(names) == len(set(names)) > 1400
    assert set(OWN) < set(names)
    assert sum(name.startswith("torchvision/") for name in names) == 80
    assert sum(name.startswith("timm/") for name in names) > 1000


@pytest.mark.parametrize(
    ("pattern", "source", "expected"),
    [
        ("resnet1*", None, ["resnet18", "resnet101", "resnet152"]),
        ("resnet1*", "zoo", ["resnet18", "resnet101", "resnet152"]),
        ("resnet18", "torchvision", []),
        ("*/resnet18", None, ["timm/resnet18", "torchvision/resnet18"]),
        ("torchvision/resnet?8", None, ["torchvision/resnet18"]),
        ("t*/resnet18", None, ["timm/resnet18", "torchvision/resnet18"]),
        ("[t]imm/resnet18", None, ["timm/resnet18"]),
        ("*resnet18", "torchvision", ["torchvision/resnet18"]),
        ("timm/resnet18", "zoo", []),
        ("timm/resnet18", None, ["timm/resnet18"]),
        ("RESNET18", None, []),
        ("", None, []),
    ],
)
def test_patterns_and_sources(pattern, source, expected):
    assert list_models(pattern, source=source) == expected


def test_unknown_source():
    with pytest.raises(ValueError, match=r"source 'tim'.*timm"):
        list_models(source="tim")


def test_libraries_are_imported_only_when_needed():
    code = """
import sys, zoo
for call in (
    "zoo.list_models('resnet*')",
    "zoo.list_models('mlp')",
    "zoo.list_models('*', source='zoo')",
    "zoo.create('resnet18', device='meta')",
    "zoo.create('mlp', weights='mlp.digits')",
):
    eval(call)
    for library in ("timm", "torchvision"):
        assert library not in sys.modules, f"{call} imported {library}"
zoo.list_models("torchvision/*")
assert "timm" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_register_with_and_without_a_name():
    @register_model
    def mine(*, num_classes: int = 3) -> nn.Module:
        return nn.Linear(2, num_classes)

    @register_model("other")
    class Net(nn.Linear):
        pass

    @register_model(name="third")
    def whatever():
        return nn.Identity()

    @register_model()
    def fourth():
        return nn.Identity()

    assert {"mine", "other", "third", "fourth"} <= set(list_models(source="zoo"))
    assert resolve("mine") is mine
    assert resolve("other") is Net
    assert build("mine", {"num_classes": 5}).out_features == 5
    assert create("other", in_features=1, out_features=2).weight.shape == (2, 1)


def test_a_name_twice_is_refused():
    with pytest.raises(ValueError, match=r"'resnet18' is registered already.*another name"):
        register_model("resnet18")(nn.Identity)
    assert resolve("resnet18") is not nn.Identity


@pytest.mark.parametrize("name", ["", "torchvision/mine", "timm/mine", "timm", 3])
def test_a_name_that_cannot_be_one_is_refused(name):
    with pytest.raises(ValueError, match="a model's name must be"):
        register_model(name)(nn.Identity)
    with pytest.raises(ValueError, match="must be a non-empty str"):
        register_model(functools.partial(nn.Linear, 1, 1))


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("resnet19", ["'resnet19'", "resnet18", "zoo.list_models()"]),
        ("Resnet18", ["resnet18"]),
        ("vit_b_16", ["torchvision/vit_b_16"]),
        ("convnext_tiny", ["torchvision/convnext_tiny and timm/convnext_tiny"]),
        ("torchvision/resnet19", ["resnet18", "torchvision model", "zoo.list_models('torchvision/*')"]),
        ("torchvision/fcn_resnet50", ["'fcn_resnet50'", "resnet50"]),
        ("timm/resnet19", ["resnet18", "timm model"]),
        ("timm/resnet18.a1_in1k", ["zoo.create('timm/resnet18', weights='a1_in1k')"]),
        ("timm/", ["''"]),
        ("", ["''"]),
        (None, ["None"]),
    ],
)
def test_an_unknown_name_is_refused_with_what_may_be_meant(name, hints):
    with pytest.raises(ValueError, match="model") as caught:
        resolve(name)
    assert all(hint in str(caught.value) for hint in hints), caught.value


def test_an_unknown_option_is_refused_with_those_there_are():
    with pytest.raises(
        TypeError, match=r"'mlp' does not take the option 'widht', 'depth'.*activation, dropout, hidden"
    ):
        build("mlp", {"widht": 1, "hidden": [2], "depth": 3})


def test_options_of():
    def builder(first, *, second=2):
        raise AssertionError

    assert list(options_of(builder)) == ["first", "second"]
    assert options_of(builder)["second"] == 2
    assert options_of(functools.partial(builder, second=3)).keys() == {"first"}
    assert options_of(functools.partial(builder, 1)) == {"second": 2}
    assert options_of(lambda **options: None) is None


def test_spec_is_what_create_was_given():
    model = create("mlp", hidden=[3], num_classes=2)
    spec = spec_of(model)
    assert spec == ModelSpec("mlp", {"hidden": [3], "num_classes": 2})
    assert spec_of(copy.deepcopy(model)) == spec
    assert spec_of(pickle.loads(pickle.dumps(model))) == spec
    assert spec_of(nn.Linear(1, 1)) is None
    assert spec_of(build("mlp", {})) is None
    assert list(model.state_dict()) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert spec_of(create("resnet18", device="meta", dtype=torch.float64)) == ModelSpec("resnet18", {})


def test_spec_follows_the_head():
    model = create("resnet18", device="meta")
    model.reset_classifier(7)
    assert spec_of(model).options == {"num_classes": 7}
    model.reset_classifier(0, "")
    assert spec_of(model).options == {"num_classes": 0, "global_pool": ""}
    rebuilt = create("resnet18", device="meta", **spec_of(model).options)
    assert list(rebuilt.state_dict()) == list(model.state_dict())
    model.reset_classifier(1000, "avg")
    assert spec_of(model).options == {}


def test_spec_of_libraries_records_the_classes():
    model = create("timm/test_vit", device="meta")
    assert spec_of(model) == ModelSpec("timm/test_vit", {"num_classes": 1000})
    model.reset_classifier(7)
    assert spec_of(model).options == {"num_classes": 7}
    assert spec_of(create("torchvision/swin_t", device="meta")).options == {"num_classes": 1000}
    assert spec_of(create("torchvision/alexnet", device="meta", dropout=0.1)).options == {"dropout": 0.1}


def test_spec_of_a_users_model_without_such_an_option():
    class Fixed(nn.Module):
        num_classes = 4

    register_model("fixed")(Fixed)
    assert spec_of(create("fixed")) == ModelSpec("fixed", {})
