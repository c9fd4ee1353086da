"""Times contestants against each other: interleaved in random order, by medians, with an interval of their ratio.

A *contestant* is a function of the number of a buffer set; it computes on that set and returns the tensors that it
computed. A *block* runs it once on every set. Sets are rotated so that what one call left in the cache is gone before
the next call on the same buffers (:func:`rotated_sets`). A *repetition* is one block of each contestant, in an order
drawn anew, so that whatever else the machine is doing falls on all of them alike; ratios are of medians, and their
interval is a bootstrap over whole repetitions.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Clock", "Contestant", "Ratio", "Timing", "WallClock", "finish", "poison", "race", "ratio", "rotated_sets"]

Contestant = Callable[[int], Sequence[Tensor]]

WARM_UP = 2
"""Blocks of each contestant before those that count."""
FEWEST = 5
"""Repetitions that are made whatever they cost."""
_RESAMPLES = 2000


class Clock(Protocol):
    """Runs and times blocks of its contestants."""

    name: str
    """"graph", "events" or "wall"."""
    sets: int

    def contestants(self) -> tuple[str, ...]:
        """Their names."""

    def block(self, contestant: str) -> float:
        """Run the contestant once on every set. Returns microseconds a call."""

    def outputs(self, contestant: str) -> Sequence[Sequence[Tensor]]:
        """What its timed calls computed, by set; NaN where they wrote nothing."""


class WallClock:
    """The host's clock around a block, the device idle before and after: for the CPU, and for whole models."""

    name = "wall"

    def __init__(self, contestants: Mapping[str, Contestant], *, sets: int, device: torch.device) -> None:
        self.sets, self._contestants, self._device = sets, dict(contestants), device
        self._outputs: dict[str, list[Sequence[Tensor]]] = {}

    def contestants(self) -> tuple[str, ...]:
        return tuple(self._contestants)

    def block(self, contestant: str) -> float:
        run = self._contestants[contestant]
        outputs: list[Sequence[Tensor]] = []
        # Memory that is used again holds NaN, and no right result of before.
        poison(self._outputs.pop(contestant, ()))
        elapsed = self._microseconds(lambda: outputs.extend(run(i) for i in range(self.sets)))
        self._outputs[contestant] = outputs
        return elapsed / self.sets

    def _microseconds(self, work: Callable[[], None]) -> float:
        finish(self._device)
        started = time.perf_counter_ns()
        work()
        finish(self._device)
        return (time.perf_counter_ns() - started) / 1e3

    def outputs(self, contestant: str) -> Sequence[Sequence[Tensor]]:
        return self._outputs[contestant]


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """What :func:`race` measured."""

    clock: str
    sets: int
    samples: dict[str, tuple[float, ...]]
    """Contestant -> microseconds a call, one for each repetition; equal places are of one repetition."""

    @property
    def repeats(self) -> int:
        return len(next(iter(self.samples.values())))

    def median(self, contestant: str) -> float:
        """Microseconds a call."""
        return statistics.median(self.samples[contestant])

    def speedup(self, contestant: str, *, over: str, seed: int = 0) -> Ratio:
        """How many times as fast the contestant is as the other: above 1 it is the faster one."""
        return ratio(self.samples[over], self.samples[contestant], seed=seed)


def race(clock: Clock, *, repeats: int, seconds: float = math.inf, seed: int = 0) -> Timing:
    """Time the clock's contestants, interleaved.

    Args:
        clock: holds the contestants.
        repeats: repetitions, at least 2.
        seconds: of the whole; fewer repetitions are made where they would take longer, but not under 5 (or
            ``repeats``, if that is fewer). Their number is settled by the warm-up, before anything counts.
        seed: of the orders in which the contestants run.
    """
    if repeats < 2:
        raise ValueError(f"repeats={repeats}: expected at least 2, for an interval")
    names = list(clock.contestants())
    for _ in range(WARM_UP):
        started = time.perf_counter()
        for name in names:
            clock.block(name)
        round_seconds = time.perf_counter() - started
    affordable = repeats if seconds == math.inf else int(seconds / max(round_seconds, 1e-9))
    count = min(repeats, max(FEWEST, affordable))
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(seed)
    for _ in range(count):
        for name in order.sample(names, len(names)):
            samples[name].append(clock.block(name))
    return Timing(clock.name, clock.sets, {name: tuple(taken) for name, taken in samples.items()})


def ratio(over: Sequence[float], under: Sequence[float], *, seed: int = 0) -> Ratio:
    """``median(over) / median(under)``, with the 95% interval of a bootstrap that draws pairs (equal places)."""
    if len(over) != len(under):
        raise ValueError(f"ratio: the samples must be pairs, got {len(over)} and {len(under)}")
    pairs = torch.tensor([over, under], dtype=torch.float64)
    draws = torch.randint(len(over), (_RESAMPLES, len(over)), generator=torch.Generator().manual_seed(seed))
    top, bottom = pairs[:, draws].quantile(0.5, dim=-1)
    low, high = (top / bottom).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(statistics.median(over) / statistics.median(under), low, high)


def rotated_sets(touched: int, *, cache: int, held: int, memory: int) -> int:
    """How many buffer sets to rotate: together at least twice the cache, at least 2, but only what memory holds.

    Args:
        touched: bytes that one call reads and writes.
        cache: bytes of the largest cache.
        held: bytes of one set, the results of all contestants among them.
        memory: bytes that all sets may take.
    """
    wanted = max(2, math.ceil(2 * cache / max(touched, 1)))
    return max(1, min(wanted, memory // max(held, 1)))


def poison(outputs: Iterable[Sequence[Tensor]]) -> None:
    """Fill the tensors with NaN."""
    for tensors in outputs:
        for tensor in tensors:
            tensor.detach().fill_(math.nan)


def finish(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
