"""The parent's part: one fresh process after the other, its own clock around every run, and the rows of the report."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zoo.bench.measuring import DTYPES
from zoo.machine import device_of, peak_of
from zoo.sweep.worker import Ended, Worker
from zoo.verify.timing.clocks import CpuClock, CudaClock
from zoo.verify.timing.conditions import conditions
from zoo.verify.timing.contest import BEGIN, END, Answer, Measured, Task, look
from zoo.verify.timing.judging import SUSPECT, Block, Sample, compared
from zoo.verify.timing.pairs import log_ratios
from zoo.verify.timing.plan import COLD, EAGER, LAYER, TWIN, Measurement, Plan
from zoo.verify.timing.report import FAILED, UNTIMED, TimingReport, TimingRow

__all__ = ["Timer", "roofline_us"]

TIME_LIMIT = 600.0
"""Seconds for one process."""
PROFILED = 2
"""Processes whose device time CUPTI tells: to begin takes it four seconds."""
AT_ONCE = 5
"""Processes that are started at once, and then wait for their turns."""


class Timer:
    """Times a layer beside the stock one, a fresh process at a time; there is a report after each."""

    def __init__(
        self,
        target: Any,
        *,
        kind: str,
        device: torch.device,
        seed: int,
        plan: Plan,
        time_limit: float = TIME_LIMIT,
        against: Any = None,
    ) -> None:
        """Args: as of :func:`zoo.verify`; ``against`` is a target that stands for the stock layer."""
        self._target, self._kind, self._device, self._seed = target, kind, device_of(device), seed
        self._plan, self._time_limit, self._against = plan, time_limit, against
        self._measurements = plan.measurements(device)
        if other := next((m.case for m in self._measurements if m.case.kind != kind), None):
            raise ValueError(f"timing: the plan's case {other.name!r} is of a {other.kind} layer; expected {kind}")
        self._blocks: dict[Measurement, list[list[Block]]] = {m: [] for m in self._measurements}
        self._answers: dict[Measurement, list[Measured]] = {m: [] for m in self._measurements}
        self._ended = ""
        self._persisting: bool | None = None
        self._ran = 0
        self._started: list[Worker] = []
        # by CUPTI: which processes, none of them can foretell
        self._profiled = set(random.SystemRandom().sample(range(plan.processes), min(PROFILED, plan.processes)))
        self._conditions: list[dict[str, str]] = []

    @property
    def steps(self) -> tuple[str, ...]:
        """A name for each process, as progress is shown."""
        return tuple(f"timing, process {i + 1} of {self._plan.processes}" for i in range(self._plan.processes))

    def step(self) -> None:
        """Run the next process. One that ends or hangs makes every row fail, and no other is started."""
        if self._ended:
            self._ran += 1
            return
        if not self._conditions:
            self._conditions.append(conditions(self._device))
        task = Task(
            self._target,
            self._kind,
            str(self._device),
            self._seed,
            self._ran,
            self._plan.blocks,
            torch.get_num_threads(),
            self._plan.peers,
            self._measurements,
            self._against,
            self._ran in self._profiled,
        )
        walls: list[float] = []
        began = 0.0

        def hear(step: str) -> None:
            nonlocal began
            now = time.perf_counter()
            if step == BEGIN:
                began = now
            elif step == END:
                walls.append((now - began) * 1e6)

        with self._fresh() as worker:
            try:
                answer = worker.ask(task, time_limit=self._time_limit, heard=hear)
                self._take(answer, walls)
            except Ended as error:
                self._ended = str(error)
        while self._ended and self._started:  # no other has a turn
            with self._started.pop():
                pass
        self._ran += 1
        self._conditions.append(conditions(self._device))

    def _fresh(self) -> Worker:
        """A process that has imported everything and done nothing. Several import at once, and none beside a timing."""
        if not self._started:
            self._started = [Worker(look) for _ in range(min(AT_ONCE, self._plan.processes - self._ran))]
            for worker in self._started:
                worker.start()
            for worker in self._started:
                worker.wait()
        return self._started.pop(0)

    def report(self) -> TimingReport:
        """What the processes so far say."""
        rows = [row for m in self._measurements for row in self._rows(m)]
        on_gpu = self._device.type == "cuda"
        notes = list(dict.fromkeys(note for found in self._answers.values() for one in found for note in one.notes))
        if self._persisting is False:
            notes.append("cudaCtxResetPersistingL2Cache is not reachable: what is set aside in the L2 stays there")
        return TimingReport(
            self._plan.form,
            self._plan.note,
            self._ran,
            self._plan.processes,
            self._plan.blocks,
            CudaClock.names if on_gpu else CpuClock.names,
            tuple(self._conditions),
            tuple(_doubted(rows)),
            tuple(notes),
        )

    def _take(self, answer: Answer, walls: Sequence[float]) -> None:
        runs = sum(len(found.runs) for found in answer.measured)
        if len(walls) != runs:
            self._ended = f"its process told of {len(walls)} runs and returned {runs}"
            return
        self._persisting = answer.persisting
        heard = iter(walls)
        for found in answer.measured:
            self._answers[found.measurement].append(found)
            if not found.failure:
                self._blocks[found.measurement].append(list(_blocks(found, heard)))
            else:  # the runs before it failed were heard too
                for _ in found.runs:
                    next(heard, None)

    def _rows(self, m: Measurement) -> Iterator[TimingRow]:
        answers, blocks, case = self._answers[m], self._blocks[m], m.case
        failure = next((found for found in answers if found.failure), None)
        for peer in self._plan.peers:
            row = TimingRow(case.name, case.M, case.K, case.N, m.dtype, m.pass_, m.state, peer, UNTIMED)
            if self._ended:
                yield replace(row, verdict=FAILED, reason=self._ended)
            elif failure is not None:
                yield replace(row, verdict=UNTIMED if failure.refused else FAILED, reason=failure.failure)
            elif len(blocks) < 2:
                yield replace(row, reason=f"{len(blocks)} processes were run, and an interval needs two")
            elif not all(peer in block for process in blocks for block in process):
                yield replace(row, reason="torch.compile did not compile the stock layer; see the notes")
            else:
                yield self._row(row, m, answers, blocks)

    def _row(
        self, row: TimingRow, m: Measurement, answers: Sequence[Measured], blocks: Sequence[Sequence[Block]]
    ) -> TimingRow:
        on_gpu = self._device.type == "cuda"
        roofline = roofline_us(m, torch.cuda.get_device_name(self._device)) if on_gpu else None
        device_us = _medians([found.device_us for found in answers if found.device_us])
        found = compared(
            blocks,
            LAYER,
            row.peer,
            equals=(EAGER, TWIN),
            threads=None if on_gpu else torch.get_num_threads(),
            roofline_us=roofline,
            device_us=device_us or None,
            wrong=next((found.wrong[LAYER] for found in answers if LAYER in found.wrong), ""),
            seed=self._seed,
        )
        layer, peer = (_median_of(blocks, name, "us") for name in (LAYER, row.peer))
        ratios = log_ratios(*([[b[name].us for b in process] for process in blocks] for name in (row.peer, LAYER)))
        others = device_us.get(LAYER, (0.0, None))[1] if on_gpu else _median_of(blocks, LAYER, "cpu_us")
        names = CudaClock.names if on_gpu else CpuClock.names
        hosts = [_host(answers, name) if on_gpu else None for name in (LAYER, row.peer)]
        return replace(
            row,
            verdict=found.verdict,
            reason=found.reason,
            layer_us=layer,
            peer_us=peer,
            speedup=found.speedup.value,
            speedup_low=found.speedup.low,
            speedup_high=found.speedup.high,
            floor=found.floor,
            detectable=found.speedup.detectable,
            by_process=tuple(math.exp(statistics.median(process)) for process in ratios),
            blocks=found.blocks,
            dropped=found.dropped,
            clocks_us=dict(zip(names, (layer, others, _median_of(blocks, LAYER, "wall_us")), strict=True)),
            layer_host_us=hosts[0],
            peer_host_us=hosts[1],
            roofline_us=roofline,
            roofline_share=None if roofline is None else roofline / layer,
        )


def roofline_us(m: Measurement, device: str) -> float | None:
    """The least that a device could take for a measurement; None where its peaks are not known.

    The longer of the operations and, where nothing is in the cache, the bytes. Tensor cores that take float32 in pieces
    are faster at it than what has no pieces, and slower than at one piece, which is tf32: so that is its bound.
    """
    medium = torch.get_float32_matmul_precision() == "medium"
    peak = peak_of(device, m.dtype, "medium" if medium else "high")
    if peak is None:
        return None
    least = m.case.flops(backward=m.backward) / peak.flops
    if m.state == COLD:
        # what is read alone: results may stay in the cache
        least = max(least, m.case.reads(backward=m.backward) * DTYPES[m.dtype].itemsize / peak.bandwidth)
    return least * 1e6


_TIMES = ("us", "wall_us", "cpu_us", "run_us", "host_us")


def _blocks(found: Measured, heard: Iterator[float]) -> Iterator[Block]:
    """The runs of each contestant in a block as one sample."""
    names = list(dict.fromkeys(run.contestant for run in found.runs))
    calls = found.measurement.calls
    for start in range(0, len(found.runs), 2 * len(names)):
        parts: dict[str, list[Sample]] = {}
        for run in found.runs[start : start + 2 * len(names)]:
            sample = Sample(run.us, next(heard) / calls, run.cpu_us, run.run_us, run.host_us)
            parts.setdefault(run.contestant, []).append(sample)
        yield {
            name: Sample(*(statistics.fmean(getattr(s, key) for s in two) for key in _TIMES))
            for name, two in parts.items()
        }


def _doubted(rows: Sequence[TimingRow]) -> Iterator[TimingRow]:
    """A clock that is not to be believed in one state of the cache is not in the other, nor beside another peer."""
    suspects = {(row.case, row.dtype, row.pass_): row for row in reversed(rows) if row.verdict == SUSPECT}
    for row in rows:
        suspect = suspects.get((row.case, row.dtype, row.pass_))
        if suspect is None or row.speedup is None or row.verdict == SUSPECT:
            yield row
        else:
            reason = f"{suspect.state}, over {suspect.peer}: {suspect.reason}"
            yield replace(row, verdict=SUSPECT, reason=reason)


def _median_of(blocks: Sequence[Sequence[Block]], name: str, key: str) -> float:
    return statistics.median(getattr(block[name], key) for process in blocks for block in process)


def _medians(parts: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    names = set.intersection(*(set(part) for part in parts)) if parts else set()
    return {
        name: (statistics.median(p[name][0] for p in parts), statistics.median(p[name][1] for p in parts))
        for name in names
    }


def _host(answers: Sequence[Measured], name: str) -> float:
    return statistics.median(run.host_us for found in answers for run in found.runs if run.contestant == name)
