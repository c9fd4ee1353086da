"""The clocks of one call, and what is done to the caches before it.

Functions of ``time`` and ``torch.cuda`` are bound when this module is imported, before the layer's: a layer that
patches them later changes nothing here. What it patches here, the parent's clock shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any

import torch
from torch import Tensor

from zoo.machine import cache_bytes

__all__ = ["CpuClock", "CudaClock", "Once", "busy_us", "clock_for", "fingerprint"]

Call = Callable[[], Sequence[Tensor]]

_SPIN_US = 60.0
"""The device spins at least so long before a call, and twice as long as the call takes the host: that hides it."""
_CYCLES_PER_US = 2000
_NO_WORK = ("Context Sync", "Event Sync", "Stream Sync", "Stream Wait")
"""What CUPTI may tell of beside kernels, copies and memsets."""
_SPINNING = "spin_kernel"
"""The kernel of torch.cuda._sleep."""
_MOST_SPIN_US = 5000.0
_MOST_CACHE = 256 * 2**20
"""Written at most before a call on a CPU, some of which share half a gigabyte of cache among many."""


@dataclass(frozen=True)
class Once:
    """One call: what it took, what it returned, and the fingerprints at its return and when all work was done."""

    us: float
    cpu_us: float
    host_us: float
    outputs: Sequence[Tensor]
    at_return: Tensor
    settled: Tensor | None
    """None where it is to be taken at the end of the run: a CPU has no queue that could be waited for."""


class CpuClock:
    """perf_counter and the processor time of the process around a call."""

    names = ("perf_counter", "process_time", "parent")
    middle = staticmethod(statistics.median)
    """Of the calls of a run. Those that the system interrupts do not count; the parent's clock has them all."""

    def __init__(self, device: torch.device) -> None:
        self._cache: Tensor | None = None

    def chill(self) -> None:
        """Write twice the last cache."""
        if self._cache is None:
            self._cache = torch.empty(min(2 * cache_bytes(torch.device("cpu")), _MOST_CACHE), dtype=torch.int8)
        self._cache.add_(1)

    def once(self, call: Call, spin_us: float) -> Once:
        """Time one call."""
        cpu, began = process_time_ns(), perf_counter_ns()
        outputs = call()
        ended, cpu_ended = perf_counter_ns(), process_time_ns()
        return Once((ended - began) / 1e3, (cpu_ended - cpu) / 1e3, 0.0, outputs, fingerprint(outputs), None)

    def wait(self) -> None:
        """Nothing is queued."""

    def now_us(self) -> float:
        """By the clock that times the calls."""
        return perf_counter_ns() / 1e3


class CudaClock:
    """Events around a call that is queued while the device spins."""

    names = ("events", "CUPTI", "parent")
    middle = staticmethod(statistics.fmean)
    """Of the calls of a run: events resolve half a microsecond, and the mean does better."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event, self._record, self._elapsed = _EVENT
        self._cache = torch.empty(2 * cache_bytes(device), dtype=torch.int8, device=device)
        self.persisting = _persisting_reset()

    def chill(self) -> None:
        """Write twice the L2, and give back what is set aside in it."""
        self._cache.add_(1)
        if self.persisting is not None:
            self.persisting()

    def once(self, call: Call, spin_us: float) -> Once:
        """Time one call; the device is idle before and after."""
        start, stop = self._event(enable_timing=True), self._event(enable_timing=True)
        _spin(spin_us)
        self._record(start)
        began = perf_counter_ns()
        outputs = call()
        host = (perf_counter_ns() - began) / 1e3
        self._record(stop)
        at_return = fingerprint(outputs)
        self.wait()
        return Once(self._elapsed(start, stop) * 1e3, 0.0, host, outputs, at_return.cpu(), fingerprint(outputs).cpu())

    def wait(self) -> None:
        """Until all streams of the device are idle."""
        _SYNCHRONIZE(self._device)

    def now_us(self) -> float:
        """By the host's clock."""
        return perf_counter_ns() / 1e3


_EVENT = (torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time)
_SYNCHRONIZE = torch.cuda.synchronize


def _spin(us: float) -> None:
    torch.cuda._sleep(int(min(max(_SPIN_US, us), _MOST_SPIN_US) * _CYCLES_PER_US))


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock(device)


def fingerprint(outputs: Sequence[Tensor]) -> Tensor:
    """A number for each tensor, as the bits of its sum in float64; queued on the current stream."""
    with torch.no_grad():
        return torch.stack([output.detach().sum(dtype=torch.float64) for output in outputs]).view(torch.int64)


def busy_us(calls: Sequence[Call], device: torch.device, spin_us: float) -> tuple[float, float]:
    """Microseconds a call between events, and those that the device was busy by CUPTI (torch.profiler), on any stream.

    Both are without the spinning, of at least ``spin_us``, behind which each call is queued.

    RuntimeError where CUPTI gives no kernel at all.
    """
    from torch.profiler import ProfilerActivity, profile

    event, record, elapsed = _EVENT
    between = 0.0
    _SYNCHRONIZE(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for call in calls:
            start, stop = event(enable_timing=True), event(enable_timing=True)
            _spin(spin_us)
            record(start)
            outputs = call()
            record(stop)
            _SYNCHRONIZE(device)
            between += elapsed(start, stop) * 1e3
            del outputs
    spans = [
        (e.time_range.start, e.time_range.end)
        for e in profiled.events() or ()
        if e.device_type.name == "CUDA" and not e.name.startswith(_NO_WORK) and _SPINNING not in e.name
    ]
    if not spans:
        raise RuntimeError("CUPTI told of no kernel")
    return between / len(calls), _covered(spans) / len(calls)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of the spans."""
    whole, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        whole += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return whole


def _persisting_reset() -> Any:
    """``cudaCtxResetPersistingL2Cache`` of the runtime that torch has loaded; None where it is not reachable."""
    with contextlib.suppress(OSError, AttributeError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            path = line.split(maxsplit=5)[-1]
            if "libcudart" in Path(path).name:
                return ctypes.CDLL(path).cudaCtxResetPersistingL2Cache
    return None
