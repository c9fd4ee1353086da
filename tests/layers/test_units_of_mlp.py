"""Units of zoo's own ``mlp``, whose hidden layers a method of its own calls; its classifier is in none."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from support.calls import Calls
from zoo.coverage import CoverageReport, coverage
from zoo.layers.units import FusedParent, units_in
from zoo.models.mlp import MLP
from zoo.swap import patch, unpatch


def ran(model: nn.Module, x: Tensor) -> list[str]:
    with Calls() as calls, torch.no_grad():
        model(x)
    return calls.names


def pair(**options: Any) -> tuple[nn.Module, MLP]:
    torch.manual_seed(0)
    options = {"in_features": 12, "hidden": (8, 6), "num_classes": 3, **options}
    model = zoo.create("mlp", custom_linear=True, **options)
    stock = zoo.create("mlp", **options)
    stock.load_state_dict(model.state_dict(), strict=True)
    assert list(model.state_dict()) == list(stock.state_dict())
    return model, stock  # type: ignore[return-value]


def apart(report: CoverageReport) -> str:
    (unit,) = report.units
    assert unit.status == "apart" and report.ok and {m.status for m in report.modules} == {"custom"}
    return next(iter(unit.apart))


def test_by_default_two_of_its_linears_are_one_operator() -> None:
    model = zoo.create("mlp", custom_linear=True)
    assert ran(model, torch.randn(2, 1, 28, 28)) == ["mlp", "linear"]
    report = coverage(model, torch.randn(2, 784))
    assert [(u.name, u.status) for u in report.units] == [("0-3", "as one")]
    assert report.ok and report.share == 1.0 and [m.name for m in report.modules] == ["0", "3", "6"]


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12), (12,), (0, 12), (4, 1, 3, 4)])
def test_outputs_and_gradients(activation: str, shape: tuple[int, ...]) -> None:
    model, stock = pair(activation=activation)
    assert "mlp" in ran(model, torch.randn(shape))
    x = torch.randn(shape)
    results = []
    for module in (model, stock):
        given = x.clone().requires_grad_()
        output = module(given)
        results.append([output, *torch.autograd.grad(output.square().sum(), [given, *module.parameters()])])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("hidden", "units"),
    [
        ((), []),
        ((8,), []),  # its second Linear is the classifier
        ((8, 6), [("0", "1", "2", "3")]),
        ((8, 6, 5), [("0", "1", "2", "3")]),
        ((8, 6, 5, 4), [("0", "1", "2", "3"), ("6", "7", "8", "9")]),
    ],
)
def test_which_are_units(hidden: tuple[int, ...], units: list[tuple[str, ...]]) -> None:
    model, stock = pair(hidden=hidden)
    assert list(units_in(stock)) == units
    assert list(model.zoo_units.values() if isinstance(model, FusedParent) else []) == units
    torch.testing.assert_close(model(torch.ones(2, 12)), stock(torch.ones(2, 12)))


def test_what_takes_it_apart_says_why() -> None:
    x = torch.randn(3, 12)
    model, stock = pair(dropout=0.5)
    assert apart(coverage(model.train(), x)) == "2 drops values in training"
    assert ran(model.eval(), x) == ["mlp", "linear"]
    hook = model[1].register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[index]
    assert apart(coverage(model, x)) == "1 has a hook"
    assert not torch.equal(model(x), stock.eval()(x))
    hook.remove()
    model.set_grad_checkpointing()  # type: ignore[operator]
    assert apart(coverage(model.eval(), x)) == "0 to 3 are not called in a row"
    with torch.no_grad():  # where nothing is kept, nothing is made again
        assert ran(model, x) == ["mlp", "linear"]


def test_its_other_methods() -> None:
    model, stock = pair()
    x = torch.randn(3, 12)
    features: Any = model.forward_features
    torch.testing.assert_close(features(x), stock.forward_features(x))
    torch.testing.assert_close(model.forward_head(features(x), pre_logits=True), features(x))  # type: ignore[operator]
    model.reset_classifier(7)  # type: ignore[operator]
    assert model(x).shape == (3, 7) and ran(model, x) == ["mlp", "linear"] and coverage(model, x).ok


def test_copies_files_and_unpatch(tmp_path: Path) -> None:
    model, stock = pair()
    x = torch.randn(3, 12)
    zoo.save_checkpoint(model, tmp_path / "m.safetensors")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), zoo.load(tmp_path / "m.safetensors")):
        assert ran(twin, x) == ["mlp", "linear"] and torch.equal(twin(x), model(x))
    unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert torch.equal(model(x), stock(x))


def test_compiled_whole() -> None:
    model, _ = pair()
    x = torch.randn(3, 12)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    exported = torch.export.export(model, (x,))
    assert any("zoo.mlp" in str(node.target) for node in exported.graph.nodes)


def test_subclasses() -> None:
    class Same(MLP):
        """Leaves all alone."""

    class Doubled(MLP):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Own(MLP):
        def _in_a_row(self, x: Tensor, first: int, end: int) -> Tensor:
            return super()._in_a_row(x, first, end).neg()

    x = torch.randn(3, 12)
    for cls, units in ((Same, 1), (Doubled, 1), (Own, 0)):
        stock = cls(in_features=12, hidden=(8, 6))
        model = copy.deepcopy(stock)
        assert len(patch(model, "mlp").swapped) == units
        torch.testing.assert_close(model(x), stock(x))
