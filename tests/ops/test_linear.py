"""linear: values and gradients against the naive float64 twin, in every shape, stride and dtype."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from support.reference import ACTIVATE, DTYPES, assert_accurate, gradients, naive_linear
from zoo import ops

SHAPES = [(1, 1, 1), (2, 3, 4), (65, 17, 10), (64, 64, 64), (130, 100, 129), (3, 200, 1), (1, 784, 256), (7, 1, 5)]


def operands(m, k, n, dtype, device, bias=True):
    g = torch.Generator().manual_seed(m * 10007 + k * 101 + n)
    x, w = (torch.randn(*s, generator=g).to(device, dtype) for s in ((m, k), (n, k)))
    return x, w, torch.randn(n, generator=g).to(device, dtype) if bias else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(device, dtype, shape):
    m, k, n = shape
    x, w, b = operands(m, k, n, dtype, device)
    g = torch.randn(m, n, device=device, dtype=dtype)
    y, (dx, dw, db) = gradients(ops.linear, (x, w, b), g)
    X, W, B, G = (t.double() for t in (x, w, b, g))
    assert y.dtype == dx.dtype == dw.dtype == db.dtype == dtype
    assert_accurate(y, naive_linear(x, w, b), terms=k + 1, sizes=X.abs() @ W.abs().T + B.abs())
    assert_accurate(dx, G @ W, terms=n, sizes=G.abs() @ W.abs())
    assert_accurate(dw, G.T @ X, terms=m, sizes=G.abs().T @ X.abs())
    assert_accurate(db, G.sum(0), terms=m, sizes=G.abs().sum(0))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_activation_is_torchs(device, dtype, activation):
    x, w, b = operands(33, 40, 21, dtype, device)
    g = torch.randn(33, 21, device=device, dtype=dtype)
    y, grads = gradients(lambda *a: ops.linear(*a, activation=activation), (x, w, b), g)
    want, want_grads = gradients(
        lambda *a: ACTIVATE[activation](F.linear(*a)), [t.double() for t in (x, w, b)], g.double()
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)
    for got, wanted in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=8 * tolerance)
    with torch.no_grad():
        assert torch.equal(ops.linear(x, w, b, activation=activation), y)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_the_activations_where_they_bend(device, activation):
    z = torch.tensor([-100.0, -10, -5, -1, -1e-3, -0.0, 0.0, 1e-3, 1, 5, 10, 100], dtype=torch.float64, device=device)
    x, one = z.unsqueeze(1).requires_grad_(), torch.ones(1, 1, dtype=torch.float64, device=device)
    y = ops.linear(x, one, activation=activation)
    want = ACTIVATE[activation](x)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-15)  # torch cancels in the far tail of gelu
    (got,), (wanted,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(want.sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-15)


def test_unknown_activation_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown activation 'tanh'; known: None, relu, gelu"):
        ops.linear(torch.ones(1, 1), torch.ones(1, 1), activation="tanh")


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    k=st.integers(0, 9),
    n=st.integers(0, 9),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["dense", "transposed", "strided", "expanded"]),
)
def test_any_shape_and_stride_gives_what_torch_gives(leading, k, n, bias, dtype, layout):
    def make(*shape):
        t = torch.randn(*shape)
        if layout == "transposed":
            t = torch.randn(*shape[::-1]).permute(*reversed(range(len(shape))))
        elif layout == "strided":
            t = torch.randn(*[2 * s for s in shape])[tuple(slice(None, None, 2) for _ in shape)]
        elif layout == "expanded":
            t = torch.randn(*[1 for _ in shape]).expand(*shape)
        return t.to(dtype) if layout == "dense" else t.to(torch.float64).to(dtype)

    x, w, b = make(*leading, k), make(n, k), make(n) if bias else None
    cotangent = make(*leading, n)
    y, grads = gradients(ops.linear, (x, w, b), cotangent)
    want, want_grads = gradients(F.linear, [None if t is None else t.double() for t in (x, w, b)], cotangent.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert y.shape == want.shape and y.is_contiguous()
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)
    for got, wanted in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def test_strides_of_every_operand(device):
    def r(*s):
        return torch.randn(*s, device=device)

    inputs = [r(6, 5).t(), r(5, 12)[:, ::2], r(1, 6).expand(5, 6), r(5, 1).expand(5, 6), r(40)[3:33].view(5, 6)]
    inputs += [r(2, 6, 3).transpose(1, 2), r(2, 6, 4, 4).permute(0, 2, 3, 1), r(6), r(5, 6).flip(0)]
    weights = [r(4, 6), r(6, 4).t(), r(4, 1).expand(4, 6), r(8, 6)[::2], r(4, 12)[:, 1::2], r(1, 1).expand(4, 6)]
    for x, w in itertools.product(inputs, weights):
        b = r(8)[::2]
        shape = (*x.shape[:-1], 4)
        for g in (r(*shape), r(1).expand(shape), r(*shape[::-1]).permute(*reversed(range(len(shape))))):
            y, grads = gradients(ops.linear, (x, w, b), g)
            want, want_grads = gradients(F.linear, (x, w, b), g)
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grads, want_grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [((0, 5), 3), ((2, 0, 5), 3), ((4, 0), 3), ((2, 5), 0), ((0, 0), 3), ((0,), 2)], ids=str
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_nothing_to_multiply(device, shape, bias, activation):
    (sizes, n), k = shape, shape[0][-1]
    x, w = torch.randn(*sizes, device=device), torch.randn(n, k, device=device)
    b = torch.randn(n, device=device) if bias else None
    torch.empty(1000, device=device).fill_(float("nan"))  # what unwritten memory may hold
    g = torch.ones(*sizes[:-1], n, device=device)
    y, grads = gradients(lambda *a: ops.linear(*a, activation=activation), (x, w, b), g)
    want, want_grads = gradients(lambda *a: ACTIVATE[activation](F.linear(*a)), (x, w, b), g)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(grads, want_grads)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_only_the_requested_gradients(device, needs, activation):
    tensors = operands(5, 6, 4, torch.float64, device)
    names = ("linear_input_grad", "linear_weight_grad", "linear_bias_grad")
    called = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.zoo.linear_backward.default:  # on CUDA one operator, told what is asked for
                called.extend(name for name, asked in zip(names, args[-3:], strict=True) if asked)
            called.append(func.name().removeprefix("zoo::"))
            return func(*args, **(kwargs or {}))

    leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    y = ops.linear(*leaves, activation=activation)
    assert y.requires_grad == any(needs)
    if any(needs):
        with Count():
            y.sum().backward()
        for leaf, need, name in zip(leaves, needs, names, strict=True):
            assert (leaf.grad is not None) == need == (name in called)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_saves_only_what_backward_needs(activation):
    def saved_shapes(needs):
        x, w, b = (t.requires_grad_(n) for t, n in zip(operands(7, 6, 4, torch.float32, "cpu"), needs, strict=True))
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.append(tuple(t.shape)), t)[1], lambda t: t):
            ops.linear(x, w, b, activation=activation)
        return sorted(shapes)

    activation_saves = [] if activation is None else [(7, 4)]
    assert saved_shapes((True, False, False)) == sorted([(4, 6), *activation_saves])
    assert saved_shapes((False, True, True)) == sorted([(7, 6), *activation_saves])
    assert saved_shapes((False, False, True)) == activation_saves
    assert saved_shapes((False, False, False)) == []


BAD = {
    "inner sizes": ((2, 5), (2, 2), None, r"in_features \(2\), got input \(2, 5\) and weight \(2, 2\)"),
    "no broadcasting": ((1, 1), (1, 2), None, "in_features"),
    "bias size": ((2, 2), (3, 2), (2,), r"out_features \(3\), got \(2\)"),
    "bias rank": ((2, 2), (3, 2), (1, 3), "bias must have 1 dimension"),
    "weight rank": ((2, 2), (2,), None, "weight must have 2 dimension"),
    "scalar input": ((), (3, 1), None, "at least 1 dimension"),
    "empty batch": ((0, 5), (3, 4), None, "in_features"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_wrong_shapes_are_refused_with_both(device, case, activation):
    *shapes, words = BAD[case]
    for where in (device, "meta"):
        args = [None if s is None else torch.randn(s, device=where) for s in shapes]
        with pytest.raises(RuntimeError, match=words):
            ops.linear(*args, activation=activation)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.complex64], ids=str)
def test_wrong_dtypes_are_refused(device, place, dtype):
    for where in (device, "meta"):
        args = [torch.ones(*s, device=where) for s in ((2, 4), (3, 4), (3,))]
        args[place] = args[place].to(dtype)
        with pytest.raises(RuntimeError, match=r"must (have the dtype of|be float64, float32, float16 or bfloat16)"):
            ops.linear(*args)


def test_extremes_are_ieee(device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, 1.0], [nan, 1.0], [3e38, 3e38], [1e-40, 0.0]], device=device)
    w = torch.tensor([[1.0, 1.0], [0.0, 1.0], [-1.0, 0.0]], device=device)
    torch.testing.assert_close(ops.linear(x, w), F.linear(x, w), equal_nan=True, rtol=0, atol=0)
    for activation, activate in ACTIVATE.items():
        got = ops.linear(x, w, activation=activation)
        assert got[1].isnan().all()
        if device == "cpu":  # the CPU core is torch's
            torch.testing.assert_close(got, activate(F.linear(x, w)), equal_nan=True, rtol=0, atol=0)
        else:
            assert got[0, 0] == got[2, 0] == inf


def test_gradient_of_relu_masks_infinities(device):
    x = torch.tensor([[-1.0], [1.0]], device=device, requires_grad=True)
    ops.linear(x, torch.ones(1, 1, device=device), activation="relu").backward(
        torch.full((2, 1), float("inf"), device=device)
    )
    assert x.grad.flatten().tolist() == [0.0, float("inf")]


def test_inputs_are_not_changed(device):
    tensors = operands(9, 8, 7, torch.float32, device)
    copies = [t.clone() for t in tensors]
    for activation in ACTIVATE:
        gradients(lambda *a, act=activation: ops.linear(*a, activation=act), tensors, torch.ones(9, 7, device=device))
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_deterministic(device):
    tensors = operands(500, 300, 200, torch.float32, device)
    g = torch.randn(500, 200, device=device)
    first = gradients(lambda *a: ops.linear(*a, activation="gelu"), tensors, g)
    for _ in range(3):
        again = gradients(lambda *a: ops.linear(*a, activation="gelu"), tensors, g)
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_gradients_accumulate_in_float32(device):
    """4096 equal terms in float16: an accumulator of that type would stop at 2048."""
    x, w = torch.ones(4096, 1, device=device, dtype=torch.float16), torch.ones(1, 1, device=device, dtype=torch.float16)
    _, (_, dw, db) = gradients(ops.linear, (x, w, w[0].clone()), torch.ones(4096, 1, device=device))
    assert dw.item() == db.item() == 4096
    assert ops.linear(x.T.contiguous(), x.T.contiguous()).item() == 4096
