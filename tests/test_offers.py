"""Layers and models that installed packages offer."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zoo
from zoo import offers

CODE = """
import torch.nn.functional as F
from torch import nn


class TheirLinear(nn.Linear):
    def forward(self, input):
        return F.linear(input, self.weight, self.bias)


def their_norm(input, normalized_shape, weight, bias, eps):
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def their_net(*, num_classes: int = 3):
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, num_classes))
"""
LAYERS = {"linear.theirs": "TheirLinear", "layer_norm.theirs": "their_norm"}

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package, as pip would, into a folder of its own on sys.path; returns the name of its module."""

    def put(package: str, layers: dict[str, str], models: dict[str, str] | None = None, code: str = CODE) -> str:
        module, folder = package.replace("-", "_"), tmp_path / package
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = []
        for group, names in (("zoo.layers", layers), ("zoo.models", models or {})):
            lines += [f"[{group}]", *(f"{name} = {module}:{attribute}" for name, attribute in names.items())]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return put


def test_layers_and_models_are_there_by_name_and_loaded_when_asked_for(install: Install) -> None:
    module = install("tiny-zoo-pkg", LAYERS, {"their_net": "their_net"})
    assert zoo.list_layers("linear") == ["theirs", "zoo"] and zoo.list_layers("layer_norm") == ["theirs"]
    assert "their_net" in zoo.list_models() and "their_net" in zoo.list_models("their*", source="zoo")
    assert module not in sys.modules

    model = zoo.create("their_net", num_classes=2, layers={"linear": "theirs", "layer_norm": "theirs"})
    assert module in sys.modules
    covered = zoo.coverage(model, torch.randn(3, 4))
    assert [(m.layer, m.status) for m in covered.modules] == [("theirs", "custom")] * 3
    assert type(model[0]).zoo_layer == "theirs" and isinstance(model[0], sys.modules[module].TheirLinear)
    assert zoo.verify("theirs", kind="layer_norm", claims="values", isolate=False).ok


def test_one_that_registers_itself_too_is_no_clash(install: Install) -> None:
    code = CODE + '\nimport zoo\nzoo.register_layer("linear", "theirs")(TheirLinear)\nzoo.register_model(their_net)\n'
    module = install("registers-itself", LAYERS, {"their_net": "their_net"}, code)
    assert zoo.patch(zoo.create("their_net"), layer="theirs").ok
    assert module in sys.modules


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("", "AttributeError: module 'broken_pkg' has no attribute 'TheirLinear'"),
        ("TheirLinear = dict", "expected a subclass of Linear or a function"),
        ("TheirLinear = 3", "expected a class or a function, got 3"),
    ],
)
def test_a_broken_one_costs_its_own_name_alone(install: Install, code: str, text: str) -> None:
    install("broken-pkg", {"linear.theirs": "TheirLinear"}, {"their_net": "TheirLinear"}, code)
    assert "theirs" in zoo.list_layers() and "their_net" in zoo.list_models("their*")
    assert zoo.patch(nn.Linear(2, 2)).ok
    with pytest.raises(ValueError, match=r"layer 'linear.theirs' is offered by broken-pkg 1.0 \(broken_pkg:") as caught:
        zoo.patch(nn.Linear(2, 2), layer="theirs")
    assert text in str(caught.value)
    if code != "TheirLinear = dict":  # which is a builder of models, to all appearances
        with pytest.raises(ValueError, match=r"model 'their_net' is offered by broken-pkg 1.0 .*could not be loaded"):
            zoo.create("their_net")


def test_names_that_are_of_no_use_are_warned_of(install: Install) -> None:
    wrong = {
        "theirs": "TheirLinear",
        "norm.theirs": "their_norm",
        "linear.": "TheirLinear",
        "linear.zoo": "TheirLinear",
    }
    install("wrong-names", wrong, {"resnet18": "their_net", "timm/own": "their_net"})
    with pytest.warns(UserWarning, match=r"wrong-names 1\.0") as caught:
        assert zoo.list_layers() == ["zoo"]
    told = [str(one.message) for one in caught]
    assert len(told) == 4
    assert "'theirs' in zoo.layers is ignored: expected a kind, a dot and a name, such as 'linear.theirs'" in told[0]
    assert "'linear.zoo' in zoo.layers is ignored: the name is zoo's own" in told[3]
    with pytest.warns(UserWarning, match="'resnet18' in zoo.models is ignored: the name is zoo's own"):
        zoo.list_models("resnet*", source="zoo")
    assert isinstance(zoo.create("resnet18", device="meta"), nn.Module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once told
        zoo.list_layers()


def test_a_clash_names_both_claimants(install: Install) -> None:
    for package in ("first-pkg", "second-pkg"):
        install(package, {"linear.theirs": "TheirLinear"}, {"their_net": "their_net"})
    assert zoo.list_layers("linear") == ["theirs", "zoo"]
    with pytest.raises(
        ValueError, match=r"layer 'linear.theirs' is offered by .*-pkg 1.0 .* and by .*; uninstall"
    ) as e:
        zoo.patch(nn.Linear(2, 2), layer="theirs")
    assert "first-pkg" in str(e.value) and "second-pkg" in str(e.value)
    with pytest.raises(ValueError, match=r"model 'their_net' is offered by .*-pkg 1.0 .* and by"):
        zoo.create("their_net")


def test_a_name_that_a_package_offers_is_taken(install: Install) -> None:
    install("tiny-zoo-pkg", LAYERS, {"their_net": "their_net"})
    with pytest.raises(ValueError, match=r"<function .*f at .* which the installed package tiny-zoo-pkg 1.0 \(tiny"):
        zoo.register_layer("linear", "theirs")(lambda_like)
    with pytest.raises(
        ValueError, match=r"model 'their_net': .*which the installed package tiny-zoo-pkg 1.0 .* offers"
    ):
        zoo.register_model("their_net")(lambda_like)
    assert zoo.register_layer("linear", "another")(lambda_like) is lambda_like


def lambda_like(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(input, weight, bias)


lambda_like.__qualname__ = "f"


_ASKED = """
from importlib import metadata
asked, look = [], metadata.entry_points
metadata.entry_points = lambda **of: (asked.append(of.get("group")), look(**of))[1]
import zoo
print([group for group in asked if group and group.startswith("zoo.")])
zoo.list_layers()
print(asked[-1])
"""


def test_importing_zoo_looks_for_nothing() -> None:
    found = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["[]", "zoo.layers"]


def test_installed_by_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "pip_zoo_pkg.py").write_text(CODE, encoding="utf-8")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "pip-zoo-pkg"\nversion = "2.5"\n[tool.setuptools]\npy-modules = ["pip_zoo_pkg"]\n'
        '[project.entry-points."zoo.layers"]\n"linear.theirs" = "pip_zoo_pkg:TheirLinear"\n'
        '[project.entry-points."zoo.models"]\ntheir_net = "pip_zoo_pkg:their_net"\n',
        encoding="utf-8",
    )
    words = ["install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", *words, str(source)], check=True, capture_output=True)
    monkeypatch.syspath_prepend(target)
    assert offers.names_offered(offers.LAYERS) == ["linear.theirs"]
    assert zoo.patch(zoo.create("their_net"), layer="theirs").ok
