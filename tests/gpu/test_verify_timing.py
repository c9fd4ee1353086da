"""Timing on a GPU: its clocks, the saboteurs that need one, planted slowdowns, and equals."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch

from support import timing_saboteurs as saboteurs
from zoo.bench.cases import Case, cases_named
from zoo.verify.timing import clocks, contest, running
from zoo.verify.timing.cases import cases_of
from zoo.verify.timing.clocks import CudaClock, busy_us
from zoo.verify.timing.judging import FASTER, SAME, SLOWER, SUSPECT
from zoo.verify.timing.plan import Plan
from zoo.verify.timing.running import Timer

pytestmark = pytest.mark.quiet

CUDA = torch.device("cuda")  # without a number, as users have it
CASE = Case("resnet50/fc_b64", 64, 2048, 1000)
PLAN = Plan("quick", 3, 10, (CASE,), ("float32",), peers=("eager",), passes=("forward",), states=("cold", "warm"))


@pytest.fixture
def here(monkeypatch):
    """Worker processes are this one: starting 40 of them would take minutes. What is patched comes back."""
    monkeypatch.setattr(running, "Worker", saboteurs.Here)
    monkeypatch.setattr(running, "conditions", lambda device: {})  # it asks nvidia-smi, three times
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", torch.cuda.Event.elapsed_time)
    monkeypatch.setattr(clocks, "_EVENT", clocks._EVENT)


def timed(target, plan=PLAN, **options):
    name = target if isinstance(target, str) else f"support.timing_saboteurs:{target.__name__}"
    timer = Timer(name, kind="linear", device=CUDA, seed=0, plan=plan, **options)
    for _ in timer.steps:
        timer.step()
    return timer.report()


def test_one_call_by_the_clock():
    clock = CudaClock(CUDA)
    a, b = (torch.randn(4096, 4096, device=CUDA) for _ in range(2))
    long, short = lambda: (a @ b,), lambda: (a[:8] * 2,)
    for call in (long, short):  # a kernel's first launch loads its module, which takes milliseconds
        clock.once(call, 0.0)
    clock.chill()
    once = clock.once(long, 0.0)
    assert once.us > 100 and once.host_us > 0  # 137 GFLOP take over 0.1 ms on any GPU there is
    assert torch.equal(once.at_return, once.settled)
    # a launch that the spinning hides; the host may be kept from it by others, at times
    assert min(clock.once(short, 200.0).us for _ in range(10)) < 30


def test_cupti_sees_what_a_side_stream_does():
    x = torch.randn(4096, 4096, device=CUDA)
    side = torch.cuda.Stream()

    def hidden():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x @ x
        y.record_stream(side)
        return (y,)

    hidden()
    between, busy = busy_us([lambda: (x @ x,)] * 3, CUDA, 100.0)
    assert busy == pytest.approx(between, rel=0.3)
    between, busy = busy_us([hidden] * 3, CUDA, 100.0)
    assert busy > 2 * between


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "layer",
    [
        saboteurs.SideStream,
        saboteurs.PatchesEvents,
        saboteurs.Lazy,
        saboteurs.MemoByShape,
        saboteurs.ReplaysTheWarmUp,
        saboteurs.half_precision,
    ],
)
def test_a_saboteur_is_suspect(layer):
    report = timed(layer)
    assert {row.verdict for row in report.rows} == {SUSPECT}, str(report)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("layer", [saboteurs.WhileItSpins, saboteurs.OnTheHost])
@pytest.mark.parametrize("cupti", [True, False])
def test_work_while_the_device_spins_is_no_saving(layer, cupti, monkeypatch):
    if not cupti:
        monkeypatch.setattr(contest, "_profile", lambda *_: None)
    report = timed(layer, replace(PLAN, cases=(Case("mnist/fc3", 64, 256, 10),)))
    assert all(row.speedup is not None and row.verdict != FASTER for row in report.rows), str(report)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("layer", [saboteurs.MemoByPointer, saboteurs.OnceUnderCapture])
def test_tricks_that_the_schedule_gives_no_chance(layer):
    report = timed(layer)
    assert all(row.speedup is not None and row.verdict != FASTER for row in report.rows), str(report)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("layer", "against", "expected"),
    [
        ("SlowerBy2Percent", "Spins", SLOWER),
        ("Spins100SlowerBy3Percent", "Spins100", SLOWER),
        ("Spins", "Spins", SAME),
    ],
)
def test_planted_slowdowns_are_found(layer, against, expected):
    """2% of about 20 µs and 3% of about 100 µs, in five processes, as the full form has, and fewer blocks."""
    tiny = Case("tiny", 8, 32, 16)
    plan = replace(PLAN, form="full", processes=5, blocks=15, cases=(tiny,), states=("warm",))
    (row,) = timed(getattr(saboteurs, layer), plan, against=f"support.timing_saboteurs:{against}").rows
    assert row.verdict == expected, row


@pytest.mark.usefixtures("here")
def test_equals_are_not_told_apart():
    """Sixteen comparisons; tests/verify_numbers.py makes a hundred, in fresh processes."""
    small = [
        replace(case, activation=None)
        for case in cases_named(["vit_b/head", "resnet50/fc_b64", "mnist/fc1", "mnist/fc3"])
    ]
    passes = ("forward", "forward+backward")
    report = timed("torch.nn:Linear", replace(PLAN, cases=tuple(small), passes=passes))
    found = Counter(row.verdict for row in report.rows)
    assert len(report.rows) == 16 and found[SUSPECT] == 0 and found[FASTER] + found[SLOWER] <= 1, str(report)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["layer_norm", "mlp", "conv2d"])
def test_layers_of_other_kinds_are_timed(kind):
    plan = replace(PLAN, processes=2, cases=cases_of(kind, gpu=True, full=False)[-1:], passes=("forward+backward",))
    stock = {"layer_norm": "torch.nn:LayerNorm", "mlp": "support.other_kinds:by_steps", "conv2d": "torch.nn:Conv2d"}
    timer = Timer(stock[kind], kind=kind, device=CUDA, seed=0, plan=plan)
    for _ in timer.steps:
        timer.step()
    report = timer.report()
    assert report.ok and all(row.speedup is not None for row in report.rows), str(report)


def test_zoos_own_layer_is_believed():
    """float32 faster than the peak of plain float32, and bf16 by cuBLAS with another host time than torch's."""
    proj, fc = cases_named(["vit_b/proj", "resnet50/fc_b64"])
    report = timed("zoo", replace(PLAN, processes=2, cases=(proj, fc), dtypes=("float32", "bfloat16")))
    assert len(report.rows) == 8 and report.ok, str(report)
    assert {row.verdict for row in report.rows if (row.case, row.dtype) == ("vit_b/proj", "float32")} == {FASTER}


def test_persisting_lines_are_given_back():
    reset = clocks._persisting_reset()
    assert reset is not None and reset() == 0


def test_the_stock_layer_against_itself():
    """In fresh processes, as a user has it."""
    passes = ("forward", "forward+backward")
    plan = replace(PLAN, processes=2, peers=("eager", "compiled"), passes=passes, states=("warm",))
    report = timed("torch.nn:Linear", plan)
    assert report.ok, str(report)
    for row in report.rows:
        assert row.speedup is not None, row
        assert row.peer != "eager" or row.verdict not in (FASTER, SLOWER), row
        assert row.clocks_us["CUPTI"] > 0 and row.layer_host_us > 0
        assert 0 < row.roofline_share <= 1 / 0.9
    assert shutil.which("nvidia-smi") is None or all("clocks.sm" in found for found in report.conditions)
    assert not any("no third clock" in note for note in report.notes), report.notes
