"""linear_backward, the three gradients in one operator: against the operators of each, and what it refuses."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad

from zoo import ops
from zoo.ops import _linear

BACKWARD = torch.ops.zoo.linear_backward
NEEDS = list(itertools.product((False, True), repeat=3))


def saved_for(activation, x, w, b):
    y, z = torch.ops.zoo.linear_activation(x, w, b, activation, True)
    return y if activation == "relu" else z


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize(
    "sizes", [((5,), 4, 3), ((2, 24), 40, 16), ((200,), 72, 136), ((), 8, 8), ((0,), 4, 8)], ids=str
)
def test_equals_the_gradients_one_by_one(device, dtype, activation, sizes):
    leading, k, n = sizes
    x, w, b = (torch.randn(*s, device=device).to(dtype) for s in ((*leading, k), (n, k), (n,)))
    grad = torch.randn(*leading, n, device=device).to(dtype)
    saved = None if activation == "none" else saved_for(activation, x, w, b)
    g = grad.double()
    if saved is not None:
        g = ops.activation_grad(g, saved.double(), activation)
    want = (
        ops.linear_input_grad(g, w.double()),
        ops.linear_weight_grad(g, x.double()),
        ops.linear_bias_grad(g),
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    scale = max(1, sum(leading)) ** 0.5
    for needs in NEEDS:
        got = BACKWARD(grad, saved, x if needs[1] else None, w if needs[0] else None, activation, *needs)
        for mine, wanted, need in zip(got, want, needs, strict=True):
            assert mine.dtype == dtype
            if need:
                torch.testing.assert_close(mine.double(), wanted, rtol=tolerance, atol=tolerance * scale)
            else:
                assert mine.numel() == 0


@pytest.mark.parametrize("grad", ["expanded", "transposed", "sliced"])
def test_strides_of_the_gradient(device, grad):
    x, w = torch.randn(48, 32, device=device), torch.randn(16, 32, device=device)
    g = {
        "expanded": lambda: torch.randn(1, device=device).expand(48, 16),
        "transposed": lambda: torch.randn(16, 48, device=device).t(),
        "sliced": lambda: torch.randn(48, 40, device=device)[:, 8:24],
    }[grad]()
    for mine, want in zip(BACKWARD(g, None, x, w, "none", True, True, True), (g @ w, g.t() @ x, g.sum(0)), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-4)


def test_a_derivative_of_it(device):
    g, x, w = (
        torch.randn(*s, device=device, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (5, 4), (3, 4))
    )
    z = torch.randn(5, 3, device=device, dtype=torch.float64, requires_grad=True)

    def run(activation, g, z, x, w):
        return BACKWARD(g, z, x, w, activation, True, True, True)

    for activation in ("none", "gelu"):
        assert torch.autograd.gradcheck(partial(run, activation), (g, z, x, w))


def test_a_tangent_is_not_dropped(device):
    g, x, w, t = (torch.randn(*s, device=device, dtype=torch.float64) for s in ((5, 3), (5, 4), (3, 4), (5, 3)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(g, t)
        outputs = [forward_ad.unpack_dual(o) for o in BACKWARD(dual, None, x, w, "none", True, True, True)]
    for output, want in zip(outputs, (t @ w, t.t() @ x, t.sum(0)), strict=True):
        torch.testing.assert_close(output.tangent, want)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (((5, 3), None, (5, 4), (3, 4), "gelu", True, True, True), "saved must be given with an activation"),
        (((5, 3), None, (5, 4), None, "none", True, True, True), "weight must be given for the input's gradient"),
        (((5, 3), None, None, (3, 4), "none", True, True, True), "input must be given for the weight's gradient"),
        (((5, 3), (5, 4), (5, 4), (3, 4), "gelu", True, True, True), r"shape of saved \(5, 4\), got \(5, 3\)"),
        (((5, 3), None, (6, 4), (3, 4), "none", True, True, True), "same leading sizes"),
        (((5, 3), None, (5, 4), (2, 4), "none", True, True, True), "weight's out_features"),
        (((5, 3), None, (5, 4), (3, 4), "elu", True, True, True), "unknown activation 'elu'"),
    ],
)
def test_refusals_are_the_same_for_data_and_fakes(device, args, words):
    for where in (device, "meta"):
        tensors = [torch.randn(*a, device=where) if isinstance(a, tuple) else a for a in args]
        with pytest.raises(RuntimeError, match=words):
            BACKWARD(*tensors)


def test_backward_of_a_layer_gives_what_torch_gives(device):
    x, w, b = (torch.randn(*s, device=device, requires_grad=True) for s in ((64, 40), (24, 40), (24,)))
    g = torch.randn(64, 24, device=device)
    want = torch.autograd.grad(F.gelu(F.linear(x, w, b)), (x, w, b), g)
    got = torch.autograd.grad(ops.linear(x, w, b, activation="gelu"), (x, w, b), g)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_cotangent_with_a_tangent(device, activation):
    """Forward over reverse without a graph of the gradients: nothing but the tangent asks for a derivative of them."""
    x, w, b = (torch.randn(*s, device=device, dtype=torch.float64, requires_grad=True) for s in ((5, 4), (3, 4), (3,)))
    g, t = (torch.randn(5, 3, device=device, dtype=torch.float64) for _ in range(2))
    with forward_ad.dual_level():
        y = ops.linear(x, w, b, activation=activation)
        gradients = torch.autograd.grad(y, (x, w, b), forward_ad.make_dual(g, t))
        tangents = [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]
    y = ops.linear(x, w, b, activation=activation)
    for tangent, want in zip(tangents, torch.autograd.grad(y, (x, w, b), t), strict=True):
        torch.testing.assert_close(tangent, want)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_batch_of_cotangents(device, activation):
    x, w, b = (torch.randn(*s, device=device, dtype=torch.float64, requires_grad=True) for s in ((5, 4), (3, 4), (3,)))
    g = torch.randn(6, 5, 3, device=device, dtype=torch.float64)
    y = ops.linear(x, w, b, activation=activation)
    together = torch.autograd.grad(y, (x, w, b), g, retain_graph=True, is_grads_batched=True)
    for i in range(len(g)):
        one = torch.autograd.grad(y, (x, w, b), g[i], retain_graph=True)
        torch.testing.assert_close([t[i] for t in together], list(one))


@pytest.fixture
def compiling(monkeypatch):
    """On a CPU a graph holds the operators one by one; here it holds the fused one there too. And no graphs of other
    tests: so many of one function are allowed."""
    torch._dynamo.reset()
    if not torch.cuda.is_available():
        monkeypatch.setattr(_linear, "_in_graph", lambda grad: _linear.is_compiled())


@pytest.mark.parametrize("activation", ["none", "gelu", "relu"])
def test_a_compiled_graph_holds_one_operator_for_all_gradients(compiling, activation):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "zoo" in str(node.target)])
        return make_boxed_func(graph.forward)

    x, w, b = (torch.randn(*s, device=device, requires_grad=True) for s in ((6, 8), (16, 8), (16,)))
    named = None if activation == "none" else activation

    def gradients(call):
        return torch.autograd.grad(call(x, w, b).square().sum(), (x, w, b))

    def call(x, w, b):
        return ops.linear(x, w, b, activation=named)

    want = gradients(call)
    got = gradients(torch.compile(call, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend), fullgraph=True))
    assert graphs[1] == ["zoo.linear_backward.default"]
    for mine, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_compiled_graph_adds_up_many_rows_of_two_bytes_by_itself(compiling, kind, dtype, rows):
    """A sum of torch's can be taken where the gradient is computed; the operator would read it once more."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []

    def compiler(graph, inputs):
        found.append([n for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph.forward)

    shapes = ((rows, 8), (16, 8), (16,)) if kind == "linear" else ((rows, 8), (16, 8), (16,), (8, 16), (8,))
    tensors = [torch.randn(*s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    weight = torch.randn(rows, shapes[-1][0], device=device, dtype=dtype)
    call = ops.linear if kind == "linear" else partial(ops.mlp, activation="gelu")

    def gradients(call):
        return torch.autograd.grad((call(*tensors) * weight).sum(), tensors)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    want = gradients(call)
    got = gradients(torch.compile(call, backend=backend, fullgraph=True, dynamic=False))
    apart = dtype is torch.bfloat16 and rows == 300
    [backward] = [n for n in found[1] if n.target is getattr(torch.ops.zoo, f"{kind}_backward").default]
    asked = backward.args[5:8] if kind == "linear" else backward.args[7:12]
    assert asked[-1] is not apart and all(asked[:-1])
    assert any(n.target is torch.ops.aten.sum.dim_IntList for n in found[1]) == apart
    for mine, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize(("leading", "features"), [((300,), 0), ((300, 2), 0), ((0,), 3)])
def test_a_sum_of_nothing_in_a_compiled_graph(compiling, leading, features):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w, b = (
        torch.randn(*s, device=device, dtype=torch.bfloat16, requires_grad=True)
        for s in ((*leading, 8), (features, 8), (features,))
    )
    compiled = torch.compile(ops.linear, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x, w, b).sum(), (x, w, b))
    torch.testing.assert_close(got, torch.autograd.grad(ops.linear(x, w, b).sum(), (x, w, b)))


def test_rows_that_are_not_known_are_taken_for_many(compiling):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w, b = (
        torch.randn(*s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in ((9, 8), (16, 8), (16,))
    )
    found = []

    def compiler(graph, inputs):
        found.append([n for n in graph.graph.nodes if n.target is torch.ops.zoo.linear_backward.default])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    compiled = torch.compile(ops.linear, backend=backend, fullgraph=True)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)  # a guard on 256 would break this promise
    got = torch.autograd.grad(compiled(x, w, b).sum(), (x, w, b))
    assert [n.args[5:8] for n in found[1]] == [(True, True, False)]
    torch.testing.assert_close(got, torch.autograd.grad(ops.linear(x, w, b).sum(), (x, w, b)))
