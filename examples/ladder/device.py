"""Runs a step on the GPU: first right, then fast. Everything here happens in a process that may crash or hang."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from steps import SHAPES, Shape, Step
from torch import Tensor

__all__ = ["find_problem", "measure", "warm_up", "wrong"]

_CHECKED = (Shape(256, 256, 256), Shape(300, 96, 200), Shape(129, 64, 1), Shape(1, 776, 131))
_ANY_K = (Shape(37, 29, 53), Shape(130, 1, 70))
_SETS = 2
"""Of operands, used in turn: a set of either timed shape is 100 MB, and the L2 holds 60."""

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, w, y) -> the result: y, or a tensor of its own."""


def find_problem() -> str | None:
    """Why the ladder cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU was found"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {capability}; the steps are built for (9, 0)"
    return None


def kernel(step: Step, library: Path | None) -> Run:
    """What computes the step's product. RuntimeError from it if a launch fails."""
    if library is None:
        os.environ["ZOO_LINEAR_KERNEL"] = "wgmma"
        import zoo

        return lambda x, w, y: zoo.ops.linear(x, w)
    launch = ctypes.CDLL(str(library)).launch
    launch.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
    launch.restype = ctypes.c_char_p

    def run(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        (M, K), N = x.shape, w.shape[0]
        stream = torch.cuda.current_stream().cuda_stream
        problem = launch(x.data_ptr(), w.data_ptr(), y.data_ptr(), M, N, K, stream)
        if problem is not None:
            raise RuntimeError(f"step {step.number}: {problem.decode()}")
        return y

    return run


def wrong(y: Tensor, x: Tensor, w: Tensor) -> str | None:
    """What is wrong with y as x w^T, or None.

    A float64 product rounded once to bf16 has some error; y may have 1.02 times as much as a whole (sums in float32 are
    far more exact than bf16, so a right y has nearly the same). No element may be off by more than its own rounding
    and what a tensor core may lose of K terms.
    """
    exact = x.double() @ w.double().T
    off = (y.double() - exact).abs()
    rounding = (exact.to(y.dtype).double() - exact).norm()
    if not bool((off <= exact.abs() * 2**-8 + 2e-5 * x.shape[1]).all()):  # not so for NaN
        worst = off.nan_to_num(nan=torch.inf).argmax().item()
        m, n = divmod(int(worst), y.shape[1])
        return f"y[{m}, {n}] is {y[m, n].item()}, expected {exact[m, n].item()}"
    if not bool(off.norm() <= 1.02 * rounding + 1e-5 * exact.norm()):
        return f"the error is {off.norm() / exact.norm():.2e}, rounding alone {rounding / exact.norm():.2e}"
    return None


def operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh x and w, and y full of NaN."""
    x, w = (torch.randn(rows, shape.K, device="cuda").bfloat16() for rows in (shape.M, shape.N))
    return x, w, torch.full((shape.M, shape.N), torch.nan, device="cuda", dtype=torch.bfloat16)


def interleaved(calls: Sequence[Callable[[], object]], spans: Sequence[float], *, seconds: float) -> list[list[float]]:
    """Milliseconds a call, samples of each, in random order and without a pause between: the queue never runs empty.

    Args:
        calls: launch one product each.
        spans: milliseconds that each is known to take.
        seconds: of the whole; but never under three samples of each.
    """
    each = [max(1, min(8, int(8 / ms))) for ms in spans]
    cost = sum(ms * count for ms, count in zip(spans, each, strict=True))
    repeats = max(3, min(30, int(1e3 * seconds / cost)))
    order = random.Random(0)
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(repeats):
        for which in order.sample(range(len(calls)), len(calls)):
            events[which].append(_mark(calls[which], each[which]))
    torch.cuda.synchronize()
    return [
        [start.elapsed_time(end) / count for start, end in pairs] for pairs, count in zip(events, each, strict=True)
    ]


def _mark(call: Callable[[], object], count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        call()
    end.record()
    return start, end


def _span(call: Callable[[], object]) -> float:
    start, end = _mark(call, 1)
    end.synchronize()
    return float(start.elapsed_time(end))


def warm_up() -> dict[str, object]:
    """Make the context and load cuBLAS, which takes longer than a measurement. Returns what the results are of."""
    F.linear(*(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    torch.cuda.synchronize()
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}


def measure(step: Step, library: Path | None, *, seconds: float) -> list[dict[str, object]]:
    """Check the step and time it beside cuBLAS. RuntimeError if it is wrong anywhere.

    Returns a row for each of SHAPES: ``shape, us, cublas_us, tflops, cublas_tflops, share`` (of cuBLAS's rate; the two
    took turns).
    """
    torch.manual_seed(0)
    run = kernel(step, library)
    for shape in (*_CHECKED, *(_ANY_K if step.multiple == 1 else ())):
        x, w, y = operands(shape)
        if problem := wrong(run(x, w, y), x, w):
            raise RuntimeError(f"step {step.number} is wrong at {shape}: {problem}")
    return [_time(step, run, shape, seconds) for shape in SHAPES]


def _time(step: Step, run: Run, shape: Shape, seconds: float) -> dict[str, object]:
    sets = [operands(shape) for _ in range(_SETS)]
    results: dict[int, Tensor] = {}
    ours_at, theirs_at = itertools.cycle(range(_SETS)), itertools.cycle(range(_SETS))

    def ours() -> None:
        which = next(ours_at)
        results[which] = run(*sets[which])

    def theirs() -> None:
        x, w, _ = sets[next(theirs_at)]
        F.linear(x, w)

    theirs()  # the first call of a shape chooses an algorithm
    spans = [_span(call) for call in (ours, theirs)]
    for _, _, y in sets:
        y.fill_(torch.nan)  # what is checked below is what the timed calls wrote
    samples = interleaved([ours, theirs], spans, seconds=seconds)
    for which, y in results.items():
        if problem := wrong(y, *sets[which][:2]):
            raise RuntimeError(f"step {step.number} is wrong at {shape}, where it was timed: {problem}")
    us, cublas_us = (1e3 * statistics.median(taken) for taken in samples)
    return {
        "shape": str(shape),
        "us": us,
        "cublas_us": cublas_us,
        "tflops": shape.flops / us / 1e6,
        "cublas_tflops": shape.flops / cublas_us / 1e6,
        "share": cublas_us / us,
    }
