"""mlp, two linear layers and the activation between them: against the naive float64 twin, and what it refuses."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from support.reference import ACTIVATE, DTYPES, gradients, naive_linear
from zoo import ops

BACKWARD = torch.ops.zoo.mlp_backward
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
NEEDS = list(itertools.product((False, True), repeat=5))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def fused(activation):
    return functools.partial(ops.mlp, activation=activation)


def stock(activation):
    return lambda x, w1, b1, w2, b2: F.linear(ACTIVATE[activation](F.linear(x, w1, b1)), w2, b2)


def naive(activation):
    return lambda x, w1, b1, w2, b2: naive_linear(naive_linear(x, w1, b1, activation), w2, b2)


def operands(device, dtype=torch.float64, leading=(3,), sizes=(4, 5, 2), bias=True, grad=False):
    k, h, n = sizes
    g = torch.Generator().manual_seed(len(leading) + k * h * n)
    shapes = ((*leading, k), (h, k), (h,), (n, h), (n,))
    made = [torch.randn(*s, generator=g).to(device, dtype).requires_grad_(grad) for s in shapes]
    return made if bias else [t if i not in (2, 4) else None for i, t in enumerate(made)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("leading", "sizes"),
    [((5,), (4, 6, 3)), ((2, 24), (16, 40, 24)), ((), (8, 8, 8)), ((0, 3), (4, 5, 2)), ((3,), (4, 0, 2))],
    ids=str,
)
def test_values_and_gradients(device, dtype, activation, leading, sizes, bias):
    tensors = operands(device, dtype, leading, sizes, bias)
    g = torch.randn(*leading, sizes[-1], device=device).to(dtype)
    y, grads = gradients(fused(activation), tensors, g)
    want, want_grads = gradients(naive(activation), [None if t is None else t.double() for t in tensors], g.double())
    tolerance = TOLERANCE[dtype]
    assert y.dtype == dtype and y.is_contiguous()
    scale = max(1, sum(leading)) ** 0.5 * sizes[1] ** 0.5
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * scale)
    for got, wanted in zip(grads, want_grads, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * scale)
    with torch.no_grad():
        assert torch.equal(ops.mlp(*tensors, activation=activation), y)


@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_the_backward_gives_what_is_asked_for(device, activation, needs):
    x, w1, b1, w2, b2 = operands(device, torch.float32, (2, 24), (8, 16, 5))
    g = torch.randn(2, 24, 5, device=device)
    _, hidden, product = torch.ops.zoo.mlp(x, w1, b1, w2, b2, activation, True)
    saved = hidden if activation == "relu" else None if activation == "none" else product
    f = naive(None if activation == "none" else activation)
    _, want = gradients(f, [t.double() for t in (x, w1, b1, w2, b2)], g.double())
    first = any(needs[:3])
    got = BACKWARD(
        g,
        hidden if needs[3] else None,
        saved if first else None,
        x if needs[1] else None,
        w1 if needs[0] else None,
        w2 if first else None,
        activation,
        *needs,
    )
    for mine, wanted, need in zip(got, want, needs, strict=True):
        assert mine.dtype == torch.float32
        if need:
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-4, atol=1e-4)
        else:
            assert mine.numel() == 0


def test_strides_of_every_operand(device):
    def r(*s):
        return torch.randn(*s, device=device)

    for x in (r(6, 5).t(), r(1, 6).expand(5, 6), r(2, 6, 3).transpose(1, 2)):
        tensors = (x, r(6, 4).t(), r(8)[::2], r(3, 8)[:, ::2], r(1).expand(3))
        for g in (r(1).expand(*x.shape[:-1], 3), r(3, *x.shape[:-1]).movedim(0, -1)):
            y, grads = gradients(fused("gelu"), tensors, g)
            want, want_grads = gradients(stock("gelu"), tensors, g)
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grads, want_grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_one_operator_forward_and_one_backward_with_the_requested_gradients(device, activation, needs):
    called = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "zoo":
                called.append((func.name(), args[7:] if "backward" in func.name() else None))
            return func(*args, **(kwargs or {}))

    leaves = [t.requires_grad_(need) for t, need in zip(operands(device), needs, strict=True)]
    with Calls():
        y = ops.mlp(*leaves, activation=activation)
        assert y.requires_grad == any(needs)
        if any(needs):
            y.sum().backward()
    assert called[0] == ("zoo::mlp", None)
    assert called[1:] == ([("zoo::mlp_backward", needs)] if any(needs) else [])
    assert [leaf.grad is not None for leaf in leaves] == list(needs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saves_no_more_than_the_two_layers(activation):
    def saved_by(f, needs):
        tensors = [t.requires_grad_(n) for t, n in zip(operands("cpu", torch.float32), needs, strict=True)]
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.update({t.untyped_storage().data_ptr(): tuple(t.shape)}), t)[1], lambda t: t
        ):
            f(*tensors)
        return sorted(kept.values())

    def apart(x, w1, b1, w2, b2):
        return ops.linear(ops.linear(x, w1, b1, activation=activation), w2, b2)

    for needs in NEEDS:
        mine = saved_by(fused(activation), needs)
        assert mine == saved_by(apart, needs), needs
    hidden = [(3, 5)] if activation == "relu" else [(3, 5), (3, 5)]
    assert saved_by(fused(activation), (True,) * 5) == sorted([(3, 4), (5, 4), (2, 5), *hidden])


# calculus


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck_and_gradgradcheck(device, activation, bias):
    args = operands(device, bias=bias, grad=True)
    f = fused(activation)
    assert torch.autograd.gradcheck(f, args, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, args)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_third_derivative(device, activation):
    x, w1, b1, w2, b2 = operands(device, grad=True)

    def third(f):
        (g,) = torch.autograd.grad(f(x, w1, b1, w2, b2).pow(3).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.pow(2).sum(), w1, create_graph=True)
        return torch.autograd.grad(gg.pow(2).sum(), (x, w1, b1, w2, b2))

    torch.testing.assert_close(third(fused(activation)), third(stock(activation)))


@pytest.mark.parametrize("frozen", [(0, 1, 2), (3, 4), (0, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_second_derivatives_where_some_are_frozen(device, activation, frozen):
    args = operands(device, grad=True)
    for i in frozen:
        args[i].requires_grad_(False)
    assert torch.autograd.gradgradcheck(fused(activation), args)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_func(device, activation):
    args = tuple(operands(device))
    f, want, close = fused(activation), stock(activation), torch.testing.assert_close
    tangents = tuple(torch.randn_like(t) for t in args)
    close(jvp(f, args, tangents), jvp(want, args, tangents))
    for i in range(5):

        def one(t, g, i=i):
            return g(*args[:i], t, *args[i + 1 :])

        close(jvp(lambda t: one(t, f), args[i : i + 1], tangents[i : i + 1]),
              jvp(lambda t: one(t, want), args[i : i + 1], tangents[i : i + 1]))  # fmt: skip
    cotangent = torch.randn(3, 2, device=device, dtype=torch.float64)
    close(vjp(f, *args)[1](cotangent), vjp(want, *args)[1](cotangent))
    every = tuple(range(5))
    for jacobian in (jacrev, jacfwd):
        close(jacobian(f, argnums=every)(*args), jacobian(want, argnums=every)(*args))
    close(
        hessian(lambda *a: f(*a).square().sum(), argnums=(0, 1, 3))(*args),
        hessian(lambda *a: want(*a).square().sum(), argnums=(0, 1, 3))(*args),
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    "in_dims",
    [
        (0, None, None, None, None),
        (1, None, None, None, None),
        (None, 0, None, None, None),
        (None, None, 0, None, None),
        (None, None, None, 0, None),
        (None, None, None, None, 0),
        (0, 1, 0, 2, 1),
        (0, None, None, 0, 0),
    ],
    ids=str,
)
def test_vmap(device, activation, in_dims):
    args = []
    for size, dim in zip(((3, 4), (5, 4), (5,), (2, 5), (2,)), in_dims, strict=True):
        shape = size if dim is None else (*size[:dim], 6, *size[dim:])
        args.append(torch.randn(*shape, device=device).double())
    f, want = fused(activation), stock(activation)
    torch.testing.assert_close(vmap(f, in_dims)(*args), vmap(want, in_dims)(*args))
    torch.testing.assert_close(
        vmap(lambda *a: torch.ops.zoo.mlp(*a, activation, False)[0], in_dims)(*args), vmap(want, in_dims)(*args)
    )
    every = tuple(range(5))
    torch.testing.assert_close(
        vmap(grad(lambda *a: f(*a).square().sum(), argnums=every), in_dims)(*args),
        vmap(grad(lambda *a: want(*a).square().sum(), argnums=every), in_dims)(*args),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_mode_without_requires_grad(device, activation):
    x, *more = operands(device)
    t = torch.randn_like(x)
    with forward_ad.dual_level():
        tangents = [
            forward_ad.unpack_dual(f(forward_ad.make_dual(x, t), *more)).tangent
            for f in (fused(activation), stock(activation))
        ]
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_cotangent_with_a_tangent(device, activation):
    args = operands(device, grad=True)
    g, t = (torch.randn(3, 2, device=device, dtype=torch.float64) for _ in range(2))
    with forward_ad.dual_level():
        made = torch.autograd.grad(ops.mlp(*args, activation=activation), args, forward_ad.make_dual(g, t))
        tangents = [forward_ad.unpack_dual(gradient).tangent for gradient in made]
    want = torch.autograd.grad(ops.mlp(*args, activation=activation), args, t)
    torch.testing.assert_close(tangents, list(want))


def test_derivatives_of_the_backward_itself(device):
    x, w1, _, w2, _ = operands(device, grad=True)
    g, h, z = (
        torch.randn(*s, device=device, dtype=torch.float64, requires_grad=True) for s in ((3, 2), (3, 5), (3, 5))
    )

    def run(activation, *tensors):
        return BACKWARD(*tensors, activation, True, True, True, True, True)

    for activation in ("none", "gelu"):
        assert torch.autograd.gradcheck(functools.partial(run, activation), (g, h, z, x, w1, w2))
    t = torch.randn_like(g)
    tensors = [a.detach() for a in (h, z, x, w1, w2)]
    with forward_ad.dual_level():
        outputs = [forward_ad.unpack_dual(o) for o in run("gelu", forward_ad.make_dual(g.detach(), t), *tensors)]
    for output, want in zip(outputs, run("gelu", t, *tensors), strict=True):
        torch.testing.assert_close(output.tangent, want)


def test_the_bare_operator_needs_to_save_for_gradients(device):
    args = operands(device, grad=True)
    with pytest.raises(ValueError, match=r"torch\.ops\.zoo\.mlp: gradients need the hidden layer; pass save=True"):
        torch.ops.zoo.mlp(*args, "relu", False)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"call zoo\.ops\.mlp"):
        torch.ops.zoo.mlp(forward_ad.make_dual(args[0].detach(), args[0].detach()), *args[1:], "relu", True)
    with torch.no_grad():
        _, hidden, product = torch.ops.zoo.mlp(*args, "gelu", False)
    assert hidden.numel() == product.numel() == 0


# compile, export, autocast


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return ops.mlp(x, self.a.weight, self.a.bias, self.b.weight, self.b.bias, activation="gelu")


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_fullgraph_compile(device, dynamic, autocast):
    torch._dynamo.reset()
    net, graphs = Net().to(device), []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(net, backend=backend, fullgraph=True, dynamic=dynamic)
    for n in (3, 7):
        x = torch.randn(n, 4, device=device)
        results = []
        for f in (net, compiled):
            net.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                y = f(x)
            assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
            y.float().square().sum().backward()
            results.append((y.detach(), *(p.grad.clone() for p in net.parameters())))
        torch.testing.assert_close(*results)
    targets = [{str(n.target) for n in gm.graph.nodes} for gm in graphs[:2]]
    assert "zoo.mlp.default" in targets[0] and "zoo.mlp_backward.default" in targets[1], targets


def test_export_keeps_the_operator(device):
    net = Net().to(device).eval()
    program = torch.export.export(
        net, (torch.randn(3, 4, device=device),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    assert "zoo.mlp.default" in {str(n.target) for n in program.graph.nodes}
    x = torch.randn(9, 4, device=device)
    torch.testing.assert_close(program.module()(x), net(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_torchs(device, dtype):
    tensors = operands(device, torch.float32)
    for x in (tensors[0], tensors[0].half(), tensors[0].bfloat16()):
        results = []
        for f in (fused("gelu"), stock("gelu")):
            leaves = [t.detach().clone().requires_grad_() for t in (x, *tensors[1:])]
            with torch.autocast(device, dtype=dtype):
                y = f(*leaves)
            y.float().sum().backward()
            results.append((y, *(leaf.grad for leaf in leaves)))
        for got, want in zip(*results, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    with torch.autocast(device, dtype=dtype):
        assert ops.mlp(*operands(device), activation="gelu").dtype == torch.float64


def test_checkpointing(device):
    args = operands(device, grad=True)
    want = torch.autograd.grad(ops.mlp(*args, activation="gelu").sum(), args)
    y = torch.utils.checkpoint.checkpoint(fused("gelu"), *args, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y.sum(), args), want, strict=True))


# refusals

BAD = {
    "inner sizes": (((2, 5), (3, 4), None, (2, 3), None), r"weight1's in_features \(4\), got input \(2, 5\)"),
    "bias1": (((2, 4), (3, 4), (2,), (2, 3), None), r"bias1 must have weight1's out_features \(3\), got \(2\)"),
    "weight1 rank": (((2, 4), (4,), None, (2, 3), None), r"weight1 must have 2 dimension\(s\)"),
    "weight2": (((2, 4), (3, 4), None, (2, 4), None), r"weight2's in_features must be weight1's out_features \(3\)"),
    "weight2 rank": (((2, 4), (3, 4), None, (3,), None), r"weight2 must have 2 dimension\(s\)"),
    "bias2": (((2, 4), (3, 4), None, (2, 3), (3,)), r"bias2 must have weight2's out_features \(2\), got \(3\)"),
    "scalar": (((), (3, 1), None, (2, 3), None), "input must have at least 1 dimension"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_shapes_are_refused_with_both(device, case):
    shapes, words = BAD[case]
    for where in (device, "meta"):
        args = [None if s is None else torch.randn(s, device=where) for s in shapes]
        with pytest.raises(RuntimeError, match=words):
            ops.mlp(*args, activation="gelu")


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_wrong_dtypes_are_refused(device, place, dtype):
    for where in (device, "meta"):
        args = [t.to(where) for t in operands(device, torch.float32)]
        args[place] = args[place].to(dtype)
        with pytest.raises(RuntimeError, match=r"zoo::mlp: .*must (have the dtype of|be float64)"):
            ops.mlp(*args, activation="gelu")


def test_unknown_activations_are_refused(device):
    with pytest.raises(ValueError, match=r"unknown activation None; known: relu, gelu"):
        ops.mlp(*operands(device), activation=None)
    for where in (device, "meta"):
        with pytest.raises(RuntimeError, match="unknown activation 'elu'"):
            torch.ops.zoo.mlp(*(t.to(where) for t in operands(device)), "elu", True)


ALL = (True,) * 5
G, H, X, W1, W2 = (5, 3), (5, 6), (5, 4), (6, 4), (3, 6)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((G, None, H, X, W1, W2, "gelu", *ALL), "hidden must be given for weight2's gradient"),
        ((G, H, None, X, W1, W2, "gelu", *ALL), "saved must be given with an activation"),
        ((G, H, H, None, W1, W2, "gelu", *ALL), "input must be given for weight1's gradient"),
        ((G, H, H, X, None, W2, "gelu", *ALL), "weight1 must be given for the input's gradient"),
        ((G, H, H, X, W1, None, "gelu", *ALL), "weight2 must be given for the gradients of input, weight1 and bias1"),
        ((G, (4, 6), H, X, W1, W2, "gelu", *ALL), "grad and hidden must have the same leading sizes"),
        ((G, (5, 7), H, X, W1, W2, "gelu", *ALL), r"hidden's last size must be weight2's in_features \(6\)"),
        ((G, H, (5, 7), X, W1, W2, "gelu", *ALL), r"saved's last size must be weight2's in_features \(6\)"),
        ((G, H, (4, 6), X, W1, W2, "gelu", *ALL), "grad and saved must have the same leading sizes"),
        ((G, H, H, (4, 4), W1, W2, "gelu", *ALL), "grad and input must have the same leading sizes"),
        ((G, H, H, X, (7, 4), W2, "gelu", *ALL), r"weight1's out_features must be weight2's in_features \(6\)"),
        ((G, H, H, X, W1, (2, 6), "gelu", *ALL), r"weight2's out_features \(2\), got grad \(5, 3\)"),
        ((G, H, H, X, W1, W2, "elu", *ALL), "unknown activation 'elu'"),
    ],
)
def test_refusals_of_the_backward_are_the_same_for_data_and_fakes(device, args, words):
    for where in (device, "meta"):
        tensors = [torch.randn(*a, device=where) if isinstance(a, tuple) else a for a in args]
        with pytest.raises(RuntimeError, match=words):
            BACKWARD(*tensors)
