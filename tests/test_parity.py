"""Saboteurs that must fail, honest layers that must not, and callers that must not notice."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from support.spoiling import spoiled, truncated
from zoo.parity import ParityReport, parity
from zoo.report import CheckFailed

parity_module = importlib.import_module("zoo.parity")  # zoo.parity is the function


pytestmark = pytest.mark.usefixtures("one_thread")


def swapped(model: nn.Module, cls: type[nn.Linear]) -> nn.Module:
    """A copy whose Linears are ``cls``; a plain swap of this file's own."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) is nn.Linear:
            module.__class__ = cls
    return twin


def mlp(width: int = 48, *, activation: Callable[[], nn.Module] = nn.GELU, outputs: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs)
    )


def judged(cls: type[nn.Linear], *, rows: int = 96, width: int = 48) -> ParityReport:
    model = mlp(width)
    return parity(swapped(model, cls), model, torch.randn(rows, width), gradients=True)


# Honest layers


class _Permuted(torch.autograd.Function):
    """The three products of a Linear with every sum taken in another order."""

    @staticmethod
    def order(n: int) -> Tensor:
        return torch.randperm(n, generator=torch.Generator().manual_seed(n))

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        p = _Permuted.order(x.shape[-1])
        return F.linear(x[..., p], weight[:, p], bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        p = _Permuted.order(grad.shape[-1])
        dx = grad[..., p] @ weight[p]
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        p = _Permuted.order(len(x))
        return dx, grad[p].T @ x[p], grad[p].sum(0) if ctx.needs_input_grad[2] else None


class Permuted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Permuted.apply(x, self.weight, self.bias)


class Chunked(nn.Linear):
    """Sums over thirds of the features."""

    def forward(self, x: Tensor) -> Tensor:
        y = sum(a @ w.T for a, w in zip(x.chunk(3, -1), self.weight.chunk(3, -1), strict=True))
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("seed", range(100))
def test_honest_sums_in_another_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    rows, k, n = pick(1, 1, 2, 7, 64, 200), pick(1, 2, 8, 33, 512), pick(1, 2, 10, 100, 513)
    torch.manual_seed(seed)
    model = nn.Linear(k, n, bias=pick(True, True, False))
    x = torch.randn(rows, k)
    if pick(True, False, False):
        x *= torch.randn(rows, k).mul(3).exp()
    dtype = pick(torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
    model, x = model.to(dtype), x.clamp(-1e4, 1e4).to(dtype)
    report = parity(swapped(model, Permuted), model, x, gradients=True)
    assert report.ok, report
    assert len(report.entries) == 3 + (model.bias is not None)


@pytest.mark.parametrize("rows", [1, 2, 600])
@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_honest_networks(rows: int, width: int, activation: Callable[[], nn.Module]) -> None:
    model = mlp(width, activation=activation, outputs=10)
    report = parity(swapped(model, Permuted), model, torch.randn(rows, width), gradients=True)
    assert report.ok, report


def test_honest_chunks() -> None:
    report = judged(Chunked)
    assert report.ok, report


def test_honest_resnet18() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    report = parity(swapped(model, Permuted), model, torch.randn(2, 3, 32, 32), gradients=True)
    assert report.ok, report
    # 62 parameters, the input, and the logits, each once and in the model's order
    names = ["output", *(n for n, _ in model.named_parameters()), "input[0]"]
    assert [e.name for e in report.entries] == names
    assert [e.kind for e in report.entries] == ["output"] + ["gradient"] * 63
    assert report.first_divergence is None and report.weights_differ == () and report.blank == ()


def test_a_model_against_itself() -> None:
    model = mlp()
    report = parity(model, model, torch.randn(5, 48), gradients=True)
    assert report.ok and all(e.error == e.reference_error for e in report.entries)


# Saboteurs: each is wrong in one way


class _Broken(torch.autograd.Function):
    """A right Linear whose gradients (dx, dw, db) are passed through a function."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, spoil: Callable[[Tensor, Tensor, Tensor], Any]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spoil = spoil
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (*ctx.spoil(grad @ weight, grad.T @ x, grad.sum(0)), None)


def broken_gradient(spoil: Callable[[Tensor, Tensor, Tensor], Any]) -> type[nn.Linear]:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return _Broken.apply(x, self.weight, self.bias, spoil)

    return Broken


def broken_output(spoil: Callable[[Tensor], Tensor]) -> type[nn.Linear]:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return spoil(super().forward(x))

    return Broken


class InBfloat16(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


class InHalf(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.half(), self.weight.half(), self.bias.half()).float()


class InTf32(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(truncated(x), truncated(self.weight), self.bias)


class WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + 0 * self.bias


class WithoutBiasAtAll(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


FORWARD = {
    "bfloat16 inside": InBfloat16,
    "float16 inside": InHalf,
    "tf32 inside": InTf32,
    "dropped bias": WithoutBias,
    "one element off": broken_output(lambda y: spoiled(y, (3, 5), 0.125)),
    "one row stale": broken_output(lambda y: torch.cat([y[:1], y[:1], y[2:]])),
    "rows from 64 on": broken_output(lambda y: torch.cat([y[:64], y[64:] * (1 + 1e-5)])),
    "constant": broken_output(lambda y: 0 * y + y.detach().mean()),
    "zeros": broken_output(lambda y: 0 * y),
    "noise": broken_output(lambda y: y + 1e-5 * torch.randn_like(y)),
    "relative noise": broken_output(lambda y: y * (1 + 1e-5 * torch.rand_like(y))),
    "nan": broken_output(lambda y: spoiled(y, (0, 0), math.nan)),
    "inf": broken_output(lambda y: spoiled(y, (0, 0), math.inf)),
    "transposed output": broken_output(lambda y: torch.cat([y[:48].T, y[48:]])),
}
BACKWARD: dict[str, tuple[type[nn.Linear], str]] = {
    "bias gradient of the first row": (broken_gradient(lambda dx, dw, db: (dx, dw, db / 2)), "bias"),
    "no bias gradient": (broken_gradient(lambda dx, dw, db: (dx, dw, None)), "bias"),
    "zero bias gradient": (broken_gradient(lambda dx, dw, db: (dx, dw, 0 * db)), "bias"),
    "zero weight gradient": (broken_gradient(lambda dx, dw, db: (dx, 0 * dw, db)), "weight"),
    "transposed weight gradient": (broken_gradient(lambda dx, dw, db: (dx, dw.T, db)), "weight"),
    "one weight gradient off": (broken_gradient(lambda dx, dw, db: (dx, spoiled(dw, (2, 3), 0.5), db)), "weight"),
    "bfloat16 weight gradient": (broken_gradient(lambda dx, dw, db: (dx, dw.bfloat16().float(), db)), "weight"),
    "nan in a weight gradient": (broken_gradient(lambda dx, dw, db: (dx, spoiled(dw, (0, 0), math.nan), db)), "weight"),
    "one row of the input gradient": (broken_gradient(lambda dx, dw, db: (spoiled(dx, 70, 0.0), dw, db)), ""),
    "no input gradient": (broken_gradient(lambda dx, dw, db: (None, dw, db)), ""),
}


@pytest.mark.parametrize("name", FORWARD)
def test_saboteurs_of_the_output_are_caught(name: str) -> None:
    report = judged(FORWARD[name])
    assert not report.ok
    assert report.entries[0].name == "output" and not report.entries[0].ok
    assert report.first_divergence is not None and report.first_divergence.kind == "layer"
    assert report.first_divergence.name == "0" and not report.first_divergence.ok
    assert report.weights_differ == ()


@pytest.mark.parametrize("name", BACKWARD)
def test_saboteurs_of_the_gradients_are_caught(name: str) -> None:
    cls, wrong = BACKWARD[name]
    report = judged(cls)
    assert report.entries[0].ok, "the output is right"
    failing = {e.name for e in report.entries if not e.ok}
    assert report.first_divergence is not None and report.first_divergence.kind == "gradient"
    if wrong:
        assert failing == {f"{i}.{wrong}" for i in (0, 2, 4)}
        assert report.first_divergence.name == f"4.{wrong}"
    else:  # shows in everything that the gradient flows to
        assert failing == {"input[0]", *(f"{i}.{p}" for i in (0, 2) for p in ("weight", "bias"))}
        assert report.first_divergence.name in ("2.weight", "2.bias")


def test_a_parameter_that_is_never_used() -> None:
    report = judged(WithoutBiasAtAll)
    assert {"0.bias", "2.bias", "4.bias"} <= {e.name for e in report.entries if "there is no gradient" in e.reason}


def test_gradients_are_not_judged_unless_asked_for() -> None:
    model = mlp()
    report = parity(swapped(model, BACKWARD["no bias gradient"][0]), model, torch.randn(4, 48))
    assert report.ok and [e.kind for e in report.entries] == ["output"]


def test_one_wrong_element_in_four_million(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_module, "RESAMPLES", 1)
    torch.manual_seed(0)
    model, x = nn.Linear(16, 2048), torch.randn(2048, 16)
    honest = parity(swapped(model, Permuted), model, x)
    assert honest.ok
    y = float(model(x).detach()[1234, 567])
    wrong = parity(swapped(model, broken_output(lambda t: spoiled(t, (1234, 567), y + 1e-4))), model, x)
    (entry,) = wrong.entries
    assert not entry.ok and entry.error <= entry.limit and "largest error 1.0e-04" in entry.reason


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (8,), (1, 8, 8), (64,)])
def test_shapes_that_would_broadcast_fail(shape: tuple[int, ...]) -> None:
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 1.0)
    cls = broken_output(lambda y: torch.full(shape, 5.0) + 0 * y.sum())
    report = parity(swapped(model, cls), model, torch.ones(8, 8), gradients=True)
    assert report.entries[0].reason == f"shape: got {shape}, expected (8, 8)"
    assert not report.ok and report.worst.name == "output"


def test_another_dtype_fails() -> None:
    model = mlp()
    report = parity(nn.Sequential(model, _Cast(torch.float16)), nn.Sequential(model, _Cast(torch.float32)), _x())
    assert not report.ok and "dtype: got torch.float16, expected torch.float32" in str(report)
    assert parity(nn.Sequential(model, _Cast(torch.float32)), nn.Sequential(model, _Cast(torch.float32)), _x()).ok


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dtype is torch.float64 else x.to(self.dtype)


def _x(rows: int = 6, width: int = 48) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def test_nan_in_the_inputs_passes_nobody() -> None:
    model, x = mlp(), _x()
    x[0, 0] = math.nan
    report = parity(model, model, x)
    assert not report.ok and "float64 reference" in report.entries[0].reason


# Kinks


@pytest.mark.parametrize("side", [-1, 1])
def test_an_activation_that_rounding_moves_over_a_kink(side: int) -> None:
    model, x = mlp(activation=nn.ReLU), _x(64)
    with torch.no_grad():  # the first unit is zero for the first row, but for rounding
        model[0].bias[0] = -(x[0].double() @ model[0].weight[0].double())
        model[0].bias[0] -= model[0](x)[0, 0]
    shifted = broken_output(lambda y: y + side * 6e-8 * (y.detach().abs() < 1e-6))
    custom = swapped(model, shifted)
    units = [float(m[0](x).detach()[0, 0]) > 0 for m in (custom, model)]
    assert units == [side > 0, False], "this case should be one"
    report = parity(custom, model, x, gradients=True)
    assert report.ok, report

    class Wrong(shifted):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + 1e-4 * (self.weight.sum() - self.weight.sum().detach())

    assert not parity(swapped(model, Wrong), model, x, gradients=True).ok


def test_a_sum_that_cancels() -> None:
    """One number, right in stock by luck: only more runs of stock show what is honest here."""
    torch.manual_seed(0)
    model, x = nn.Linear(512, 1, bias=False), torch.randn(4000, 512)
    terms = x.double() * model.weight.detach().double()
    exact, size = terms.sum(1), terms.norm(dim=1)
    outputs = torch.cat([model(row).detach() for row in x])
    evidence = torch.maximum((outputs - exact).abs(), 1.2e-7 * exact.abs()) / size
    best = int(evidence.argmin())
    off = 3e-8 * float(size[best])  # less than a rounding of one of the 512 products
    assert 4 * float(evidence[best]) < 3e-8, "this case should be one"
    assert parity(swapped(model, broken_output(lambda y: y + off)), model, x[best]).ok
    assert not parity(swapped(model, broken_output(lambda y: y + 100 * off)), model, x[best]).ok


# The first layer


class _Block(nn.Module):
    """Shares one activation, and adds something of its own."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.a, self.act, self.b, self.extra = nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48), extra

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.act(self.a(x)))) + x * (1 + self.extra)


class _WrongOnSecondCall(nn.GELU):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.001 if self.calls % 2 == 0 else 1)


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 48), _Block(), nn.Linear(48, 48), _Block(), nn.Linear(48, 10))


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda m: setattr(m[3].b, "__class__", InBfloat16), "3.b"),
        (lambda m: setattr(m[3], "extra", 1e-3), "3"),
        (lambda m: setattr(m[1], "act", _WrongOnSecondCall()), "1.act (call 2)"),
        (lambda m: setattr(m[4], "__class__", InTf32), "4"),
    ],
)
def test_the_first_layer_that_parts(spoil: Callable[[Any], None], name: str) -> None:
    reference, model = _blocks(), _blocks()
    spoil(model)
    report = parity(model, reference, _x())
    assert report.first_divergence is not None and report.first_divergence.name == name
    assert report.first_divergence.error > report.first_divergence.limit
    assert report.first_divergence.reference_error < 1e-6
    assert f"first divergence: layer {name}: " in str(report)


def test_no_layer_shows_it() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module, factor: float) -> None:
            super().__init__()
            self.inner, self.factor = inner, factor

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.factor

    model = mlp()
    report = parity(Doubled(model, 2.0), Doubled(model, 1.0), _x())
    assert not report.ok and report.first_divergence is None


def test_the_failing_gradient_nearest_the_output() -> None:
    reference, model = _blocks(), _blocks()
    cls = BACKWARD["zero weight gradient"][0]
    model[1].b.__class__ = model[3].a.__class__ = cls
    report = parity(model, reference, _x(), gradients=True)
    assert {e.name for e in report.entries if not e.ok} == {"1.b.weight", "3.a.weight"}
    assert report.first_divergence is not None and report.first_divergence.name == "3.a.weight"


# Weights, names and wrappers


def test_other_weights_are_named_as_the_cause() -> None:
    reference, model = mlp(), mlp()
    with torch.no_grad():
        model[2].bias[3] += 0.25
    report = parity(model, reference, _x())
    assert not report.ok and report.weights_differ == ("2.bias",)
    assert "do not hold equal weights, which is the probable cause: 2.bias" in str(report)
    assert report.first_divergence is not None and report.first_divergence.name == "2"


def test_other_weights_that_do_not_matter() -> None:
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = copy.deepcopy(reference)
    model[1].num_batches_tracked += 7
    report = parity(model, reference, torch.randn(3, 4))
    assert report.ok and report.weights_differ == ("1.num_batches_tracked",)
    assert "probable cause" not in str(report) and "1.num_batches_tracked" in str(report)


def test_entries_that_one_of_them_lacks_differ() -> None:
    a, b = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3, bias=False))
    b[0].weight = a[0].weight
    nn.init.zeros_(a[0].bias)
    for model, reference in ((a, b), (b, a)):
        report = parity(model, reference, torch.randn(2, 3), gradients=True)
        assert report.weights_differ == ("0.bias",)
        (entry,) = (e for e in report.entries if not e.ok)
        assert entry.name == "0.bias"


def test_equal_nan_weights_are_equal() -> None:
    model = mlp()
    model.register_buffer("odd", torch.tensor([math.nan, 1.0]))
    assert parity(copy.deepcopy(model), model, _x()).weights_differ == ()


def test_weights_of_another_dtype_differ() -> None:
    models = [mlp(), mlp()]
    for model, dtype in zip(models, (torch.int64, torch.float32), strict=True):
        model.register_buffer("steps", torch.zeros(2, dtype=dtype))
    assert parity(*models, _x()).weights_differ == ("steps",)


def test_frozen_parameters_have_no_gradient() -> None:
    reference = mlp()
    reference[0].requires_grad_(False)
    model = copy.deepcopy(reference)
    report = parity(model, reference, _x(), gradients=True)
    assert report.ok and [e.name for e in report.entries if e.kind == "gradient"] == [
        "2.weight", "2.bias", "4.weight", "4.bias", "input[0]"
    ]  # fmt: skip
    model[2].weight.requires_grad_(False)
    report = parity(model, reference, _x(), gradients=True)
    assert [e.name for e in report.entries if not e.ok] == ["2.weight"]
    assert not parity(reference, model, _x(), gradients=True).ok


def test_tied_weights() -> None:
    reference = mlp()
    reference[2].weight = reference[0].weight
    assert parity(swapped(reference, Permuted), reference, _x(), gradients=True).ok
    untied = copy.deepcopy(reference)
    untied[2].weight = nn.Parameter(reference[0].weight.detach().clone())
    report = parity(untied, reference, _x(), gradients=True)
    assert {e.name for e in report.entries if not e.ok} == {"0.weight"}
    assert not parity(reference, untied, _x(), gradients=True).ok


def test_ties_under_another_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.add_module(first, nn.Linear(48, 48, bias=False))
            self.add_module(second, nn.Linear(48, 48, bias=False))
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x)))

    model, reference = Tied("b", "a"), Tied("a", "b")
    model.load_state_dict(reference.state_dict())
    report = parity(model, reference, _x(), gradients=True)
    assert report.ok and [e.name for e in report.entries] == ["output", "a.weight", "input[0]"]


def test_wrapped_models() -> None:
    reference = mlp()

    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="eager")

    for wrap in (
        compiled,
        nn.DataParallel,
        lambda m: compiled(nn.DataParallel(m)),
        lambda m: nn.DataParallel(compiled(m)),
    ):
        assert parity(wrap(swapped(reference, Permuted)), reference, _x(), gradients=True).ok
        assert parity(reference, wrap(reference), _x(), gradients=True).ok
        report = parity(wrap(swapped(reference, InTf32)), reference, _x())
        assert report.first_divergence is not None and report.first_divergence.name == "0"


class InFloat32(nn.Module):
    """A part that says float32, whatever the dtype of the model: timm's mixed rotary embeddings are so."""

    def __init__(self, *, also: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.inner, self.also, self.angles = mlp(), also, nn.Parameter(torch.randn(48, 48))
        self.register_buffer("grid", torch.randn(48, 48))
        self.kept = [torch.randn(48, 48)]

    def forward(self, x: Tensor) -> Tensor:
        angles = self.also(self.grid @ self.angles.float() @ self.kept[0])
        return self.inner(x) @ angles.sin().to(dtype=torch.float32).to(x.dtype)


def test_a_forward_that_says_float32_is_judged_in_float64() -> None:
    torch.manual_seed(1)
    model = InFloat32()
    with pytest.raises(RuntimeError, match=r"dtype|Double"):  # the buffer is float64 there, the parameter is not
        copy.deepcopy(model).double()(_x().double())
    report = parity(swapped(model, Permuted), model, _x(), gradients=True)
    assert report.ok and "angles" in {entry.name for entry in report.entries}, report
    assert max(entry.reference_error for entry in report.entries) < 1e-4
    assert torch.get_default_dtype() is torch.float32 and model.angles.dtype is torch.float32
    for wrong in (broken_output(lambda y: y * (1 + 1e-5)), InTf32):
        assert not parity(swapped(model, wrong), model, _x(), gradients=True).ok
    off = InFloat32(also=lambda x: x + 1e-4 * (x - x.detach()))
    off.load_state_dict(model.state_dict())
    off.kept = model.kept
    report = parity(off, model, _x(), gradients=True)
    assert [entry.name for entry in report.entries if not entry.ok] == ["angles"]


class Reads(InFloat32):
    """Takes bytes for float32; and draws numbers that are others in float64."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.bytes = what, nn.Buffer(torch.randn(48, 48).view(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "bytes":
            return self.inner(x.float()) @ self.bytes.view(torch.float32)
        drawn = torch.randn(x.shape, dtype=torch.float32)
        return self.inner(x + drawn) @ (self.grid @ self.angles.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("what", "says"), [("bytes", "does not run: .*dtype"), ("drawn", r"computes something else .*: 'output' is")]
)
def test_a_float64_copy_that_is_no_reference_is_refused(what: str, says: str) -> None:
    """Beside it stock would be so far off that a layer might be too."""
    torch.manual_seed(1)
    model = Reads(what)
    for layer in (Permuted, broken_output(lambda y: 1.3 * y)):
        with pytest.raises(ValueError, match=says):
            parity(swapped(model, layer), model, _x())


@pytest.mark.parametrize("fails", [False, True])
def test_recurrent_layers_are_differentiated_without_cudnn(fails: bool) -> None:
    """In eval mode, as all passes are: cuDNN refuses that."""
    seen = []

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fc = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cudnn.enabled)
            if fails and not torch.backends.cudnn.enabled:
                raise KeyError("gone")
            return self.fc(self.inner(x)[0])

    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    assert cudnn.enabled, "this case should be one"
    model, x = Recurrent(), torch.randn(2, 5, 6)
    if fails:
        with pytest.raises(ValueError, match="gone"):
            parity(model, model, x, gradients=True)
    else:
        assert parity(swapped(model, Permuted), model, x, gradients=True).ok
    assert not any(seen)
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == before
    seen.clear()
    assert parity(model, model, x).ok and all(seen)  # nothing is differentiated
    assert parity(mlp(), mlp(), _x(), gradients=True).ok


def test_results_kept_as_attributes_do_not_stop_the_copy() -> None:
    model = mlp()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[2])
    model(_x())
    assert parity(model, model, _x(), gradients=True).ok


class _Caching(nn.Module):
    """Keeps a result for the next call in eval mode, with its graph, as timm's LeViT keeps its attention biases."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.scale = mlp(activation=nn.ReLU), nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.where, self.attribute, self.table, self.rows = where, None, {"at": {}}, []
        self.register_buffer("buffer", None)
        self.register_buffer("index", torch.arange(48) % 6)

    def kept(self) -> Tensor:
        if self.where in ("attribute", "buffer"):
            if getattr(self, self.where) is None:
                setattr(self, self.where, self.scale[self.index])
            return getattr(self, self.where)
        if self.where == "rows":
            if not self.rows:
                self.rows += [self.scale[self.index]]
            return self.rows[0]
        if "cpu" not in self.table["at"]:
            self.table["at"]["cpu"] = self.scale[self.index]
        return self.table["at"]["cpu"]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.kept())


@pytest.mark.parametrize("where", ["attribute", "buffer", "table", "rows"])
def test_results_kept_with_their_graph_are_differentiated_in_every_pass(where: str) -> None:
    model, x = _Caching(where).eval(), _x(64)
    with torch.no_grad():  # the case of test_an_activation_that_rounding_moves_over_a_kink, that all passes are run
        one = (x[0] * model.scale[model.index]).double()
        model.inner[0].bias[0] = -(one @ model.inner[0].weight[0].double())
        model.inner[0].bias[0] -= model.inner[0](one.float())[0]
    custom = copy.deepcopy(model)
    custom.inner[0].__class__ = broken_output(lambda y: y + 6e-8 * (y.detach().abs() < 1e-6))
    report = parity(custom, model, x, gradients=True)
    assert report.ok and "scale" in {entry.name for entry in report.entries}, report
    assert parity(model, model, x, gradients=True).ok
    for _ in range(2):  # the callers' own
        assert torch.autograd.grad(custom(x).sum(), custom.scale)[0].norm() > 0
        custom.attribute, custom.buffer, custom.table, custom.rows = None, None, {"at": {}}, []

    class Wrong(_Caching):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.kept().detach())

    custom = copy.deepcopy(model)
    custom.__class__ = Wrong
    report = parity(custom, model, x, gradients=True)
    assert [entry.name for entry in report.entries if not entry.ok] == ["scale"], report


# Outputs and inputs of any form

Pair = namedtuple("Pair", "logits aux")


@dataclasses.dataclass
class Named:
    logits: Tensor
    rest: dict[str, Any]


class _Shaped(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.form = mlp(), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.inner(x))


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (lambda y: (y, [2 * y, None]), ["output[0]", "output[1][0]"]),
        (lambda y: Pair(y, None), ["output.logits"]),
        (lambda y: {"a": y, "b": (y + 1,)}, ["output['a']", "output['b'][0]"]),
        (lambda y: Named(y, {"n": 3, "y": y}), ["output.logits", "output.rest['y']"]),
        (lambda y: (y, y.argmax(-1)), ["output[0]", "output[1]"]),
        (lambda y: (y, float(y.detach().sum())), ["output[0]", "output[1]"]),
    ],
)
def test_forms_of_output(form: Callable[[Tensor], Any], names: list[str]) -> None:
    report = parity(swapped(_Shaped(form), Permuted), _Shaped(form), _x(), gradients=True)
    assert report.ok, report
    assert [e.name for e in report.entries if e.kind == "output"] == names
    wrong = parity(swapped(_Shaped(form), InBfloat16), _Shaped(form), _x(), gradients=True)
    assert not any(e.ok for e in wrong.entries if e.kind == "output" and e.dtype == "float32")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (lambda y: (y,), "structure: got output is tuple, expected output is Tensor"),
        (lambda y: None, "structure: got output is None, expected output is Tensor"),
    ],
)
def test_another_form_fails(form: Callable[[Tensor], Any], reason: str) -> None:
    report = parity(_Shaped(form), _Shaped(lambda y: y), _x(), gradients=True)
    assert not report.ok and report.worst.reason == reason and reason in str(report)


def test_forms_must_be_equal_in_depth() -> None:
    stock = _Shaped(lambda y: {"a": y, "n": 1})
    for form in (
        lambda y: {"a": y}, lambda y: {"a": y, "n": 2}, lambda y: {"b": y, "n": 1}, lambda y: {"a": y, "n": 1, "z": y}
    ):  # fmt: skip
        report = parity(_Shaped(form), stock, _x())
        assert not report.ok and report.worst.reason.startswith("structure: "), report
    assert "got nothing more, expected output['n'] is 1" in str(parity(_Shaped(lambda y: {"a": y}), stock, _x()))


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a = nn.Embedding(7, 48), nn.Linear(48, 48)

    def forward(self, where: Tensor, more: dict[str, list[Tensor]], factor: float) -> Tensor:
        return self.a(self.embed(where) * more["x"][0]) * factor


def test_forms_of_input() -> None:
    torch.manual_seed(0)
    model = _TwoInputs()
    inputs = [torch.arange(6), {"x": [_x()]}, 0.5]
    report = parity(swapped(model, Permuted), model, inputs, gradients=True)
    assert report.ok
    assert [e.name for e in report.entries][1:] == ["embed.weight", "a.weight", "a.bias", "input[1]['x'][0]"]


def test_inputs_keep_their_strides() -> None:
    seen: list[tuple[Any, ...]] = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, x.stride()))
            return super().forward(x)

    model = Watching(4, 3)
    for x in (torch.randn(4, 6).T, torch.randn(6, 8)[:, ::2], torch.randn(1, 4).expand(6, 4)):
        seen.clear()
        assert parity(model, model, x, gradients=True).ok
        assert [s for d, s in seen if d is torch.float32] == [x.stride()] * 2


def test_batchless_and_empty_inputs() -> None:
    model = mlp()
    assert parity(swapped(model, Chunked), model, _x()[0], gradients=True).ok
    report = parity(swapped(model, Chunked), model, torch.zeros(0, 48), gradients=True)
    assert report.ok and "0.weight" in report.blank


# Precision


def test_float64_models_are_held_to_float64() -> None:
    model, x = mlp().double(), _x().double()
    assert parity(swapped(model, Permuted), model, x, gradients=True).ok
    wide = nn.Linear(2048, 64).double()
    report = parity(swapped(wide, Permuted), wide, torch.randn(64, 2048).double())
    assert report.ok and report.entries[0].error > 2 * torch.finfo(torch.float64).eps, report

    class InFloat32(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.float(), self.weight.float(), self.bias.float()).double()

    report = parity(swapped(model, InFloat32), model, x, gradients=True)
    assert not any(e.ok for e in report.entries[:1]) and report.entries[0].dtype == "float64"
    assert report.entries[0].limit < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model, x = mlp(256).to(dtype), _x(32, 256).to(dtype)
    assert parity(swapped(model, Permuted), model, x, gradients=True).ok

    class Accumulates(nn.Linear):
        """Rounds the sum to half precision after each product of 4 features."""

        def forward(self, x: Tensor) -> Tensor:
            y = self.bias.expand(*x.shape[:-1], -1)
            for a, w in zip(x.split(4, -1), self.weight.split(4, -1), strict=True):
                y = y + a @ w.T
            return y

    assert not parity(swapped(model, Accumulates), model, x).ok


def test_under_autocast_models_are_judged_in_it() -> None:
    model, x = mlp(), _x(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = parity(swapped(model, InBfloat16Autocast), model, x, gradients=True)
        assert report.ok, report
        assert report.entries[0].dtype == "bfloat16" and report.entries[0].reference_error > 1e-3
        assert {e.dtype for e in report.entries[1:]} == {"float32"}
        assert not parity(swapped(model, InFloat8), model, x, gradients=True).ok
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    assert not parity(swapped(model, InBfloat16), model, x).ok


class InBfloat16Autocast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return _Permuted.apply(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class InFloat8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rounded = self.weight + (self.weight.detach().to(torch.float8_e4m3fn).float() - self.weight.detach())
        return F.linear(x, rounded, self.bias)


def test_nothing_stays_in_autocasts_cache() -> None:
    """A weight that a pass has cast must not be what the caller's next forward uses."""
    model, x = mlp(), _x()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parity(model, model, x, gradients=True)
        parity(model, model, x)
        with torch.no_grad():
            model[4].weight.zero_()
        assert torch.equal(model(x), model[4].bias.bfloat16().expand(len(x), -1))
        model(x).float().sum().backward()
        assert model[0].weight.grad is not None


def test_float64_models_are_held_to_float64_under_autocast() -> None:
    model, x = mlp().double(), _x().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = parity(swapped(model, Permuted), model, x)
    assert report.ok and report.entries[0].limit < 1e-13


# Nothing of the caller's changes


class _Stateful(nn.Module):
    """Counts, draws, writes into its input and its buffers, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = mlp(), nn.BatchNorm1d(48), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        assert not any(module.training for module in self.modules())
        assert torch.is_grad_enabled() == x.requires_grad
        torch.rand(3)
        if self.fail:
            raise ArithmeticError("on purpose")
        y = self.inner(self.drop(self.norm(x)))
        x.data.zero_()
        return y


class _Accumulating(torch.autograd.Function):
    """Adds to ``weight.grad`` itself, as fused optimizers want it, and returns the gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if ctx.parameter.grad is None:
            ctx.parameter.grad = torch.zeros_like(weight)
        ctx.parameter.grad += grad.T @ x
        return grad @ weight, grad.T @ x, grad.sum(0)


class Accumulating(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Accumulating.apply(x, self.weight, self.bias)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_caller_notices_nothing(fails: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    reference, model = _Stateful(), _Stateful()
    model.load_state_dict(reference.state_dict())
    model.fail = fails
    model.inner[4].__class__ = Accumulating
    hooked: list[str] = []
    for m in (model, reference):
        m.train()
        m.norm.eval()
        m.inner[1].eval()
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        m.inner.register_forward_hook(lambda *_: hooked.append("caller's"))
        m.inner[0].weight.requires_grad_(False)

    x = _x(8).requires_grad_()
    before = x.detach().clone()

    def state() -> list[Any]:
        return [
            [
                [(n, s.training) for n, s in m.named_modules()],
                [(n, id(p), id(p.grad), p.requires_grad, p.tolist(), p.grad.tolist()) for n, p in m.named_parameters()],
                [(n, id(b), b.tolist()) for n, b in m.named_buffers()],
                [(n, len(s._forward_hooks), len(s._forward_pre_hooks)) for n, s in m.named_modules()],
            ]
            for m in (model, reference)
        ] + [torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]

    seen = state()
    if fails:
        with pytest.raises(ArithmeticError):
            parity(model, reference, x, gradients=gradients)
    else:
        assert parity(model, reference, x, gradients=gradients).ok
    assert state() == seen
    assert torch.equal(x, before) and x.grad is None and x.requires_grad
    assert set(hooked) == {"caller's"}


def test_a_failing_comparison_leaves_nothing_either() -> None:
    reference = mlp()
    model = swapped(reference, InBfloat16)
    for m in (model, reference):
        m.train()
    state = torch.get_rng_state()
    assert not parity(model, reference, _x(), gradients=True).ok
    assert torch.equal(state, torch.get_rng_state())
    for m in (model, reference):
        assert all(s.training and not s._forward_hooks for s in m.modules())
        assert all(p.grad is None for p in m.parameters())


def test_a_backward_of_the_callers_that_is_pending() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    loss = model(torch.randn(3, 4)).sum()
    parity(model, model, torch.randn(3, 4))
    loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_within_modes_without_gradients(mode: Callable[[], Any]) -> None:
    model = mlp()
    custom = swapped(model, Permuted)
    with mode():
        x = torch.randn(4, 48)
        assert parity(custom, model, x, gradients=True).ok
        assert not torch.is_grad_enabled()


def test_every_pass_draws_the_same_numbers() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randint(100, (self.out_features,)).to(x.dtype)

    model = swapped(mlp(), Noisy)
    report = parity(copy.deepcopy(model), model, _x(), gradients=True)
    assert report.ok and report.worst.reference_error < 1e-5


def test_equal_calls_give_equal_reports() -> None:
    model = mlp()
    x = _x()
    one = parity(swapped(model, InTf32), model, x, gradients=True)
    torch.manual_seed(12345)
    assert parity(swapped(model, InTf32), model, x, gradients=True) == one


# Arguments


def test_refused_arguments() -> None:
    model, x = mlp(), _x()
    with pytest.raises(ValueError, match="inputs: got dict, expected a tensor or a tuple or list"):
        parity(model, model, {"x": x})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model: it or its inputs .* meta device"):
        parity(mlp().to("meta"), model, x)
    with pytest.raises(ValueError, match=r"reference: it or its inputs .* meta device"):
        parity(model, mlp().to("meta"), x)
    with pytest.raises(ValueError, match="meta device"):
        parity(model, model, x.to("meta"))
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"model: 0\.weight is not initialised yet"):
        parity(lazy, nn.Sequential(nn.Linear(48, 3)), x)
    with pytest.raises(ValueError, match=r"gradients=True: no parameter .* requires a gradient"):
        parity(nn.Embedding(3, 3).requires_grad_(False), nn.Embedding(3, 3).requires_grad_(False),
               torch.tensor([1]), gradients=True)  # fmt: skip
    with pytest.raises(ValueError, match="returns no tensor"):
        parity(_Shaped(lambda y: None), _Shaped(lambda y: None), x)


def test_a_reference_that_cannot_run_in_float64_says_so() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is not torch.float32:
                raise RuntimeError(f"got {x.dtype}")
            return self.inner(x)

    with pytest.raises(ValueError, match=r"the float64 copy of the reference does not run: .*; expected a model that"):
        parity(Fixed(), Fixed(), _x())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU for a second device")
def test_models_on_two_devices() -> None:
    with pytest.raises(ValueError, match="model: got device cuda:0, expected the reference's, cpu"):
        parity(mlp().cuda(), mlp(), _x())


# The report


def test_zero_weights_are_said_to_show_little() -> None:
    reference = mlp()
    nn.init.zeros_(reference[4].weight)
    report = parity(swapped(reference, Permuted), reference, _x(), gradients=True)
    assert report.ok and "0.weight" in report.blank and "output" not in report.blank
    assert "tensors are zero in the reference and show little (0.weight first)" in str(report)
    assert report.to_dict()["blank"] == list(report.blank)


def test_the_report() -> None:
    model = mlp()
    good, bad = (parity(swapped(model, cls), model, _x(), gradients=True) for cls in (Permuted, InBfloat16))
    assert str(good).startswith("parity: ok, 1 output, 7 gradients\n") and "and 3 more" in str(good)
    good.raise_for_failure()
    assert not bad.worst.ok and bad.worst.excess == max(e.excess for e in bad.entries)
    assert str(bad).startswith("parity: FAILED for ") and bad.worst.reason in str(bad)
    with pytest.raises(CheckFailed, match="parity: FAILED"):
        bad.raise_for_failure()
    with pytest.raises(dataclasses.FrozenInstanceError):
        bad.entries = ()  # type: ignore[misc]
    data = json.loads(bad.to_json())
    assert data["ok"] is False and len(data["entries"]) == 8
    assert data["entries"][0]["name"] == "output" and data["first_divergence"]["name"] == "0"


def test_a_failure_that_nothing_excuses_costs_no_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of_it(*_: Any) -> None:
        raise AssertionError("stock ran again")

    monkeypatch.setattr(parity_module._Comparison, "_resampled", none_of_it)
    model = mlp()
    assert not parity(swapped(model, InBfloat16), model, _x(64), gradients=True).ok
    with pytest.raises(AssertionError, match="stock ran again"):
        parity(swapped(model, broken_output(lambda y: y * (1 + 2e-6))), model, _x(64))
