"""Everything that torch can do to an operator: derivatives, torch.func, forward mode, compile, export, autocast."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zoo
from support.reference import ACTIVATE
from zoo import ops

ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]


def fused(activation):
    return functools.partial(ops.linear, activation=activation)


def stock(activation):
    return lambda *a: ACTIVATE[activation](F.linear(*a))


def doubles(device, *shapes, grad=True):
    torch.manual_seed(1)
    return tuple(torch.randn(*s, device=device, dtype=torch.float64, requires_grad=grad) for s in shapes)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck_and_gradgradcheck(device, activation, bias):
    args = doubles(device, (3, 4), (2, 4), *([(2,)] if bias else []))
    f = fused(activation)
    assert torch.autograd.gradcheck(f, args, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, args)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_third_derivative(device, activation):
    x, w, b = doubles(device, (3, 4), (2, 4), (2,))

    def third(f):
        (g,) = torch.autograd.grad(f(x, w, b).pow(3).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.pow(2).sum(), w, create_graph=True)
        return torch.autograd.grad(gg.pow(2).sum(), (x, w, b))

    torch.testing.assert_close(third(fused(activation)), third(stock(activation)))


def test_gradcheck_of_the_gradient_operators(device):
    g, w, x = doubles(device, (2, 3, 4), (4, 5), (2, 3, 5))
    for f, args in (
        (ops.linear_input_grad, (g, w)),
        (ops.linear_weight_grad, (g, x)),
        (ops.linear_bias_grad, (g,)),
        (ops.matmul, (g, w)),
    ):
        assert torch.autograd.gradcheck(f, args, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(f, args)
    for activation in ACTIVATIONS[1:]:
        saved = g.detach().relu() if activation == "relu" else g.detach().clone()
        f = functools.partial(ops.activation_grad, saved=saved, activation=activation)
        assert torch.autograd.gradcheck(lambda t, f=f: f(t), (g,), check_forward_ad=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_func(device, activation):
    x, w, b = doubles(device, (3, 4), (2, 4), (2,), grad=False)
    f, want = fused(activation), stock(activation)
    tangents = tuple(torch.randn_like(t) for t in (x, w, b))
    close = torch.testing.assert_close
    close(jvp(f, (x, w, b), tangents), jvp(want, (x, w, b), tangents))
    close(jvp(lambda t: f(t, w, b), (x,), tangents[:1]), jvp(lambda t: want(t, w, b), (x,), tangents[:1]))
    close(jvp(lambda t: f(x, t, b), (w,), tangents[1:2]), jvp(lambda t: want(x, t, b), (w,), tangents[1:2]))
    close(jvp(lambda t: f(x, w, t), (b,), tangents[2:]), jvp(lambda t: want(x, w, t), (b,), tangents[2:]))
    cotangent = torch.randn(3, 2, device=device, dtype=torch.float64)
    close(vjp(f, x, w, b)[1](cotangent), vjp(want, x, w, b)[1](cotangent))
    for jacobian in (jacrev, jacfwd):
        close(jacobian(f, argnums=(0, 1, 2))(x, w, b), jacobian(want, argnums=(0, 1, 2))(x, w, b))
    close(
        hessian(lambda *a: f(*a).square().sum(), argnums=(0, 1))(x, w, b),
        hessian(lambda *a: want(*a).square().sum(), argnums=(0, 1))(x, w, b),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "in_dims",
    [(0, None, None), (1, None, None), (None, 0, None), (None, None, 0), (0, 1, 0), (None, 0, 0), (0, None, 1)],
    ids=str,
)
def test_vmap(device, activation, in_dims):
    sizes = ((3, 4), (2, 4), (2,))
    args = []
    for size, dim in zip(sizes, in_dims, strict=True):
        shape = size if dim is None else (*size[:dim], 5, *size[dim:])
        args.append(torch.randn(*shape, device=device).double())
    f, want = fused(activation), stock(activation)
    torch.testing.assert_close(vmap(f, in_dims)(*args), vmap(want, in_dims)(*args))
    per_sample = vmap(grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2)), in_dims)(*args)
    wanted = vmap(grad(lambda *a: want(*a).square().sum(), argnums=(0, 1, 2)), in_dims)(*args)
    torch.testing.assert_close(per_sample, wanted)


def test_vmap_of_vmap_and_of_vectors(device):
    x, w = torch.randn(5, 6, 4, device=device), torch.randn(5, 2, 4, device=device)
    torch.testing.assert_close(
        vmap(vmap(ops.linear, (0, None)), (0, 0))(x, w), vmap(vmap(F.linear, (0, None)), (0, 0))(x, w)
    )
    torch.testing.assert_close(vmap(ops.matmul)(x, w.mT), vmap(torch.matmul)(x, w.mT))


def test_per_sample_gradients_of_a_model(device):
    net = nn.Sequential(zoo.layers.Linear(4, 8), nn.ReLU(), zoo.layers.Linear(8, 2)).to(device)
    ref = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    ref.load_state_dict(net.state_dict())
    x = torch.randn(6, 4, device=device)

    def per_sample(m):
        params = {k: v.detach() for k, v in m.named_parameters()}
        return vmap(grad(lambda p, s: functional_call(m, p, (s,)).square().sum()), (None, 0))(params, x)

    torch.testing.assert_close(per_sample(net), per_sample(ref))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_mode_without_requires_grad(device, activation):
    x, w, b = doubles(device, (3, 4), (2, 4), (2,), grad=False)
    t = torch.randn_like(x)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(fused(activation)(forward_ad.make_dual(x, t), w, b)).tangent
        want = forward_ad.unpack_dual(stock(activation)(forward_ad.make_dual(x, t), w, b)).tangent
    torch.testing.assert_close(tangent, want)


def test_the_bare_operator_refuses_tangents_and_is_differentiable(device):
    x, w, b = doubles(device, (3, 4), (2, 4), (2,))
    assert torch.autograd.gradcheck(torch.ops.zoo.linear, (x, w, b))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"call zoo\.ops\.linear"):
        torch.ops.zoo.linear(forward_ad.make_dual(x.detach(), x.detach()), w.detach(), None)
    with pytest.raises((RuntimeError, NotImplementedError)):
        jvp(lambda t: torch.ops.zoo.linear(t, w.detach(), None), (x.detach(),), (x.detach(),))


SAMPLES = {
    "linear": lambda r: [
        (r(5, 4), r(3, 4), r(3)),
        (r(2, 3, 4), r(3, 4), None),
        (r(4, 5).T, r(4, 3).T, r(3)),
        (r(4), r(3, 4), r(3)),
        (r(0, 4), r(3, 4), r(3)),
    ],
    "linear_activation": lambda r: (
        [(r(5, 4), r(3, 4), r(3), a, True) for a in ("relu", "gelu")] + [(r(2, 3, 4), r(3, 4), None, "relu", False)]
    ),
    "linear_input_grad": lambda r: [(r(5, 3), r(3, 4)), (r(2, 5, 3), r(4, 3).T)],
    "linear_weight_grad": lambda r: [(r(5, 3), r(5, 4)), (r(2, 5, 3), r(2, 5, 4))],
    "linear_bias_grad": lambda r: [(r(5, 3),), (r(2, 5, 3),), (r(3),)],
    "linear_backward": lambda r: [
        (r(5, 3), None, r(5, 4), r(3, 4), "none", True, True, True),
        (r(2, 5, 3), r(2, 5, 3), r(2, 5, 4), None, "gelu", False, True, False),
        (r(5, 3), r(5, 3), None, r(3, 4), "relu", True, False, True),
        *(
            []
            if r(1).requires_grad
            else [(r(5, 3).half(), None, r(5, 4).half(), None, "none", False, True, True, True)]
        ),
    ],
    "linear_cast": lambda r: (
        []
        if r(1).requires_grad
        else [
            (r(5, 4).bfloat16(), r(3, 4), r(3), "none", False),
            (r(2, 5, 4).half(), r(4, 3).T, None, "gelu", True),
        ]
    ),
    "mlp_cast": lambda r: (
        []
        if r(1).requires_grad
        else [
            (r(5, 4).bfloat16(), r(6, 4), r(6), r(3, 6), r(3), "gelu", True),
            (r(5, 4).half(), r(6, 4), None, r(6, 3).T, r(3), "relu", False),
        ]
    ),
    "mlp": lambda r: [
        (r(5, 4), r(6, 4), r(6), r(3, 6), r(3), "gelu", True),
        (r(2, 5, 4), r(6, 4), None, r(6, 3).T, None, "relu", True),
        *([] if r(1).requires_grad else [(r(0, 4), r(6, 4), r(6), r(3, 6), r(3), "silu", False)]),
    ],
    "mlp_backward": lambda r: [
        (r(5, 3), r(5, 6), r(5, 6), r(5, 4), r(6, 4), r(3, 6), "gelu", True, True, True, True, True),
        (r(2, 5, 3), None, r(2, 5, 6), r(2, 5, 4), None, r(3, 6), "relu", False, True, True, False, False),
        (r(5, 3), r(5, 6), None, None, None, None, "silu", False, False, False, True, True),
        (r(5, 3), None, None, None, r(6, 4), r(3, 6), "none", True, False, False, False, False),
    ],
    "activation_grad": lambda r: [(r(5, 3), r(5, 3), a) for a in ("relu", "gelu")] + [(r(3, 5).T, r(5, 3), "gelu")],
    "matmul": lambda r: [(r(5, 3), r(3, 4)), (r(2, 5, 3), r(2, 4, 3).mT)],
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(device, name, requires_grad):
    def r(*s):
        return torch.randn(*s, device=device, requires_grad=requires_grad)

    for args in SAMPLES[name](r):
        torch.library.opcheck(getattr(torch.ops.zoo, name).default, args)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = zoo.layers.Linear(4, 8), zoo.layers.Linear(8, 2)

    def forward(self, x):
        h = ops.linear(x, self.a.weight, self.a.bias, activation="gelu")
        return self.b(h)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_fullgraph_compile(device, dynamic, autocast):
    torch._dynamo.reset()
    net = Net().to(device)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=dynamic)
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


def test_export_keeps_the_operator(device):
    net = Net().to(device).eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(net, (torch.randn(3, 4, device=device),), dynamic_shapes=({0: batch},))
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert {"zoo.linear.default", "zoo.linear_activation.default"} <= targets
    x = torch.randn(9, 4, device=device)
    torch.testing.assert_close(program.module()(x), net(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_torchs(device, dtype):
    mine, stock_layer = zoo.layers.Linear(4, 3).to(device), nn.Linear(4, 3).to(device)
    stock_layer.load_state_dict(mine.state_dict())
    base = torch.randn(2, 4, device=device)
    for x in (base, base.half(), base.bfloat16()):
        results = []
        for layer in (mine, stock_layer):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            with torch.autocast(device, dtype=dtype):
                y = layer(leaf)
            y.float().sum().backward()
            results.append((y, layer.weight.grad, layer.bias.grad, leaf.grad))
        for got, want in zip(*results, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    with torch.autocast(device, dtype=dtype):
        assert mine.double()(base.double()).dtype == torch.float64
    with torch.autocast(device, dtype=dtype, enabled=False):
        assert mine.float()(base).dtype == torch.float32


def test_inference_mode_and_no_grad(device):
    layer = zoo.layers.Linear(4, 3).to(device)
    x = torch.randn(2, 4, device=device)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            y = layer(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias).detach())


def test_checkpointing_and_saved_tensor_checks(device):
    layer = zoo.layers.Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g, layer.weight.sum(0).expand(2, 4))
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_flops_are_counted_as_torch_counts_its_own(device):
    from torch.utils.flop_counter import FlopCounterMode

    x, w, b = doubles(device, (2, 3, 4), (5, 4), (5,))

    def count(f):
        with FlopCounterMode(display=False) as counter:
            f(x, w, b).sum().backward()
        return counter.get_total_flops()

    assert count(ops.linear) == count(fused("gelu")) == count(F.linear) == 3 * 2 * 6 * 5 * 4
    with FlopCounterMode(display=False) as counter:
        ops.matmul(x, w.T)
    assert counter.get_total_flops() == 2 * 6 * 5 * 4


def test_threads_agree(device):
    from concurrent.futures import ThreadPoolExecutor

    layer = zoo.layers.Linear(32, 16).to(device)
    xs = [torch.randn(8, 32, device=device) for _ in range(16)]
    want = [layer(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for got, wanted in zip(pool.map(layer, xs), want, strict=True):
            assert torch.equal(got, wanted)
