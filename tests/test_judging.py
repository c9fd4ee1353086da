"""The rule itself, on tensors whose errors are made to measure."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zoo import judging
from zoo.judging import Entry, Measure, judge, measure

EPS = torch.finfo(torch.float32).eps
HALF = torch.finfo(torch.bfloat16).eps


def _made(
    rms: float, *, peak: float = 0.0, shape: tuple[int, ...] = (64, 64), dtype: torch.dtype = torch.float32
) -> Measure:
    """A tensor of norm 1 and largest value 1 with a relative error of ``rms`` and a largest one of ``peak``."""
    return Measure(shape, dtype, rms, peak, 1.0, 1.0, float(math.prod(shape)))


def test_the_error_of_a_plain_sum() -> None:
    """One term after the other, of either sign: what is measured is what of_sum is made from."""
    for terms in (64, 784, 4096):
        a, b = torch.randn(64, terms), torch.randn(terms, 64)
        total = torch.zeros(64, 64)
        for k in range(terms):
            total.addr_(a[:, k], b[k])
        found = measure(total, a.double() @ b.double())
        assert 0.11 < found.error / EPS / math.sqrt(terms) < 0.19
        exact = replace(found, norm=0.0, peak=0.0).of_sum(terms)
        assert _one(found, exact).ok and not _one(found.scaled(2, found.dtype), exact).ok
        assert not _one(found, replace(exact, norm=0.0, peak=0.0)).ok or terms == 64
    assert _made(1e-3, dtype=torch.bfloat16).of_sum(4096) == _made(1e-3, dtype=torch.bfloat16)


def _one(got: Measure | None, want: Measure | None) -> Entry:
    (entry,) = judge("output", {"y": got}, {"y": want})
    return entry


def test_errors_are_measured_against_the_exact_value() -> None:
    exact = torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=torch.float64)
    m = measure(torch.tensor([[3.0, -4.5], [0.0, 1.0]]), exact)
    assert (m.shape, m.dtype, m.peak, m.exact_norm, m.exact_peak) == ((2, 2), torch.float32, 1.0, 5.0, 4.0)
    assert m.norm == pytest.approx(math.sqrt(1.25))
    assert m.error == pytest.approx(math.sqrt(1.25) / 5) and m.peak_error == 0.25


def test_the_exact_value_is_not_rounded_first() -> None:
    exact = torch.full((4,), 1.0, dtype=torch.float64) + 1e-10
    assert measure(exact.float(), exact).peak == pytest.approx(1e-10, rel=1e-5)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_squares_neither_overflow_nor_vanish(size: float) -> None:
    exact = torch.full((3,), size, dtype=torch.float64)
    m = measure(exact * 1.5, exact)
    assert m.error == pytest.approx(0.5) and m.exact_norm == pytest.approx(size * math.sqrt(3))


def test_values_that_carry_the_norm_are_counted() -> None:
    torch.manual_seed(0)
    flat = torch.randn(100_000, dtype=torch.float64)
    peaked = flat.clone()
    peaked[7] = 1e6
    assert measure(flat, flat).sample == pytest.approx(100_000, rel=0.02)
    assert measure(peaked, peaked).sample == pytest.approx(3, rel=0.01)
    ones = torch.ones(5, dtype=torch.float64)
    assert measure(ones, ones).sample == 5


def test_an_error_where_the_exact_value_is_zero() -> None:
    zero = torch.zeros(2000, dtype=torch.float64)
    right, wrong = measure(zero.float(), zero), measure(torch.full((2000,), 1e-30), zero)
    assert right.error == 0 and wrong.error == math.inf
    assert _one(right, right).ok and not _one(wrong, right).ok
    assert _one(wrong, wrong).ok


def test_zero_sized() -> None:
    empty = measure(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.float64))
    assert empty.error == 0 and _one(empty, empty).ok


def test_complex() -> None:
    exact = torch.tensor([3 + 4j] * 2000, dtype=torch.complex128)
    m = measure(exact.to(torch.complex64) + 1e-3j, exact)
    assert m.peak == pytest.approx(1e-3, rel=1e-3) and not _one(m, measure(exact.to(torch.complex64), exact)).ok


def test_sparse_gradients_are_measured() -> None:
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert measure(dense.to_sparse(), dense.double()).error == 0
    assert measure(dense.to_sparse(), dense.double().to_sparse() * 2).error == 0.5


# The rule


def test_twice_stock_is_the_limit() -> None:
    stock = _made(10 * EPS)
    assert _one(_made(19.9 * EPS), stock).ok
    entry = _one(_made(20.1 * EPS), stock)
    assert not entry.ok and entry.limit == pytest.approx(20 * EPS) and "error" in entry.reason
    assert entry.excess == pytest.approx(1.005)


def test_four_times_the_largest_error_is_the_limit() -> None:
    stock = _made(EPS, peak=10 * EPS)
    assert _one(_made(EPS, peak=39.9 * EPS), stock).ok
    entry = _one(_made(EPS, peak=40.1 * EPS), stock)
    assert not entry.ok and entry.max_limit == pytest.approx(40 * EPS) and "largest error" in entry.reason


def test_where_stock_is_exact_roundings_are_allowed() -> None:
    exact = _made(0.0)
    assert _one(_made(1.9 * EPS, peak=3.9 * EPS), exact).ok
    assert not _one(_made(2.1 * EPS), exact).ok
    assert not _one(_made(0.0, peak=4.1 * EPS), exact).ok


def test_limits_are_relative_to_the_exact_value() -> None:
    exact = replace(_made(0.0), exact_norm=1000.0, exact_peak=100.0)
    assert _one(replace(exact, norm=1900 * EPS, peak=390 * EPS), exact).ok
    assert not _one(replace(exact, norm=2100 * EPS), exact).ok
    assert not _one(replace(exact, peak=410 * EPS), exact).ok


def _beside(got: Measure, want: Measure, other: float = 4 * EPS) -> Entry:
    """Judged beside four tensors of which stock's error is ``other``."""
    rest = dict.fromkeys("abcd", _made(other))
    return judge("gradient", {"y": got, **rest}, {"y": want, **rest})[0]


def test_noise_is_judged_as_noise() -> None:
    stock = _made(1e9, peak=1e8)
    assert _beside(_made(7.9e9, peak=15.9e8), stock).ok  # 2 and 4, NOISE times
    assert not _beside(_made(8.1e9), stock).ok and not _beside(_made(1e9, peak=16.1e8), stock).ok
    for other in (_made(0.9, peak=1.0), _made(1e9, dtype=torch.bfloat16), _made(1e9, dtype=torch.float64)):
        assert not _beside(replace(other, norm=2.1 * other.norm), other).ok
    zero = replace(_made(1e-6, peak=1e-7), exact_norm=0.0, exact_peak=0.0)
    assert _beside(replace(zero, norm=7.9e-6), zero).ok
    entry = _beside(replace(zero, norm=8.1e-6), zero)
    assert entry.reason == "the norm 8.1e-06 is over the limit of 8.0e-06, where the exact value is zero"
    assert _beside(replace(zero, peak=3.2e-6), zero).excess == pytest.approx(2.0)


@pytest.mark.parametrize("other", [3e-4, 3e-3])
def test_noise_of_coarser_roundings_is_no_excuse(other: float) -> None:
    """Of TF32 and of bfloat16 under autocast, where float32 gradients are as coarse."""
    stock = _made(1e9, peak=1e8)
    assert _beside(_made(1.9e9, peak=3.9e8), stock, other).ok
    assert not _beside(_made(2.1e9), stock, other).ok and not _beside(_made(1e9, peak=4.1e8), stock, other).ok
    assert not _one(_made(2.1e9), stock).ok  # nothing beside it shows what it was computed in


def test_terms_that_cancel() -> None:
    """A plain sum leaves more than one by pairs, as torch's is; a fault in a single term leaves far more."""
    exact = torch.randn(768, 196, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact -= exact.mean(0)
    terms = exact.float()
    plain = torch.zeros(196)
    for row in terms:
        plain += row
    stock, honest = (measure(value, exact.sum(0)) for value in (terms.sum(0), plain))
    assert stock.error > 1 and honest.norm > 2.5 * stock.norm, "this case should be one"
    assert _beside(honest, stock).ok
    tf32 = (terms.view(torch.int32) & ~0x1FFF).view(torch.float32)
    doubled = torch.cat([terms[:1] * (1 + 1e-3), terms[1:]])
    for wrong in (terms[1:], tf32, terms.bfloat16().float(), doubled):
        assert not _beside(measure(wrong.sum(0), exact.sum(0)), stock).ok


@pytest.mark.parametrize("larger", [1.0, 4.0, 1e6])
def test_two_exact_values_of_different_size(larger: float) -> None:
    """Errors are held to those of stock's exact value; what an entry says of them is what failed."""
    stock = _made(1.3e-3, peak=1e-2)
    big = {"exact_norm": larger, "exact_peak": larger}
    assert _one(replace(stock, norm=2.5e-3, peak=3.9e-2, **big), stock).ok
    entry = _one(replace(stock, norm=2.7e-3, **big), stock)
    assert not entry.ok and entry.error > entry.limit and entry.excess == pytest.approx(2.7 / 2.6)
    assert "largest error" in _one(replace(stock, peak=4.1e-2, **big), stock).reason
    entry = _one(replace(stock, norm=2.7e-3, exact_norm=1 / larger, exact_peak=1 / larger), stock)
    assert not entry.ok and entry.error > entry.limit


def test_an_exact_value_that_is_zero_for_stock_alone() -> None:
    stock = replace(_made(0.0), exact_norm=0.0, exact_peak=0.0)
    assert _one(replace(_made(0.0), exact_norm=1.0), stock).ok and not _one(_made(EPS), stock).ok


def test_half_precision_is_rounded_once() -> None:
    exact = _made(0.0, dtype=torch.bfloat16)
    assert _one(_made(0.49 * HALF, dtype=torch.bfloat16), exact).ok
    assert not _one(_made(0.51 * HALF, dtype=torch.bfloat16), exact).ok


def test_a_small_sample_scatters() -> None:
    small = {"shape": (16,), "dtype": torch.bfloat16}  # 2 * (1 + 2 / 4) times eps
    assert _one(_made(2.9 * HALF, **small), _made(0.0, **small)).ok
    assert not _one(_made(3.1 * HALF, **small), _made(0.0, **small)).ok


def test_the_sample_counts_and_not_the_size() -> None:
    peaked = replace(_made(0.0), sample=16.0)
    assert _one(_made(2.9 * EPS), peaked).ok and not _one(_made(3.1 * EPS), peaked).ok


def _pooled(lucky: float, others: list[float], got: float) -> Entry:
    """A tensor of 16 values with an error of ``lucky`` in stock, judged with large ones."""
    stock = {"small": _made(lucky, peak=lucky, shape=(16,))} | {f"t{i}": _made(e, peak=e) for i, e in enumerate(others)}
    custom = stock | {"small": _made(got, peak=got, shape=(16,))}
    return judge("gradient", custom, stock)[0]


def test_a_lucky_small_tensor_is_judged_by_the_pool() -> None:
    # root mean square of 0 and three times 10 eps: 8.66 eps; times 3 for 16 values
    assert _pooled(0.0, [10 * EPS] * 3, 25.9 * EPS).ok
    assert not _pooled(0.0, [10 * EPS] * 3, 26.1 * EPS).ok


def test_large_tensors_are_not_excused_by_the_pool() -> None:
    stock = {"big": _made(EPS)} | {f"t{i}": _made(100 * EPS) for i in range(3)}
    assert not judge("gradient", stock | {"big": _made(3 * EPS)}, stock)[0].ok


def test_one_outlier_does_not_poison_the_pool() -> None:
    errors = [EPS] * 8 + [1e9]
    assert not _pooled(EPS, errors, 1e-3).ok
    # it counts as 10 eps: the root mean square is sqrt(109 / 10) = 3.3 eps, times 3
    assert _pooled(EPS, errors, 9.8 * EPS).ok and not _pooled(EPS, errors, 10 * EPS).ok


def test_a_pool_of_mostly_exact_tensors() -> None:
    # root mean square of six zeros and two times 10 eps: 5 eps, times 3
    assert _pooled(0.0, [0.0] * 5 + [10 * EPS] * 2, 14.9 * EPS).ok
    assert not _pooled(0.0, [0.0] * 5 + [10 * EPS] * 2, 15.1 * EPS).ok


def test_kinds_are_named_and_stocks_order_is_kept() -> None:
    entries = judge("gradient", {"b": _made(0), "a": _made(0)}, {"a": _made(0), "b": _made(0)})
    assert [(e.kind, e.name) for e in entries] == [("gradient", "a"), ("gradient", "b")]


# What fails without a comparison


def test_shapes_are_never_broadcast() -> None:
    exact = torch.ones(3, 4, dtype=torch.float64)
    stock = measure(torch.ones(3, 4), exact)
    for shape in ((3, 1), (1, 4), (4,), (12,), (3, 4, 1), ()):
        entry = _one(measure(torch.ones(shape), exact), stock)
        assert not entry.ok and entry.reason == f"shape: got {shape}, expected (3, 4)", shape
        assert entry.excess == math.inf and not entry.comparable


def test_another_dtype_fails() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    entry = _one(measure(torch.ones(3).half(), exact), measure(torch.ones(3), exact))
    assert not entry.ok and entry.reason == "dtype: got torch.float16, expected torch.float32"
    assert entry.dtype == "float16"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["custom", "stock", "exact"])
def test_non_finite_never_passes(bad: float, where: str) -> None:
    tensors = {name: torch.ones(4, 5) for name in ("custom", "stock", "exact")}
    tensors[where][2, 3] = bad
    exact = tensors["exact"].double()
    entry = _one(measure(tensors["custom"], exact), measure(tensors["stock"], exact))
    assert not entry.ok and "1 of 20 values are not finite, the first at [2, 3]" in entry.reason
    assert {"custom": "1 of", "stock": "the reference: ", "exact": "the float64 reference: "}[where] in entry.reason


def test_all_non_finite_alike_does_not_pass() -> None:
    bad = torch.full((4,), math.inf)
    assert not _one(measure(bad, bad.double()), measure(bad, bad.double())).ok


def test_a_gradient_on_one_side_only() -> None:
    some = _made(0.0)
    (lost,) = judge("gradient", {"w": None}, {"w": some})
    (extra,) = judge("gradient", {"w": some}, {"w": None})
    (more,) = judge("gradient", {"v": some}, {})
    assert not (lost.ok or extra.ok or more.ok)
    assert lost.reason == "there is no gradient; the reference has one"
    assert extra.reason == more.reason == "the reference has no such gradient"
    assert judge("gradient", {"w": None}, {"w": None}) == ()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_may_be_wrong_as_often_as_stocks(dtype: torch.dtype) -> None:
    exact = torch.tensor([0, 1, 1, 0]).to(dtype)

    def off(n: int) -> Tensor:
        return torch.cat([(1 - exact[:n].long()).to(dtype), exact[n:]])

    assert _one(measure(off(1), exact), measure(off(1), exact)).ok
    entry = _one(measure(off(2), exact), measure(off(1), exact))
    assert not entry.ok and entry.reason == "2 of 4 values are wrong; 1 of the reference's are"


def test_scaling_and_maximum_of_measures() -> None:
    a, b = _made(1.0, peak=4.0), _made(2.0, peak=3.0)
    for larger in (a.at_least(b), b.at_least(a)):
        assert (larger.norm, larger.peak, larger.exact_norm) == (2.0, 4.0, 1.0)
    scaled = a.scaled(0.5, torch.float64)
    assert (scaled.norm, scaled.peak, scaled.exact_norm, scaled.dtype) == (0.5, 2.0, 1.0, torch.float64)


def test_the_exact_dtype() -> None:
    assert judging.exact_dtype(torch.bfloat16) is torch.float64
    assert judging.exact_dtype(torch.complex64) is torch.complex128
    assert judging.exact_dtype(torch.int32) is torch.int32
