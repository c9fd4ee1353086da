"""How the operators behave as CUDA work: streams, graphs, devices, memory, sizes, launches."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from zoo import ops

CUDA = torch.device("cuda")


def work(x, w, b):
    y = ops.linear(x, w, b, activation="gelu")
    return y, *torch.autograd.grad(y.square().sum(), (x, w, b))


def operands(m=300, k=200, n=100, device=CUDA):
    return [torch.randn(*s, device=device, requires_grad=True) for s in ((m, k), (n, k), (n,))]


def test_runs_on_the_current_stream():
    """Behind a long wait on a side stream; work put on another stream would read its input before it is written."""
    x, w, b = operands()
    want = work(x, w, b)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x.detach())
        got = work(late.requires_grad_(), w, b)
    stream.synchronize()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_leaves_other_streams_alone():
    """A forward on a side stream is done when that stream is, while the default stream is still busy."""
    x, w, b = operands()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    idle = []
    for _ in range(3):  # other processes may keep this one from the processor for a while
        torch.cuda._sleep(1_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        with torch.cuda.stream(stream), torch.no_grad():
            y = ops.linear(x, w, b)
        stream.synchronize()
        idle.append(busy.query())
        torch.cuda.synchronize()
        torch.testing.assert_close(y, F.linear(x, w, b).detach(), rtol=1e-4, atol=1e-4)
        if not idle[-1]:
            break
    assert not all(idle), "the default stream was waited for (or the pause was too short)"


def test_cuda_graph_of_forward_and_backward():
    x, w, b = operands()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work(x, w, b)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work(x, w, b)
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        for t in outputs:
            t.detach().fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(outputs, work(x, w, b), rtol=0, atol=0)


def test_graphed_callable_and_reduce_overhead_compile():
    net = nn.Sequential(zoo.layers.Linear(64, 128), nn.ReLU(), zoo.layers.Linear(128, 10)).cuda()
    x = torch.randn(32, 64, device=CUDA)
    want = net(x).detach()
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(net, fullgraph=True, mode=mode)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(x)
            torch.testing.assert_close(y.detach(), want, rtol=1e-5, atol=1e-5)
            net.zero_grad()
            y.square().sum().backward()
        grads = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        net(x).square().sum().backward()
        torch.testing.assert_close(grads, [p.grad for p in net.parameters()], rtol=1e-4, atol=1e-4)


def test_mixed_devices_are_refused():
    x, w, b = (t.detach() for t in operands(2, 3, 4))
    for args in ((x, w.cpu(), b), (x.cpu(), w, b), (x, w, b.cpu())):
        with pytest.raises(RuntimeError, match=r"must be on the device of input|on cuda|Expected all tensors"):
            ops.linear(*args)
    torch.testing.assert_close(ops.linear(x, w, b), F.linear(x, w, b))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_alone_is_touched():
    """In a fresh process: work on cuda:1 makes no context on cuda:0 and allocates nothing there."""
    code = """
        import torch, zoo
        from zoo import ops
        x = torch.randn(64, 32, device="cuda:1", requires_grad=True)
        layer = zoo.layers.Linear(32, 16, device="cuda:1")
        for activation in (None, "gelu", "relu"):
            ops.linear(x, layer.weight, layer.bias, activation=activation).square().sum().backward()
        ops.matmul(x, layer.weight.T)
        torch.cuda.synchronize("cuda:1")
        import ctypes
        cuda = ctypes.CDLL("libcuda.so.1")
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        assert active.value == 0, "a context on cuda:0"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_memory_is_that_of_torchs_layer(monkeypatch):
    """And while float32 is split into planes, those, 6 bytes an element, and the pieces of spread tiles."""

    def peak(layer, activation=None):
        x = torch.randn(4096, 512, device=CUDA, requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = layer(x)
        held = torch.cuda.memory_allocated() - before
        y.backward(torch.ones_like(y))
        return held, torch.cuda.max_memory_allocated() - before

    stock, mine = nn.Linear(512, 1024, device=CUDA), zoo.layers.Linear(512, 1024, device=CUDA)
    peak(stock), peak(mine)  # cuBLAS allocates its workspace once
    (held, top), (stock_held, stock_top) = peak(mine), peak(stock)
    assert held == stock_held
    planes = 6 * 4096 * (512 + 1024) + 20 * 1024 * 1024
    assert top <= stock_top + (planes if torch.cuda.get_device_capability() == (9, 0) else 1024 * 1024)
    monkeypatch.setenv("ZOO_LINEAR_KERNEL", "tiled")
    assert peak(mine)[1] <= stock_top + 1024 * 1024
    for layer in (stock, mine):
        layer.weight.requires_grad_(False)
    assert peak(mine)[0] == peak(stock)[0]


@pytest.mark.usefixtures("large_memory")
@pytest.mark.parametrize("where", ["input", "output", "weight"])
def test_more_than_two_to_the_31_elements(where):
    big = 2**31 // 64 + 129
    m, k, n = {"input": (big, 64, 3), "output": (big, 2, 64), "weight": (3, 64, big)}[where]
    x = torch.randn(m, k, device=CUDA, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=CUDA, dtype=torch.bfloat16)
    y = ops.linear(x, w)
    rows, cols = slice(-70, None), slice(-70, None)
    torch.testing.assert_close(y[rows, cols], F.linear(x[rows], w[cols]), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(y[:70, :70], F.linear(x[:70], w[:70]), rtol=2e-2, atol=2e-2)
    if where == "input":
        dx = ops.linear_input_grad(y, w)
        torch.testing.assert_close(dx[rows], y[rows] @ w, rtol=2e-2, atol=2e-1)
        ones = torch.ones(1, 1, device=CUDA, dtype=torch.bfloat16).expand(m, 3)
        assert (ops.linear_bias_grad(ones) == m).all() or (
            ops.linear_bias_grad(ones).float() / m - 1
        ).abs().max() < 0.01


def test_long_sums_stay_accurate():
    g = torch.rand(1_000_000, 5, device=CUDA)
    want = g.double().sum(0)
    assert ((ops.linear_bias_grad(g).double() - want).abs() / want).max() < 1e-6


def test_unwritten_memory_never_shows():
    """Each output into memory that holds NaN."""
    for m, k, n in ((1, 1, 1), (65, 3, 67), (64, 64, 64), (129, 0, 5), (7, 300, 130)):
        x, w, b = operands(m, k, n)
        for activation in (None, "relu", "gelu", "gelu_tanh", "silu"):
            poison = [torch.full((m * max(n, k, 1) + n * max(k, 1),), float("nan"), device=CUDA) for _ in range(8)]
            del poison
            y = ops.linear(x, w, b, activation=activation)
            for t in (y, *torch.autograd.grad(y.sum(), (x, w, b))):
                assert t.isfinite().all(), (m, k, n, activation)


def test_multi_threaded_streams():
    from concurrent.futures import ThreadPoolExecutor

    x, w, b = operands()
    want = work(x, w, b)

    def run(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            got = work(x, w, b)
            torch.cuda.current_stream().synchronize()
        return got

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(run, range(16)):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
