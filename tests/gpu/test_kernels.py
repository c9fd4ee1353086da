"""Each CUDA kernel, forced, against float64: shapes, layouts, types, activations, what is not finite, repeated runs."""

import math

import pytest
import torch
import torch.nn.functional as F

from support.gpu_kernels import ACTIVATIONS, CUDA, LIMITS, NEEDS_HOPPER, check, exact_gradient, normal
from zoo import ops
from zoo.ops import _library

BF16 = [f"wgmma:{config}:{spread}" for config in (0, 1, 2, 4, 5) for spread in (0, 1)]
F16 = [f"wgmma:{config}:{spread}" for config in (0, 1) for spread in (0, 1)]
SPLIT = [f"split6:{config}:{spread}" for config in (0, 1, 3, 6) for spread in (0, 1)]
RAW = [f"split6:{config}:{spread}" for config in (8, 9, 10, 11) for spread in (0, 1)]  # A split in registers
SMALL = ["small", *(f"small:{blocks}" for blocks in (1, 2, 4, 8))]
FORCED = [
    *((kernel, torch.bfloat16) for kernel in [*BF16, *SMALL, "mma", "cublas"]),
    *((kernel, torch.float16) for kernel in [*F16, *SMALL, "mma", "cublas"]),
    *((kernel, torch.float32) for kernel in [*SPLIT, *SMALL, "cublas"]),
    ("cublas", torch.float64),
]
SHAPES = [
    (200, 784, 1000),
    (1000, 96, 200),
    (520, 776, 1000),
    (130, 129, 33),
    (1600, 1000, 3000),
    (64, 256, 10),
    (1, 72, 8),
]


@pytest.mark.parametrize(("kernel", "dtype"), FORCED, ids=str)
def test_forward_and_gradients(force, kernel, dtype):
    force(kernel)
    limit = 1e-6 if (kernel, dtype) == ("cublas", torch.float32) else LIMITS[dtype]
    names = list(ACTIVATIONS)
    for number, (m, k, n) in enumerate(SHAPES):
        x, w, b = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype, scale=k**-0.5), normal(n, dtype=dtype)
        g = normal(m, n, dtype=dtype)
        activation = names[number % len(names)]
        what = f"{kernel} {dtype} {(m, k, n)} {activation}"
        z = F.linear(x.double(), w.double(), b.double())
        y, saved = torch.ops.zoo.linear_activation(x, w, b, activation, True)
        check(y, ACTIVATIONS[activation](z), limit, what)
        if saved.numel():
            check(saved, z, limit, f"{what}: before the activation")
        check(ops.linear(x, w), z - b.double(), limit, f"{what}: without bias")
        check(ops.linear_input_grad(g, w), g.double() @ w.double(), limit, f"{what}: dX")
        check(ops.linear_weight_grad(g, x), g.double().t() @ x.double(), limit, f"{what}: dW")
        again = torch.ops.zoo.linear_activation(x, w, b, activation, True)
        assert torch.equal(again[0], y) and torch.equal(again[1], saved), f"{what}: another run gives other bits"
        assert torch.equal(ops.linear_weight_grad(g, x), ops.linear_weight_grad(g, x)), f"{what}: dW differs"


@pytest.mark.parametrize(("kernel", "dtype"), [*FORCED, *((kernel, torch.float32) for kernel in RAW)], ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations_of_operands_along_their_rows(force, kernel, dtype, activation):
    """A weight kept as (K, N), with such an input too: the layouts of the gradients' products, with an epilogue."""
    force(kernel)
    m, k, n = 520, 264, 208
    limit = 1e-6 if (kernel, dtype) == ("cublas", torch.float32) else LIMITS[dtype]
    w, b = normal(k, n, dtype=dtype, scale=k**-0.5).t(), normal(n, dtype=dtype)
    for x in (normal(m, k, dtype=dtype), normal(k, m, dtype=dtype).t()):
        z = F.linear(x.double(), w.double(), b.double())
        y, saved = torch.ops.zoo.linear_activation(x, w, b, activation, True)
        check(y, ACTIVATIONS[activation](z), limit, f"{kernel} {x.stride()} {activation}")
        if saved.numel():
            check(saved, z, limit, f"{kernel} {x.stride()} {activation}: before the activation")


@pytest.mark.parametrize("kernel", RAW)
def test_a_split_in_registers(force, kernel):
    """All three products: no size fills a tile, more tiles than blocks, rows that lie apart."""
    force(kernel)
    limit = LIMITS[torch.float32]
    names = list(ACTIVATIONS)
    shapes = [s for s in SHAPES if s[1] % 4 == 0]
    shapes += [(513, 4, 97), (333, 36, 96), (65, 132, 288), (40000, 96, 100), (256, 4096, 96), (300, 32, 2)]
    for number, (m, k, n) in enumerate(shapes):
        x, w, b = normal(m, k), normal(n, k, scale=k**-0.5), normal(n)
        activation = names[number % len(names)]
        what = f"{kernel} {(m, k, n)} {activation}"
        z = F.linear(x.double(), w.double(), b.double())
        y, saved = torch.ops.zoo.linear_activation(x, w, b, activation, True)
        check(y, ACTIVATIONS[activation](z), limit, what)
        if saved.numel():
            check(saved, z, limit, f"{what}: before the activation")
        check(ops.linear(x, w), z - b.double(), limit, f"{what}: without bias")
        assert torch.equal(torch.ops.zoo.linear_activation(x, w, b, activation, True)[0], y), f"{what}: other bits"
        g = normal(m, n)
        if n % 4 == 0:
            check(ops.linear_input_grad(g, w), g.double() @ w.double(), limit, f"{what}: dX")
            deep = limit * max(1, m / 2048) ** 0.5  # float32's own rounding: a chunk of 32 rows is one addition
            check(ops.linear_weight_grad(g, x), g.double().t() @ x.double(), deep, f"{what}: dW")
            assert torch.equal(ops.linear_weight_grad(g, x), ops.linear_weight_grad(g, x)), f"{what}: dW differs"
            got = torch.ops.zoo.linear_backward(g, None, x, w, "none", True, True, False)
            check(got[0], g.double() @ w.double(), limit, f"{what}: dX of linear_backward")
            check(got[1], g.double().t() @ x.double(), deep, f"{what}: dW of linear_backward")
    wide, w = normal(300, 520), normal(200, 131)
    for x in (wide[:, 4:135], wide[::2, :131], wide[7:8, :131]):
        check(ops.linear(x, w), F.linear(x.double(), w.double()), limit, f"{kernel} {x.stride()}")
    turned = normal(520, 300).t()  # along its rows, and W along K
    for x, weight in ((wide[:, 1:132], w), (turned, normal(200, 520))):
        with pytest.raises(RuntimeError, match="splits a in rows of whole 16 bytes, along M only with b along N"):
            ops.linear(x, weight)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_weights_gradient_turned(force, activation):
    """x, which is wide, is split in registers, and dY comes in planes: no pass over x, and dW is stored turned."""
    force("split6")
    for m, k, n in ((4096, 3072, 96), (20000, 772, 72), (9999, 1604, 200), (40000, 384, 96)):
        x, g = normal(m, k), normal(m, n)
        saved = None if activation == "none" else normal(m, n)
        if activation == "relu":
            saved = saved.relu()
        _, exact = exact_gradient(g, saved, activation)
        want, what = exact.t() @ x.double(), f"turned {activation} {(m, k, n)}"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _, dw, db = torch.ops.zoo.linear_backward(g, saved, x, None, activation, False, True, True)
            torch.cuda.synchronize()
        names = [event.key for event in profile.key_averages()]
        assert any("gemm_kernel" in name for name in names) and not any("split_kernel" in name for name in names), what
        check(dw, want, 2.5 * LIMITS[torch.float32], what)
        check(db, exact.sum(0), 2.5 * LIMITS[torch.float32], f"{what}: db")
        w = normal(n, k, scale=k**-0.5)
        dx, again, _ = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
        check(dx, exact @ w.double(), 2.5 * LIMITS[torch.float32], f"{what}: dX")
        assert torch.equal(again, dw), f"{what}: dW differs"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_wide_gradient_is_read_as_it_is(force, activation):
    """Without an activation dX and dW from dY itself: no planes of it, those of x alone."""
    force("split6")
    for m, k, n in ((60000, 96, 288), (9999, 36, 1608), (70000, 96, 384)):
        x, w, g = normal(m, k), normal(n, k, scale=k**-0.5), normal(m, n)
        saved = None if activation == "none" else normal(m, n)
        if activation == "relu":
            saved = saved.relu()
        _, exact = exact_gradient(g, saved, activation)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        got = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
        peak = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in got)
        what = f"{activation} {(m, k, n)}"
        if activation == "none":
            assert peak < 1.3 * 1.5 * x.nbytes + 2**24 < 1.5 * g.nbytes, what
        want = (exact @ w.double(), exact.t() @ x.double(), exact.sum(0))
        for name, mine, wanted in zip(("dX", "dW", "db"), got, want, strict=True):
            check(mine, wanted, 2.5 * LIMITS[torch.float32], f"{what} {name}")
        again = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_pass_over_a_gradient_whatever_its_rows(dtype):
    """Rows that fill a block's threads or do not, few and many of them: db alone, and dY act'(z) with it."""
    for m, n in (
        (256, 1000),
        (257, 72),
        (300, 96),
        (1000, 2304),
        (5000, 288),
        (70000, 40),
        (1100000, 24),  # 1024 rows a block, 4 threads a row
        (200704, 288),  # 512, 8
        (20000, 1024),  # 128, 32
        (9, 4096),
    ):
        g, z, w = normal(m, n, dtype=dtype), normal(m, n, dtype=dtype), normal(n, 16, dtype=dtype)
        for activation in ("none", "gelu"):
            rounded, exact = exact_gradient(g, None if activation == "none" else z, activation)
            saved = None if activation == "none" else z
            dx, _, db = torch.ops.zoo.linear_backward(g, saved, None, w, activation, True, False, True)
            what = f"{dtype} {activation} {(m, n)}"
            check(db, exact.sum(0), 2.5 * LIMITS[dtype], f"{what} db")
            check(dx, rounded @ w.double(), 2.5 * LIMITS[dtype], f"{what} dX")
            alone = torch.ops.zoo.linear_backward(g, saved, None, None, activation, False, False, True)[2]
            check(alone, exact.sum(0), 2.5 * LIMITS[dtype], f"{what} db alone")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_in_a_turned_gradient(force, monkeypatch, value):
    for place in ("x", "g"):
        x, g = normal(6000, 1540), normal(6000, 64)
        (x if place == "x" else g)[1234, 33] = value
        x[1234, 7] = g[1234, 9] = 0.0
        monkeypatch.setenv("ZOO_LINEAR_KERNEL", "tiled")
        wanted = torch.ops.zoo.linear_backward(g, None, x, None, "none", False, True, False)[1]
        force("split6")
        mine = torch.ops.zoo.linear_backward(g, None, x, None, "none", False, True, False)[1]
        assert torch.equal(mine.isnan(), wanted.isnan()) and torch.equal(mine.isinf(), wanted.isinf()), place
        assert torch.equal(mine[mine.isinf()] > 0, wanted[wanted.isinf()] > 0), place
        finite = wanted.isfinite()
        torch.testing.assert_close(mine[finite], wanted[finite], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", RAW)
def test_what_is_not_finite_stays_where_a_is_split_in_registers(force, monkeypatch, kernel):
    """Each alone, as the sum may hide what it meets: inf, NaN, a NaN whose upper half is inf's, in A and in B."""
    x, w = normal(700, 512), normal(304, 512)
    low = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32).to(CUDA)[0]
    for place, value in (("a", math.inf), ("a", -math.inf), ("a", math.nan), ("a", low), ("a", 3e38), ("b", math.inf)):
        changed, weight = x.clone(), w.clone()
        (changed if place == "a" else weight)[300, 77] = value
        weight[5, 77] = 0.0
        weight[6, 77] = 1e-3
        for run in (
            ops.linear,
            lambda a, b: ops.linear_input_grad(a, b.t().contiguous()),
            lambda a, b: ops.linear_weight_grad(a.t().contiguous(), b.t().contiguous()),
        ):
            monkeypatch.setenv("ZOO_LINEAR_KERNEL", "tiled")
            wanted = run(changed, weight)
            force(kernel)
            mine = run(changed, weight)
            assert torch.equal(mine.isnan(), wanted.isnan()), (place, value)
            assert torch.equal(mine.isinf(), wanted.isinf()), (place, value)
            assert torch.equal(mine[mine.isinf()] > 0, wanted[wanted.isinf()] > 0), (place, value)
            finite = wanted.isfinite()
            torch.testing.assert_close(mine[finite], wanted[finite], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemv(force, dtype, activation):
    force("gemv")
    wide = 16 // dtype.itemsize
    shapes = [(1, 4096, 1000), (2, 64, 7), (3, 200, 33), (5, 776, 10), (8, 1024, 300), (1, 2048, 5000), (4, 8192, 3)]
    shapes += [(m, wide * (2 * m - 1), 1 + 7 * (m - 1)) for m in range(1, 9)]
    for m, k, n in shapes:
        x, w, b = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype, scale=k**-0.5), normal(n, dtype=dtype)
        if n == 1:  # a lone sum that cancels has no digits to compare
            x, w, b = x.abs(), w.abs(), b.abs()
        z = F.linear(x.double(), w.double(), b.double())
        y, saved = torch.ops.zoo.linear_activation(x, w, b, activation, True)
        check(y, ACTIVATIONS[activation](z), LIMITS[dtype], f"gemv {(m, k, n)}")
        if saved.numel():
            check(saved, z, LIMITS[dtype], f"gemv {(m, k, n)} before")
        check(ops.linear(x, w), z - b.double(), LIMITS[dtype], f"gemv {(m, k, n)} without bias")
        assert torch.equal(torch.ops.zoo.linear_activation(x, w, b, activation, True)[0], y)


def test_gemv_reads_rows_that_lie_apart(force):
    force("gemv")
    x, w = normal(8, 1000)[::2, 4:404], normal(700, 1000)[::3, 8:408]
    check(ops.linear(x, w), F.linear(x.double(), w.double()), LIMITS[torch.float32], "gemv of views")
    row = x[:1].expand(5, 400)
    check(ops.linear(row, w), F.linear(row.double(), w.double()), LIMITS[torch.float32], "gemv of one row five times")


@pytest.mark.parametrize("make", [torch.randn, torch.rand])
def test_gemv_is_as_accurate_as_float32(force, make):
    force("gemv")
    for m, k, n in ((1, 4096, 4096), (8, 4096, 4096), (1, 4096, 1000), (1, 2048, 1000)):
        x, w = make(m, k, device=CUDA), make(n, k, device=CUDA)
        exact = F.linear(x.double(), w.double())
        mine, theirs = (float((y.double() - exact).norm() / exact.norm()) for y in (ops.linear(x, w), F.linear(x, w)))
        print(f"{make.__name__} {(m, k, n)}: zoo {mine:.3g}, torch {theirs:.3g}")
        assert mine <= max(theirs, 1.5e-7)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_few_rows(force, dtype, activation):
    """All three, each subset of them, N and K that fill no block, N that blocks share, and bits that stay the same."""
    force("gemv")
    wide, limit = 16 // dtype.itemsize, 2.5 * LIMITS[dtype]
    shapes = [(m, wide * (3 * m - 2), 1 + 37 * (m - 1)) for m in range(1, 9)]
    shapes += [(1, 2048, 1000), (1, 512, 20000), (3, 4096, 1000), (8, 768, 3072), (2, 104, 9000), (4, 24, 1500)]
    for m, k, n in shapes:
        x, w, g = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), normal(m, n, dtype=dtype)
        saved = None if activation == "none" else normal(m, n, dtype=dtype)
        if activation == "relu":
            saved = saved.relu()
        if saved is not None:
            saved[0, 0] = 1  # a lone gradient that is not near zero
        rounded, exact = exact_gradient(g, saved, activation)
        want = (rounded @ w.double(), rounded.t() @ x.double(), exact.sum(0))
        got = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
        for name, mine, wanted in zip(("dX", "dW", "db"), got, want, strict=True):
            check(mine, wanted, limit, f"few rows {dtype} {activation} {(m, k, n)} {name}")
        for asked in ((True, False, False), (False, True, False), (False, False, True), (True, True, False)):
            some = torch.ops.zoo.linear_backward(
                g, saved, x if asked[1] else None, w if asked[0] else None, activation, *asked
            )
            for wanted, mine, again, name in zip(asked, got, some, ("dX", "dW", "db"), strict=True):
                assert again.shape == (mine.shape if wanted else (0,))
                if wanted:
                    check(again, want[("dX", "dW", "db").index(name)], limit, f"{asked} {(m, k, n)} {name}")
        again = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_gradients_of_few_rows_that_lie_apart(force):
    force("gemv")
    x, w = normal(6, 808)[::2, 4:404], normal(900, 808)[::3, 8:408]
    turned, one = normal(300, 3).t(), normal(1, 1).expand(3, 300)
    for g in (turned, one):
        for activation in ("none", "gelu"):
            saved = None if activation == "none" else normal(300, 3).t()
            rounded, exact = exact_gradient(g, saved, activation)
            got = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
            want = (rounded @ w.double(), rounded.t() @ x.double(), exact.sum(0))
            for name, mine, wanted in zip(("dX", "dW", "db"), got, want, strict=True):
                check(mine, wanted, 6e-7, f"few rows {g.stride()} {activation} {name}")


@pytest.mark.parametrize("kernel", ["split6", "split6:3:1", "wgmma", "wgmma:4:1", "small"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_in_one(force, kernel, activation):
    """linear_backward against float64; rows of whole 16 bytes take the fused pass, the others the operators."""
    force(kernel)
    dtype = torch.bfloat16 if kernel.startswith("wgmma") else torch.float32
    limit = 2.5 * LIMITS[dtype]
    for m, k, n in ((520, 776, 1000), (300, 100, 64), (1600, 1000, 304), (130, 40, 33)):
        x, w, g = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype, scale=k**-0.5), normal(m, n, dtype=dtype)
        _, z = torch.ops.zoo.linear_activation(x, w, normal(n, dtype=dtype), activation, True)
        saved = normal(m, n, dtype=dtype).relu() if activation == "relu" else z if z.numel() else None
        _, exact = exact_gradient(g, saved, activation)
        got = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
        want = (exact @ w.double(), exact.t() @ x.double(), exact.sum(0))
        for name, mine, wanted in zip(("dX", "dW", "db"), got, want, strict=True):
            check(mine, wanted, limit, f"{kernel} {activation} {(m, k, n)} {name}")
        again = torch.ops.zoo.linear_backward(g, saved, x, w, activation, True, True, True)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        alone = torch.ops.zoo.linear_backward(g, saved, None, None, activation, False, False, True)[2]
        check(alone, want[2], limit, f"{kernel} {activation} {(m, k, n)} db alone")


@pytest.mark.parametrize("kernel", ["split6", "split6:0:1", "small", "gemv", "cublas"])
def test_what_is_not_finite_stays(force, monkeypatch, kernel):
    m, k, n = (8, 512, 304) if kernel == "gemv" else (300, 512, 304)
    x, w, g = normal(m, k), normal(n, k), normal(m, n)
    x[0, 5], x[1, 7], x[2, 9], x[3, 100] = math.inf, -math.inf, math.nan, 3e38
    w[4, 5], w[5, 0], g[6, 3] = 0.0, math.inf, math.inf
    w[:, 100] = 0.5
    g[3] *= 0.1  # not beyond float32 together with 3e38
    z = normal(m, n)
    monkeypatch.setenv("ZOO_LINEAR_KERNEL", "tiled")
    want = [ops.linear(x, w), *torch.ops.zoo.linear_backward(g, z, x, w, "gelu", True, True, True)]
    force(kernel)
    got = [ops.linear(x, w), *torch.ops.zoo.linear_backward(g, z, x, w, "gelu", True, True, True)]
    for mine, wanted in zip(got, want, strict=True):
        assert torch.equal(mine.isnan(), wanted.isnan())
        assert torch.equal(mine.isinf(), wanted.isinf())
        assert torch.equal(mine[mine.isinf()] > 0, wanted[wanted.isinf()] > 0)
        finite = wanted.isfinite()
        torch.testing.assert_close(mine[finite], wanted[finite], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", ["split6:0:0", "split6:3:1", "split6:8:0", "split6:10:1", "small"])
def test_the_planes_do_not_overflow_where_float32_does_not(force, kernel):
    """A product just under float32's largest, whose first planes' product is over it."""
    force(kernel)
    x, w = torch.zeros(300, 256, device=CUDA), torch.zeros(304, 256, device=CUDA)
    x[7, 3], w[9, 3], w[11, 3] = 2.0**64 * 1.0045, 2.0**64 * 0.995, 2.0**64 * 1.0045
    y = ops.linear(x, w)
    torch.testing.assert_close(y, x @ w.t(), rtol=1e-6, atol=0)
    assert y[7, 11].isinf() and y.isfinite().sum() == y.numel() - 1
    x.zero_(), w.zero_()
    x[7, 3], x[8, 5], w[9, 3], w[11, 5] = 0.5, 3.4e38, 3.4e38, 0.5  # beyond bf16's range, when rounded
    torch.testing.assert_close(ops.linear(x, w), x @ w.t(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", [f"split3:{config}:{spread}" for config in (0, 1) for spread in (0, 1)])
def test_split3(force, kernel):
    torch.set_float32_matmul_precision("high")
    force(kernel)
    for m, k, n in SHAPES:
        x, w, g = normal(m, k), normal(n, k, scale=k**-0.5), normal(m, n)
        check(ops.linear(x, w), F.linear(x.double(), w.double()), 1e-5, f"{kernel} {(m, k, n)}")
        got = torch.ops.zoo.linear_backward(g, None, x, w, "none", True, True, True)
        want = (g.double() @ w.double(), g.double().t() @ x.double(), g.double().sum(0))
        for name, mine, wanted in zip(("dX", "dW", "db"), got, want, strict=True):
            check(mine, wanted, 1e-5, f"{kernel} {(m, k, n)} {name}")


@pytest.mark.parametrize("kernel", ["split6", "wgmma", "mma"])
def test_operands_that_are_copied_first(force, kernel):
    force(kernel)
    dtype = torch.float32 if kernel == "split6" else torch.bfloat16
    wide, weight = normal(300, 520, dtype=dtype), normal(200, 520, dtype=dtype, scale=0.1)
    turned = normal(260, 300, dtype=dtype).t()
    pairs = [
        (wide[:, 1:261], weight[:, 1:261]),
        (wide[:, ::2], weight[:, ::2]),
        (turned, weight[:, :260]),
        (wide[:1, :260].expand(300, 260), weight[:, 260:]),
        (wide[:, :1].expand(300, 260), weight[:, 260:]),
        (wide[:, :260].flip(0), weight[:, 260:]),
    ]
    for x, w in pairs:
        check(ops.linear(x, w), F.linear(x.double(), w.double()), LIMITS[dtype], f"{kernel} {x.stride()} {w.stride()}")
    a, b = normal(260, 300, dtype=dtype).t(), normal(200, 260, dtype=dtype).t()
    check(ops.matmul(a, b), a.double() @ b.double(), LIMITS[dtype], f"{kernel}: a along M, b along K")


@pytest.mark.parametrize("kernel", ["split6:0", "split6:9"])
@pytest.mark.parametrize("scale", [1e15, 1e-15])
def test_split_keeps_its_accuracy_at_any_magnitude(force, kernel, scale):
    force(kernel)
    x, w = normal(300, 768, scale=scale), normal(384, 768)
    check(ops.linear(x, w), F.linear(x.double(), w.double()), 2.5e-7, f"scale {scale}")


@pytest.mark.parametrize("kernel", ["split6:0", *(kernel for kernel in RAW if kernel.endswith(":0"))])
def test_float32_is_as_accurate_as_float32(force, kernel):
    """On data where sums cancel and on data where they do not: at most cuBLAS's error, or what rounding alone makes."""
    force(kernel)
    for make in (torch.randn, torch.rand):
        x, w = make(1024, 4096, device=CUDA), make(1024, 4096, device=CUDA)
        exact = F.linear(x.double(), w.double())
        mine, theirs = (float((y.double() - exact).norm() / exact.norm()) for y in (ops.linear(x, w), F.linear(x, w)))
        print(f"{make.__name__}: zoo {mine:.3g}, torch {theirs:.3g}")
        assert mine <= max(theirs, 2e-7)


def test_split3_is_better_than_tf32(force):
    x, w = normal(1024, 1024), normal(1024, 1024)
    exact = F.linear(x.double(), w.double())
    torch.set_float32_matmul_precision("high")
    force("split3")
    mine, theirs = (float((y.double() - exact).norm() / exact.norm()) for y in (ops.linear(x, w), F.linear(x, w)))
    print(f"zoo {mine:.3g}, tf32 {theirs:.3g}")
    assert 2e-7 < mine < theirs / 10


def test_what_is_chosen_runs():
    """explain tells the truth: the chosen kernel is the one in the profile."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    x, w = normal(1024, 768), normal(768, 768)
    names = {"split6": "gemm_kernel", "wgmma": "gemm_kernel", "small": "small_kernel", "gemv": "gemv_kernel"}
    large = normal(12608, 768).bfloat16()
    for a, b in ((x, w), (large, w.bfloat16()), (x[:64], w), (x[:1], w)):
        kernel = ops.explain(a, b).kernel
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ops.linear(a, b)
            torch.cuda.synchronize()
        assert any(names[kernel] in event.key for event in profile.key_averages()), kernel


def test_few_rows_take_one_kernel_back():
    x, w, g = normal(1, 2048), normal(1000, 2048), normal(1, 1000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.ops.zoo.linear_backward(g, None, x, w, "none", True, True, True)
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels = [event.name for event in profile.events() if event.device_type == on_gpu]
    assert len(kernels) == 1 and "few_rows_kernel" in kernels[0]


def test_kernels_are_those_of_the_library():
    assert set(NEEDS_HOPPER) < set(_library.CUDA_KERNELS)
