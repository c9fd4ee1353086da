"""Judging in this process and in a worker; reports, partial ones too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zoo
from support import honest, saboteurs
from zoo.verify import SCHEMA, Verdict, VerifyReport
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED
from zoo.verify.running import chosen_claims


def statuses(report: VerifyReport) -> dict[str, str]:
    return {v.claim: v.status for v in report.verdicts}


def test_in_this_process() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    report = zoo.verify(honest.addmm, claims=("values", "gradients*"), isolate=False)
    assert torch.equal(torch.rand(1), expected)  # the random state is as it was
    assert report.ok and report.complete
    assert list(statuses(report)) == ["build", "values", *(c.name for c in chosen_claims("gradients*")[1:])]
    assert set(statuses(report).values()) == {PASS}
    report.raise_for_failure()


def test_json() -> None:
    report = zoo.verify(saboteurs.drops_nan, claims=("nan", "values"), isolate=False, seed=3)
    data = json.loads(report.to_json())
    assert list(data)[:2] == ["ok", "schema"] and data["schema"] == SCHEMA and data["ok"] is False
    assert data["target"] == "support.saboteurs:drops_nan" and data["kind"] == "linear" and data["seed"] == 3
    assert data["source_file"] == "saboteurs.py" and len(data["source_sha256"]) == 64
    assert data["torch"] == torch.__version__ and data["zoo"] == zoo.__version__ and data["complete"] is True
    assert data["counts"] == {"pass": 2, "fail": 1, "refused": 0, "untested": 0}
    nan = data["verdicts"][-1]
    assert nan["claim"] == "nan" and nan["status"] == "fail" and "outputs are nan" in nan["reason"]
    values = data["verdicts"][1]
    assert 0 < values["error"] <= values["error_limit"] and values["stock_error"] > 0
    assert values["error_at"].endswith("output")
    assert "FAILED: nan" in str(report)
    with pytest.raises(zoo.CheckFailed):
        report.raise_for_failure()


class NotALinear(nn.Module):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(3))


def test_a_layer_that_cannot_be_built() -> None:
    report = zoo.verify(NotALinear, claims=("values", "nan"), isolate=False)
    assert statuses(report) == {"build": FAIL, "values": UNTESTED, "nan": UNTESTED} and not report.ok
    assert "matrix" in report.verdicts[0].reason


def refuses_everything(input: object, weight: object, bias: object) -> object:
    raise NotImplementedError("not today")


def test_refusing_everything_is_not_ok() -> None:
    report = zoo.verify(refuses_everything, claims=("values", "nan"), isolate=False)
    assert statuses(report) == {"build": PASS, "values": REFUSED, "nan": REFUSED} and not report.ok


def test_a_claim_alone_gives_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def spy(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(float(input.double().sum()))
        return nn.functional.linear(input, weight, bias)

    zoo.verify(spy, claims=("values", "strides"), isolate=False)
    both, seen[:] = list(seen), []
    zoo.verify(spy, claims="strides", isolate=False)
    assert seen and seen == both[-len(seen) :]
    zoo.verify(spy, claims="strides", isolate=False, seed=1)
    assert seen[: len(seen) // 2] != seen[len(seen) // 2 :]


def test_partial_reports() -> None:
    reports: list[VerifyReport] = []
    zoo.verify(nn.Linear, claims=("inf", "nan"), isolate=False, checkpoint=reports.append)
    assert [set(statuses(r).values()) for r in reports] == [{PASS, UNTESTED}, {PASS, UNTESTED}, {PASS}]
    assert [r.verdicts[-1].reason for r in reports] == ["not reached", "not reached", ""]
    assert not any(r.complete or r.ok for r in reports)
    assert "stopped before its end" in str(reports[0])
    assert json.loads(reports[0].to_json())["complete"] is False


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="no claim matches 'velues'; there are build, values"):
        zoo.verify(nn.Linear, claims="velues", isolate=False)
    with pytest.raises(ValueError, match="expected more than 0 seconds"):
        zoo.verify(nn.Linear, time_limit=0)
    with pytest.raises(ValueError, match="at a module's top level"):
        zoo.verify(lambda input, weight, bias: input)
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        zoo.verify("nowhere:Linear", isolate=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exits", "its process ended with exit code 3"),
        ("crashes", "its process was ended by SIGABRT"),
        ("hangs", "not done after 5 s"),
        ("fills_memory", "allocate"),
    ],
)
def test_a_deadly_layer_costs_one_claim(name: str, reason: str) -> None:
    claim = saboteurs.DEADLY[getattr(saboteurs, name)]
    report = zoo.verify(
        f"support.saboteurs:{name}",
        claims=("inf", claim),
        time_limit=5 if name == "hangs" else 60,
        memory_limit=2 * 2**30,
    )
    assert report.complete and not report.ok
    found = {v.claim: v for v in report.verdicts}
    assert found[claim].status == FAIL and reason in found[claim].reason
    assert {v.status for v in report.verdicts if v.claim != claim} == {PASS}
    assert report.source_file == "saboteurs.py"


def test_a_module_that_ends_the_process_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_at_import.py").write_text("import os\nos._exit(5)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    report = zoo.verify("ends_at_import:Layer", claims="values")
    assert statuses(report) == {"build": FAIL, "values": UNTESTED} and not report.ok
    assert report.verdicts[0].reason == "its process ended with exit code 5"
    assert report.source_sha256 is None


def test_ok_needs_all() -> None:
    report = zoo.verify(nn.Linear, claims="values", isolate=False)
    assert report.ok and not replace(report, complete=False).ok
    assert replace(report, verdicts=(*report.verdicts, Verdict("x", "", REFUSED, "no"))).ok
    assert not replace(report, verdicts=(*report.verdicts, Verdict("x", "", FAIL, "wrong"))).ok


@pytest.mark.parametrize("claim", ["ddp", "fsdp", "model-outputs@mlp", "model-sgd@mlp", "model-captured@mlp"])
def test_what_is_compared_with_the_stock_layer_alone_is_untested_beside_a_twin(claim: str) -> None:
    report = zoo.verify(honest.Sliced, against=nn.Linear, claims=(claim,), models=("mlp",), isolate=False)
    (found,) = (v for v in report.verdicts if v.claim == claim)
    assert found.status == UNTESTED and "it is compared with a twin" in found.reason, found


def test_against_a_twin() -> None:
    report = zoo.verify(honest.Sliced, against=nn.Linear, claims=("values", "gradients"), isolate=False)
    assert report.ok and report.against == "torch.nn.modules.linear:Linear"
    assert json.loads(report.to_json())["against"] == report.against
    assert "against='torch.nn.modules.linear:Linear'" in report.command
    assert "against torch.nn.modules.linear:Linear" in str(report)
    for against, text in (
        ("nowhere:Linear", "against: target 'nowhere:Linear': No module named 'nowhere'"),
        (3, "against: target 3: expected a class"),
        (honest.addmm, "against support.honest:addmm: expected a class"),
    ):
        with pytest.raises(ValueError, match=text):
            zoo.verify(nn.Linear, against=against, isolate=False)


def test_what_a_layer_sets_in_one_claim_is_not_there_in_the_next() -> None:
    """Else it would be what was set before the layer was called."""
    before = torch.get_float32_matmul_precision()
    for isolate in (False, True):
        claims = ("values", "global-state")
        report = zoo.verify("support.saboteurs:sets_precision", models=(), claims=claims, isolate=isolate)
        assert [v.status for v in report.verdicts] == [PASS, PASS, FAIL], report
    assert torch.get_float32_matmul_precision() == before
