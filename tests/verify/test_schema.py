"""The schema says all that is in a verdict's JSON, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import zoo
from support.verdicts import REPORT, document
from zoo.verify import schema
from zoo.verify.outcome import Claim
from zoo.verify.reading import read
from zoo.verify.running import judge_claim
from zoo.verify.schema import FIELDS, SCHEMA, paths, unknown
from zoo.verify.subject import Case, Subject
from zoo.verify.target import source_of


def test_fields_are_those_of_a_report() -> None:
    data = json.loads(REPORT.to_json())
    assert set(paths(data)) == set(FIELDS)
    assert data["schema"] == SCHEMA and f"\n{SCHEMA}. " in (schema.__doc__ or "")
    assert unknown({**data, "new": {"x": 1}}) == ["new", "new.x"]


def test_a_real_report_has_them(tmp_path: Path) -> None:
    report = zoo.verify(nn.Linear, claims=("values", "nan"), isolate=False)
    assert unknown(json.loads(report.to_json())) == []
    (tmp_path / "a.json").write_text(report.to_json(), encoding="utf-8")
    assert read(tmp_path / "a.json")["target"] == "torch.nn.modules.linear:Linear"


def test_it_comes_back_from_a_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(REPORT.to_json(), encoding="utf-8")
    assert read(tmp_path / "a.json") == json.loads(json.dumps(document()))


def test_libraries_are_hashed() -> None:
    found = source_of(zoo.layers.Linear).libraries
    assert any(name.startswith("_C") and len(value) == 64 for name, value in found.items())
    assert not any(name.startswith("libtorch") for name in found), torch.ops.loaded_libraries


def test_a_claim_about_a_model_tells_its_tensors() -> None:
    """Those of :mod:`zoo.verify.claims` that are about one have its name behind an @."""

    def check(subject: Subject) -> None:
        subject.compare([Case(f"case {n}", subject.randn(4, 8), 4, gradients=("weight",)) for n in range(30)])

    found = judge_claim(Claim("model-x@mlp", "", check), Subject(nn.Linear))
    assert found.status == "pass" and len(found.tensors) == 40
    assert found.error_at in [t.name for t in found.tensors]
    assert [t.name for t in found.tensors] == sorted((t.name for t in found.tensors), key=lambda n: int(n.split()[1]))
    assert judge_claim(Claim("x", "", check), Subject(nn.Linear)).tensors == ()
