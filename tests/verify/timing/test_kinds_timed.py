"""Timing of layers of other kinds than Linear: their cases, right layers, and ones that cheat."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import layer_norms, other_kinds
from support.timing_saboteurs import Here
from zoo.verify.kinds import suite_of
from zoo.verify.timing import plan, running
from zoo.verify.timing.cases import LayerCase, cases_of, conv2d, layer_norm, mlp
from zoo.verify.timing.judging import FASTER, SUSPECT
from zoo.verify.timing.plan import Plan, plan_for
from zoo.verify.timing.report import TimingReport
from zoo.verify.timing.running import Timer

CPU = torch.device("cpu")
KINDS = ("linear", "layer_norm", "mlp", "conv2d")
SMALL = {
    "layer_norm": layer_norm("small", 256, 96),
    "mlp": mlp("small", 64, 96, 128, 32, "gelu"),
    "conv2d": conv2d("small", 2, 8, 14, 12, 3, stride=2),
}


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Worker", Here)
    monkeypatch.setattr(plan, "_RUN_US", 1500.0)


def timed(layer: Any, kind: str, peers: tuple[str, ...] = ("eager",)) -> TimingReport:
    passes = ("forward", "forward+backward")
    chosen = Plan("quick", 2, 3, (SMALL[kind],), ("float32",), peers=peers, passes=passes, states=("warm",))
    timer = Timer(layer, kind=kind, device=CPU, seed=0, plan=chosen)
    for _ in timer.steps:
        timer.step()
    return timer.report()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_cases_are_what_they_say(kind: str, gpu: bool, full: bool) -> None:
    """Each is built, on the meta device, and run; parameters and operations are counted."""
    from torch.utils.flop_counter import FlopCounterMode

    found = cases_of(kind, gpu=gpu, full=full)
    assert len(found) == (3 if full else 2) or kind == "linear"
    assert plan_for(torch.device("cuda" if gpu else "cpu"), "full" if full else "quick", kind).cases == found
    for case in found:
        stock = suite_of(kind).stock(*case.sizes, **dict(case.options), device="meta", dtype=torch.float32)
        counter = FlopCounterMode(display=False)
        with counter:
            output = stock(torch.empty(case.input, device="meta"))
        assert tuple(output.shape) == case.output and case.kind == kind
        assert sum(p.numel() for p in stock.parameters()) == case.parameters
        assert counter.get_total_flops() in (case.flops(backward=False), 0)  # none of a LayerNorm is counted
        assert (case.output[1] if kind == "conv2d" else case.output[-1]) == case.N
        assert math.prod(case.output) // case.N == case.M
        assert case.reads(backward=True) - case.reads(backward=False) == math.prod(case.output)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("layer_norm", layer_norms.two_pass),
        ("layer_norm", nn.LayerNorm),
        ("mlp", other_kinds.by_steps),
        ("conv2d", nn.Conv2d),
        ("conv2d", other_kinds.unfolded),
    ],
)
def test_a_right_layer_is_timed(kind: str, layer: Any) -> None:
    report = timed(layer, kind)
    assert report.ok, str(report)
    assert len(report.rows) == 2
    for row in report.rows:
        assert row.speedup is not None and (row.M, row.K, row.N) == (SMALL[kind].M, SMALL[kind].K, SMALL[kind].N)


def in_half(input: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Tensor:
    return F.layer_norm(input.half(), shape, weight.half(), bias.half(), eps).float()


def one_product(input: Tensor, weight1: Any, bias1: Any, weight2: Any, bias2: Any, activation: str) -> Tensor:
    return input[:, :1] * weight2[:, 0] + bias2


def every_second_filter(input: Tensor, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any) -> Tensor:
    return F.conv2d(input, weight[::2], None, stride, padding, *rest).repeat_interleave(2, 1)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("kind", "layer"), [("layer_norm", in_half), ("mlp", one_product), ("conv2d", every_second_filter)]
)
def test_wrong_outputs_are_suspect(kind: str, layer: Any) -> None:
    report = timed(layer, kind)
    assert report.rows[0].verdict == SUSPECT and "wrong" in report.rows[0].reason, str(report)
    assert all(row.verdict != FASTER for row in report.rows)


def test_what_has_no_cases_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'attention' has no cases"):
        cases_of("attention", gpu=False, full=False)
    assert isinstance(cases_of("linear", gpu=True, full=True)[0], LayerCase)
