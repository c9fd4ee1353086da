"""The suites of LayerNorm, Conv2d and the mlp unit: saboteurs are caught by the claim named for them, and no honest
layer is flagged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zoo
from support import layer_norms, other_kinds
from zoo.layers.kinds import KINDS, stock_of
from zoo.layers.mlp import mlp
from zoo.verify.claims import CLAIMS
from zoo.verify.kinds import SUITES
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED
from zoo.verify.running import chosen_claims, judge_claim
from zoo.verify.subject import Subject

CAUGHT_BY: dict[str, dict[Any, str]] = {"layer_norm": layer_norms.CAUGHT_BY, **other_kinds.CAUGHT_BY}
HONEST: dict[str, dict[Any, set[str]]] = {"layer_norm": layer_norms.HONEST, **other_kinds.HONEST}
COMPILING = ("compile", "compile-dynamic", "export")


def flat(table: dict[str, dict[Any, Any]]) -> list[Any]:
    return [
        pytest.param(kind, layer, value, id=f"{kind}-{layer.__name__}-{value if isinstance(value, str) else ''}")
        for kind, layers in table.items()
        for layer, value in layers.items()
    ]


@pytest.mark.parametrize(("kind", "layer", "claim"), flat(CAUGHT_BY))
def test_a_saboteur_is_caught(kind: str, layer: Any, claim: str) -> None:
    (found,) = [c for c in chosen_claims(claim, kind) if c.name == claim]
    verdict = judge_claim(found, Subject(layer, kind=kind))
    assert verdict.status == FAIL, verdict
    assert verdict.reason
    stock = mlp if kind == "mlp" else stock_of(kind)
    assert judge_claim(found, Subject(stock, kind=kind)).status == PASS


@pytest.mark.parametrize(("kind", "layer", "refusals"), flat(HONEST))
def test_an_honest_layer_is_not_flagged(kind: str, layer: Any, refusals: set[str]) -> None:
    # compiled and compiling, each takes seconds
    some = ("values", "gradients", "constant-rows", "large-mean", "bfloat16", "saved", "double-backward")
    for claim in chosen_claims(some if layer is layer_norms.Compiled else "*", kind):
        if claim.name in COMPILING and layer is not layer_norms.two_pass:
            continue
        torch._dynamo.reset()  # what is compiled again too often is run as it is
        verdict = judge_claim(claim, Subject(layer, kind=kind), seed=1)
        operators = claim.name == "opcheck" and layer is not mlp  # of which the others have none of their own
        assert verdict.status == (REFUSED if claim.name in refusals else UNTESTED if operators else PASS), verdict


def test_there_is_a_suite_of_every_kind_and_cases_of_every_claim() -> None:
    assert SUITES.keys() == KINDS.keys()
    names = {claim.name for claim in CLAIMS} | {"dtype", "compile"}
    for kind, suite in SUITES.items():
        assert suite.cases.keys() <= names
        subject = Subject(mlp if kind == "mlp" else suite.stock, kind=kind)
        for cases in suite.cases.values():
            for case in cases(subject):
                _, stock = subject.pair(*suite.sizes_of(case), **case.options)
                assert tuple(stock(case.input).shape) == suite.shape_of(case), (kind, case.name)
        custom, _ = subject.pair()
        assert custom(subject.input(5)).shape == (5, *suite.out)
        assert {name for name, _ in custom.named_parameters()} == set(suite.parameters)


def test_what_only_a_layer_norm_is_asked_has_a_saboteur() -> None:
    its_own = {claim.name for claim in CLAIMS if claim.kinds == ("layer_norm",)}
    assert its_own == {"no-affine", "normalized-shape", "eps", "constant-rows", "large-mean"}
    assert its_own <= set(layer_norms.CAUGHT_BY.values())


def test_by_name_and_in_a_worker() -> None:
    report = zoo.verify("support.layer_norms:one_pass_variance", kind="layer_norm", claims=("values", "large-mean"))
    assert {v.claim: v.status for v in report.verdicts} == {"build": PASS, "values": PASS, "large-mean": FAIL}
    assert report.kind == "layer_norm" and not report.ok

    zoo.register_layer("layer_norm", "mine")(layer_norms.two_pass)
    report = zoo.verify("mine", kind="layer_norm", claims=("values", "gradients"), isolate=False)
    assert report.ok and len(report.verdicts) == 3


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="no claim about conv2d layers matches 'eps'; there are build, values"):
        zoo.verify(nn.Conv2d, kind="conv2d", claims="eps", isolate=False)
    with pytest.raises(ValueError, match="no claim matches 'large-mean'"):
        zoo.verify(nn.Linear, claims="large-mean", isolate=False)
    with pytest.raises(ValueError, match="unknown kind of layer 'norm'"):
        zoo.verify(nn.LayerNorm, kind="norm", isolate=False)
