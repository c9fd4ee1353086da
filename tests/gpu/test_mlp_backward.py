"""mlp_backward whose first product multiplies by act'(saved) and sums b1's gradient in its epilogue (sm90/through.cuh).

Against float64 and against the two products with a pass between them. Where weight1 is the identity, the input's
gradient is the hidden layer's, bit by bit.
"""

import math
import re

import pytest
import torch

import zoo  # noqa: F401  torch.ops.zoo
from support.gpu_kernels import ACTIVATIONS, CUDA, LIMITS, check, exact_gradient, kernels_of, normal

DERIVED = [name for name in ACTIVATIONS if name != "none"]
HALVES = [torch.bfloat16, torch.float16]
TILES = ["wgmma:0:0", "wgmma:1:0", "wgmma"]
ALL = (True,) * 5
# rows, columns of the gradient, columns of the hidden layer
SHAPES = [
    (128, 128, 128),
    (1, 64, 96),
    (63, 8, 3072),
    (129, 200, 72),
    (1000, 72, 8),
    (520, 264, 200),
    (300, 1000, 1160),
    (20000, 96, 384),
]


def operands(m, n, h, dtype, activation, k=None):
    """grad, hidden, saved, input, weight1, weight2; weight1 the identity unless `k` is given."""
    saved = normal(m, h, dtype=dtype, scale=2)
    if activation == "relu":
        saved = saved.relu()
    weight1 = torch.eye(h, dtype=dtype, device=CUDA) if k is None else normal(h, k, dtype=dtype, scale=k**-0.5)
    x = normal(m, h if k is None else k, dtype=dtype)
    return (
        normal(m, n, dtype=dtype),
        normal(m, h, dtype=dtype),
        saved,
        x,
        weight1,
        normal(n, h, dtype=dtype, scale=n**-0.5),
    )


def backward(tensors, activation, asked=ALL, wide=False):
    return torch.ops.zoo.mlp_backward(*tensors, activation, *asked, wide)


def runs_in_epilogue(tensors, activation):
    """Whether a product with `through`, the last of Config's parameters, is there."""
    return any(
        re.search(r"gemm_kernel<.*Config<[^>]*, true>", name)
        for name in kernels_of(lambda: backward(tensors, activation))
    )


def with_a_pass(tensors, activation, wide=False):
    """The same by the operators that mlp_backward is otherwise made of."""
    g, hidden, saved, x, w1, w2 = tensors
    dh, dw2, db2 = torch.ops.zoo.linear_backward(g, None, hidden, w2, "none", True, True, True, wide)
    return *torch.ops.zoo.linear_backward(dh, saved, x, w1, activation, True, True, True, wide), dw2, db2


def exact(tensors, activation):
    g, hidden, saved, x, w1, w2 = (t.double() for t in tensors)
    dh = exact_gradient(g @ w2, saved, activation)[1]
    return dh @ w1, dh.t() @ x, dh.sum(0), g.t() @ hidden, g.sum(0)


def check_all(got, want, limit, what):
    for name, mine, wanted in zip(("dX", "dW1", "db1", "dW2", "db2"), got, want, strict=True):
        check(mine, wanted, limit, f"{what} {name}")


@pytest.mark.parametrize("kernel", TILES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", DERIVED)
def test_against_float64(force, kernel, dtype, activation):
    force(kernel)
    for m, n, h in SHAPES:
        tensors = operands(m, n, h, dtype, activation)
        what = f"{kernel} {dtype} {activation} {(m, n, h)}"
        want = exact(tensors, activation)
        got = backward(tensors, activation)
        check(got[0], want[0], LIMITS[dtype], f"{what} dH")
        check_all(got, want, 2.5 * LIMITS[dtype], what)
        again = backward(tensors, activation)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), f"{what}: another run gives other bits"
    assert runs_in_epilogue(tensors, activation)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", DERIVED)
def test_it_is_chosen_for_large_ones_and_is_the_more_exact(monkeypatch, dtype, activation):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.delenv("ZOO_LINEAR_KERNEL", raising=False)
    for m, n, h in ((12608, 768, 3072), (200704, 96, 384)):
        tensors = operands(m, n, h, dtype, activation, k=n)
        want = exact(tensors, activation)
        assert runs_in_epilogue(tensors, activation)
        got, apart = backward(tensors, activation), with_a_pass(tensors, activation)
        check_all(got, want, 2.5 * LIMITS[dtype], f"{dtype} {activation} {(m, n, h)}")
        for mine, theirs, wanted in zip(got[:3], apart[:3], want[:3], strict=True):
            errors = [float((t.double() - wanted).norm() / wanted.norm()) for t in (mine, theirs)]
            print(f"{dtype} {activation} {(m, n, h)}: {errors[0]:.3g}, with a pass {errors[1]:.3g}")
            assert errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize("kernel", TILES)
def test_what_is_not_asked_for_is_not_there_and_changes_nothing(force, kernel):
    force(kernel)
    tensors = operands(777, 264, 328, torch.bfloat16, "gelu", k=136)
    full = backward(tensors, "gelu")
    for number in range(32):
        asked = tuple(bool(number >> i & 1) for i in range(5))
        g, hidden, saved, x, w1, w2 = tensors
        needed = (g, hidden if asked[3] else None, saved, x if asked[1] else None, w1 if asked[0] else None, w2)
        for got, whole, wanted in zip(backward(needed, "gelu", asked), full, asked, strict=True):
            assert torch.equal(got, whole) if wanted else got.numel() == 0, asked


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", DERIVED)
def test_wide_gradients_of_parameters(force, dtype, activation):
    force("wgmma")
    tensors = operands(1000, 264, 328, dtype, activation, k=136)
    got, want = backward(tensors, activation, wide=True), exact(tensors, activation)
    assert [t.dtype for t in got] == [dtype] + [torch.float32] * 4
    check_all(got, want, 2.5 * LIMITS[dtype], f"wide {dtype} {activation}")
    # summed before the hidden gradient is rounded, and not rounded itself
    check(got[2], want[2], 5e-4, f"wide {dtype} {activation} db1")
    assert torch.equal(got[2].to(dtype), backward(tensors, activation)[2])


@pytest.mark.parametrize("kernel", TILES)
def test_rows_that_lie_apart(force, kernel):
    force(kernel)
    m, n, h = 400, 136, 200
    g, hidden, saved, x, w1, w2 = operands(m, n, h, torch.bfloat16, "silu")
    want = backward((g, hidden, saved, x, w1, w2), "silu")

    def apart(t, columns, first):
        memory = normal(t.shape[0], t.shape[1] + columns, dtype=t.dtype)
        memory[:, first : first + t.shape[1]] = t
        return memory[:, first : first + t.shape[1]]

    for wide in (apart(saved, 64, 8), apart(saved, 8, 0), saved.repeat_interleave(2, 0)[::2]):
        assert runs_in_epilogue((g, hidden, wide, x, w1, w2), "silu")
        for mine, wanted in zip(backward((g, hidden, wide, x, w1, w2), "silu"), want, strict=True):
            assert torch.equal(mine, wanted), wide.stride()
    for wide in (apart(g, 24, 16), apart(g, 8, 0)):
        assert torch.equal(backward((wide, hidden, saved, x, w1, w2), "silu")[0], want[0])
    # rows that TMA cannot read, and a weight along its other dimension: the two products and the pass
    for z, weight in (
        (apart(saved, 7, 0), w2),
        (apart(saved, 8, 1), w2),
        (saved.t().contiguous().t(), w2),
        (saved, w2.t().contiguous().t()),
    ):
        tensors = (g, hidden, z, x, w1, weight)
        assert not runs_in_epilogue(tensors, "silu")
        check_all(backward(tensors, "silu"), exact(tensors, "silu"), 2.5 * LIMITS[torch.bfloat16], f"{z.stride()}")


def test_leading_dimensions(force):
    force("wgmma")
    g, hidden, saved, x, w1, w2 = operands(600, 136, 200, torch.bfloat16, "gelu", k=72)
    want = backward((g, hidden, saved, x, w1, w2), "gelu")
    split = [t.unflatten(0, (3, 200)) for t in (g, hidden, saved, x)]
    got = backward((*split, w1, w2), "gelu")
    assert got[0].shape == (3, 200, 72)
    for mine, wanted in zip(got, want, strict=True):
        assert torch.equal(mine.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("kernel", ["wgmma:2:0", "wgmma:0:1", "small", "cublas", "mma"])
def test_other_kernels_leave_it(force, kernel):
    force(kernel)
    tensors = operands(520, 264, 200, torch.bfloat16, "gelu")
    assert not runs_in_epilogue(tensors, "gelu")
    check_all(backward(tensors, "gelu"), exact(tensors, "gelu"), 2.5 * LIMITS[torch.bfloat16], kernel)


@pytest.mark.parametrize("kernel", TILES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", DERIVED)
def test_what_is_not_finite(force, kernel, dtype, activation):
    """As two products and a pass have it: in the gradient, the weight, what was saved; rows that fill no tile."""
    force(kernel)
    m, n, h = 200, 72, 328
    largest = torch.finfo(dtype).max

    def pattern(change):
        tensors = operands(m, n, h, dtype, activation)
        change(*tensors)
        got, want = backward(tensors, activation), with_a_pass(tensors, activation)
        for mine, wanted in ((got[0], want[0]), (got[2], want[2])):
            assert torch.equal(mine.isnan(), wanted.isnan())
            assert torch.equal(mine.isinf(), wanted.isinf())
            assert torch.equal(mine[mine.isinf()] > 0, wanted[wanted.isinf()] > 0)
            finite = wanted.isfinite()
            torch.testing.assert_close(mine[finite], wanted[finite], rtol=2e-2, atol=0.3)
        return got[2]

    def in_gradient(g, hidden, saved, x, w1, w2):
        g[3, 5] = math.inf
        saved[3] = saved[3].abs() + 1
        saved[3, ::3] = 0 if activation == "relu" else 2

    def in_weight(g, hidden, saved, x, w1, w2):
        g[:, 5] = g[:, 5].abs() + 0.1
        saved[:, 17] = 2
        w2[5, 17] = math.inf

    def in_saved(g, hidden, saved, x, w1, w2):
        saved[7, 9], saved[8, 10], saved[9, 11] = math.nan, math.inf, -math.inf
        saved[10, 12], saved[11, 13], saved[12, 14], saved[13, 15] = largest, -largest, 0.0, -0.0

    masked = pattern(in_gradient)
    if activation == "relu":
        assert masked[::3].isfinite().all() and masked[1::3].isinf().all()
    assert pattern(in_weight)[17] == math.inf, "rows that are not there add nothing"
    sums = pattern(in_saved)
    assert sums[12:16].isfinite().all() and (activation == "relu" or sums[9].isnan())


def test_in_a_cuda_graph(force):
    force("wgmma")
    tensors = operands(1000, 264, 328, torch.bfloat16, "gelu", k=136)
    backward(tensors, "gelu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(tensors, "gelu")
    for _ in range(3):
        tensors[0].normal_()
        tensors[2].normal_()
        graph.replay()
        for mine, wanted in zip(captured, backward(tensors, "gelu"), strict=True):
            assert torch.equal(mine, wanted)
