"""The suites of LayerNorm, Conv2d and the mlp unit on a GPU, and the Triton example on one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from support import layer_norms, other_kinds
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED
from zoo.verify.running import chosen_claims, judge_claim
from zoo.verify.subject import Subject

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CUDA = torch.device("cuda")
COMPILING = ("compile", "compile-dynamic", "export")
HONEST = [
    *(("layer_norm", layer, refusals) for layer, refusals in layer_norms.HONEST.items()),
    *((kind, layer, refusals) for kind, layers in other_kinds.HONEST.items() for layer, refusals in layers.items()),
]


@pytest.mark.parametrize(
    ("kind", "layer", "refusals"), [pytest.param(*one, id=f"{one[0]}-{one[1].__name__}") for one in HONEST]
)
def test_an_honest_layer_is_not_flagged(kind: str, layer: Any, refusals: set[str]) -> None:
    some = ("values", "gradients", "constant-rows", "large-mean", "bfloat16", "autocast")
    wrong = []
    slow = layer in (layer_norms.Compiled, layer_norms.OneNumberOnly)  # the latter in many small kernels
    for claim in chosen_claims(some if slow else "*", kind):
        if claim.name in COMPILING:
            continue
        torch._dynamo.reset()
        verdict = judge_claim(claim, Subject(layer, CUDA, kind=kind), seed=1)
        expected = REFUSED if claim.name in refusals else PASS
        if verdict.status != expected and not (
            verdict.status == UNTESTED and (claim.name == "opcheck" or "GPU" in verdict.reason)
        ):
            wrong.append(str(verdict))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("layer", "claim"),
    [
        (layer, claim)
        for layer, claim in layer_norms.CAUGHT_BY.items()
        if claim in ("values", "eps", "normalized-shape", "constant-rows", "large-mean", "gradients", "no-affine")
        and layer is not layer_norms.NeedsParameters  # which puts its tensor on the CPU
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_saboteur_is_caught(layer: Any, claim: str) -> None:
    (found,) = [c for c in chosen_claims(claim, "layer_norm") if c.name == claim]
    assert judge_claim(found, Subject(layer, CUDA, kind="layer_norm")).status == FAIL


def test_the_triton_example(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "triton_linear", raising=False)
    layer = importlib.import_module("triton_linear").triton_linear
    claims = ("values", "edge-shapes", "bfloat16", "float16", "autocast", "gradients", "gradients-strided", "saved")
    report = zoo.verify(layer, device=CUDA, claims=claims, isolate=False)
    assert report.ok, str(report)
    assert {v.status for v in report.verdicts} == {PASS}, str(report)
