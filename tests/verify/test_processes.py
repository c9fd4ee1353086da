"""Claims that two processes judge: each finds its saboteur, flags no honest layer, and outlives a rank that dies."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zoo
from support import honest
from support.process_saboteurs import IN_RANKS, ends_in_rank_1, hangs_in_rank_0, refuses_in_rank_1
from zoo.layers import Linear
from zoo.verify import ranks
from zoo.verify.claims.processes import CLAIMS
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED, Claim, Untested, Verdict
from zoo.verify.running import judge_claim
from zoo.verify.subject import Subject


def verdict(layer: object, name: str) -> Verdict:
    (claim,) = [c for c in CLAIMS if c.name == name]
    return judge_claim(claim, Subject(layer))


@pytest.mark.parametrize(("layer", "name"), [pytest.param(*i, id=f"{i[0].__name__}-{i[1]}") for i in IN_RANKS.items()])
def test_a_saboteur_is_caught(layer: object, name: str) -> None:
    found = verdict(layer, name)
    assert found.status == FAIL and found.reason.startswith("rank "), found


def test_every_claim_has_a_saboteur() -> None:
    assert {claim.name for claim in CLAIMS} == set(IN_RANKS.values())


SOME = (nn.Linear, honest.FromScratch, honest.Refuses)
OTHERS = [pytest.param(layer, marks=pytest.mark.slow) for layer in honest.LAYERS if layer not in SOME]


@pytest.mark.parametrize("layer", [*SOME, Linear, *OTHERS], ids=lambda layer: layer.__qualname__)
def test_an_honest_layer_is_not_flagged(layer: object) -> None:
    for claim in CLAIMS:
        found = verdict(layer, claim.name)
        if claim.name == "tensor-parallel" and layer is honest.FromScratch:
            assert found.status == UNTESTED and "take an nn.Linear" in found.reason
        else:
            assert found.status == PASS, found


def test_a_rank_that_dies_costs_the_claim_alone() -> None:
    begun = time.monotonic()
    found = verdict(ends_in_rank_1, "ddp")
    assert found.status == FAIL and "its process ended with exit code 7: no kernel for rank 1" in found.reason
    assert time.monotonic() - begun < ranks.TIME_LIMIT
    assert verdict(honest.addmm, "ddp").status == PASS


def test_a_rank_that_hangs_costs_the_claim_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(honest.addmm, "ddp").status == PASS  # the processes are up
    monkeypatch.setattr(ranks, "TIME_LIMIT", 4.0)
    found = verdict(hangs_in_rank_0, "ddp-no-sync")
    assert found.status == FAIL and "not done after 4 s" in found.reason
    monkeypatch.undo()
    assert verdict(honest.addmm, "ddp-no-sync").status == PASS


def test_from_within_a_worker() -> None:
    report = zoo.verify("support.honest:addmm", claims="ddp-unused", models=())
    assert [v.status for v in report.verdicts] == [PASS, PASS], report


def test_a_layer_that_no_process_finds_is_untested() -> None:
    def local(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(input, weight, bias)

    found = verdict(local, "ddp")
    assert found.status == UNTESTED and "cannot be sent to other processes" in found.reason


def test_a_check_that_no_process_finds_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(s: Subject, rank: int) -> None:
        pass

    here_alone = types.ModuleType("here_alone")
    check.__module__, check.__qualname__ = here_alone.__name__, "check"
    monkeypatch.setattr(here_alone, "check", check, raising=False)
    monkeypatch.setitem(sys.modules, "here_alone", here_alone)
    claim = Claim("some", "", lambda s: ranks.judge_in_ranks(check, s))
    found = judge_claim(claim, Subject(nn.Linear))
    assert found.status == UNTESTED and "other processes do not find it" in found.reason, found
    assert verdict(honest.addmm, "ddp").status == PASS  # and the process that was asked lives on


def test_what_one_rank_says_counts() -> None:
    claim = Claim("some", "", lambda s: ranks.judge_in_ranks(refuses_in_rank_1, s))
    found = judge_claim(claim, Subject(nn.Linear))
    assert (found.status, found.reason) == (REFUSED, "rank 1: NotImplementedError: rank 1 is not supported")


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    """Killed, it leaves no process behind."""
    code = (
        "import os, signal; from zoo.verify import ranks; from zoo.verify.subject import Subject;"
        "from torch import nn; from zoo.verify.claims.processes import ddp;"
        "ranks.judge_in_ranks(ddp, Subject(nn.Linear));"
        "print([r.process.pid for r in ranks._starters], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == -9, done.stderr
    pids = [int(n) for n in done.stdout.strip().strip("[]").split(",")]
    assert len(pids) == 1
    until = time.monotonic() + 10
    while any(_lives(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def test_they_are_untested_where_there_are_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    subject = Subject(nn.Linear, torch.device("cuda"))
    with pytest.raises(Untested, match="needs 2 GPUs; there is 1"):
        ranks.judge_in_ranks(refuses_in_rank_1, subject)
