"""The test of the tests: each saboteur is caught by the claim named for it, and no honest layer is flagged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from support.gpu_saboteurs import ON_GPU, ON_TWO_GPUS
from support.honest import LAYERS, REFUSED_BY_REFUSES, Refuses, plain_sum
from support.process_saboteurs import IN_RANKS
from support.saboteurs import CAUGHT_BY, DEADLY
from zoo.layers import Linear
from zoo.verify.claims import CLAIMS, cuda, processes
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED
from zoo.verify.running import chosen_claims, judge_claim
from zoo.verify.subject import Subject

COMPILING = ("compile", "compile-dynamic", "export")


@pytest.fixture(autouse=True)
def _precision_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("layer", "claim"), [pytest.param(*item, id=f"{item[0].__name__}-{item[1]}") for item in CAUGHT_BY.items()]
)
def test_a_saboteur_is_caught(layer: object, claim: str) -> None:
    (found,) = [c for c in chosen_claims(claim) if c.name == claim]
    verdict = judge_claim(found, Subject(layer))
    assert verdict.status == FAIL, verdict
    assert verdict.reason
    # the claim, and not the saboteur, is what tells: the stock layer passes it
    assert judge_claim(found, Subject(nn.Linear)).status in (PASS, UNTESTED)


def test_every_claim_has_a_saboteur() -> None:
    tables = (CAUGHT_BY, DEADLY, IN_RANKS, ON_GPU, ON_TWO_GPUS)
    assert {claim.name for claim in CLAIMS if "linear" in claim.kinds} == {
        claim for table in tables for claim in table.values()
    }


@pytest.mark.parametrize("layer", [*LAYERS, Linear], ids=lambda layer: layer.__qualname__)
def test_an_honest_layer_is_not_flagged(layer: object) -> None:
    refusals = REFUSED_BY_REFUSES if layer is Refuses else set()
    for claim in chosen_claims():
        if (claim.name in COMPILING and layer is not Linear) or claim in processes.CLAIMS:
            continue  # they take seconds each; test_processes.py has the latter
        verdict = judge_claim(claim, Subject(layer), seed=1)
        expected = REFUSED if claim.name in refusals else PASS
        if claim.name == "opcheck" and layer is not Linear:
            expected = UNTESTED  # they have no operators of their own
        if claim in cuda.CLAIMS:
            expected = UNTESTED
        assert verdict.status == expected, verdict
        assert bool(verdict.reason) == (expected != PASS)


def test_a_plain_sum_is_honest() -> None:
    """In float32 it is three times as far from float64 as the stock layer, over 2048 features."""
    names = ("values", "edge-shapes", "no-bias", "strides", "large", "repeated", "float*", "gradients*", "new-values")
    for claim in chosen_claims(names):
        if claim.name == "float16":
            continue  # its sums are of the tensors' dtype, and half precision needs a wider one
        verdict = judge_claim(claim, Subject(plain_sum), seed=1)
        assert verdict.status == PASS, verdict
        if claim.name == "values":
            assert verdict.error is not None and verdict.error > 4 * torch.finfo(torch.float32).eps
    (claim,) = (claim for claim in chosen_claims("bfloat16") if claim.name == "bfloat16")
    assert judge_claim(claim, Subject(plain_sum), seed=1).status == FAIL


def test_values_of_honest_layers_pass_with_another_seed() -> None:
    names = ("values", "edge-shapes", "gradients", "gradients-singly", "float64", "bfloat16", "autocast", "training")
    for layer in (*LAYERS, Linear):
        for claim in chosen_claims(names):
            verdict = judge_claim(claim, Subject(layer), seed=2)
            assert verdict.status in (PASS, REFUSED), (layer, verdict)
