"""The statistics, on recorded blocks that are made up."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from zoo.verify.timing.judging import (
    FASTER,
    INCONCLUSIVE,
    SAME,
    SLOWER,
    SUSPECT,
    Block,
    Found,
    Sample,
    compared,
    decided,
)
from zoo.verify.timing.pairs import Interval, bootstrap, kept, log_ratios, noise_floor

EQUALS = ("eager", "twin")


def recorded(
    seed: int,
    *,
    slower: float = 0.0,
    processes: int = 5,
    blocks: int = 60,
    noise: float = 0.01,
    between: float = 0.002,
    spikes: float = 0.05,
    hidden: float = 0.0,
    stopped: float = 0.0,
    cpu: float = 1.0,
    us: float = 20.0,
) -> list[list[Block]]:
    """Blocks of a layer, the stock layer and its twin, on a machine that drifts and is disturbed now and then.

    Args:
        slower: the true log-ratio of the layer.
        noise, between: standard deviations of a block's log-time, and of what a process adds to it.
        spikes: how many blocks are disturbed, by 30% on average.
        hidden: microseconds of the layer that its clock does not see.
        stopped: those during which the worker's clock stands still.
        cpu: the layer's processor time, in units of its time.
    """
    rng, found = random.Random(seed), []
    for _ in range(processes):
        lasting = {name: rng.gauss(0, between) for name in ("layer", *EQUALS)}
        process = []
        for block in range(blocks):
            common, samples = rng.gauss(0, 0.05) + 0.1 * block / blocks, {}
            for name, own in lasting.items():
                spike = rng.expovariate(1 / 0.3) if rng.random() < spikes else 0.0
                true = us * math.exp(common + own + rng.gauss(0, noise) + spike + slower * (name == "layer"))
                shown = true - hidden * (name == "layer")
                share = cpu if name == "layer" else 1.0
                wall = true + 150 + rng.gauss(0, 8)
                unseen = stopped * (name == "layer")
                samples[name] = Sample(shown - unseen, wall, shown * share, wall - 5 - unseen - rng.expovariate(1))
            process.append(samples)
        found.append(process)
    return found


def judged(blocks: list[list[Block]], **options: Any) -> Found:
    return compared(blocks, "layer", "eager", equals=EQUALS, **options)


def test_equals_are_not_told_apart_in_100_comparisons() -> None:
    found = Counter(judged(recorded(seed, blocks=30), seed=seed).verdict for seed in range(100))
    assert found[FASTER] + found[SLOWER] <= 1, found
    assert found[SUSPECT] == 0, found
    assert found[SAME] >= 70, found


@pytest.mark.parametrize("kind", [{"between": 0.03}, {"noise": 0.1}, {"spikes": 0.3}, {"processes": 3, "blocks": 10}])
def test_equals_on_a_bad_machine_are_not_told_apart_either(kind: dict[str, Any]) -> None:
    found = Counter(judged(recorded(seed, **{"blocks": 20, **kind}), seed=seed).verdict for seed in range(25))
    assert set(found) <= {SAME, INCONCLUSIVE}, found


@pytest.mark.parametrize(("effect", "us"), [(0.02, 20.0), (0.03, 100.0), (-0.02, 20.0)])
def test_planted_effects_are_found(effect: float, us: float) -> None:
    expected = SLOWER if effect > 0 else FASTER
    found = [judged(recorded(seed, slower=effect, us=us), seed=seed) for seed in range(10)]
    assert Counter(f.verdict for f in found)[expected] >= 9, Counter(f.verdict for f in found)
    right = [f.speedup.low <= math.exp(-effect) <= f.speedup.high for f in found]
    assert sum(right) >= 8


def test_what_cannot_be_told_says_what_could() -> None:
    found = judged(recorded(0, slower=0.02, noise=0.1, blocks=10))
    assert found.verdict == INCONCLUSIVE
    assert found.reason.startswith("the smallest effect that these blocks would find is ")
    assert found.speedup.detectable == pytest.approx(2.8 * found.speedup.error)
    assert found.speedup.detectable > 0.02


def test_a_fooled_clock_is_suspect() -> None:
    found = judged(recorded(0, hidden=15.0))
    assert found.verdict == SUSPECT and found.speedup.value > 3
    assert "µs a call more than with its peer pass outside the clock" in found.reason
    assert "stands still" not in found.reason
    found = judged(recorded(0, stopped=15.0))
    assert found.verdict == SUSPECT and re.search(r"stands still for 1[34]\.\d µs", found.reason)
    # the machine's own overhead of 150 µs a call is no reason, nor is a layer that is honestly fast
    assert judged(recorded(0, slower=-1.0)).verdict == FASTER
    # one that sees a tenth of what passes is caught by the processor's time too
    found = judged(recorded(0, cpu=10.0), threads=2)
    assert found.verdict == SUSPECT and "the processor worked 10.0 times" in found.reason
    assert judged(recorded(0, cpu=1.9), threads=2).verdict == SAME


def test_a_saving_that_the_parents_clock_cannot_confirm_is_not_told() -> None:
    blocks = recorded(0, slower=-0.5)
    assert judged(blocks).verdict == FASTER
    rng = random.Random(0)
    for process in blocks:  # a machine on which the parent is woken late, by milliseconds
        for block in process:
            for name, sample in block.items():
                block[name] = replace(sample, wall_us=sample.wall_us + rng.expovariate(1 / 500))  # type: ignore[index]
    found = judged(blocks)
    assert (found.verdict, "too unsteady to confirm" in found.reason) == (INCONCLUSIVE, True)
    assert judged(blocks, device_us={"layer": (12.0, 12.0), "eager": (20.0, 20.0)}).verdict == FASTER


@pytest.mark.parametrize(("own", "expected"), [(0.5, FASTER), (1.9, FASTER), (2.1, INCONCLUSIVE), (30.0, INCONCLUSIVE)])
def test_what_the_host_does_while_the_device_spins_is_no_saving(own: float, expected: str) -> None:
    """By the other clocks all is well: the device spins as long for stock, and CUPTI sees no host."""
    blocks = recorded(0, slower=-1.0)
    for process in blocks:
        for block in process:
            for name, sample in block.items():
                block[name] = replace(sample, host_us=30.0 * (own if name == "layer" else 1.0))  # type: ignore[index]
    devices = {"layer": (7.0, 7.0), "eager": (20.0, 20.0)}
    for found in (judged(blocks), judged(blocks, device_us=devices)):
        assert found.verdict == expected, found
        assert (f"takes the host {30 * own:.1f} µs, and 30.0 with" in found.reason) is (expected == INCONCLUSIVE)
    for process in blocks:  # a longer call saves more than the host could have done meanwhile
        for block in process:
            for name, sample in block.items():
                times = {"us": 100 * sample.us, "wall_us": 100 * sample.wall_us, "run_us": 100 * sample.run_us}
                block[name] = replace(sample, **times)  # type: ignore[index]
    assert judged(blocks).verdict == FASTER
    assert judged(recorded(0, slower=0.1)).verdict == SLOWER


def test_better_than_the_roofline_is_suspect() -> None:
    found = judged(recorded(0), roofline_us=30.0)
    assert found.verdict == SUSPECT and "faster than the roofline" in found.reason
    assert judged(recorded(0), roofline_us=20.0).verdict == SAME


def test_work_that_events_do_not_see_is_suspect() -> None:
    found = judged(recorded(0), device_us={"layer": (2.0, 20.0), "eager": (24.0, 20.0)})
    assert found.verdict == SUSPECT and "busy for 20.0 µs a call, and 2.0 by the events" in found.reason
    assert judged(recorded(0), device_us={"layer": (24.0, 20.0), "eager": (24.0, 20.0)}).verdict == SAME


def test_wrong_outputs_are_suspect() -> None:
    found = judged(recorded(0), wrong="a timed call's y is wrong")
    assert (found.verdict, found.reason) == (SUSPECT, "a timed call's y is wrong")


def test_few_processes_widen_the_interval() -> None:
    # what differs between processes does not shrink with their blocks
    narrow, wide = (bootstrap([[1.0 + 0.1 * p + 0.001 * i for i in range(200)] for p in range(n)]) for n in (8, 2))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    with pytest.raises(ValueError, match="two processes or more"):
        bootstrap([[1.0]])
    with pytest.raises(ValueError, match="two processes or more"):
        bootstrap([[1.0], []])


def test_bootstrap_is_reproducible_and_takes_processes_of_any_length() -> None:
    blocks = [[0.1, 0.2, 0.15], [0.12], [0.16, 0.11]]
    found = bootstrap(blocks, seed=3)
    assert found == bootstrap(blocks, seed=3) and found.value == pytest.approx(0.135)
    assert found.low < found.value < found.high
    assert noise_floor([[-0.3] * 5] * 3) == pytest.approx(0.3)  # a bias is noise


def test_pairs() -> None:
    assert log_ratios([[2.0], [1.0]], [[1.0], [1.0]]) == [[math.log(2)], [0.0]]
    with pytest.raises(ValueError, match=r"pairs, got \[1\] and \[2\]"):
        log_ratios([[1.0]], [[1.0, 2.0]])


def test_outliers_are_left_out_blindly() -> None:
    assert kept([100.0, 101.0, 99.0, 100.5, 300.0]) == [True] * 4 + [False]
    assert kept([5.0] * 4) == [True] * 4
    # a block is out for what it took as a whole, and then for all contestants
    blocks = recorded(0, spikes=0.0, blocks=20)
    blocks[2][7] = {name: replace(s, us=s.us * 5) for name, s in blocks[2][7].items()}
    found = judged(blocks)
    assert (found.blocks, found.dropped) == (99, 1)


@pytest.mark.parametrize(
    ("value", "low", "high", "floor", "verdict"),
    [
        (0.03, 0.02, 0.04, 0.005, FASTER),
        (0.03, 0.02, 0.04, 0.025, INCONCLUSIVE),  # surely not 0, and not over the noise
        (0.008, 0.005, 0.0095, 0.001, SAME),  # surely not 0, and of no consequence
        (-0.03, -0.04, -0.02, 0.005, SLOWER),
        (0.0, -0.009, 0.009, 0.005, SAME),
        (0.0, -0.009, 0.009, 0.02, INCONCLUSIVE),  # a machine that noisy proves no equality of 1%
        (0.0, -0.03, 0.03, 0.005, INCONCLUSIVE),
    ],
)
def test_decisions(value: float, low: float, high: float, floor: float, verdict: str) -> None:
    assert decided(Interval(value, low, high, (high - low) / 4), floor)[0] == verdict
