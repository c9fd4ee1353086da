"""The worker's part: builds the contestants of each measurement, runs them block by block, and checks their outputs.

Every call has new values at new addresses. Which of the timed calls are compared with float64 nobody can foretell.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.bench.exact import combined
from zoo.bench.measuring import DTYPES
from zoo.judging import Measure, judge, measure
from zoo.machine import device_of
from zoo.verify.kinds import suite_of
from zoo.verify.outcome import REFUSED, outcome_of
from zoo.verify.target import build, resolve
from zoo.verify.timing.clocks import CudaClock, Once, busy_us, clock_for, fingerprint
from zoo.verify.timing.judging import HOST
from zoo.verify.timing.plan import COLD, COMPILED, EAGER, LAYER, TWIN, Measurement, block_order

__all__ = ["Answer", "Measured", "Run", "Task", "look"]

WARM_UP = 3
CHECKED = 3
"""Runs of a contestant in a measurement of which one call is compared with float64."""
_PROFILED = 5
_SLACK = 4096
"""Bytes of an arena beyond what a tensor needs, times 512: it lies at any of so many addresses."""
BEGIN, END = "begin", "end"


@dataclass(frozen=True)
class Task:
    """What one fresh process is asked."""

    target: Any
    kind: str
    device: str
    seed: int
    process: int
    blocks: int
    threads: int
    peers: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    against: Any = None
    """What the peers are, by the rules of a target; the stock layer unless told."""
    profiled: bool = True
    """Whether CUPTI is asked at the end, which takes seconds to begin."""


@dataclass(frozen=True)
class Run:
    """One run of one contestant; microseconds a call."""

    contestant: str
    us: float
    cpu_us: float
    host_us: float
    run_us: float
    """From begin to end by the worker's clock, all that surrounds the calls with them."""


@dataclass
class Measured:
    """One measurement in one process."""

    measurement: Measurement
    runs: list[Run] = field(default_factory=list)
    """Block by block, each contestant twice."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Contestant -> what is wrong with its outputs; absent where nothing is."""
    device_us: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Contestant -> between events, busy by CUPTI."""
    notes: list[str] = field(default_factory=list)
    failure: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Answer:
    """What one process measured, in the order in which it ran; its runs are those that it told the parent of."""

    measured: tuple[Measured, ...]
    persisting: bool | None
    """Whether what is set aside in the L2 was given back; None on a CPU."""
    ok: bool = True


def look(task: Task, note: Callable[[str], object]) -> Answer:
    """Time everything that a task asks for, in this process. ``note`` is told the begin and the end of each run."""
    torch.set_num_threads(task.threads)
    device = device_of(task.device)
    if COMPILED in task.peers:
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # its processes would stand beside what is timed
    if device.type == "cuda":
        torch.cuda.set_device(device)
    clock = clock_for(device)
    order = random.Random(f"{task.seed} {task.process}")
    # What is imported and built first may lie better in memory: it alternates.
    stock_first = task.process % 2 == 1
    if stock_first:
        nn.Linear(8, 8, device=device)(torch.ones(2, 8, device=device))
    layer = resolve(task.target, task.kind)
    against = suite_of(task.kind).stock if task.against is None else resolve(task.against, task.kind)
    measured: list[Measured] = []
    contests: list[tuple[_Contest, Measured]] = []
    for measurement in order.sample(task.measurements, len(task.measurements)):
        found = Measured(measurement)
        measured.append(found)
        seed = zlib.crc32(f"{task.seed} {task.process} {measurement}".encode())
        torch.manual_seed(seed)  # of the weights
        generator = torch.Generator(device).manual_seed(seed)
        try:
            contest = _Contest(
                layer, against, measurement, device, generator, clock, task.peers, stock_first=stock_first
            )
        except Exception as error:
            status, found.failure = outcome_of(error)
            found.refused = status == REFUSED
            continue
        found.notes += contest.notes
        try:
            _run(contest, found, task.blocks, order, note)
        except Exception as error:
            status, found.failure = outcome_of(error)
            found.refused = status == REFUSED
        else:
            contests.append((contest, found))
    for contest, found in contests if device.type == "cuda" and task.profiled else ():
        _profile(contest, found)
    return Answer(tuple(measured), clock.persisting is not None if isinstance(clock, CudaClock) else None)


def _run(contest: _Contest, found: Measured, blocks: int, order: random.Random, note: Callable[[str], object]) -> None:
    names = list(contest.modules)
    unforeseen = random.SystemRandom()
    places = range(2 * blocks)
    checked = {name: set(unforeseen.sample(places, min(CHECKED, len(places)))) for name in names}
    count = dict.fromkeys(names, 0)
    gc.collect()
    gc.disable()
    try:
        for name in block_order(names, order):  # as the others, and not counted
            contest.run(name, lambda _: None)
        for _ in range(blocks):
            contest.settle()
            for name in block_order(names, order):
                run, calls = contest.run(name, note)
                found.runs.append(run)
                if count[name] in checked[name]:
                    contest.check(name, *unforeseen.choice(calls))
                count[name] += 1
            gc.collect(0)
    finally:
        gc.enable()
    found.wrong = contest.wrong()


def _profile(contest: _Contest, found: Measured) -> None:
    """The third clock of a GPU. At the end of all: launches may be slower once CUPTI has been asked."""
    try:
        found.device_us = {name: contest.profiled(name) for name in (LAYER, EAGER)}
    except Exception as error:  # no CUPTI on this machine, or another profiler has it
        found.notes.append(f"no third clock: {type(error).__name__}: {error}")


class _Contest:
    """The contestants of one measurement, and their data."""

    def __init__(
        self,
        layer: Any,
        against: Any,
        measurement: Measurement,
        device: torch.device,
        generator: torch.Generator,
        clock: Any,
        peers: Sequence[str],
        *,
        stock_first: bool,
    ) -> None:
        self.m, self.device, self._generator, self._clock = measurement, device, generator, clock
        self.notes: list[str] = []
        case, dtype = measurement.case, DTYPES[measurement.dtype]
        where: dict[str, Any] = {**dict(case.options), "kind": case.kind, "device": device, "dtype": dtype}
        stock = build(against, *case.sizes, **where)
        suite_of(case.kind).fill(stock)
        makers: dict[str, Callable[[], nn.Module]] = {
            LAYER: lambda: build(layer, *case.sizes, **where),
            EAGER: lambda: stock,
            TWIN: lambda: copy.deepcopy(stock),
        }
        if COMPILED in peers:
            torch._dynamo.reset()
            makers[COMPILED] = functools.partial(_compiled, stock)
        names_of = [name for name, parameter in stock.named_parameters() if parameter.requires_grad]
        self._outputs = ("y", "dx", *(f"gradient of {name}" for name in names_of))
        names = list(makers) if not stock_first else [name for name in makers if name != LAYER] + [LAYER]
        self.modules: dict[str, nn.Module] = {}
        self._parameters: dict[str, tuple[Tensor, ...]] = {}
        self._spin_us = dict.fromkeys(names, 0.0)
        self._host_us = dict.fromkeys(names, 0.0)
        self._exact = copy.deepcopy(stock).double()
        self._exact_parameters = _named(self._exact, names_of)
        self._measures: dict[str, dict[str, list[Measure]]] = {name: {} for name in names}
        self._moved: dict[str, int] = {}
        self._types: dict[str, str] = {}
        for name in names:
            module = makers[name]()
            if name == LAYER:
                module.load_state_dict(stock.state_dict())
            try:
                self.modules[name], self._parameters[name] = module, _named(module, names_of)
                self._warm_up(name)
            except Exception as error:
                if name != COMPILED:
                    raise
                del self.modules[name]
                self.notes.append(f"compiled: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def settle(self) -> None:
        """Set how long the device spins before each call of the next block: twice the host's time, which hides it.

        The same for the layer, stock and its twin, since spinning is time outside the clock, and that is compared. What
        is compiled takes the host several times as long, and spins for itself. A layer draws it out to ``HOST`` times
        what stock needs, and no further: what it did meanwhile on another stream, or on the host, would show nowhere.
        """
        stock = max(self._host_us[EAGER], self._host_us[TWIN])
        longest = max(stock, min(self._host_us[LAYER], HOST * stock))
        self._spin_us = {name: 2 * (us if name == COMPILED else longest) for name, us in self._host_us.items()}

    def run(self, name: str, note: Callable[[str], object]) -> tuple[Run, list[tuple[Tensor, Tensor | None, Once]]]:
        """One run of a contestant: its mean times, and each call's input, cotangent and outcome."""
        inputs = [self._inputs() for _ in range(self.m.calls)]
        done: list[Once] = []
        with torch.set_grad_enabled(self.m.backward):
            self._clock.wait()
            note(BEGIN)
            began = self._clock.now_us()
            for x, grad in inputs:
                self._prepare(x, grad)
                done.append(self._clock.once(functools.partial(self._call, name, x, grad), self._spin_us[name]))
            settled = [once.settled if once.settled is not None else fingerprint(once.outputs) for once in done]
            run_us = (self._clock.now_us() - began) / self.m.calls
            note(END)
        moved = sum(not torch.equal(once.at_return, after) for once, after in zip(done, settled, strict=True))
        self._moved[name] = self._moved.get(name, 0) + moved
        for once in done:
            odd = next((type(output).__name__ for output in once.outputs if type(output) is not Tensor), None)
            if odd is not None:
                self._types[name] = odd
        self._host_us[name] = max(once.host_us for once in done)
        us, cpu_us, host_us = (
            self._clock.middle([getattr(once, key) for once in done]) for key in ("us", "cpu_us", "host_us")
        )
        return Run(name, us, cpu_us, host_us, run_us), [
            (x, grad, once) for (x, grad), once in zip(inputs, done, strict=True)
        ]

    def check(self, name: str, x: Tensor, grad: Tensor | None, once: Once) -> None:
        """Measure what a timed call returned against float64."""
        double = x.detach().double().requires_grad_(self.m.backward)
        with torch.set_grad_enabled(self.m.backward):
            cotangent = None if grad is None else grad.double()
            exact = _computed(self._exact, self._exact_parameters, double, cotangent)
        for what, got, want in zip(self._outputs, once.outputs, exact, strict=False):
            self._measures[name].setdefault(what, []).append(measure(got, want))

    def wrong(self) -> dict[str, str]:
        """What is wrong with the outputs of the timed calls."""
        whole = {who: {what: combined(parts) for what, parts in by.items()} for who, by in self._measures.items()}
        found: dict[str, str] = {}
        case = self.m.case
        limits = {what: m.of_sum(max(case.M, case.K, case.N)) for what, m in whole[EAGER].items()}
        for who in self.modules:
            entries = judge("output", whole[who], limits) if who != EAGER else ()
            reasons = [f"a timed call's {entry.name} is wrong: {entry.reason}" for entry in entries if not entry.ok]
            if who in self._types:
                reasons.append(f"a timed call returned a {self._types[who]}, not a Tensor")
            if self._moved.get(who):
                reasons.append(f"the outputs of {self._moved[who]} timed calls changed after they were returned")
            if reasons:
                found[who] = "; ".join(reasons[:2])
        return found

    def profiled(self, name: str) -> tuple[float, float]:
        """Time between events and time that the device was busy, of the same calls."""
        inputs = [self._inputs() for _ in range(_PROFILED)]
        self._warm_up(name)
        with torch.set_grad_enabled(self.m.backward):
            return busy_us(
                [functools.partial(self._call, name, x, grad) for x, grad in inputs], self.device, self._spin_us[name]
            )

    def _warm_up(self, name: str) -> None:
        with torch.set_grad_enabled(self.m.backward):
            for _ in range(WARM_UP):
                self._call(name, *self._inputs())
        self._clock.wait()

    def _call(self, name: str, x: Tensor, grad: Tensor | None) -> Sequence[Tensor]:
        return _computed(self.modules[name], self._parameters[name], x, grad)

    def _prepare(self, x: Tensor, grad: Tensor | None) -> None:
        if self.m.state == COLD:
            self._clock.chill()
        else:
            for tensor in filter(lambda t: t is not None, (x, grad)):
                tensor.detach().sum()  # type: ignore[union-attr]

    def _inputs(self) -> tuple[Tensor, Tensor | None]:
        """New values at a new address: the input, and for a backward the gradient of the output."""
        case = self.m.case
        x = self._values(*case.input).requires_grad_(self.m.backward)
        # small, so that half precision holds the sums over M
        return x, self._values(*case.output, scale=case.M**-0.5) if self.m.backward else None

    def _values(self, *shape: int, scale: float = 1.0) -> Tensor:
        dtype = DTYPES[self.m.dtype]
        size = dtype.itemsize
        step = 512 // size  # as torch's allocator aligns
        place = step * int(torch.randint(_SLACK, (), generator=_PLACES))
        numel = math.prod(shape)
        with torch.no_grad():
            arena = torch.empty(numel + step * _SLACK, dtype=dtype, device=self.device)
            tensor = arena[place : place + numel].view(shape)
            made = torch.randn(shape, device=self.device, generator=self._generator)
            return tensor.copy_(made.mul_(scale)).detach()


_PLACES = torch.Generator().manual_seed(0)


def _compiled(stock: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(copy.deepcopy(stock), dynamic=False)  # type: ignore[assignment]
    return compiled


def _named(module: nn.Module, names: Sequence[str]) -> tuple[Tensor, ...]:
    """The parameters of these names."""
    by_name = {name.removeprefix("_orig_mod."): parameter for name, parameter in module.named_parameters()}
    return tuple(by_name[name] for name in names)


def _computed(module: nn.Module, parameters: Sequence[Tensor], x: Tensor, grad: Tensor | None) -> Sequence[Tensor]:
    """(y,), or with a gradient (y, dx, and each parameter's)."""
    y = module(x)
    if grad is None:
        return (y,)
    grads = torch.autograd.grad(y, (x, *parameters), grad)
    return (y.detach() if type(y) is Tensor else y, *grads)
