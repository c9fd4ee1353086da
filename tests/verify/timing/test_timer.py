"""The schedule on real layers: the saboteurs of timing are not believed, and honest ones are timed."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from support import honest
from support import timing_saboteurs as saboteurs
from support.timing_saboteurs import Here
from zoo.bench.cases import Case
from zoo.machine import peak_of
from zoo.sweep.worker import Ended
from zoo.verify.timing import clocks, contest, plan, running
from zoo.verify.timing.cases import linear
from zoo.verify.timing.judging import FASTER, INCONCLUSIVE, SAME, SLOWER, SUSPECT
from zoo.verify.timing.plan import COLD, COMPILED, EAGER, LAYER, TWIN, WARM, Measurement, Plan, block_order, plan_for
from zoo.verify.timing.report import FAILED, UNTIMED, TimingReport
from zoo.verify.timing.running import Timer, roofline_us

CPU = torch.device("cpu")
CASE = Case("small", 64, 256, 128)
PLAN = Plan("quick", 3, 4, (CASE,), ("float32",), peers=("eager",), passes=("forward",), states=("warm",))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Worker", Here)
    monkeypatch.setattr(plan, "_RUN_US", 1500.0)
    for module in (time, clocks):  # so that they come back from what patches them
        for name in ("perf_counter_ns", "process_time_ns"):
            monkeypatch.setattr(module, name, getattr(module, name))


def timed(target: Any, plan_: Plan = PLAN, **options: Any) -> TimingReport:
    timer = Timer(target, kind="linear", device=CPU, seed=0, plan=plan_, **options)
    for _ in timer.steps:
        timer.step()
    return timer.report()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("layer", saboteurs.CAUGHT, ids=lambda layer: layer.__name__)
def test_a_saboteur_of_timing_is_suspect(layer: Any) -> None:
    report = timed(layer)
    assert not report.ok
    (row,) = report.rows
    assert row.verdict == SUSPECT, row
    assert any(words in row.reason for words in saboteurs.CAUGHT[layer].split("|")), row.reason


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "layer", [saboteurs.MemoByPointer, saboteurs.OnceUnderCapture], ids=lambda layer: layer.__name__
)
def test_tricks_that_this_schedule_gives_no_chance(layer: Any) -> None:
    report = timed(layer)
    assert report.ok and report.rows[0].verdict != FASTER, report


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("layer", [*honest.LAYERS, zoo.layers.Linear], ids=lambda layer: layer.__name__)
def test_an_honest_layer_is_not_suspected(layer: Any) -> None:
    report = timed(layer, replace(PLAN, blocks=3, passes=("forward", "forward+backward")))
    assert report.ok, [row.reason for row in report.rows]
    assert len(report.rows) == 2
    for row in report.rows:
        assert row.verdict in (FASTER, SLOWER, SAME, INCONCLUSIVE), row
        assert row.layer_us and row.peer_us and row.speedup_low and row.speedup_high
        assert row.speedup_low <= row.speedup <= row.speedup_high
        assert len(row.by_process) == 3 and row.blocks + row.dropped == 9


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("layer", "against", "expected"),
    [
        (saboteurs.SlowerBy5Percent, saboteurs.Spins, SLOWER),
        (saboteurs.Spins, saboteurs.SlowerBy5Percent, FASTER),
        (saboteurs.Spins, saboteurs.Spins, SAME),
    ],
)
def test_planted_speeds_are_found(layer: Any, against: Any, expected: str) -> None:
    (row,) = timed(layer, replace(PLAN, processes=5, blocks=4), against=against).rows
    # on a machine that is busy with other things, honestly uncertain; never the opposite
    assert row.verdict in (expected, INCONCLUSIVE), row
    assert row.speedup == pytest.approx({SLOWER: 1 / 1.05, FASTER: 1.05, SAME: 1.0}[expected], abs=0.01)


def no_backward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled():
        raise NotImplementedError("backward is not supported")
    return nn.functional.linear(input, weight, bias)


def breaks(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise IndexError("out of range")


@pytest.mark.usefixtures("here")
def test_a_layer_that_does_not_run_has_no_times() -> None:
    chosen = replace(PLAN, passes=("forward", "forward+backward"), blocks=3)
    report = timed(no_backward, chosen)
    assert [row.verdict for row in report.rows][1:] == [UNTIMED] and report.ok
    assert report.rows[1].reason == "NotImplementedError: backward is not supported"
    report = timed(breaks, chosen)
    assert {row.verdict for row in report.rows} == {FAILED} and not report.ok
    assert "IndexError: out of range" in str(report)


def test_a_process_that_ends_costs_the_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(Here):
        def ask(self, task: Any, **_: Any) -> Any:
            raise Ended("build", "its process was ended by SIGSEGV")

    monkeypatch.setattr(running, "Worker", Dies)
    report = timed(nn.Linear)
    assert report.rows[0].verdict == FAILED and report.rows[0].reason == "its process was ended by SIGSEGV"
    assert not report.ok


@pytest.mark.usefixtures("here")
def test_reports_on_the_way() -> None:
    timer = Timer(nn.Linear, kind="linear", device=CPU, seed=0, plan=replace(PLAN, blocks=3))
    assert [row.verdict for row in timer.report().rows] == [UNTIMED]
    timer.step()
    assert timer.report().rows[0].reason == "1 processes were run, and an interval needs two"
    assert not timer.report().ok
    timer.step()
    assert timer.report().rows[0].speedup is not None
    timer.step()
    report = timer.report()
    assert report.ok and "quick form: 3 processes" in str(report) and len(report.conditions) == 4
    data = json.loads(report.to_json())
    assert data["counts"] == Counter(row.verdict for row in report.rows)
    assert data["rows"][0]["pass"] == "forward" and "pass_" not in data["rows"][0]


def test_cupti_is_asked_in_two_processes_that_none_foretells(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Any] = []

    class Notes(Here):
        def ask(self, task: Any, **_: Any) -> Any:
            tasks.append(task)
            return contest.Answer((), None)

    monkeypatch.setattr(running, "Worker", Notes)
    monkeypatch.setattr(running, "conditions", lambda device: {})
    for _ in range(12):
        timer = Timer(nn.Linear, kind="linear", device=CPU, seed=0, plan=replace(PLAN, processes=5))
        for _ in timer.steps:
            timer.step()
    chosen = {tuple(i for i in range(5) if tasks[start + i].profiled) for start in range(0, 60, 5)}
    assert {len(which) for which in chosen} == {2} and len(chosen) > 1


def test_blocks_are_symmetric_and_drawn_anew() -> None:
    import random

    order, names = random.Random(0), (LAYER, EAGER, TWIN, COMPILED)
    blocks = [tuple(block_order(names, order)) for _ in range(60)]
    assert all(block == block[::-1] and Counter(block) == dict.fromkeys(names, 2) for block in blocks)
    assert len(set(blocks)) > 15


def test_plans() -> None:
    for device in (CPU, torch.device("cuda")):
        quick, full = plan_for(device), plan_for(device, "full")
        assert quick.note and not full.note and full.processes >= 5 > quick.processes
        assert all(m.calls >= 2 for m in full.measurements(device))
    with pytest.raises(ValueError, match="timing='fast': expected one of quick, full"):
        plan_for(CPU, "fast")
    with pytest.raises(ValueError, match="the plan's case 'small' is of a linear layer; expected mlp"):
        Timer("zoo", kind="mlp", device=CPU, seed=0, plan=PLAN)
    with pytest.raises(ValueError, match="kind 'attention' has no cases; expected one of linear, layer_norm, mlp"):
        plan_for(CPU, kind="attention")


def test_every_call_has_new_values_at_a_new_address() -> None:
    seen: list[tuple[int, float]] = []

    class Spy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append((input.data_ptr(), float(input.sum())))
            return super().forward(input)

    (m,) = PLAN.measurements(CPU)
    generator = torch.Generator().manual_seed(0)
    race = contest._Contest(Spy, nn.Linear, m, CPU, generator, clocks.CpuClock(CPU), (), stock_first=False)
    seen.clear()
    for _ in range(3):
        race.run(LAYER, lambda step: None)
    assert len(seen) == 3 * m.calls >= 20
    assert len({value for _, value in seen}) == len(seen)
    assert len({address for address, _ in seen}) > 0.9 * len(seen)


def test_the_device_spins_as_long_for_the_layer_as_for_stock() -> None:
    """Spinning is outside the clock, and a layer that takes the host longer would seem to work there."""

    class Clock(clocks.CpuClock):
        def once(self, call: clocks.Call, spin_us: float) -> clocks.Once:
            asked.append(spin_us)
            return replace(super().once(call, 0.0), host_us=next(host))

    asked: list[float] = []
    (m,) = PLAN.measurements(CPU)
    generator = torch.Generator().manual_seed(0)
    race = contest._Contest(nn.Linear, nn.Linear, m, CPU, generator, Clock(CPU), ("compiled",), stock_first=False)
    took = {LAYER: 50.0, EAGER: 30.0, TWIN: 31.0, COMPILED: 200.0}
    assert set(race.modules) == set(took)
    for times in (1.0, 3.0):
        for name, us in took.items():
            host = iter([us * times] * m.calls)
            race.run(name, lambda step: None)
        before, asked[:] = list(asked), []
        race.settle()
        for name in took:
            host = iter([0.0] * m.calls)
            race.run(name, lambda step: None)
        want = [2 * times * (200.0 if name == COMPILED else 50.0) for name in took for _ in range(m.calls)]
        assert before and asked == want
        asked.clear()
    host = iter([1000.0] * m.calls)  # a layer does not draw it out as it likes, to work meanwhile
    race.run(LAYER, lambda step: None)
    race.settle()
    assert race._spin_us[LAYER] == race._spin_us[EAGER] == 0.0  # stock took none just now
    for name in (EAGER, TWIN):
        host = iter([30.0] * m.calls)
        race.run(name, lambda step: None)
    race.settle()
    assert {race._spin_us[name] for name in (LAYER, EAGER, TWIN)} == {2 * 2.0 * 30.0}


def test_the_roofline_of_float32_is_that_of_pieces_on_tensor_cores() -> None:
    def least(dtype: str, state: str = WARM, pass_: str = "forward") -> float | None:
        return roofline_us(Measurement(linear(Case("square", 4096, 4096, 4096)), dtype, pass_, state, 1), "NVIDIA H200")

    flops = 2 * 4096**3
    high, half = (peak_of("NVIDIA H200", "float32", precision) for precision in ("high", "medium"))
    assert high is not None and half is not None
    assert least("float32") == pytest.approx(flops / high.flops * 1e6)
    assert least("bfloat16") == pytest.approx(flops / half.flops * 1e6)
    both = least("float32", pass_="forward+backward")
    assert both == pytest.approx(3 * flops / high.flops * 1e6)
    torch.set_float32_matmul_precision("medium")
    try:
        assert least("float32") == pytest.approx(flops / half.flops * 1e6)
    finally:
        torch.set_float32_matmul_precision("highest")
    thin = Measurement(linear(Case("vector", 1, 4096, 4096)), "float32", "forward", COLD, 1)
    assert roofline_us(thin, "NVIDIA H200") == pytest.approx(4 * (4096**2 + 2 * 4096) / high.bandwidth * 1e6, rel=1e-3)
    assert roofline_us(thin, "AMD EPYC") is None


@pytest.mark.slow
def test_in_fresh_processes() -> None:
    """One plan as a user has it: with torch.compile, and the parent's clock over a pipe."""
    chosen = replace(PLAN, processes=2, blocks=3, peers=("eager", "compiled"), states=("cold", "warm"))
    report = timed("support.honest:addmm", chosen)
    assert report.ok, [row.reason for row in report.rows]
    assert [(row.state, row.peer) for row in report.rows] == [
        (state, peer) for state in ("cold", "warm") for peer in ("eager", "compiled")
    ]
    for row in report.rows:
        assert row.speedup is not None, row
        assert row.clocks_us is not None and row.clocks_us["parent"] > row.clocks_us["perf_counter"] > 0
