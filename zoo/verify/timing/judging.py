"""What recorded blocks say: faster, slower, the same, nothing certain; or that the clock is not to be believed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zoo.verify.timing.pairs import Interval, bootstrap, in_step, kept, log_ratios, noise_floor

__all__ = [
    "FASTER",
    "HOST",
    "INCONCLUSIVE",
    "SAME",
    "SLOWER",
    "SUSPECT",
    "TOO_SMALL",
    "Found",
    "Recorded",
    "Sample",
    "compared",
    "decided",
]

FASTER, SLOWER, SAME, INCONCLUSIVE, SUSPECT = "FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "SUSPECT"
HOST = 2.0
"""How many times as long as stock a layer may take the host, which the device's clock hides, and be called FASTER by it
alone. Beyond, it is if it would be with what the host takes longer counted in."""
_MOST = math.log(1e6)
"""Two processes that disagree give an interval without bounds; this is said of one."""
TOO_SMALL = "the smallest effect that these blocks would find is"
LEAST = math.log(1.01)
"""An effect under 1% is none, however sure."""
HIDDEN = 0.10
"""Time outside the clock, as a part of the stock layer's, that the parent's clock must show before it counts."""
SURE, SURER = 2.0, 3.0
"""In half-widths of the 95% interval."""
DEVICE = 1.25
"""How much longer than between the events the device may have been busy, beside the same of the stock layer."""
DEVICE_US = 5.0
PROCESSOR = 1.5
"""How much more processor time than threads times the clock's time a call may have used."""
ROOFLINE = 0.9
"""Measured below so much of the least possible time, a time is impossible."""


@dataclass(frozen=True)
class Sample:
    """What one contestant took in one block, in microseconds a call."""

    us: float
    """By the clock that is judged: events on a GPU, perf_counter on a CPU."""
    wall_us: float
    """By the parent's clock, with all that surrounds a call."""
    cpu_us: float
    """Processor time of the worker, all threads."""
    run_us: float
    """What the worker's own clock shows for all that the parent's has."""
    host_us: float = 0.0
    """What the call took the host while the device spun; on a GPU."""


Block = Mapping[str, Sample]
Recorded = Sequence[Sequence[Block]]
"""By process, the blocks; each has a sample of every contestant."""


@dataclass(frozen=True)
class Found:
    """A verdict with its numbers; ratios are how many times as fast the layer is as its peer."""

    verdict: str
    speedup: Interval
    """As a ratio; its error is relative."""
    floor: float
    """What the stock layer against itself comes to, as a part of 1."""
    blocks: int
    dropped: int
    reason: str = ""


def compared(
    recorded: Recorded,
    layer: str,
    peer: str,
    *,
    equals: tuple[str, str],
    threads: int | None = None,
    roofline_us: float | None = None,
    device_us: Mapping[str, tuple[float, float]] | None = None,
    wrong: str = "",
    seed: int = 0,
) -> Found:
    """The verdict on a layer beside a peer.

    Args:
        recorded: of at least two processes.
        layer: the contestant that is judged.
        peer: what it is compared with.
        equals: two contestants that are the same: their comparison is the noise.
        threads: that the worker may use, where its processor time is to be believed; on a CPU.
        roofline_us: what no device can do faster; where it is known.
        device_us: the layer and the first of the equals -> (time between events, time that the device was busy by
            CUPTI), of the same calls.
        wrong: what was found wrong with the outputs of the timed calls.
        seed: of the bootstrap.
    """
    used = [_without_outliers(blocks) for blocks in recorded]
    ratios = log_ratios(_times(used, peer), _times(used, layer))
    floor = noise_floor(log_ratios(*(_times(used, name) for name in equals)), seed=seed)
    found = bootstrap(ratios, seed=seed)
    doubts = [wrong] if wrong else []
    doubts += _hidden(used, layer, peer, equals, seed)
    doubts += _stopped(used, layer, peer)
    if threads is not None:
        doubts += _impossible(used, layer, threads)
    if roofline_us is not None:
        doubts += _beaten(used, layer, roofline_us)
    if device_us is not None:
        doubts += _elsewhere(device_us[layer], device_us[equals[0]])
    verdict, reason = (SUSPECT, "; ".join(doubts)) if doubts else decided(found, floor)
    if verdict == FASTER and device_us is None and not _confirmed(used, layer, peer, seed):
        verdict, reason = INCONCLUSIVE, "the parent's clock is too unsteady to confirm what the worker's shows"
    if verdict == FASTER and (busy := _on_the_host(used, layer, peer, equals[0])):
        verdict, reason = INCONCLUSIVE, busy
    blocks = sum(map(len, used))
    return Found(verdict, _as_ratio(found), math.expm1(floor), blocks, sum(map(len, recorded)) - blocks, reason)


def decided(found: Interval, floor: float) -> tuple[str, str]:
    """The verdict on a log-ratio (above 0: faster) over a noise floor, and the reason where it is none."""
    least = max(floor, LEAST)
    if found.low > least:
        return FASTER, ""
    if found.high < -least:
        return SLOWER, ""
    # Two one-sided tests, stricter than their 5%: the 95% interval lies within what counts as no effect.
    if found.low > -LEAST and found.high < LEAST and floor <= LEAST:
        return SAME, ""
    text = f"{TOO_SMALL} {math.expm1(max(found.detectable, least)):.1%}"
    return INCONCLUSIVE, text


def _without_outliers(blocks: Sequence[Block]) -> list[Block]:
    flags = kept([sum(sample.us for sample in block.values()) for block in blocks])
    return [block for block, keep in zip(blocks, flags, strict=True) if keep]


def _times(recorded: Recorded, name: str) -> list[list[float]]:
    return [[block[name].us for block in blocks] for blocks in recorded]


def _outside(recorded: Recorded, name: str) -> list[list[float]]:
    """The parent's clock less the judged one."""
    return [[block[name].wall_us - block[name].us for block in blocks] for blocks in recorded]


def _unseen(recorded: Recorded, name: str) -> list[list[float]]:
    """The parent's clock less the worker's, of the same span: what the message between them takes."""
    return [[block[name].wall_us - block[name].run_us for block in blocks] for blocks in recorded]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def _middle(recorded: Recorded, name: str) -> float:
    times = sorted(t for blocks in _times(recorded, name) for t in blocks)
    return times[len(times) // 2]


def _hidden(recorded: Recorded, layer: str, peer: str, equals: tuple[str, str], seed: int) -> list[str]:
    """Time that passed outside the clock with the layer, and did not with its peer."""
    more = bootstrap(in_step(_outside(recorded, layer), _outside(recorded, peer)), seed=seed)
    noise = noise_floor(in_step(*(_outside(recorded, name) for name in equals)), seed=seed)
    stock, own = _middle(recorded, peer), _middle(recorded, layer)
    # An accusation: far beyond doubt, and the more so where the layer has nothing to gain by it.
    surely = more.value - (SURE if stock - own > HIDDEN * stock else SURER) * (more.value - more.low)
    if surely > max(2 * noise, HIDDEN * stock):
        return [
            f"clocks disagree: with the layer {more.value:.1f} µs a call more than with its peer pass outside the "
            f"clock (at least {surely:.1f}), which shows {own:.1f} µs"
        ]
    return []


def _stopped(recorded: Recorded, layer: str, peer: str) -> list[str]:
    """Time that the worker's clock does not show and the parent's does, of the very same span.

    But for that, they are apart by what a message takes, which is never too short: quartiles tell, in each process.
    """
    least = min(
        _quantile(mine, 0.25) - _quantile(others, 0.75)
        for mine, others in zip(_unseen(recorded, layer), _unseen(recorded, peer), strict=True)
    )
    if least > HIDDEN * _middle(recorded, peer):
        return [f"clocks disagree: the worker's own stands still for {least:.1f} µs a call of the layer"]
    return []


def _confirmed(recorded: Recorded, layer: str, peer: str, seed: int) -> bool:
    """Whether at most half of a saving may have passed outside the clock. Savings under HIDDEN are not asked."""
    stock = _middle(recorded, peer)
    saving = stock - _middle(recorded, layer)
    if saving < HIDDEN * stock:
        return True
    more = bootstrap(in_step(_outside(recorded, layer), _outside(recorded, peer)), seed=seed)
    return more.high < saving / 2


def _on_the_host(recorded: Recorded, layer: str, peer: str, stock: str) -> str:
    """What a call takes the host, where it may be work: copies, products on the CPU, waits for another stream."""
    own, its = (statistics.median(b[name].host_us for blocks in recorded for b in blocks) for name in (layer, stock))
    saving = _middle(recorded, peer) - _middle(recorded, layer)
    if own <= HOST * its or own - its < saving:
        return ""
    return (
        f"by the device's clock alone it is faster: a call takes the host {own:.1f} µs, and {its:.1f} with the stock "
        "layer, while the device spins"
    )


def _impossible(recorded: Recorded, layer: str, threads: int) -> list[str]:
    """More processor time than the clock's time holds."""
    shares = sorted(b[layer].cpu_us / max(b[layer].us, 1e-3) for blocks in recorded for b in blocks)
    share = shares[len(shares) // 2]
    if share > PROCESSOR * threads:
        return [
            f"clocks disagree: the processor worked {share:.1f} times as long as the clock shows, on {threads} threads"
        ]
    return []


def _beaten(recorded: Recorded, layer: str, roofline_us: float) -> list[str]:
    us = _middle(recorded, layer)
    if us < ROOFLINE * roofline_us:
        return [f"faster than the roofline: {us:.2f} µs, and the device cannot do it under {roofline_us:.2f} µs"]
    return []


def _elsewhere(layer: tuple[float, float], peer: tuple[float, float]) -> list[str]:
    """Work of the device that the events did not see."""
    (events, busy), (peer_events, peer_busy) = layer, peer
    allowed = DEVICE * events * max(1.0, peer_busy / max(peer_events, 1e-3)) + DEVICE_US
    if busy > allowed:
        return [f"clocks disagree: the device was busy for {busy:.1f} µs a call, and {events:.1f} by the events"]
    return []


def _as_ratio(found: Interval) -> Interval:
    value, low, high, error = (
        max(-_MOST, min(number, _MOST)) for number in (found.value, found.low, found.high, found.error)
    )
    return Interval(math.exp(value), math.exp(low), math.exp(high), math.expm1(error))
