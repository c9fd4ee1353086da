"""Claims about running: memory, state, order, threads."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.verify.kinds import EVERY
from zoo.verify.outcome import Broken, Claim
from zoo.verify.subject import Subject, double_of, evaluate, judged, parameter_of

__all__ = ["CLAIMS"]


def deterministic(s: Subject) -> None:
    for case in s.suite.cases["determinism"](s):
        custom, _ = s.pair(*s.suite.sizes_of(case), **case.options)
        whole = replace(case, cotangent=s.cotangent(*s.suite.shape_of(case)))
        first = evaluate(custom, whole)
        for run in range(1, 8):
            for name, value in evaluate(custom, whole).items():
                before = first[name]
                if value is None or before is None or not torch.equal(value, before):
                    raise Broken(f"run {run} on equal values gave another {name} than run 0")


def new_values(s: Subject) -> None:
    """Equal objects at equal pointers, with other values in them: whoever keeps results by these is found."""
    custom, stock = s.pair()
    x = s.input(64)
    pairs = [(parameter_of(custom, name), parameter) for name, parameter in stock.named_parameters()]

    def right(what: str) -> None:
        with torch.no_grad():
            got, want = custom(x), stock(x)
        name = f"output after {what}"
        judged({name: got}, {name: want}, {name: double_of(stock, x)})

    right("the first call")
    x.copy_(s.input(64))
    right("the input was overwritten")
    x.data.mul_(-2.0)  # leaves no trace in the version counter
    right("the input was overwritten through .data")
    with torch.no_grad():
        for mine, theirs in pairs:
            new = s.randn(*theirs.shape)
            mine.copy_(new)
            theirs.copy_(new)
    right("an optimizer's step")
    for mine, theirs in pairs:
        new = s.randn(*theirs.shape)
        mine.data.copy_(new)
        theirs.data.copy_(new)
    right("a step through .data")
    for name in s.suite.weights:
        new = s.randn(*getattr(stock, name).shape)
        setattr(_owner(custom, name), name, nn.Parameter(new))
        setattr(stock, name, nn.Parameter(new.clone()))
        right(f"a new Parameter took the {name}'s place")


def reused_memory(s: Subject) -> None:
    """New tensors, none of which was ever written to, where another one lay before."""
    custom, stock = s.pair()
    memory = torch.empty_like(s.input(64))
    got, want, exact = {}, {}, {}
    with torch.no_grad():
        for number in range(3):
            memory.copy_(s.input(64))
            x = memory.data
            name = f"output for tensor {number} at one address"
            got[name], want[name], exact[name] = custom(x), stock(x), double_of(stock, x)
    judged(got, want, exact)


def _owner(module: nn.Module, name: str) -> Any:
    return next(m for m in module.modules() if name in m._parameters)


def own_output(s: Subject) -> None:
    custom, _ = s.pair()
    first = custom(s.input(64))
    kept = first.detach().clone()
    second = custom(s.input(64))
    if not torch.equal(first.detach(), kept):
        raise Broken("a second call changed the output of the first")
    if first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr():
        raise Broken("two outputs lie in the same memory")
    leaves = [p for p in custom.parameters() if p.requires_grad]
    grads = torch.autograd.grad(first, leaves, s.gradient(64))
    kept_grads = [g.clone() for g in grads]
    torch.autograd.grad(second, leaves, s.gradient(64))
    if not all(map(torch.equal, grads, kept_grads)):
        raise Broken("a second backward changed the gradients of the first")


def untouched(s: Subject) -> None:
    custom, _ = s.pair()
    x, cotangent = s.input(64).requires_grad_(), s.gradient(64)
    held = {"input": x, "the incoming gradient": cotangent, **dict(custom.named_parameters())}
    before = {name: t.detach().clone() for name, t in held.items()}
    versions = {name: t._version for name, t in held.items()}
    custom(x).backward(cotangent)
    for name, t in held.items():
        if not torch.equal(t.detach(), before[name]) or t._version != versions[name]:
            raise Broken(f"{name} was written to")


_STATE: dict[str, Callable[[], Any]] = {
    "grad mode": torch.is_grad_enabled,
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "number of threads": torch.get_num_threads,
    "TF32 in cuBLAS": lambda: torch.backends.cuda.matmul.allow_tf32,
    "random state": lambda: zlib.crc32(torch.random.get_rng_state().numpy().tobytes()),
}


def global_state(s: Subject) -> None:
    custom, _ = s.pair()
    x, cotangent = s.input(64).requires_grad_(), s.gradient(64)
    before = {what: read() for what, read in _STATE.items()}
    custom(x).backward(cotangent)
    for what, read in _STATE.items():
        if read() != before[what]:
            raise Broken(f"a call changed torch's {what}: {before[what]} before, {read()} after")


def no_grad(s: Subject) -> None:
    custom, _ = s.pair()
    x = s.input(64)
    graded = custom(x)
    for what, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode():
            output = custom(x)
        if output.requires_grad:
            raise Broken(f"the output requires a gradient under {what}")
        if not torch.equal(output, graded):
            raise Broken(f"the output under {what} is another one than with gradients")
    custom.eval()
    if not torch.equal(custom(x), graded):
        raise Broken("the output in eval mode is another one than in training mode")


def threads(s: Subject) -> None:
    """Four threads with one layer, each with inputs of its own; what each gets is what it would get alone."""
    custom, _ = s.pair()
    inputs = [s.input(64) for _ in range(4)]
    cotangents = [s.gradient(64) for _ in range(4)]
    leaves = [p for p in custom.parameters() if p.requires_grad]
    names = ("output", *(name for name, p in custom.named_parameters() if p.requires_grad))

    def work(number: int) -> list[Tensor]:
        output = custom(inputs[number])
        return [output.detach(), *torch.autograd.grad(output, leaves, cotangents[number])]

    alone = [work(number) for number in range(4)]
    barrier = threading.Barrier(4)
    wrong: list[str] = []

    def thread(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(25):
                for name, got, right in zip(names, work(number), alone[number], strict=False):
                    if got.shape != right.shape or not torch.allclose(got, right, rtol=1e-3, atol=1e-3):
                        wrong.append(f"thread {number} got a wrong {name}")
                        return
        except Exception as error:
            wrong.append(f"thread {number}: {type(error).__name__}: {error}")

    started = [threading.Thread(target=thread, args=(number,), daemon=True) for number in range(4)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    if wrong:
        raise Broken(f"{wrong[0]}, as it did not alone")


CLAIMS = (
    Claim("determinism", "equal inputs give equal bits, forward and backward", deterministic, EVERY),
    Claim("new-values", "new values at the same pointers, and new weights, give new results", new_values, EVERY),
    Claim("reused-memory", "a new tensor at an address that was used before is read anew", reused_memory, EVERY),
    Claim("own-output", "results stay as they are when the layer is called again", own_output, EVERY),
    Claim("inputs-untouched", "input, weights and the incoming gradient are not written to", untouched, EVERY),
    Claim("global-state", "torch's global settings and random state stay as they are", global_state, EVERY),
    Claim("no-grad", "no_grad, inference_mode and eval change nothing but the graph", no_grad, EVERY),
    Claim("threads", "four threads may use one layer at once", threads, EVERY),
)
