"""The rule by which a tensor is judged: its error against float64, beside the stock layer's own error.

A fixed tolerance is too strict for one shape and too lax for the next. The stock model shows what is honest in its
dtype, at this size, on these values. With ``e = ||y - exact|| / ||exact||`` (root mean square) and
``m = max|y - exact|``, a tensor passes if

* ``e <= RATIO * max(e of stock, floor * eps)``, and
* ``m <= PEAK_RATIO * max(m of stock, eps * max|exact|)``, so that one wrong element in millions is found;
* it has the shape, the dtype and the structure of stock's (nothing is broadcast, nothing converted);
* all is finite: the tensor, stock's, and the exact value.

``eps`` is that of the tensor's dtype. The floor is for where stock happens to be exact. It is 1, since honest ways to
add up in the tensor's own dtype differ by a few roundings; and ``HALF_FLOOR`` in half precision, where the sum is kept
in float32 and rounded once.

A tensor of fewer than ``SMALL`` values is too small a sample of stock's error: one number may be right by luck. Those
values count that carry the norm, by the participation ratio ``||exact||_2^4 / ||exact||_4^4``. For ``n`` of them

* ``RATIO`` is ``1 + SCATTER / sqrt(n)`` times as large;
* the floor is 1 in any dtype;
* stock's error is at least the *pooled* one: the root mean square of the relative errors of all tensors that are judged
  together, each counted as at most ``OUTLIER`` times their median, so that one gradient that is zero but for rounding
  does not excuse all the others. The largest errors, relative to ``max|exact|``, are pooled in the same way.

A gradient that cancels has a value of zero but for rounding, such as that of a bias before a layer norm or a softmax,
which do not see it. Stock's relative error is then over 1: neither has a right digit, and how large its noise is
depends on the order in which the terms are added up. In float32, one term after the other leaves 4 times what pairs
leave for 768 terms that cancel, 5.6 times for 2048 (measured); so both ratios are ``NOISE`` times as large there. What
a fault leaves is far more: a term that is lost 10^5 times, terms rounded to TF32 10^3 times as much as pairs do. The
tensor's own magnitude, and a factor in it, nobody can judge: the tensors beside it show those.
Where the pooled error is over ``IN_FLOAT32`` eps, values were rounded more coarsely than to float32 (autocast, TF32).
Noise comes of that then, in any order of the terms, and a term that is lost leaves but 5 times as much: no ``NOISE``.

The exact values of both may differ, where each is compared at its own activations. The limits are those of stock's: a
layer whose results are too small, before a norm that does not see it, has larger gradients and larger errors in them.

Where it is known how many terms a layer adds up for a value, in float32 or wider, stock's error is at least what one
term added after the other leaves (:meth:`Measure.of_sum`). Stock may add up in blocks, and is then several times better
than a plain loop over 2048 terms, which is honest too.

Integers and booleans: no more values may differ from the exact ones than do in stock's.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.readout import numbers

__all__ = [
    "HALF_FLOOR",
    "IN_FLOAT32",
    "NOISE",
    "OUTLIER",
    "PEAK_RATIO",
    "RATIO",
    "SCATTER",
    "SMALL",
    "SUM_FLOOR",
    "Entry",
    "Measure",
    "exact_dtype",
    "judge",
    "judged_entries",
    "measure",
    "measure_all",
    "refusal",
]

RATIO = 2.0
PEAK_RATIO = 4.0
HALF_FLOOR = 0.25  # rounding an exact result once leaves about this much of eps, as a root mean square
SUM_FLOOR = 0.1  # times RATIO it is a third over the 0.15 that a plain sum leaves
SMALL = 1024
SCATTER = 2.0
OUTLIER = 10.0
NOISE = 4.0
IN_FLOAT32 = 512.0


@dataclass(frozen=True)
class Measure:
    """How far one tensor is from its exact value; norms and maxima are absolute."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    norm: float
    peak: float
    exact_norm: float
    exact_peak: float
    sample: float
    """How many values carry the norm of the exact tensor, at most all of them."""
    fault: str = ""

    @property
    def error(self) -> float:
        """``||y - exact|| / ||exact||``; 0 for no error at all, inf for one where the exact value is zero."""
        return _ratio(self.norm, self.exact_norm)

    @property
    def peak_error(self) -> float:
        """``max|y - exact| / max|exact|``."""
        return _ratio(self.peak, self.exact_peak)

    def scaled(self, factor: float, dtype: torch.dtype) -> Measure:
        """The same measure with errors ``factor`` times as large, spoken of ``dtype``."""
        return replace(self, norm=self.norm * factor, peak=self.peak * factor, dtype=dtype)

    def of_sum(self, terms: int) -> Measure:
        """The same measure with errors at least about those of a plain sum of so many terms, if not in half precision.

        Rounding after each of n terms of either sign leaves 0.15 sqrt(n) eps, as a root mean square, and at most about
        0.4 sqrt(n) eps of the largest value (measured).
        """
        if self.dtype not in (torch.float32, torch.float64) or self.fault:
            return self
        least = SUM_FLOOR * math.sqrt(terms) * torch.finfo(self.dtype).eps
        peak = max(self.peak, 2 * least * self.exact_peak)
        return replace(self, norm=max(self.norm, least * self.exact_norm), peak=peak)

    def at_least(self, other: Measure) -> Measure:
        """The larger errors of both."""
        return replace(self, norm=max(self.norm, other.norm), peak=max(self.peak, other.peak))


@dataclass(frozen=True)
class Entry:
    """The judgement of one tensor.

    ``error`` is relative (root mean square) and ``max_error`` absolute, both against float64; ``reference_error`` and
    ``reference_max_error`` are the stock model's own; ``limit`` and ``max_limit`` are what the first two may be.
    ``exact_norm`` is the Euclidean norm of the float64 value. ``reason`` says in plain words why an entry is not
    ``ok``. Numbers are nan where nothing could be compared.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    error: float
    reference_error: float
    limit: float
    max_error: float
    reference_max_error: float
    max_limit: float
    exact_norm: float
    ok: bool
    reason: str = ""

    @property
    def excess(self) -> float:
        """How many times the limit the error is (the worse of both rules); inf where nothing could be compared.

        Of the largest errors alone where the exact value is zero, as no error is relative to it.
        """
        if not self.comparable:
            return math.inf
        error = 0.0 if math.isinf(self.limit) else _ratio(self.error, self.limit)
        return max(error, _ratio(self.max_error, self.max_limit))

    @property
    def comparable(self) -> bool:
        """Whether it was judged by its values, rather than failed for its shape, dtype or non-finite values."""
        return not (math.isnan(self.error) or math.isnan(self.max_error))


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor of ``dtype`` is computed as a reference: float64, complex128, or itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def measure(value: Tensor, exact: Tensor) -> Measure:
    """The errors of ``value`` against ``exact`` (any shapes; nan where the shapes differ).

    Non-finite values on either side are told in ``fault``.
    """
    return measure_all({"": (value, exact)})[""]


def measure_all(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Measure]:
    """:func:`measure` of many pairs (value, exact), with one wait for the device: a model has hundreds of tensors."""
    dense = {name: (_dense(value), _dense(exact)) for name, (value, exact) in pairs.items()}
    sizes = numbers(_sizes(value, exact) for value, exact in dense.values())
    return {name: _measure(*dense[name], found) for name, found in zip(dense, sizes, strict=True)}


def _sizes(value: Tensor, exact: Tensor) -> Tensor:
    """The numbers that a measure is made of; none where none are needed."""
    if value.shape != exact.shape or value.numel() == 0:
        return torch.empty(0)
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return (value != exact).sum()
    exact = exact.to(exact_dtype(value.dtype))
    return torch.stack([*_norms(value.to(exact.dtype) - exact), *_norms(exact)])


def _measure(value: Tensor, exact: Tensor, sizes: Any) -> Measure:
    shape, dtype = tuple(value.shape), value.dtype
    nothing = Measure(shape, dtype, math.nan, math.nan, math.nan, math.nan, math.nan)
    if shape != tuple(exact.shape):
        return nothing
    if value.numel() == 0:
        return Measure(shape, dtype, 0.0, 0.0, 0.0, 0.0, 0.0)
    if not (dtype.is_floating_point or dtype.is_complex):
        wrong, size = float(sizes), float(value.numel())
        return Measure(shape, dtype, wrong, wrong, size, size, size)
    if not all(map(math.isfinite, sizes)):
        fault = _fault("the float64 reference", exact.to(exact_dtype(dtype))) or _fault("", value)
        if fault:
            return replace(nothing, fault=fault)
    peak, norm, _, exact_peak, exact_norm, exact_norm4 = sizes
    # 3 makes normally distributed values count as what they are.
    sample = min(value.numel(), 3 * (exact_norm / exact_norm4) ** 4) if exact_norm4 else 0.0
    return Measure(shape, dtype, peak * norm, peak, exact_peak * exact_norm, exact_peak, sample)


def judge(kind: str, custom: Mapping[str, Measure | None], stock: Mapping[str, Measure | None]) -> tuple[Entry, ...]:
    """Judge the tensors of one kind together, in stock's order; ``None`` stands for a gradient that is absent.

    What is absent on both sides has no entry.
    """
    usable = [m for m in stock.values() if m is not None and (m.dtype.is_floating_point or m.dtype.is_complex)]
    pool = _pool(usable, lambda m: m.error), _pool(usable, lambda m: m.peak_error)
    names = [*stock, *(name for name in custom if name not in stock)]
    found = (_judge_one(kind, name, custom.get(name), stock.get(name), pool) for name in names)
    entries = tuple(entry for entry in found if entry is not None)
    heard = _heard.get()
    if heard is not None:
        heard += entries
    return entries


@contextlib.contextmanager
def judged_entries() -> Iterator[list[Entry]]:
    """Every entry that :func:`judge` makes inside, in this thread, is in the list too."""
    entries: list[Entry] = []
    token = _heard.set(entries)
    try:
        yield entries
    finally:
        _heard.reset(token)


_heard: ContextVar[list[Entry] | None] = ContextVar("heard", default=None)


def _judge_one(
    kind: str, name: str, got: Measure | None, want: Measure | None, pool: tuple[float, float]
) -> Entry | None:
    if got is None and want is None:
        return None
    if got is None or want is None:
        reason = f"there is no {kind}; the reference has one" if got is None else f"the reference has no such {kind}"
    elif got.shape != want.shape:
        reason = f"shape: got {got.shape}, expected {want.shape}"
    elif got.dtype != want.dtype:
        reason = f"dtype: got {got.dtype}, expected {want.dtype}"
    elif got.fault or want.fault:
        reason = got.fault or f"the reference: {want.fault}"
    else:
        return _judge_values(kind, name, got, want, pool)
    here = got or want
    assert here is not None
    return refusal(kind, name, here.shape, _name(here.dtype), reason)


def _judge_values(kind: str, name: str, got: Measure, want: Measure, pool: tuple[float, float]) -> Entry:
    limit, max_limit = _limits(want, pool)
    # Compared as absolute numbers: where the exact value is zero, relative ones say nothing.
    over = got.norm > limit or math.isnan(got.norm)
    max_over = got.peak > max_limit or math.isnan(got.peak)
    entry = Entry(
        name,
        kind,
        got.shape,
        _name(got.dtype),
        got.error,
        want.error,
        _ratio(limit, got.exact_norm),
        got.peak,
        want.peak,
        max_limit,
        want.exact_norm,
        ok=not (over or max_over),
    )
    if entry.ok:
        return entry
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        reason = f"{got.norm:.0f} of {got.exact_norm:.0f} values are wrong; {want.norm:.0f} of the reference's are"
    elif over and got.exact_norm == 0:
        reason = f"the norm {got.norm:.1e} is over the limit of {limit:.1e}, where the exact value is zero"
    elif over:
        reason = f"error {entry.error:.1e} is over the limit of {entry.limit:.1e}"
    else:
        reason = f"largest error {got.peak:.1e} is over the limit of {max_limit:.1e}"
    return replace(entry, reason=reason)


def _limits(stock: Measure, pool: tuple[float, float]) -> tuple[float, float]:
    """What the norm and the peak of custom's error may be."""
    if not (stock.dtype.is_floating_point or stock.dtype.is_complex):
        return stock.norm, stock.peak
    eps = torch.finfo(stock.dtype).eps
    ratio, least, max_least = RATIO, _floor(stock.dtype) * eps, eps
    if 0 < stock.sample < SMALL:
        ratio *= 1 + SCATTER / math.sqrt(stock.sample)
        least, max_least = max(eps, pool[0]), max(eps, pool[1])
    noise = NOISE if _is_noise(stock, pool[0]) else 1.0
    return (
        noise * ratio * max(stock.norm, least * stock.exact_norm),
        noise * PEAK_RATIO * max(stock.peak, max_least * stock.exact_peak),
    )


def _is_noise(stock: Measure, pooled: float) -> bool:
    """Whether stock has no right digit, by the order of a sum in float32 alone."""
    in_float32 = stock.dtype is torch.float32 and 0 < pooled < IN_FLOAT32 * torch.finfo(torch.float32).eps
    return in_float32 and stock.norm > stock.exact_norm


def _floor(dtype: torch.dtype) -> float:
    return HALF_FLOOR if dtype in (torch.float16, torch.bfloat16) else 1.0


def _pool(measures: Iterable[Measure], relative: Callable[[Measure], float]) -> float:
    errors = [error for error in map(relative, measures) if math.isfinite(error)]
    if not any(errors):
        return 0.0
    most = OUTLIER * statistics.median(error for error in errors if error)
    return math.sqrt(statistics.fmean(min(error, most) ** 2 for error in errors))


def refusal(kind: str, name: str, shape: tuple[int, ...], dtype: str, reason: str) -> Entry:
    """The entry of a tensor that fails without its values being compared."""
    nan = math.nan
    return Entry(name, kind, shape, dtype, nan, nan, nan, nan, nan, nan, nan, ok=False, reason=reason)


def _fault(whose: str, tensor: Tensor) -> str:
    finite = torch.isfinite(tensor)
    if bool(finite.all()):
        return ""
    bad = (~finite).nonzero()
    text = f"{len(bad)} of {tensor.numel()} values are not finite, the first at {bad[0].tolist()}"
    return f"{whose}: {text}; choose inputs for which it is finite" if whose else text


def _norms(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest magnitude, and the 2- and the 4-norm of all divided by it, so that no power overflows."""
    magnitudes = tensor.abs()
    peak = magnitudes.max()
    magnitudes /= torch.where(peak > 0, peak, 1.0)
    return peak, torch.linalg.vector_norm(magnitudes, 2), torch.linalg.vector_norm(magnitudes, 4)


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.inf


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
