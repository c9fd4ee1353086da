from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from zoo.bench import timing
from zoo.bench.timing import WallClock, poison, race, ratio, rotated_sets

CPU = torch.device("cpu")


class Scripted:
    """A clock whose blocks take what it is told."""

    name, sets = "scripted", 3

    def __init__(self, **times: Callable[[int], float]) -> None:
        self.times, self.log, self.count = times, list[str](), Counter[str]()

    def contestants(self) -> tuple[str, ...]:
        return tuple(self.times)

    def block(self, contestant: str) -> float:
        self.log.append(contestant)
        self.count[contestant] += 1
        return self.times[contestant](self.count[contestant])

    def outputs(self, contestant: str) -> Sequence[Sequence[Tensor]]:
        return ()


def test_medians_and_ratio_of_what_was_measured() -> None:
    # the first blocks, which set things up, are slow; later ones drift, alike for both
    clock = Scripted(
        zoo=lambda i: 1e6 if i <= timing.WARM_UP else 10.0 + i,
        eager=lambda i: 1e7 if i <= timing.WARM_UP else 20 + 2 * i,
    )
    found = race(clock, repeats=9)
    assert (found.clock, found.sets, found.repeats) == ("scripted", 3, 9)
    assert found.median("zoo") == 10 + timing.WARM_UP + 5
    speedup = found.speedup("zoo", over="eager")
    assert (speedup.value, speedup.low, speedup.high) == (2.0, 2.0, 2.0)  # in pairs, drift does not blur it
    assert found.speedup("eager", over="zoo").value == 0.5


def test_repetitions_are_interleaved_in_random_order() -> None:
    clock = Scripted(a=lambda i: 1.0, b=lambda i: 1.0, c=lambda i: 1.0)
    race(clock, repeats=40, seed=3)
    rounds = [tuple(clock.log[i : i + 3]) for i in range(0, len(clock.log), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds[timing.WARM_UP :])) == 6
    again = Scripted(a=lambda i: 1.0, b=lambda i: 1.0, c=lambda i: 1.0)
    race(again, repeats=40, seed=3)
    assert again.log == clock.log


def test_fewer_repetitions_where_they_take_long() -> None:
    def slow(i: int) -> float:
        time.sleep(0.01)
        return 1.0

    assert race(Scripted(a=slow), repeats=50, seconds=0.1).repeats in range(timing.FEWEST, 12)
    assert race(Scripted(a=slow), repeats=50, seconds=0.0).repeats == timing.FEWEST
    assert race(Scripted(a=slow), repeats=3, seconds=0.0).repeats == 3
    with pytest.raises(ValueError, match="repeats=1"):
        race(Scripted(a=slow), repeats=1)


def test_interval_of_a_ratio() -> None:
    noise = torch.Generator().manual_seed(0)
    under = (100 + torch.randn(25, generator=noise)).tolist()
    over = (130 + torch.randn(25, generator=noise)).tolist()
    found = ratio(over, under)
    assert 1.28 < found.low < found.value < found.high < 1.32
    assert found == ratio(over, under)
    wide = ratio(over, (100 + 20 * torch.randn(25, generator=noise)).tolist())
    assert wide.high - wide.low > 5 * (found.high - found.low)
    with pytest.raises(ValueError, match="pairs, got 2 and 1"):
        ratio([1.0, 2.0], [1.0])


def test_rotated_sets_exceed_the_cache_twice() -> None:
    mb = 2**20
    assert rotated_sets(mb, cache=60 * mb, held=3 * mb, memory=1000 * mb) == 120
    assert rotated_sets(7 * mb, cache=60 * mb, held=mb, memory=1000 * mb) == 18  # 126 MB
    assert rotated_sets(500 * mb, cache=60 * mb, held=mb, memory=10**12) == 2
    assert rotated_sets(mb, cache=60 * mb, held=30 * mb, memory=100 * mb) == 3
    assert rotated_sets(mb, cache=60 * mb, held=300 * mb, memory=100 * mb) == 1


def test_wall_clock_runs_every_set_and_keeps_what_it_computed() -> None:
    def work(i: int) -> tuple[Tensor]:
        time.sleep(0.002)
        return (torch.full((2,), float(i)),)

    clock = WallClock({"work": work, "idle": lambda i: (torch.zeros(1),)}, sets=3, device=CPU)
    assert clock.contestants() == ("work", "idle")
    assert 2000 <= clock.block("work") < 200_000  # microseconds a call
    first = clock.outputs("work")
    assert [float(y[0]) for (y,) in first] == [0.0, 1.0, 2.0]
    clock.block("idle")
    assert not first[0][0].isnan().any()
    clock.block("work")
    assert all(y.isnan().all() for (y,) in first), "memory that is used again must not hold right results"
    found = race(clock, repeats=5)
    assert found.speedup("idle", over="work").value > 10
    assert [float(y[0]) for (y,) in clock.outputs("work")] == [0.0, 1.0, 2.0]


def test_poison() -> None:
    x = torch.ones(3, requires_grad=True)
    y = (x * 2, torch.ones(2, dtype=torch.bfloat16))
    poison([y])
    assert all(math.isnan(v) for t in y for v in t.tolist())
