"""What is timed, and how often: fixed before the first call, so that nobody looks and then decides to go on."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zoo.bench.cases import Case
from zoo.verify.timing.cases import LayerCase, cases_of, linear

__all__ = ["COLD", "FORMS", "FULL_PROCESSES", "LAYER", "Measurement", "Plan", "block_order", "plan_for"]

LAYER, EAGER, TWIN, COMPILED = "layer", "eager", "twin", "compiled"
"""The contestants: the layer, the stock layer, the same once more (the noise), and the stock layer compiled."""
COLD, WARM = "cold", "warm"
PASSES = ("forward", "forward+backward")
FORMS = ("quick", "full")
FULL_PROCESSES = 5
"""Fewer fresh processes are a quick form: they show too little of what differs between processes."""
_RUN_US = 5000.0
"""On a CPU a run of calls lasts about this long, by a rough guess from the case alone."""


@dataclass(frozen=True)
class Measurement:
    """One case in one dtype, pass and state of the cache; all contestants are timed in it together."""

    case: LayerCase
    dtype: str
    pass_: str
    """"forward" (without gradients) or "forward+backward" (all of them)."""
    state: str
    """"cold": twice the last cache is written before each call; "warm": the call's inputs are read before it."""
    calls: int
    """Of one run."""

    @property
    def backward(self) -> bool:
        return self.pass_ != "forward"

    def __str__(self) -> str:
        return f"{self.case.name} {self.dtype} {self.pass_} {self.state}"


@dataclass(frozen=True)
class Plan:
    """A schedule; the number of blocks is fixed by it."""

    form: str
    """"quick" or "full"."""
    processes: int
    """Fresh ones, one after the other."""
    blocks: int
    """Of each measurement in each process."""
    cases: tuple[LayerCase | Case, ...]
    """Of one kind; the bench's are of Linears."""
    dtypes: tuple[str, ...]
    peers: tuple[str, ...] = (EAGER, COMPILED)
    passes: tuple[str, ...] = PASSES
    states: tuple[str, ...] = (COLD, WARM)

    def measurements(self, device: torch.device) -> tuple[Measurement, ...]:
        """All of them, in the order in which they are reported."""
        return tuple(
            Measurement(case, dtype, pass_, state, _calls(case, pass_, state, device))
            for case, dtype, pass_, state in itertools.product(
                (linear(case) if isinstance(case, Case) else case for case in self.cases),
                self.dtypes,
                self.passes,
                self.states,
            )
        )

    @property
    def note(self) -> str:
        """What the form does not show."""
        if self.processes >= FULL_PROCESSES:
            return ""
        return (
            f"quick form: {self.processes} processes, where the full form has at least {FULL_PROCESSES}; "
            "intervals are wide"
        )


def plan_for(device: torch.device, form: str = "quick", kind: str = "linear") -> Plan:
    """The plan of a form on a device. ValueError for an unknown form or kind."""
    if form not in FORMS:
        raise ValueError(f"timing={form!r}: expected one of {', '.join(FORMS)}")
    gpu, full = device.type == "cuda", form == "full"
    return Plan(
        form,
        FULL_PROCESSES if full else 3,
        (40 if full else 25) if gpu else (40 if full else 20),
        cases_of(kind, gpu=gpu, full=full),
        ("float32", "bfloat16") if gpu and full else ("float32",),
    )


def block_order(names: Sequence[str], order: random.Random) -> Iterator[str]:
    """Every contestant twice: an order drawn anew, then the same backwards."""
    drawn = order.sample(list(names), len(names))
    return itertools.chain(drawn, reversed(drawn))


def _calls(case: LayerCase, pass_: str, state: str, device: torch.device) -> int:
    if device.type == "cuda":
        return 6
    if state == COLD:
        return 2
    made = math.prod(case.input)  # the call's values are drawn too
    guess_us = 20 + case.flops(backward=pass_ != "forward") / 50e3 + made / 200
    return max(2, min(50, round(_RUN_US / guess_us)))
