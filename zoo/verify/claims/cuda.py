"""Claims about a layer on a GPU: streams, graphs, devices, sizes, memory. Elsewhere they are untested."""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.machine import device_of, free_bytes
from zoo.verify.outcome import Broken, Claim, Untested
from zoo.verify.ranks import judge_apart
from zoo.verify.subject import ALL, Case, Subject, Tensors, evaluate, judged

__all__ = ["CLAIMS"]

PAUSE = 600_000_000
"""Cycles that a stream is kept busy for: about a third of a second."""
TRIES = 4
"""How often it is tried to find the device busy, or a stream: other processes may keep this one from the processor for
longer than the pause, and what is launched for the first time waits until its module is loaded."""
LARGE_NEEDS = 40 * 2**30
"""Bytes that must be free to try more than 2**31 elements: the tensors, their gradients, and as much of workspace."""
EDGE = 70
"""How many of the first and of the last are looked at, of a dimension that is too long to look at all."""
WORKSPACE = 32 * 2**20
"""Bytes that any layer may have at hand; cuBLAS has as much on a Hopper GPU."""
READINGS, PATIENCE = 10, 20
"""How often it is read what is allocated, every 10 ms, and how many times as often before it is a leak."""
TERMS = 512
"""Of the longest sum of the typical layer here."""


def _case(s: Subject) -> Case:
    return Case("", s.randn(200, 512), 256, gradients=ALL, cotangent=s.cotangent(200, 256))


def _exact(stock: nn.Module, case: Case) -> Tensors:
    double = nn.Linear(512, 256, device=case.input.device, dtype=torch.float64)
    double.load_state_dict(stock.state_dict())
    assert case.cotangent is not None
    right = Case("", case.input.double(), 256, gradients=ALL, cotangent=case.cotangent.double())
    return evaluate(double, right)


def stream(s: Subject) -> None:
    """The input is written late, on a side stream that is busy; work on any other stream reads it too early."""
    custom, stock = s.pair(512, 256)
    case = _case(s)
    assert case.cotangent is not None
    want, exact = evaluate(stock, case), _exact(stock, case)
    evaluate(custom, _case(s))  # whatever it does once
    side = torch.cuda.Stream(s.device)
    for turn in range(TRIES):
        late = Case("", torch.zeros_like(case.input), 256, gradients=ALL, cotangent=torch.zeros_like(case.cotangent))
        written = torch.cuda.Event()
        torch.cuda.synchronize(s.device)
        with torch.cuda.stream(side):
            torch.cuda._sleep((turn + 1) * PAUSE // 3)
            late.input.copy_(case.input)
            late.cotangent.copy_(case.cotangent)  # type: ignore[union-attr]
            written.record()
            got = evaluate(custom, late)
            early = not written.query()  # or else it came too late to show anything
            got = {name: None if value is None else value.clone() for name, value in got.items()}
        side.synchronize()
        judged(got, want, exact, terms=TERMS)
        if early:
            return
    raise Untested(
        f"{TRIES} times the input was written before the layer returned: it waited, or others kept it waiting"
    )


def asynchronous(s: Subject) -> None:
    custom, stock = s.pair(512, 256)
    case = _case(s)
    for _ in range(3):
        evaluate(stock, case)
        evaluate(custom, case)
    side = torch.cuda.Stream(s.device)
    for layer, problem in ((stock, Untested), (custom, Broken)):
        whose = "the stock layer's" if layer is stock else "its"
        if _done_when(s, functools.partial(evaluate, layer, case)):
            raise problem(f"the device was idle when {whose} forward and backward returned: they waited for it")

        def beside(layer: nn.Module = layer) -> None:
            with torch.cuda.stream(side):
                evaluate(layer, case)
            side.synchronize()

        if _done_when(s, beside):
            raise problem(f"{whose} work on one stream waited for another that was busy")


def _done_when(s: Subject, call: Callable[[], object]) -> bool:
    """Whether the current stream, busy when ``call`` begins, is idle when it returns, each time that it is tried."""
    for _ in range(TRIES):
        torch.cuda.synchronize(s.device)
        busy = torch.cuda.Event()
        with torch.cuda.device(s.device):
            torch.cuda._sleep(PAUSE)
            busy.record()
            call()
            idle = busy.query()
        torch.cuda.synchronize(s.device)
        if not idle:
            return False
    return True


def graph(s: Subject) -> None:
    custom, stock = s.pair(512, 256)
    case = _case(s)
    x = case.input.clone().requires_grad_()
    try:
        _captured(stock, x, case.cotangent)
    except RuntimeError as error:
        raise Untested(f"the stock layer itself cannot be captured: {error}") from None
    captured, outputs = _captured(custom, x, case.cotangent)
    weights = {name.rpartition(".")[2]: parameter for name, parameter in custom.named_parameters()}
    for replay in range(3):
        new = _case(s)
        with torch.no_grad():
            x.copy_(new.input)
            for name, weight in weights.items():
                value = s.randn(*weight.shape) / 16
                weight.copy_(value)
                getattr(stock, name).copy_(value)
            for output in outputs.values():
                output.detach().fill_(float("nan"))
        captured.replay()
        torch.cuda.synchronize(s.device)
        now = Case("", new.input, 256, gradients=ALL, cotangent=case.cotangent)
        names = {name: f"{name} of replay {replay}" for name in outputs}
        want, exact = evaluate(stock, now), _exact(stock, now)
        judged(*({names[n]: values[n] for n in names} for values in (outputs, want, exact)), terms=TERMS)


def _captured(layer: nn.Module, x: Tensor, cotangent: Tensor | None) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    leaves = {"input": x, **{name.rpartition(".")[2]: p for name, p in layer.named_parameters()}}

    def work() -> dict[str, Tensor]:
        output = layer(x)
        grads = torch.autograd.grad(output, list(leaves.values()), cotangent)
        return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}

    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream(x.device).wait_stream(side)
    made = torch.cuda.CUDAGraph()
    gc.collect()  # graphs and events of before, which must not be freed in a capture
    with torch.cuda.graph(made):
        outputs = work()
    return made, outputs


def second_gpu(s: Subject) -> None:
    judge_apart(_on_another, s, _other(s))


def _other(s: Subject) -> torch.device:
    if torch.cuda.device_count() < 2:
        raise Untested("it needs two GPUs, and there is one")
    return torch.device("cuda", 1 if device_of(s.device).index == 0 else 0)


def _on_another(s: Subject, _: int) -> None:
    """In a fresh process: work on one GPU makes no context, and so allocates nothing, on the others."""
    custom, stock = s.pair(512, 256)
    case = _case(s)
    found: list[Tensors] = []
    for layer, problem in ((stock, Untested), (custom, Broken)):
        found.append(evaluate(layer, case))
        torch.cuda.synchronize(s.device)
        for gpu in range(torch.cuda.device_count()):
            if gpu != s.device.index and _has_context(gpu):
                whose = "the stock layer" if layer is stock else "the layer"
                raise problem(f"all tensors are on {s.device}, and {whose} made a context on cuda:{gpu}")
    judged(found[1], found[0], _exact(stock, case), terms=TERMS)


def _has_context(gpu: int) -> bool:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), gpu):
        raise Untested(f"the driver does not know cuda:{gpu}")
    if cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)):
        raise Untested(f"the driver does not tell of cuda:{gpu}")
    return bool(active.value)


def current_device(s: Subject) -> None:
    """Tensors on a GPU that is not the current one, either way round."""
    other = _other(s)
    home = device_of(s.device)
    for where, current in ((home, other), (other, home)):
        t = replace(s, device=where)
        custom, stock = t.pair(512, 256)
        case = _case(t)
        with torch.cuda.device(current):
            with torch.no_grad():
                output = custom(case.input)
            if output.device != where:
                raise Broken(
                    f"all tensors are on {where}, {current} is the current device; the output is on {output.device}"
                )
            got = evaluate(custom, case)
            after = torch.device("cuda", torch.cuda.current_device())
        if after != current:
            raise Broken(f"{current} was the current device before a call, and {after} is after it")
        wrong = [
            f"{name} on {value.device}" for name, value in got.items() if value is not None and value.device != where
        ]
        if wrong:
            raise Broken(f"all tensors are on {where}, {current} is the current device; got {', '.join(wrong)}")
        judged(got, evaluate(stock, case), _exact(stock, case), terms=TERMS)


def large_tensors(s: Subject) -> None:
    if (free := free_bytes(s.device)) < LARGE_NEEDS:
        raise Untested(f"it needs {LARGE_NEEDS / 2**30:.0f} GiB of free memory; there are {free / 2**30:.1f}")
    big = 2**31 // 64 + 129
    torch.cuda.reset_peak_memory_stats(s.device)
    try:
        for what, (m, k, n) in {"input": (big, 64, 3), "output": (big, 2, 64), "weight": (3, 64, big)}.items():
            _large(s.of(torch.bfloat16), what, m, k, n)
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        if (most := torch.cuda.max_memory_reserved(s.device)) < LARGE_NEEDS:
            held = f"this process held {most / 2**30:.1f} GiB of memory when"
            raise Untested(f"{held} there was no more; others on the GPU have the rest") from None
        raise


def _large(s: Subject, what: str, m: int, k: int, n: int) -> None:
    """The first and the last 70 of the long dimension; elsewhere the incoming gradient is zero."""
    custom, stock = s.pair(k, n)
    long = 1 if what == "weight" else 0
    x = torch.randn(m, k, device=s.device, dtype=s.dtype).requires_grad_()
    cotangent = torch.zeros(m, n, device=s.device, dtype=s.dtype)
    for start in (0, cotangent.shape[long] - EDGE):
        part = cotangent.narrow(long, start, EDGE)
        part.copy_(s.cotangent(*part.shape))
    leaves = {name.rpartition(".")[2]: p for name, p in custom.named_parameters()}
    output = custom(x)
    grads = torch.autograd.grad(output, [x, leaves["weight"], leaves["bias"]], cotangent)
    got = {"output": _ends(output.detach(), long), **dict(zip(ALL, grads, strict=True))}
    rows, weight, bias, grad = x.detach(), stock.weight.detach(), stock.bias.detach(), _ends(cotangent, long)
    if long == 0:
        rows, got["input"] = _ends(rows, 0), _ends(got["input"], 0)
    else:
        weight, bias = _ends(weight, 0), _ends(bias, 0)
        got["weight"], got["bias"] = _ends(got["weight"], 0), _ends(got["bias"], 0)

    def by_torch(dtype: torch.dtype) -> dict[str, Tensor | None]:
        operands = [t.detach().to(dtype).requires_grad_() for t in (rows, weight, bias)]
        y = nn.functional.linear(*operands)
        found = torch.autograd.grad(y, operands, grad.to(dtype))
        return {"output": y.detach(), **dict(zip(ALL, found, strict=True))}

    names = {name: f"{what} of more than 2**31 elements: {name}" for name in got}
    values = (got, by_torch(s.dtype), by_torch(torch.float64))
    judged(*({names[n]: found[n] for n in names} for found in values))


def _ends(tensor: Tensor, dim: int) -> Tensor:
    """A copy of the first and the last of a dimension, without indices that may be too few themselves."""
    size = tensor.shape[dim]
    return torch.cat([tensor.narrow(dim, 0, EDGE), tensor.narrow(dim, size - EDGE, EDGE)], dim)


def peak_memory(s: Subject) -> None:
    custom, stock = s.pair(1024, 1024)
    case = Case("", s.randn(8192, 1024), 1024, gradients=ALL, cotangent=s.cotangent(8192, 1024))
    got, want = (_peak(s, layer, case) for layer in (custom, stock))
    if got > 2 * want + WORKSPACE:
        raise Broken(f"{got / 2**20:.0f} MiB at the peak, operands counted; the stock layer takes {want / 2**20:.0f}")


def _peak(s: Subject, layer: nn.Module, case: Case) -> int:
    for _ in range(2):  # workspaces are allocated once
        evaluate(layer, case)
    torch.cuda.synchronize(s.device)
    torch.cuda.reset_peak_memory_stats(s.device)
    before = torch.cuda.memory_allocated(s.device)
    evaluate(layer, case)
    torch.cuda.synchronize(s.device)
    operands: Any = [case.input, case.cotangent, *layer.parameters()]
    return torch.cuda.max_memory_allocated(s.device) - before + sum(t.numel() * t.element_size() for t in operands)


def allocated(device: torch.device, at_most: int = -1) -> int:
    """Bytes that are allocated, the least of some readings until they are ``at_most`` so many.

    Autograd's thread may hold the last gradients until it runs again.
    """
    least = torch.cuda.memory_allocated(device)
    for _ in range(READINGS if at_most < 0 else PATIENCE * READINGS):
        if least <= at_most:
            break
        time.sleep(0.01)
        least = min(least, torch.cuda.memory_allocated(device))
    return least


def memory_growth(s: Subject) -> None:
    custom, _ = s.pair(512, 256)
    rows = (64, 200, 1, 1000)

    def rounds(n: int) -> None:
        for number in range(n):
            m = rows[number % len(rows)]
            evaluate(custom, Case("", s.randn(m, 512), 256, gradients=ALL, cotangent=s.cotangent(m, 256)))
        torch.cuda.synchronize(s.device)

    rounds(12)
    before = allocated(s.device)
    rounds(60)
    after = allocated(s.device, at_most=before)
    if after > before:
        raise Broken(f"60 calls left {after - before} bytes allocated")


def _claim(name: str, says: str, check: Callable[[Subject], None]) -> Claim:
    def on_a_gpu(s: Subject) -> None:
        if s.device.type != "cuda":
            raise Untested("not on a GPU; --device cuda")
        check(s)

    return Claim(name, says, on_a_gpu)


CLAIMS = (
    _claim("stream", "its work is on the caller's stream, forward and backward", stream),
    _claim("asynchronous", "it waits neither for the device nor for other streams", asynchronous),
    _claim("cuda-graph", "a CUDA graph of forward and backward is right for new values", graph),
    _claim("second-gpu", "on one GPU it leaves the others alone, in a fresh process", second_gpu),
    _claim(
        "current-device", "right on a GPU that is not the current device, which stays the current one", current_device
    ),
    _claim("large-tensors", "right for an input, output or weight of more than 2**31 elements", large_tensors),
    _claim("peak-memory", "at its peak at most twice the stock layer's memory, and 32 MiB", peak_memory),
    _claim("memory-growth", "calls leave no memory allocated", memory_growth),
)
