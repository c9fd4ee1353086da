"""The statistics of a comparison, as pure functions over recorded blocks.

A *block* runs every contestant twice, in an order drawn anew and then backwards (ABBA), so that a steady drift falls on
all alike. Its *log-ratio* of two contestants is ``log(time of the one / time of the other)``. What is told of a
comparison is the median log-ratio of all blocks, and an interval by a bootstrap over processes, then over the blocks of
each: what differs from one process to the next (addresses, the order of imports) does not shrink by repeating within
one. Few processes show a bootstrap too little of their spread: where Student's t of their medians gives a wider
interval, that one counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Interval", "bootstrap", "in_step", "kept", "log_ratios", "noise_floor"]

Blocks = Sequence[float]

RESAMPLES = 1000
LEVEL = 0.95
OUTLYING = 8.0
"""A block whose whole duration is so many (scaled) median deviations off is left out, whoever was slow in it."""
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95%, by degrees of freedom from 1; more than 9 count as 9."""
_NORMAL = 1.960


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval and standard error."""

    value: float
    low: float
    high: float
    error: float
    """The standard error; of an interval by Student's t, what would give it with many processes."""

    @property
    def detectable(self) -> float:
        """The smallest effect that this many blocks find in 80% of the cases, at 5%: about 2.8 standard errors."""
        return 2.8 * self.error


def log_ratios(over: Sequence[Blocks], under: Sequence[Blocks]) -> list[list[float]]:
    """``log(over / under)`` of each block, by process. Times of any unit, above 0; pairs have equal places.

    ValueError for numbers that are no pairs.
    """
    if [len(p) for p in over] != [len(p) for p in under]:
        raise ValueError(
            f"log_ratios: the blocks must be pairs, got {[len(p) for p in over]} and {[len(p) for p in under]}"
        )
    return [[math.log(o / u) for o, u in zip(a, b, strict=True)] for a, b in zip(over, under, strict=True)]


def bootstrap(processes: Sequence[Blocks], *, seed: int = 0) -> Interval:
    """The median of all blocks, and its interval.

    Args:
        processes: a value for each block of each process; at least two processes, each with a block.
        seed: of the resampling.
    """
    draws, value = _resampled(processes, seed)
    low, high = draws.quantile(_tails()).tolist()
    medians = [statistics.median(blocks) for blocks in processes]
    t = _T[min(len(medians) - 1, len(_T)) - 1]
    half = t * statistics.stdev(medians) / math.sqrt(len(medians))
    error = max(float(draws.std()), half / _NORMAL)
    return Interval(value, min(low, value - half), max(high, value + half), error)


def noise_floor(processes: Sequence[Blocks], *, seed: int = 0) -> float:
    """How far from 0 a comparison of equals lands: the 97.5th percentile of the resampled \\|median log-ratio\\|.

    Args:
        processes: log-ratios of a layer against itself, on the schedule of the comparison that is judged.
    """
    draws, _ = _resampled(processes, seed)
    return float((draws.abs()).quantile(torch.tensor(0.975, dtype=torch.float64)))


def kept(totals: Blocks) -> list[bool]:
    """Which blocks of a process count, told blindly: from how long each took as a whole, all contestants together."""
    middle = statistics.median(totals)
    spread = 1.4826 * statistics.median(abs(total - middle) for total in totals)
    return [spread == 0.0 or abs(total - middle) <= OUTLYING * spread for total in totals]


def in_step(left: Sequence[Blocks], right: Sequence[Blocks]) -> list[list[float]]:
    """``left - right`` of each block, by process."""
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(left, right, strict=True)]


def _resampled(processes: Sequence[Blocks], seed: int) -> tuple[Tensor, float]:
    if len(processes) < 2 or not all(len(blocks) for blocks in processes):
        raise ValueError(f"bootstrap: got blocks {[len(p) for p in processes]}, expected two processes or more of them")
    generator = torch.Generator().manual_seed(seed)
    longest = max(len(blocks) for blocks in processes)
    lengths = torch.tensor([len(blocks) for blocks in processes])
    table = torch.tensor(
        [[*blocks, *[math.nan] * (longest - len(blocks))] for blocks in processes], dtype=torch.float64
    )
    who = torch.randint(len(processes), (RESAMPLES, len(processes)), generator=generator)
    where = torch.rand(RESAMPLES, len(processes), longest, generator=generator, dtype=torch.float64)
    where = (where * lengths[who][..., None]).long()
    drawn = table[who[..., None], where]
    # a process with fewer blocks is drawn fewer times
    drawn[torch.arange(longest).expand_as(drawn) >= lengths[who][..., None]] = math.nan
    value = statistics.median(v for blocks in processes for v in blocks)
    return drawn.flatten(1).nanquantile(0.5, dim=1), value


def _tails() -> Tensor:
    return torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
