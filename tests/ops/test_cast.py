"""Layers in training under autocast: the operator casts their parameters, and their gradients come in float32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoo import ops


class Operators(TorchDispatchMode):
    """The names of what runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


KINDS = ["linear", "relu", "gelu", "mlp"]


def layer(kind, device):
    """A function of (x, *parameters), the same in torch, and float32 parameters."""
    torch.manual_seed(0)
    w1, b1 = nn.Parameter(torch.randn(24, 16, device=device) / 4), nn.Parameter(torch.randn(24, device=device))
    if kind == "mlp":
        w2, b2 = nn.Parameter(torch.randn(8, 24, device=device) / 5), nn.Parameter(torch.randn(8, device=device))
        return (
            lambda x, w1, b1, w2, b2: ops.mlp(x, w1, b1, w2, b2, activation="gelu"),
            lambda x, w1, b1, w2, b2: F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2),
            [w1, b1, w2, b2],
        )
    activation = None if kind == "linear" else kind
    act = {"linear": lambda t: t, "relu": F.relu, "gelu": F.gelu}[kind]
    return (
        lambda x, w, b: ops.linear(x, w, b, activation=activation),
        lambda x, w, b: act(F.linear(x, w, b)),
        [w1, b1],
    )


def gradients(function, x, parameters, dtype, device, inputs=None):
    inputs = [t for t in [x, *parameters] if t.requires_grad] if inputs is None else inputs
    with torch.autocast(device, dtype=dtype):
        y = function(x, *parameters)
    assert y.dtype == dtype
    return torch.autograd.grad(y.float().square().sum(), inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("input_dtype", ["float32", "autocast's"])
def test_gradients_are_torchs_and_in_the_parameters_dtype(device, kind, dtype, input_dtype):
    mine, stock, parameters = layer(kind, device)
    x = torch.randn(40, 16, device=device, dtype=dtype if input_dtype == "autocast's" else None, requires_grad=True)
    exact = [p.detach().double().requires_grad_() for p in [x, *parameters]]
    y = stock(*exact)
    want = torch.autograd.grad(y.square().sum(), exact)
    for got, right, theirs in zip(
        gradients(mine, x, parameters, dtype, device), want, gradients(stock, x, parameters, dtype, device), strict=True
    ):
        assert got.dtype == theirs.dtype
        error, allowed = ((t.double() - right).norm() / right.norm() for t in (got, theirs))
        assert error <= max(2 * allowed, 4e-3)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_cast_is_the_operators_own(device, kind):
    mine, _, parameters = layer(kind, device)
    x = torch.randn(40, 16, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16), Operators() as seen:
        y = mine(x, *parameters)
        y.backward(torch.ones_like(y))
    assert f"zoo.{kind}_cast.default" in seen.names and f"zoo.{kind}.default" not in seen.names
    casts = [name for name in seen.names if "_to_copy" in name]
    if device == "cuda":
        assert len(casts) == 2  # of the input, and of its gradient
    assert all(p.grad.dtype == torch.float32 for p in parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_derivative_reaches_the_parameters(device, kind):
    """As where every cast is an operation of its own."""
    mine, _, parameters = layer(kind, device)
    x = torch.randn(40, 16, device=device, requires_grad=True)

    def twice(function, cast):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not cast):
            leaves = [x, *parameters]
            y = function(*(t.bfloat16() for t in leaves)) if cast else function(*leaves)
        first = torch.autograd.grad(y.float().square().sum(), leaves, create_graph=True)
        return first, torch.autograd.grad(sum(g.float().square().sum() for g in first), leaves)

    for got, want in zip(twice(mine, False), twice(mine, True), strict=True):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.detach().abs().max()))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_only_what_is_asked_for(device, frozen):
    mine, stock, parameters = layer("linear", device)
    x = torch.randn(40, 16, device=device, requires_grad=True)
    leaves = [x, *parameters]
    for i in frozen:
        leaves[i].requires_grad_(False)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t)
    with hooks, torch.autocast(device, dtype=torch.bfloat16):
        y = mine(x, *parameters)
    kept = {(tuple(t.shape), t.dtype) for t in saved}
    assert ((40, 16), torch.bfloat16) not in kept or leaves[1].requires_grad
    assert ((24, 16), torch.bfloat16) not in kept or leaves[0].requires_grad
    assert all(t.data_ptr() in {p.data_ptr() for p in leaves} for t in saved if t.dtype == torch.float32)
    inputs = [t for t in leaves if t.requires_grad]
    got = torch.autograd.grad(y.float().square().sum(), inputs)
    for a, b in zip(got, gradients(stock, x, parameters, torch.bfloat16, device), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.detach().abs().max()))


def test_computed_parameters_take_the_common_way(device):
    mine, _, (w, b) = layer("linear", device)
    x = torch.randn(40, 16, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16), Operators() as seen:
        mine(x, w * 2, b).sum().backward()
    assert "zoo.linear.default" in seen.names and "zoo.linear_cast.default" not in seen.names
    assert w.grad.dtype == torch.float32


def test_a_parameter_of_a_class_of_its_own_takes_the_common_way(device):
    """As a sharded or a quantized one, which is cast by its own rules."""

    class Own(nn.Parameter):
        pass

    mine, _, (w, b) = layer("linear", device)
    x = torch.randn(40, 16, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16), Operators() as seen:
        mine(x, Own(w.detach()), b).sum().backward()
    assert "zoo.linear.default" in seen.names and "zoo.linear_cast.default" not in seen.names


def test_outside_training_nothing_changes(device):
    mine, _, parameters = layer("gelu", device)
    x = torch.randn(40, 16, device=device)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16), Operators() as seen:
        y = mine(x, *parameters)
    assert "zoo.linear_cast.default" not in seen.names and y.dtype == torch.bfloat16


def test_clear_refusals(device):
    x, w, b = (torch.randn(*s, device=device) for s in ((4, 16), (8, 16), (8,)))
    cast = torch.ops.zoo.linear_cast
    with pytest.raises(RuntimeError, match=r"zoo::linear_cast: input must be float16 or bfloat16, got"):
        cast(x, w, b, "none", False)
    with pytest.raises(RuntimeError, match=r"zoo::linear_cast: weight must be float32, got"):
        cast(x.half(), w.half(), b, "none", False)
    with pytest.raises(RuntimeError, match=r"zoo::linear_cast: bias must be float32, got"):
        cast(x.half(), w, b.half(), "none", False)
    with pytest.raises(NotImplementedError, match=r"call zoo\.ops\.linear under torch\.autocast"):
        cast(x.half(), w.requires_grad_(), b, "none", False)
    with pytest.raises(RuntimeError, match=r"input's last size must be weight's in_features \(16\)"):
        cast(x[:, :8].half(), w.detach(), b, "none", False)
    with pytest.raises(RuntimeError, match=r"zoo::mlp_cast: weight2 must be float32, got"):
        torch.ops.zoo.mlp_cast(x.half(), w.detach(), b, w.half().detach().T, None, "gelu", False)


@pytest.mark.parametrize("where", ["here", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_wide_gradients_are_of_parameters_alone(device, dtype, where):
    """Of sizes that fill no pack of eight; the same values as the narrow ones."""
    place = device if where == "here" else "meta"
    x, w, g, h, w2 = (
        torch.randn(*s, device=device).to(dtype).to(place) for s in ((9, 13), (7, 13), (9, 7), (9, 5), (5, 7))
    )
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    backward, of_mlp = torch.ops.zoo.linear_backward, torch.ops.zoo.mlp_backward
    for op, args, parameters in (
        (backward, (g, None, x, w, "none", True, True, True), (1, 2)),
        (of_mlp, (h, g, g, x, w, w2, "relu", True, True, True, True, True), (1, 2, 3, 4)),
    ):
        for i, (narrow, wide) in enumerate(zip(op(*args), op(*args, True), strict=True)):
            assert narrow.dtype == dtype and wide.dtype == (wide_dtype if i in parameters else dtype)
            assert narrow.shape == wide.shape
            if where == "here":
                assert torch.equal(wide, narrow.to(wide.dtype))


def test_what_is_cast_is_rounded_as_torch_rounds(device):
    """Sizes that fill no pack of eight, strides that are not dense, and no bias."""
    x, w, b = torch.randn(9, 13, device=device).bfloat16(), torch.randn(13, 7, device=device).t(), None
    y, _, low = torch.ops.zoo.linear_cast(x, w, b, "none", False)
    assert torch.equal(low, w.bfloat16()) and low.is_contiguous()
    assert torch.equal(y, ops.linear(x, low))
    w2, b2 = torch.randn(5, 7, device=device), torch.randn(5, device=device)
    y, hidden, _, *lows = torch.ops.zoo.mlp_cast(x, w, b, w2, b2, "relu", True)
    assert torch.equal(lows[0], low) and torch.equal(lows[1], w2.bfloat16())
    assert torch.equal(hidden, ops.linear(x, low, activation="relu"))
    assert torch.equal(y, ops.linear(hidden, lows[1], b2.bfloat16()))
