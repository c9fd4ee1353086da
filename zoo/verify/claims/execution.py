"""Claims about running: memory, state, order, threads."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.verify.outcome import Broken, Claim
from zoo.verify.subject import ALL, Case, Subject, evaluate, judged

__all__ = ["CLAIMS"]


def deterministic(s: Subject) -> None:
    custom, _ = s.pair(192, 96)
    case = Case("", s.randn(130, 192), 96, gradients=ALL, cotangent=s.cotangent(130, 96))
    first = evaluate(custom, case)
    for run in range(1, 8):
        for name, value in evaluate(custom, case).items():
            before = first[name]
            if value is None or before is None or not torch.equal(value, before):
                raise Broken(f"run {run} on equal values gave another {name} than run 0")


def new_values(s: Subject) -> None:
    """Equal objects at equal pointers, with other values in them: whoever keeps results by these is found."""
    custom, stock = s.pair(96, 48)
    x = s.randn(64, 96)
    weight, bias = (dict(custom.named_parameters())[name] for name in ("weight", "bias"))

    def right(what: str) -> None:
        with torch.no_grad():
            got, want = custom(x), stock(x)
            exact = nn.functional.linear(x.double(), stock.weight.double(), stock.bias.double())
        judged({f"output after {what}": got}, {f"output after {what}": want}, {f"output after {what}": exact})

    right("the first call")
    x.copy_(s.randn(64, 96))
    right("the input was overwritten")
    x.data.mul_(-2.0)  # leaves no trace in the version counter
    right("the input was overwritten through .data")
    with torch.no_grad():
        for mine, theirs in ((weight, stock.weight), (bias, stock.bias)):
            new = s.randn(*theirs.shape)
            mine.copy_(new)
            theirs.copy_(new)
    right("an optimizer's step")
    for mine, theirs in ((weight, stock.weight), (bias, stock.bias)):
        new = s.randn(*theirs.shape)
        mine.data.copy_(new)
        theirs.data.copy_(new)
    right("a step through .data")
    new = s.randn(48, 96)
    _owner(custom, "weight").weight = nn.Parameter(new)
    stock.weight = nn.Parameter(new.clone())
    right("a new Parameter took the weight's place")


def reused_memory(s: Subject) -> None:
    """New tensors, none of which was ever written to, where another one lay before."""
    custom, stock = s.pair(96, 48)
    memory = torch.empty(64, 96, device=s.device, dtype=s.dtype)
    got, want, exact = {}, {}, {}
    with torch.no_grad():
        for number in range(3):
            memory.copy_(s.randn(64, 96))
            x = memory.data
            name = f"output for tensor {number} at one address"
            got[name], want[name] = custom(x), stock(x)
            exact[name] = nn.functional.linear(x.double(), stock.weight.double(), stock.bias.double())
    judged(got, want, exact)


def _owner(module: nn.Module, name: str) -> Any:
    return next(m for m in module.modules() if name in m._parameters)


def own_output(s: Subject) -> None:
    custom, _ = s.pair(96, 48)
    first = custom(s.randn(64, 96))
    kept = first.detach().clone()
    second = custom(s.randn(64, 96))
    if not torch.equal(first.detach(), kept):
        raise Broken("a second call changed the output of the first")
    if first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr():
        raise Broken("two outputs lie in the same memory")
    leaves = list(custom.parameters())
    grads = torch.autograd.grad(first, leaves, s.cotangent(64, 48))
    kept_grads = [g.clone() for g in grads]
    torch.autograd.grad(second, leaves, s.cotangent(64, 48))
    if not all(map(torch.equal, grads, kept_grads)):
        raise Broken("a second backward changed the gradients of the first")


def untouched(s: Subject) -> None:
    custom, _ = s.pair(96, 48)
    x, cotangent = s.randn(64, 96).requires_grad_(), s.cotangent(64, 48)
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
    custom, _ = s.pair(96, 48)
    x, cotangent = s.randn(64, 96).requires_grad_(), s.cotangent(64, 48)
    before = {what: read() for what, read in _STATE.items()}
    custom(x).backward(cotangent)
    for what, read in _STATE.items():
        if read() != before[what]:
            raise Broken(f"a call changed torch's {what}: {before[what]} before, {read()} after")


def no_grad(s: Subject) -> None:
    custom, _ = s.pair(96, 48)
    x = s.randn(64, 96)
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
    custom, _ = s.pair(96, 48)
    inputs = [s.randn(64, 96) for _ in range(4)]
    cotangents = [s.cotangent(64, 48) for _ in range(4)]
    leaves = list(custom.parameters())

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
                for name, got, right in zip(("output", "weight", "bias"), work(number), alone[number], strict=False):
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
    Claim("determinism", "equal inputs give equal bits, forward and backward", deterministic),
    Claim("new-values", "new values at the same pointers, and new weights, give new results", new_values),
    Claim("reused-memory", "a new tensor at an address that was used before is read anew", reused_memory),
    Claim("own-output", "results stay as they are when the layer is called again", own_output),
    Claim("inputs-untouched", "input, weights and the incoming gradient are not written to", untouched),
    Claim("global-state", "torch's global settings and random state stay as they are", global_state),
    Claim("no-grad", "no_grad, inference_mode and eval change nothing but the graph", no_grad),
    Claim("threads", "four threads may use one layer at once", threads),
)
