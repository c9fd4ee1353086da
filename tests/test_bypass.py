"""The static search for weights that are read past their layer's forward: what it must find, and what it must not."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import bypass


def weights_read_past_forward(model: nn.Module) -> dict[nn.Module, str]:
    """Each module whose weight is read -> where, for the first reader."""
    return {child: next(iter(places.values())) for child, places in bypass.weights_read_past_forward(model).items()}


class Net(nn.Module):
    """Two layers and a container of two; a subclass says how it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.items = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.inner = nn.ModuleDict({"x": nn.Linear(4, 4)})

    def calls_all(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, *self.items, self.inner["x"]):
            x = layer(x)
        return x


def apply_weight(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight)


def call_layer(x: Tensor, layer: nn.Linear) -> Tensor:
    return layer(x)


helpers = types.SimpleNamespace(apply_weight=apply_weight)


class Direct(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(x, self.a.weight, self.a.bias))


class OtherNameForSelf(Net):
    def forward(s, x: Tensor) -> Tensor:
        return s.b(F.linear(x, s.a.weight, s.a.bias))


class OfAPart(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.x.weight)


class ByLocalName(Net):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a, self.b
        other = a
        return b(F.linear(x, other.weight)) + (again := self.inner).x.weight.sum() + again.x(x)


class InALoop(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.items):
            x = F.linear(x, layer.weight) + i
        return self.a(x)


class InAComprehension(Net):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([layer.weight for layer in (self.a, self.inner["x"])])
        return F.linear(x, weights)


class BySubscript(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.items[0].weight) @ self.items[-1].weight


class ByGetattr(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self, "a").weight) + F.linear(x, getattr(self.b, "weight"))  # noqa: B009


class InAPlainList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.listed, self.named = [self.a, self.b], {"x": self.inner["x"]}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.listed:
            x = F.linear(x, layer.weight)
        return self.items[0](F.linear(x, self.named["x"].weight))


class InAMethod(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)

    def step(self, x: Tensor) -> Tensor:
        return self.further(self.b, x)

    def further(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight)


class InAStaticMethodOrProperty(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.joined @ self.kept

    @property
    def joined(self) -> Tensor:
        return self.a.weight

    @functools.cached_property
    def kept(self) -> Tensor:
        return self.b.weight


class AsACallback(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.step, x)

    def step(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight)


class InAFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        return apply_weight(x, self.a) + helpers.apply_weight(x, layer=self.b) + call_layer(x, self.items[0])


class ThroughSuper(Direct):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class InANestedFunction(Net):
    def forward(self, x: Tensor) -> Any:
        def run(x: Tensor) -> Tensor:
            return F.linear(x, self.a.weight)

        return run(x)


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Decorated(Net):
    @_decorated
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight)


class InOneBranch(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.training else F.linear(x, self.a.weight)


@pytest.mark.parametrize(
    ("cls", "read"),
    [
        (Direct, {"a"}),
        (OtherNameForSelf, {"a"}),
        (OfAPart, {"inner.x"}),
        (ByLocalName, {"a", "inner.x"}),
        (InALoop, {"items.0", "items.1"}),
        (InAComprehension, {"a", "inner.x"}),
        (BySubscript, {"items.0", "items.1"}),
        (ByGetattr, {"a", "b"}),
        (InAPlainList, {"a", "b", "inner.x"}),
        (InAMethod, {"b"}),
        (InAStaticMethodOrProperty, {"a", "b"}),
        (AsACallback, {"a"}),
        (InAFunction, {"a", "b"}),
        (ThroughSuper, {"a"}),
        (InANestedFunction, {"a"}),
        (Decorated, {"a"}),
        (InOneBranch, {"a"}),
    ],
)
def test_reads_are_found(cls: type[Net], read: set[str]) -> None:
    model = nn.Sequential(cls())
    found = weights_read_past_forward(model)
    linears = {name.removeprefix("0."): m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {name for name, m in linears.items() if m in found} == read
    assert all("reads its weight past its forward" in found[linears[name]] for name in read)


def test_where_is_named() -> None:
    model = InAMethod()
    assert weights_read_past_forward(model)[model.b] == "InAMethod.further reads its weight past its forward"


class AsksOnly(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.a.weight.dtype).to(device=self.a.weight.device)
        if self.b.bias is not None and self.b.weight.requires_grad and x.shape[-1] == self.a.weight.shape[1]:
            x = self.calls_all(x)
        return self.b(x) + self.a.weight.size(0)


class ReadsElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.calls_all(x)

    def reset(self) -> None:
        nn.init.zeros_(self.a.weight)

    def fuse(self) -> Tensor:
        return self.a.weight @ self.b.weight


class OwnWeight(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class ResultsAreNoLayers(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.b
        for _ in range(2):
            y = z(y) + call_layer(y, self.a)
        routed: Any = (self.items[0](y), 1)
        return y * routed[0].weight


@pytest.mark.parametrize("cls", [AsksOnly, ReadsElsewhere, ResultsAreNoLayers, lambda: OwnWeight(2, 2)])
def test_what_is_no_read_is_not_found(cls: Callable[[], nn.Module]) -> None:
    assert weights_read_past_forward(nn.Sequential(cls())) == {}


SOURCELESS = """
class Reads(Net):
    def forward(s, x):
        return s.step(x)
    def step(s, x):
        return s.b(F.linear(x, s.a.weight))
class Calls(Net):
    def forward(s, x):
        return s.a(s.inner["x"](x))
"""


def test_without_source_every_child_named_beside_a_weight_is_doubtful() -> None:
    space: dict[str, Any] = {"Net": Net, "F": F}
    exec(compile(SOURCELESS, "nowhere", "exec"), space)
    model = space["Reads"]()
    found = weights_read_past_forward(model)
    assert set(found) == {model.a, model.b}
    assert found[model.a] == "Reads.step, whose source is not at hand, may read its weight past its forward"
    assert weights_read_past_forward(space["Calls"]()) == {}


def test_a_forward_set_on_the_instance_is_read() -> None:
    model = Net()
    model.forward = types.MethodType(lambda net, x: F.linear(x, net.a.weight), model)  # type: ignore[method-assign]
    assert model.a in weights_read_past_forward(model)
    around = Net()

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, around.b.weight)

    around.forward = forward  # type: ignore[method-assign]
    assert set(weights_read_past_forward(around)) == {around.b}


class CallsAndReads(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + F.linear(x, self.a.weight))


def test_a_traced_graph_is_read() -> None:
    graph = torch.fx.symbolic_trace(CallsAndReads())
    assert set(weights_read_past_forward(graph)) == {graph.a}
    assert weights_read_past_forward(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))) == {}


def test_torchs_own_attention() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    assert set(weights_read_past_forward(model)) >= {model.self_attn.out_proj, model.linear1, model.linear2}


def test_every_reader_is_named() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    layer = model.layers[0]
    found = bypass.weights_read_past_forward(model)
    assert set(found[layer.self_attn.out_proj]) == {model, layer, layer.self_attn}
    assert set(found[layer.linear1]) == {model, layer}
    assert found[layer.linear1][layer] == "TransformerEncoderLayer.forward reads its weight past its forward"
    assert bypass.weights_read_past_forward(nn.Sequential(nn.Linear(4, 4))) == {}
