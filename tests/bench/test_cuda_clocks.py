"""Which clock is taken; what they measure is tested in tests/gpu/test_bench.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zoo.bench import cuda_clocks
from zoo.bench.cuda_clocks import CaptureFailed, EventClock, cuda_clock

CUDA = torch.device("cuda")


def test_events_where_graphs_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def graphs(contestants: Any, *, sets: int, device: torch.device) -> Any:
        made.append((contestants, sets, device))
        if "bad" in contestants:
            raise CaptureFailed("bad cannot be captured in a CUDA graph: it waits for the device")
        return "graphs"

    monkeypatch.setattr(cuda_clocks, "GraphClock", graphs)
    good = {"good": lambda i: ()}
    assert cuda_clock(good, sets=3, device=CUDA) == ("graphs", "")
    assert made == [(good, 3, CUDA)]
    clock, note = cuda_clock({**good, "bad": lambda i: ()}, sets=3, device=CUDA)
    assert isinstance(clock, EventClock)
    assert (clock.name, clock.sets, clock.contestants()) == ("events", 3, ("good", "bad"))
    assert note == "bad cannot be captured in a CUDA graph: it waits for the device"


def test_out_of_memory_is_no_reason_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphs(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_clocks, "GraphClock", graphs)
    with pytest.raises(torch.OutOfMemoryError):
        cuda_clock({}, sets=1, device=CUDA)
