"""Which kernel runs a product: the choice as a pure function, asked on the CPU for a GPU that need not be there."""

import itertools

import pytest
import torch

import zoo._C as core
from zoo import ops
from zoo.ops._library import CUDA_KERNELS

H200, A100 = (90, 132), (80, 108)
VIT = {"qkv": (12608, 768, 2304), "fc1": (12608, 768, 3072), "fc2": (12608, 3072, 768), "proj": (12608, 768, 768)}


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def choice(shape, dtype=torch.float32, activation=None, gpu=H200):
    m, k, n = shape
    return ops.explain(meta(m, k, dtype=dtype), meta(n, k, dtype=dtype), activation=activation, gpu=gpu)


def query(**changes):
    """choose's arguments for a float32 product of 4096^3 on an H200."""
    given = {
        "batch": 1,
        "M": 4096,
        "N": 4096,
        "K": 4096,
        "dtype": "float32",
        "a": (4096, 1, True),
        "b": (4096, 1, True),
    }
    given |= {"activation": "none", "precision": "highest", "capability": 90, "processors": 132, "hopper": True}
    return core.choose(*(given | {"forced": None} | changes).values())


def test_on_the_device_of_the_tensors(device):
    x, w, b = torch.randn(2, 4, device=device), torch.randn(3, 4, device=device), torch.randn(3, device=device)
    found = ops.explain(x, w, b, activation="gelu")
    assert found.kernel in ({"aten"} if device == "cpu" else set(CUDA_KERNELS))
    assert found.rejected and found.kernel not in {r.kernel for r in found.rejected}
    assert found.kernel in str(found) and all(r.reason in str(found) for r in found.rejected)
    with pytest.raises(RuntimeError, match="in_features"):
        ops.explain(x, w.T)
    with pytest.raises(RuntimeError, match="one device"):
        ops.explain(x, w.to("meta"))
    with pytest.raises(ValueError, match="unknown activation"):
        ops.explain(x, w, activation="tanh")
    assert ops.explain(x.to("meta"), w.to("meta")).kernel == "none"


@pytest.mark.parametrize("shape", [(2, 3, 0), (0,), (0, 5), (4, 0, 5), (5,), (2, 3, 5)])
def test_leading_dimensions_and_zero_sizes(shape):
    found = ops.explain(meta(*shape), meta(7, shape[-1]), gpu=H200)
    assert found.kernel == ("tiled" if 0 in shape else ops.explain(meta(6, 5), meta(7, 5), gpu=H200).kernel)


@pytest.mark.parametrize("name", VIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_products_on_hopper_use_its_tensor_cores(name, dtype):
    found = choice(VIT[name], dtype)
    assert found.kernel == ("split6" if dtype == torch.float32 else "wgmma")
    assert {r.kernel for r in found.rejected} == {"aten", *CUDA_KERNELS} - {found.kernel}
    assert all(r.reason for r in found.rejected) and "tiles" in found.configuration


def test_float32_precision_is_followed():
    before = torch.get_float32_matmul_precision()
    try:
        kernels = {}
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            kernels[precision] = choice(VIT["fc1"]).kernel
            assert choice(VIT["fc1"], torch.bfloat16).kernel == "wgmma"
    finally:
        torch.set_float32_matmul_precision(before)
    assert kernels == {"highest": "split6", "high": "cublas", "medium": "cublas"}  # in tf32, as torch's own


def test_few_tiles_share_k_and_few_rows_read_the_weight_once():
    head = choice((64, 2048, 1000))
    assert head.kernel == "small" and "8 blocks a tile" in head.configuration
    assert choice((1, 4096, 4096)).kernel == choice((1, 2048, 1000)).kernel == "gemv"


def together(m, k, n, dtype="float32", activation="none", gpu=H200, hopper=True, forced=None):
    return core.choose_together(m, n, k, dtype, activation, True, "highest", *gpu, hopper, forced)


def apart(m, k, n, dtype="float32", activation="none", precision="highest", gpu=H200, hopper=True, forced=None):
    return core.choose_apart(m, n, k, dtype, activation, True, precision, *gpu, hopper, forced)


def test_a_gradient_wider_than_the_input_is_read_as_it_is():
    """Measured on an H200, (200704, 96, 288): planes of dY 227 us, and 315 of products; dY itself 102, and 334."""
    for shape, activation in (((200704, 96, 288), "none"), ((200704, 96, 384), "gelu")):
        planes, raw_dx, turn, *kernels, microseconds = apart(*shape, activation=activation)
        assert not (planes or raw_dx or turn) and kernels == ["split6", "split6"] and microseconds > 0


def test_a_gradient_narrower_than_the_input_is_in_planes_for_dw():
    """Measured on an H200, (200704, 384, 96): dW turned 226 us, else 418; dX 188 of dY itself, 221 of planes."""
    assert apart(200704, 384, 96)[:3] == (True, True, True)
    assert apart(200704, 384, 96, activation="gelu")[:3] == (True, False, True), "dY act'(z) is in planes alone"
    for products in ((12608, 3072, 768), (4096, 4096, 4096)):
        assert apart(*products)[:3] == (True, False, True), "products bound both, and planes are there"


def test_the_bias_of_many_rows_takes_a_launch_more():
    def more(rows):
        with_bias, without = (
            core.choose_apart(rows, 1000, 768, "float32", "gelu", bias, "highest", *H200, True, None)[-1]
            for bias in (True, False)
        )
        return with_bias - without

    assert more(256) == 0 < more(257)


def test_gradients_without_planes():
    for arguments in (
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "float64"},
        {"hopper": False},
        {"gpu": A100},
        {"precision": "high"},  # torch's tf32
        {"forced": "cublas"},
    ):
        assert not any(apart(200704, 384, 96, **arguments)[:3]), arguments
    assert not any(apart(200704, 384, 100)[:3]), "no pass reads rows of this length"
    assert apart(200704, 384, 96, forced="split6:1")[:3] == (True, False, False)
    with pytest.raises(RuntimeError, match="ZOO_LINEAR_KERNEL is 'fast'"):
        apart(64, 64, 64, forced="fast")
    with pytest.raises(ValueError, match="choose_apart: sizes must not be negative"):
        apart(-1, 64, 64)


def test_the_gradients_of_few_tiles_are_one_launch():
    for m, k, n in ((64, 768, 1000), (64, 512, 1000), (64, 256, 256), (64, 256, 10)):
        better, before, dw, dx, microseconds = together(m, k, n)
        assert better and not before and {dw, dx} <= {1, 2, 4, 8} and len({dw, dx} - {1}) <= 1
        assert microseconds > 0
    assert together(64, 768, 1000)[2:4] == (1, 4), "dW has tiles enough; dX has few, and its K is shared"
    assert not together(*VIT["fc1"])[0] and not together(4096, 4096, 4096, "bfloat16")[0]
    assert not together(64, 768, 1000, gpu=A100, hopper=False)[0] and not together(64, 768, 1000, "float64")[0]
    assert not together(64, 1, 1000)[0], "rows of one element lie along neither"


def test_the_gradients_activation_costs_as_it_is_read_or_before():
    plain, relu, gelu = (together(200, 768, 3072, activation=a, forced="small")[4] for a in ("none", "relu", "gelu"))
    assert plain < relu < gelu
    assert not together(64, 768, 1000, activation="gelu", forced="small")[1], "forced, there is no pass before"


def test_forcing_one_launch_for_both_gradients():
    for cluster in (1, 2, 4, 8):
        better, _, dw, dx, _ = together(*VIT["fc1"], forced=f"small:{cluster}")
        assert better and max(dw, dx) == cluster
    assert not together(64, 768, 1000, forced="split6")[0]
    with pytest.raises(RuntimeError, match="1, 2, 4 or 8 blocks share a tile"):
        together(64, 2048, 1000, forced="small:3")
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        together(64, 2048, 1000, activation="tanh")
    with pytest.raises(ValueError, match="must not be negative"):
        together(-1, 2048, 1000)


def through(m, n, k, dtype="bfloat16", activation="gelu", sums=True, gpu=H200, hopper=True, forced=None):
    return core.choose_through(m, n, k, dtype, activation, sums, *gpu, hopper, forced)


def test_a_large_gradients_activation_is_in_the_epilogue_of_its_product():
    large = [(12608, 3072, 768), (12544, 3072, 768), (200704, 384, 96), (50176, 768, 192), (12544, 1536, 384)]
    for shape, dtype, activation in itertools.product(
        large, ("bfloat16", "float16"), ("relu", "gelu", "gelu_tanh", "silu")
    ):
        better, tile, microseconds = through(*shape, dtype, activation)
        assert better and tile in (0, 1) and microseconds > through(*shape, dtype, activation, sums=False)[2] > 0
    assert not through(64, 3072, 768)[0], "few tiles, each of which takes as long as many"


def test_a_gradient_whose_activation_takes_a_pass():
    shape = (12608, 3072, 768)
    assert not any(through(*shape, dtype)[0] for dtype in ("float32", "float64"))
    assert not through(*shape, activation="none")[0] and not through(*shape, hopper=False)[0]
    assert not through(*shape, gpu=A100)[0] and not through(0, 3072, 768)[0]
    assert not through(12608, 3076, 768)[0] and not through(12608, 3072, 764)[0], "rows of no whole 16 bytes"


def test_forcing_the_activation_into_the_epilogue():
    assert through(64, 3072, 768, forced="wgmma")[0] and through(1, 8, 8, forced="wgmma")[0]
    assert [through(12608, 3072, 768, forced=f"wgmma:{tile}:0")[:2] for tile in (0, 1)] == [(True, 0), (True, 1)]
    for forced in ("wgmma:2", "wgmma:0:1", "small", "cublas", "mma"):
        assert not through(12608, 3072, 768, forced=forced)[0]
    with pytest.raises(RuntimeError, match="ZOO_LINEAR_KERNEL is 'wgmma:'"):
        through(12608, 3072, 768, forced="wgmma:")
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        through(12608, 3072, 768, activation="tanh")
    with pytest.raises(ValueError, match="must not be negative"):
        through(-1, 3072, 768)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_chips_and_float64_use_cublas(dtype):
    assert choice(VIT["fc1"], dtype, "gelu", gpu=A100).kernel == "cublas"
    assert choice(VIT["fc1"], torch.bfloat16, "gelu", gpu=A100).kernel in ("mma", "cublas")
    old = choice(VIT["fc1"], torch.float16, gpu=(75, 40))
    assert (
        old.kernel == "cublas" and {r.kernel: r.reason for r in old.rejected}["mma"] == "needs compute capability 8.0"
    )
    assert choice(VIT["fc1"], torch.float64, gpu=H200).kernel == "cublas"
    assert all("9.0" in r.reason or r.kernel not in ("wgmma", "split6") for r in choice(VIT["fc1"], gpu=A100).rejected)


def test_a_build_without_code_for_hopper_says_so():
    kernel, *_, rejected = query(hopper=False)
    assert kernel == "cublas" and dict(rejected)["split6"] == "this build has no code for sm_90a"


def test_layouts():
    def configuration(**changes):
        return query(dtype="bfloat16", forced="wgmma", **changes)[:2]

    assert configuration()[0] == "wgmma" and "copied" not in configuration()[1]
    assert "a copied first" in configuration(a=(4096, 1, False))[1]  # not aligned
    assert "b copied first" in configuration(b=(4099, 1, True))[1]  # rows not of 16 bytes
    assert "a copied first" in configuration(a=(0, 1, True))[1]  # expanded rows overlap
    assert "a copied first" in configuration(a=(-4096, 1, True))[1]
    assert "both operands copied" in configuration(a=(8192, 2, True), b=(8192, 2, True))[1]
    assert "copied" not in configuration(b=(1, 4096, True))[1]  # the input's gradient
    assert "copied" not in configuration(a=(1, 4096, True), b=(1, 4096, True))[1]  # the weight's
    assert "a copied first" in configuration(a=(1, 4096, True))[1]  # no kernel has this pair
    # float32 is copied into planes anyway, where rows may lie as they like
    assert "copied" not in query(a=(4099, 1, False), b=(0, 1, True))[1]
    assert "copied" in query(a=(8192, 2, True))[1]


def test_thin_float32_products_split_a_in_registers():
    thin = {(200704, 384, 96): None, (200704, 96, 384): "gelu", (200704, 96, 288): None, (49152, 196, 384): "gelu"}
    for shape, activation in {**thin, VIT["fc2"]: None, VIT["proj"]: None}.items():
        found = choice(shape, activation=activation)
        assert found.kernel == "split6" and "a split in registers" in found.configuration, found
        if shape in thin:
            assert "192x96 tiles" in found.configuration, "three workers: short tiles wait for instructions"

    def configuration(**changes):
        return query(**({"M": 50176, "N": 192, "K": 768, "a": (768, 1, True), "b": (768, 1, True)} | changes))[:2]

    raw = "split6", "128x192 tiles, a split in registers"
    assert configuration() == raw and configuration(b=(1, 192, True)) == raw, "W either way: the forward and dX"
    assert configuration(a=(772, 1, True)) == raw, "rows that lie apart"
    assert configuration(a=(1, 50176, True), b=(1, 192, True)) == raw, "both along their rows: dW"
    # what TMA does not read as it lies is split by a pass before: not aligned, rows of no whole 16 bytes, along M
    for a in ((768, 1, False), (770, 1, True), (0, 1, True), (1, 50176, True), (2, 768, True)):
        kernel, words = configuration(a=a)
        assert kernel == ("small" if a == (1, 50176, True) else "split6") and "registers" not in words, a
    assert "registers" not in configuration(precision="high", forced="split3")[1]


def test_forcing_a_split_in_registers():
    tiles = {8: "128x192 tiles", 9: "128x128 tiles", 10: "192x96 tiles", 11: "128x96 tiles"}
    for number, tile in tiles.items():
        assert query(forced=f"split6:{number}:0")[1] == f"{tile}, a split in registers"
        with pytest.raises(RuntimeError, match=f"split6:{number} cannot.*in rows of whole 16 bytes, along M only with"):
            query(forced=f"split6:{number}", a=(1, 4096, True))
        with pytest.raises(RuntimeError, match="no such tile shape"):
            query(forced=f"split3:{number}", precision="high")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_product_has_a_kernel(dtype):
    sizes = (0, 1, 7, 64, 1000, 100_000, 2**31)
    layouts = ((1000, 1, True), (1, 1000, True), (0, 0, False), (-3, 2, False))
    for m, n, k in itertools.product(sizes, repeat=3):
        for a, b in itertools.product(layouts, repeat=2):
            for batch in (0, 1, 5):
                args = {"batch": batch, "M": m, "N": n, "K": k, "dtype": dtype, "a": a, "b": b}
                kernel, words, reason, time, rejected = query(**args)
                assert time > 0 and words and reason
                assert {kernel, *(r[0] for r in rejected)} == set(CUDA_KERNELS)
                if 0 in (m, n, k, batch):
                    assert kernel == "tiled"
                if max(m, n, k) == 2**31:  # beyond the 32-bit indices of the rest
                    assert kernel in ("tiled", "gemv", "cublas", "mma")


def test_forced(monkeypatch):
    monkeypatch.setenv("ZOO_LINEAR_KERNEL", "tiled")
    found = choice(VIT["fc1"])
    assert found.kernel == "tiled" and "ZOO_LINEAR_KERNEL" in found.reason
    for kernel, why in (("wgmma", "multiplies 2-byte types"), ("gemv", "up to 8 rows"), ("split3", "less accurate")):
        monkeypatch.setenv("ZOO_LINEAR_KERNEL", kernel)
        with pytest.raises(
            RuntimeError, match=f"ZOO_LINEAR_KERNEL={kernel} cannot compute this product: .*{why}.*unset"
        ):
            choice(VIT["fc1"])
    for wrong in ("fast", "wgmma:", "wgmma:x", "wgmma:1:2", "wgmma:1:1:1", "split"):
        monkeypatch.setenv("ZOO_LINEAR_KERNEL", wrong)
        with pytest.raises(RuntimeError, match=f"'{wrong}'; expected tiled, gemv, cublas, mma, small, wgmma"):
            choice(VIT["fc1"])
    monkeypatch.setenv("ZOO_LINEAR_KERNEL", "split6:6:1")
    assert choice(VIT["fc1"]).configuration == "192x128 tiles, the last round spread along K"
    monkeypatch.setenv("ZOO_LINEAR_KERNEL", "wgmma:2:0")
    assert choice(VIT["fc1"], torch.bfloat16).configuration == "128x256 tiles"
    monkeypatch.setenv("ZOO_LINEAR_KERNEL", "wgmma:3")
    with pytest.raises(RuntimeError, match="no such tile shape"):
        choice(VIT["fc1"], torch.bfloat16)
    monkeypatch.setenv("ZOO_LINEAR_KERNEL", "")
    assert choice(VIT["fc1"]).kernel == "split6"


def test_choose_refuses_what_it_does_not_know():
    for name, word in (("dtype", "int8"), ("activation", "tanh"), ("precision", "low")):
        with pytest.raises(ValueError, match=f"unknown {name} '{word}'"):
            query(**{name: word})
    with pytest.raises(ValueError, match="negative"):
        query(M=-1)


@pytest.mark.parametrize(("m", "k", "n"), [(200704, 384, 96), (200704, 96, 288), (200704, 96, 384), (49152, 196, 384)])
def test_weight_gradients_of_many_rows_in_tf32_are_left_to_torch(m, k, n):
    """Few tiles, but cuBLAS shares their long K: 66 to 135 us on an H200; by planes 2 to 3 times as much."""
    gradient = {"M": n, "N": k, "K": m, "a": (1, n, True), "b": (1, k, True)}
    assert query(**gradient, precision="high")[0] == "cublas"
    assert query(**gradient)[0] == "split6"


def test_small_float32_products_take_what_was_measured_to_be_fastest():
    """By hand on an H200, each with 1, 2, 4 and 8 blocks a tile and by split6."""
    fastest = {
        (64, 768, 1000): 4,
        (64, 2048, 1000): 8,
        (256, 2048, 1000): 2,
        (64, 512, 1000): 4,
        (256, 512, 1000): 2,
        (64, 784, 256): 8,
        (64, 256, 256): 4,
        (64, 256, 10): 4,
    }
    for shape, blocks in fastest.items():
        found = choice(shape)
        assert (found.kernel, found.configuration) == ("small", f"64x64 tiles, {blocks} blocks a tile"), shape
    assert {choice(shape).kernel for shape in ((1024, 768, 768), (3136, 768, 768), (200704, 96, 288))} == {"split6"}


def test_small_float32_backward_passes_take_what_was_measured_to_be_fastest():
    for shape in ((64, 768, 1000), (64, 2048, 1000), (64, 784, 256), (64, 256, 256)):
        assert together(*shape)[:4] == (True, False, 1, 4)
    assert together(64, 512, 1000)[:4] == (True, False, 1, 8) and together(256, 2048, 1000)[:4] == (True, False, 1, 2)
    assert not together(3136, 768, 768)[0], "102 us apart, 119 in one"
    assert not together(200704, 96, 288)[0] and together(200704, 96, 288)[4] < 551, (
        "dW turned; 803 us were measured if not"
    )


def test_small_float32_products_of_ragged_rows_cost_more():
    """Copies of 4 bytes: 20.7 us for (64, 2047, 999), where (64, 2048, 1000) takes 14.1."""
    whole, ragged = (
        query(M=64, N=n, K=k, a=(k, 1, True), b=(k, 1, True), forced="small:8")[3]
        for k, n in ((2048, 1000), (2047, 999))
    )
    assert whole == pytest.approx(14.1, rel=0.1) and ragged == pytest.approx(20.7, rel=0.15)
