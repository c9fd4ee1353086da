"""The device's own clock for CUDA work: events around replays of graphs, or around eager launches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.bench.timing import Clock, Contestant, WallClock, poison

__all__ = ["CaptureFailed", "EventClock", "GraphClock", "cuda_clock"]

_BLOCK_US = 500.0
"""A block is replayed until it lasts about this long: events resolve half a microsecond."""
_MOST_REPLAYS = 20
_LAUNCH_CYCLES = 100_000
"""The device spins about 50 µs before a block, so that the first launch is in its queue before the clock starts."""
_REPLAY_CYCLES, _SET_CYCLES = 30_000, 500
"""And longer, by the launches that a block makes."""


class CaptureFailed(RuntimeError):
    """A contestant cannot be captured in a graph."""


class GraphClock:
    """Replays one CUDA graph a contestant, of its calls on all sets; each call keeps its own results.

    Raises CaptureFailed.
    """

    name = "graph"

    def __init__(self, contestants: Mapping[str, Contestant], *, sets: int, device: torch.device) -> None:
        self.sets, self._device = sets, device
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[str, list[Sequence[Tensor]]] = {}
        self._replays: dict[str, int] = {}
        with torch.cuda.device(device):
            for name, run in contestants.items():
                self._graphs[name], self._outputs[name] = _capture(name, run, sets)
                self._replays[name] = 1
                self.block(name)
                block_us = self.block(name) * sets
                self._replays[name] = max(1, min(_MOST_REPLAYS, math.ceil(_BLOCK_US / max(block_us, 1.0))))

    def contestants(self) -> tuple[str, ...]:
        return tuple(self._graphs)

    def block(self, contestant: str) -> float:
        replays, graph = self._replays[contestant], self._graphs[contestant]

        def work() -> None:
            for _ in range(replays):
                graph.replay()

        spin = _LAUNCH_CYCLES + replays * (_REPLAY_CYCLES + _SET_CYCLES * self.sets)
        return _between_events(work, spin, self._device) / (replays * self.sets)

    def outputs(self, contestant: str) -> Sequence[Sequence[Tensor]]:
        """What the graph that was timed writes over NaN, in one more replay."""
        poison(self._outputs[contestant])
        with torch.cuda.device(self._device):
            self._graphs[contestant].replay()
            torch.cuda.synchronize()
        return self._outputs[contestant]


class EventClock(WallClock):
    """Events around eager launches, for what cannot be captured: where calls are short, the host's time shows."""

    name = "events"

    def _microseconds(self, work: Callable[[], None]) -> float:
        return _between_events(work, _LAUNCH_CYCLES, self._device)


def cuda_clock(contestants: Mapping[str, Contestant], *, sets: int, device: torch.device) -> tuple[Clock, str]:
    """A clock for them all: graphs, or events where one of them cannot be captured, and then the reason."""
    try:
        return GraphClock(contestants, sets=sets, device=device), ""
    except CaptureFailed as failure:
        return EventClock(contestants, sets=sets, device=device), str(failure)


def _between_events(work: Callable[[], None], spin: int, device: torch.device) -> float:
    """Microseconds of the device's time that the work takes, launches hidden behind so many cycles of spinning."""
    with torch.cuda.device(device):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(spin)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3


def _capture(name: str, run: Contestant, sets: int) -> tuple[torch.cuda.CUDAGraph, list[Sequence[Tensor]]]:
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            run(i)
    current.wait_stream(stream)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            # all of them stay alive, so that no call writes where another one did
            outputs = [run(i) for i in range(sets)]
    except Exception as error:
        _clean_up(graph, pool, current)
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # the end of a broken capture raises too, in front of what broke it
        first = error.__context__ or error
        reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        raise CaptureFailed(f"{name} cannot be captured in a CUDA graph: {reason}") from error
    return graph, outputs


_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocator of pinned memory may still point to them."""


def _clean_up(graph: torch.cuda.CUDAGraph, pool: Any, current: torch.cuda.Stream) -> None:
    """What torch leaves behind where the end of a capture fails, put right.

    The capture's stream is still the current one, the allocator believes that a capture is under way (and would refuse
    to empty its cache), and the random number generator waits for the end of it, which a capture that succeeds brings.
    """
    _failed.append(graph)
    torch.cuda.set_stream(current)
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # done already, where only the body failed
            end(torch.cuda.current_device(), pool)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    counter = torch.zeros((), device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        counter += 1
