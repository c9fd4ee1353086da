"""One measurement of the Linear: its data, its contestants, and what came of them."""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo import ops
from zoo.bench.cases import Case
from zoo.bench.cuda_clocks import cuda_clock
from zoo.bench.exact import Operands, combined, names_of, verdicts, worst_error, wrongness
from zoo.bench.linear_report import LinearRow
from zoo.bench.timing import Clock, Contestant, Timing, WallClock, finish, race, rotated_sets
from zoo.judging import Measure
from zoo.machine import Machine, cache_bytes, float32_precision, free_bytes, peak_of
from zoo.ops._linear import activate

__all__ = ["DTYPES", "Measurement", "compiled", "custom", "eager", "measured"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

SECONDS = 3.0
"""That the repetitions of one measurement may take, before there are fewer of them."""
CHECKED = 4
"""Sets whose results are compared with float64; on all others every value must have been written and be finite."""
_HOST_CALLS, _HOST_BLOCKS = 50, 9
_HOST_SHOWS_US = 1000.0
"""A call that keeps the device busy for longer hides the host's time."""
_KINK = 0.05
"""Nearer to relu's kink than this, a float32 product in any precision may be rounded to its other side."""

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Measurement:
    """One case in one dtype, precision and pass; it is timed beside all peers at once."""

    case: Case
    dtype: str
    precision: str
    pass_: str

    @property
    def backward(self) -> bool:
        return self.pass_ != "forward"

    @property
    def depth(self) -> int:
        """The longest sum in any of the results."""
        return max(self.case.K, self.case.M, self.case.N) if self.backward else self.case.K

    def __str__(self) -> str:
        return f"{self.case.name} {self.dtype} {self.pass_}"


def eager(activation: str | None) -> Linear:
    """What a user of torch writes."""
    if activation is None:
        return F.linear
    return lambda x, weight, bias: activate(F.linear(x, weight, bias), activation)


def compiled(activation: str | None) -> Linear:
    """The same under torch.compile."""
    return torch.compile(eager(activation), fullgraph=True, dynamic=False)


def custom(activation: str | None) -> Linear:
    """zoo's."""
    return ops.linear if activation is None else functools.partial(ops.linear, activation=activation)


def measured(
    m: Measurement, peers: Sequence[str], machine: Machine, device: torch.device, *, repeats: int, seed: int
) -> list[LinearRow]:
    """Time zoo's Linear and the peers at once: a row for each peer.

    Args:
        m: what to measure.
        peers: "eager", "compiled".
        machine: the facts about the device.
        device: where to run.
        repeats: repetitions, at most.
        seed: of the data and of the order of the contestants.
    """
    case = m.case
    blank = LinearRow(case.name, case.M, case.K, case.N, m.dtype, m.precision, case.activation, m.pass_, "", "")
    with float32_precision(m.precision), torch.set_grad_enabled(m.backward):
        if "compiled" in peers:  # what was compiled before for other shapes counts towards the limit of recompilations
            torch._dynamo.reset()
        if device.type == "cuda":  # a graph of the last measurement may hold gigabytes
            gc.collect()
        try:
            return _Race(m, peers, device, seed).rows(blank, machine, repeats)
        except RuntimeError as error:  # out of memory, or a device that has failed
            return [replace(blank, peer=peer, failure=_first_line(error)) for peer in peers]


class _Race:
    """One measurement: its data, its contestants, and what came of them."""

    def __init__(self, m: Measurement, peers: Sequence[str], device: torch.device, seed: int) -> None:
        self.m, self.peers, self.device, self.seed = m, peers, device, seed
        makers = {"zoo": custom, "eager": eager, "compiled": compiled}
        self.functions = {name: makers[name](m.case.activation) for name in ("zoo", *peers)}
        self.eager = eager(m.case.activation)
        size, case = DTYPES[m.dtype].itemsize, m.case
        touched = case.elements(backward=m.backward) * size
        results = touched // 2 if m.backward else case.M * case.N * size
        held = touched + results * len(peers)
        self.count = rotated_sets(touched, cache=cache_bytes(device), held=held, memory=free_bytes(device) // 2)
        words = f"{seed} {case.name} {m.dtype} {m.backward}"
        self.generator = torch.Generator(device).manual_seed(zlib.crc32(words.encode()))
        self.sets = [self._operands(positive=i == self.count) for i in range(self.count + 1)]

    def rows(self, blank: LinearRow, machine: Machine, repeats: int) -> list[LinearRow]:
        x, weight, bias = self.sets[0].arguments()
        blank = replace(blank, kernel=ops.explain(x, weight, bias, activation=self.m.case.activation).kernel)
        failures = {name: self._trial(name) for name in self.functions}
        runs = {name: self._run_with(function) for name, function in self.functions.items() if not failures[name]}
        rows = [replace(blank, peer=peer) for peer in self.peers]
        clock: Clock | None = None
        if "zoo" in runs and len(runs) > 1:
            clock, note = self._clock(runs)
            timing = race(clock, repeats=repeats, seconds=SECONDS, seed=self.seed)
            errors, wrong = self._check({name: clock.outputs(name) for name in runs}, self._checked())
            positive, more = self._check({name: [run(self.count)] for name, run in runs.items()}, {0: self.count})
            wrong = {name: "; ".join(filter(None, (wrong[name], more[name]))) for name in runs}
            host = self._host_times(runs, timing)
        for index, row in enumerate(rows):
            if failure := failures["zoo"] or failures[row.peer]:
                rows[index] = replace(row, failure=failure)
                continue
            assert clock is not None
            rows[index] = replace(
                row,
                **_times(timing, row.peer, self.seed),
                **self._shares(timing.median("zoo"), machine),
                zoo_err=errors["zoo"],
                peer_err=errors[row.peer],
                zoo_err_positive=positive["zoo"],
                peer_err_positive=positive[row.peer],
                zoo_host_us=host.get("zoo"),
                peer_host_us=host.get(row.peer),
                clock=timing.clock,
                clock_note=note,
                sets=timing.sets,
                repeats=timing.repeats,
                failure="; ".join(filter(None, (wrong["zoo"], wrong[row.peer]))),
            )
        return rows

    def _operands(self, *, positive: bool) -> Operands:
        """Fresh data: normal with weights as a layer has them; or uniform in (0, 1), where sums do not cancel."""
        case, dtype, backward = self.m.case, DTYPES[self.m.dtype], self.m.backward

        def values(*shape: int, scale: float = 1.0) -> Tensor:
            working = torch.promote_types(dtype, torch.float32)
            made = torch.empty(shape, dtype=working, device=self.device)
            made = made.uniform_(generator=self.generator) if positive else made.normal_(generator=self.generator)
            return made.mul_(scale).to(dtype)

        with torch.no_grad():
            x = values(case.M, case.K)
            weight = values(case.N, case.K, scale=case.K**-0.5)
            bias = values(case.N) if case.bias else None
            # small, so that float16 holds the sums over M
            grad = values(case.M, case.N, scale=case.M**-0.5) if backward else None
            if grad is not None and case.activation == "relu":
                # no gradient where rounding decides on which side of its kink a value lies
                z = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
                grad[z.abs() < _KINK] = 0
        operands = Operands(x, weight, bias, grad)
        for tensor in operands.leaves() if backward else ():
            tensor.requires_grad_()
        return operands

    def _run_with(self, function: Linear) -> Contestant:
        """The function on set i, the last of which holds the positive data."""
        sets = self.sets
        if not self.m.backward:
            return lambda i: (function(*sets[i].arguments()),)

        def run(i: int) -> Sequence[Tensor]:
            operands = sets[i]
            y = function(*operands.arguments())
            return (y.detach(), *torch.autograd.grad(y, operands.leaves(), operands.grad))

        return run

    def _trial(self, name: str) -> str:
        """Run a contestant once, so that it is compiled; why it cannot run, if it cannot."""
        try:
            self._run_with(self.functions[name])(0)
            finish(self.device)
        except Exception as error:
            return f"{name} failed: {_first_line(error)}"
        return ""

    def _clock(self, runs: Mapping[str, Contestant]) -> tuple[Clock, str]:
        if self.device.type == "cuda":
            return cuda_clock(runs, sets=self.count, device=self.device)
        return WallClock(runs, sets=self.count, device=self.device), ""

    def _checked(self) -> dict[int, int]:
        """The first and the last set that were timed, and others between them."""
        steps = max(1, min(CHECKED, self.count) - 1)
        return {index: index for index in sorted({i * (self.count - 1) // steps for i in range(steps + 1)})}

    def _check(
        self, outputs: Mapping[str, Sequence[Sequence[Tensor]]], checked: Mapping[int, int]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """The error of each contestant, and what is wrong with its results ("" for nothing).

        Args:
            outputs: contestant -> its results.
            checked: place among those -> the set they belong to.
        """
        parts: dict[str, dict[str, list[Measure]]] = {}
        stock_run = self._run_with(self.eager)
        for place, index in checked.items():
            results = {name: by_place[place] for name, by_place in outputs.items()}
            results["stock"] = stock_run(index)
            for who, measures in wrongness(results, self.sets[index], self.m.case.activation).items():
                for name, measure in measures.items():
                    parts.setdefault(who, {}).setdefault(name, []).append(measure)
        whole = {who: {name: combined(found) for name, found in by.items()} for who, by in parts.items()}
        stock = whole.pop("stock")
        errors = {who: worst_error(measures) for who, measures in whole.items()}
        wrong = {}
        for who, measures in whole.items():
            entries = verdicts(measures, stock, precision=self.m.precision, depth=self.m.depth)
            reasons = [f"{who}'s {entry.name}: {entry.reason}" for entry in entries if not entry.ok]
            reasons += [] if reasons else _unwritten(who, outputs[who], names_of(self.sets[0]))
            wrong[who] = "; ".join(reasons)
        return errors, wrong

    def _host_times(self, runs: Mapping[str, Contestant], timing: Timing) -> dict[str, float]:
        """Microseconds of the host for an eager call, the device's queue empty before; nothing on the CPU."""
        if self.device.type != "cuda" or max(map(timing.median, runs)) >= _HOST_SHOWS_US:
            return {}
        taken: dict[str, list[float]] = {name: [] for name in runs}
        order = random.Random(self.seed)
        for _ in range(_HOST_BLOCKS):
            for name in order.sample(list(runs), len(runs)):
                finish(self.device)
                calls = runs[name] if self.m.backward else self._direct(self.functions[name])
                started = time.perf_counter_ns()
                for i in range(_HOST_CALLS):
                    calls(i % self.count)
                taken[name].append((time.perf_counter_ns() - started) / 1e3 / _HOST_CALLS)
        finish(self.device)
        return {name: statistics.median(times) for name, times in taken.items()}

    def _direct(self, function: Linear) -> Callable[[int], Any]:
        arguments = [operands.arguments() for operands in self.sets]
        return lambda i: function(*arguments[i])

    def _shares(self, us: float, machine: Machine) -> dict[str, Any]:
        peak = peak_of(machine.device, self.m.dtype, self.m.precision) if self.device.type == "cuda" else None
        if peak is None:
            return {"zoo_flop_share": None, "zoo_byte_share": None}
        moved = self.m.case.elements(backward=self.m.backward) * DTYPES[self.m.dtype].itemsize
        flops = self.m.case.flops(backward=self.m.backward)
        return {
            "zoo_flop_share": flops / (us * 1e-6) / peak.flops,
            "zoo_byte_share": moved / (us * 1e-6) / peak.bandwidth,
        }


def _times(timing: Timing, peer: str, seed: int) -> dict[str, Any]:
    found = timing.speedup("zoo", over=peer, seed=seed)
    return {
        "zoo_us": timing.median("zoo"),
        "peer_us": timing.median(peer),
        "speedup": found.value,
        "speedup_low": found.low,
        "speedup_high": found.high,
    }


def _unwritten(who: str, outputs: Sequence[Sequence[Tensor]], names: Sequence[str]) -> list[str]:
    """What was left unwritten, or is not finite for another reason, on any set."""
    found = []
    for position, name in enumerate(names):
        finite = torch.stack([tensors[position].isfinite().all() for tensors in outputs])
        if not bool(finite.all()):
            bad = (~finite).nonzero().flatten().tolist()
            found.append(f"{who}'s {name}: not finite on {len(bad)} of {len(outputs)} sets, first on set {bad[0]}")
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
