"""Linears that fool a clock, one way each; and some whose speed is known.

None of them may be called FASTER. ``CAUGHT`` maps those that a CPU runs to what the verdict must say.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CAUGHT: dict[Any, str] = {}
"""A saboteur -> a pattern that the reason for SUSPECT matches."""


def caught(reason: str) -> Any:
    def note(layer: Any) -> Any:
        CAUGHT[layer] = reason
        return layer

    return note


_true_clock = time.perf_counter_ns


@caught("stands still")
class StopsTheClock(nn.Linear):
    """Patches every timer that it finds bound in a module, so that no time passes in its own forward."""

    stolen = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        def slow() -> int:
            return _true_clock() - StopsTheClock.stolen

        for module in list(sys.modules.values()):
            for name in ("perf_counter_ns", "process_time_ns"):
                if getattr(module, "__name__", "").startswith(("zoo.verify.timing", "time")) and hasattr(module, name):
                    setattr(module, name, slow)

    def forward(self, input: Tensor) -> Tensor:
        began = _true_clock()
        output = F.linear(input, self.weight, self.bias)
        StopsTheClock.stolen += _true_clock() - began
        return output


class Promise(Tensor):
    """Computes when something is asked of it."""

    work: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__get__" not in getattr(func, "__name__", ""):
            for arg in args:
                if isinstance(arg, Promise) and arg.work is not None:
                    work, arg.work = arg.work, None
                    with torch._C.DisableTorchFunctionSubclass():
                        arg.copy_(work())
        return super().__torch_function__(func, types, args, kwargs or {})


@caught("not a Tensor|clocks disagree")
class Lazy(nn.Linear):
    """Returns a tensor that is computed when it is looked at, which is after the clock was read."""

    def forward(self, input: Tensor) -> Tensor:
        kept = input.detach()
        with torch.no_grad():
            output = input.new_empty(*input.shape[:-1], self.out_features).as_subclass(Promise)
        output.work = lambda: F.linear(kept, self.weight.detach(), self.bias.detach())
        return output


@caught("output|wrong")
class MemoByShape(nn.Linear):
    """Returns what it computed for an input of that shape."""

    def forward(self, input: Tensor) -> Tensor:
        memo = self.__dict__.setdefault("memo", {})
        if input.shape not in memo:
            memo[input.shape] = F.linear(input, self.weight, self.bias)
        return memo[input.shape]


class MemoByPointer(nn.Linear):
    """Returns what it computed for an input at that address: with addresses that are new each time, it is honest."""

    def forward(self, input: Tensor) -> Tensor:
        memo = self.__dict__.setdefault("memo", {})
        key = (input.data_ptr(), input.shape)
        if key not in memo:
            memo.clear()
            memo[key] = F.linear(input, self.weight, self.bias)
        return memo[key]


@caught("output|wrong")
class ReplaysTheWarmUp(nn.Linear):
    """Three honest calls, then what the third returned."""

    def forward(self, input: Tensor) -> Tensor:
        calls = self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        if calls <= 3:
            self.__dict__["kept"] = F.linear(input, self.weight, self.bias)
        return self.__dict__["kept"].clone()


@caught("changed after they were returned|wrong")
class WorksLater(nn.Linear):
    """Returns at once; another thread computes. On a GPU it would be another stream."""

    def forward(self, input: Tensor) -> Tensor:
        output = input.new_empty(*input.shape[:-1], self.out_features)
        kept, weight, bias = input.detach(), self.weight.detach(), self.bias.detach()

        def work() -> None:
            time.sleep(0.002)
            output.copy_(F.linear(kept, weight, bias))

        threading.Thread(target=work).start()
        return output


@caught("wrong")
def half_precision(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Faster, and right to three digits."""
    return F.linear(input.half(), weight.half(), None if bias is None else bias.half()).to(input.dtype)


class OnceUnderCapture(nn.Linear):
    """Works once while a graph is captured, however often it is called; outside of a capture it is honest."""

    def forward(self, input: Tensor) -> Tensor:
        kept = self.__dict__.get("kept")
        if input.is_cuda and torch.cuda.is_current_stream_capturing() and kept is not None:
            return kept
        self.__dict__["kept"] = output = F.linear(input, self.weight, self.bias)
        return output


# on a GPU


class SideStream(nn.Linear):
    """Works on a stream that nobody waits for."""

    def forward(self, input: Tensor) -> Tensor:
        stream = self.__dict__.setdefault("stream", torch.cuda.Stream())
        output = input.new_empty(*input.shape[:-1], self.out_features)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            torch.addmm(self.bias, input.detach(), self.weight.T, out=output)
        return output


class WhileItSpins(nn.Linear):
    """Works on a stream that waits for nothing, and has the host wait for it: nothing is left when the clock begins."""

    def forward(self, input: Tensor) -> Tensor:
        stream = self.__dict__.setdefault("stream", torch.cuda.Stream())
        output = input.new_empty(*input.shape[:-1], self.out_features)
        with torch.cuda.stream(stream), torch.no_grad():
            torch.addmm(self.bias, input.detach(), self.weight.T, out=output)
        time.sleep(2e-4)
        stream.synchronize()
        return output


class OnTheHost(nn.Linear):
    """Works on the CPU meanwhile."""

    def forward(self, input: Tensor) -> Tensor:
        stream = self.__dict__.setdefault("stream", torch.cuda.Stream())
        with torch.cuda.stream(stream), torch.no_grad():
            weight, bias = self.__dict__.setdefault("kept", (self.weight.detach().cpu(), self.bias.detach().cpu()))
            output = F.linear(input.detach().cpu(), weight, bias).to(input.device)
            stream.synchronize()
        return output


class PatchesEvents(nn.Linear):
    """Patches what torch's events say, also where it is bound already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        calls = self.__dict__.setdefault("calls", [])
        clocks = sys.modules["zoo.verify.timing.clocks"]
        event, record, elapsed = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time

        def short(start: Any, stop: Any) -> float:
            mine = bool(calls)
            calls.clear()
            return elapsed(start, stop) * (0.3 if mine else 1.0)

        torch.cuda.Event.elapsed_time = short  # type: ignore[method-assign,assignment]
        clocks._EVENT = (event, record, short)  # type: ignore[attr-defined]
        for name in ("gc",):  # clocks that are made already hold the true function
            for found in sys.modules[name].get_objects() if name in sys.modules else ():
                if type(found).__name__ == "CudaClock":
                    found._elapsed = short

    def forward(self, input: Tensor) -> Tensor:
        self.__dict__["calls"].append(1)
        return F.linear(input, self.weight, self.bias)


# of known speed


class Spins(nn.Linear):
    """A Linear that takes at least a known time: 0.5 ms on a CPU; on a GPU 30,000 cycles more, about 17 µs."""

    factor = 1.0

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda:
            output = F.linear(input, self.weight, self.bias)
            torch.cuda._sleep(int(30_000 * self.factor))
            return output
        began = _true_clock()
        output = F.linear(input, self.weight, self.bias)
        while _true_clock() - began < 500_000 * self.factor:
            pass
        return output


class SlowerBy2Percent(Spins):
    """On a GPU by 2% of the whole, of which the Linear itself and the gap between two kernels are a fourth."""

    factor = 1.027


class SlowerBy5Percent(Spins):
    factor = 1.05


class Spins100(Spins):
    """On a GPU about 100 µs."""

    factor = 5.5


class Spins100SlowerBy3Percent(Spins):
    factor = 5.5 * 1.03


class Here:
    """Stands for a worker process, and works in this one; the rest of the schedule is the same."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def ask(self, task: Any, *, time_limit: float, heard: Any) -> Any:
        return self.look(task, heard)
