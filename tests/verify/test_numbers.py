"""The script that counts how often zoo verify is right, on few layers: what it writes, and that it goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import verify_numbers as script
from typer.testing import CliRunner
from verify_numbers import Numbers, Unit, found_by, units

from support import honest, saboteurs
from support.timing_saboteurs import Here
from zoo.verify.timing import running

CPU = torch.device("cpu")


def index_of(layer: Any) -> int:
    return list(saboteurs.CAUGHT_BY).index(layer)


def test_a_unit_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by(Unit("saboteurs", "linear", index_of(saboteurs.clamps), 3, "cpu")) == []
    monkeypatch.setitem(saboteurs.CAUGHT_BY, saboteurs.clamps, "nan")  # which does not find it
    (text,) = found_by(Unit("saboteurs", "linear", index_of(saboteurs.clamps), 3, "cpu"))
    assert "'pass'" in text
    monkeypatch.setitem(script.CONTROLS, "linear", {honest.addmm: set(), saboteurs.clamps: set()})
    assert found_by(Unit("honest", "linear", 0, 0, "cpu")) == []
    wrong = found_by(Unit("honest", "linear", 1, 0, "cpu"))
    assert any("claim='inf'" in text for text in wrong)


def test_all_layers_come_before_the_second_seed() -> None:
    found = list(units("cpu", 2, 40, ""))
    caught = [unit for unit in found if unit.part == "saboteurs"]
    assert len(caught) == 2 * len(saboteurs.CAUGHT_BY) and caught[len(saboteurs.CAUGHT_BY)].seed == 1
    right = [unit for unit in found if unit.part == "honest"]
    assert len(right) == 40 and len({unit.name for unit in right}) >= 10 and right[-1].seed == 2
    assert len(set(found)) == len(found)


def test_it_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Unit] = []

    def answers(left: list[Unit], jobs: int, until: float) -> Any:
        for unit in left[:3]:
            ran.append(unit)
            yield unit, ["as it should not be"] if unit.name == ran[0].name else []

    monkeypatch.setattr(script, "_answers", answers)
    app, file = typer.Typer(), tmp_path / "found" / "numbers.json"
    app.command()(script.main)
    words = ["--json", str(file), "--repeats", "2", "--honest", "2", "--equals", "0", "--no-planted", "--only", "er"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    first = json.loads(file.read_text())
    assert first["summary"]["saboteurs"] == 3 and first["summary"]["caught each time"] == 2
    assert first["saboteurs"][ran[0].name]["told"] == ["seed 0: as it should not be"]
    assert not first["summary"]["complete"]["saboteurs"] and "summary" in first and first["machine"]["torch"]
    while not all(json.loads(file.read_text())["summary"]["complete"].values()):
        CliRunner().invoke(app, words)
    assert len(ran) == len(set(ran)) == len(list(units("cpu", 2, 2, "er")))


def test_a_unit_that_raises_is_told() -> None:
    """And the others go on."""
    left = [Unit("saboteurs", "linear", n, 0, "cpu") for n in (10**6, index_of(saboteurs.clamps))]
    found = dict(script._answers(left, 1, time.monotonic() + 100))
    assert found[left[0]] == ["IndexError: list index out of range"] and found[left[1]] == []
    assert dict(script._answers(left, 1, 0.0)) == {}


def test_times_are_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Worker", Here)
    plan = script.replace(script.equals_plan(CPU), processes=2, blocks=2, passes=("forward",), states=("warm",))
    wanted = {"repeats": 0, "honest": 0, "equals": 1, "planted": 0}
    numbers = Numbers(tmp_path / "numbers.json", CPU, "", wanted)
    numbers.time("equals", "seed 0", lambda: script._timer("", CPU, 0, plan), 0.0)
    assert not numbers.data["equals"] and not numbers.summary()["complete"]["equals"]
    numbers.time("equals", "seed 0", lambda: script._timer("", CPU, 0, plan), time.monotonic() + 100)
    (row,) = numbers.data["equals"]["seed 0"]
    assert row["speedup"] and numbers.summary()["comparisons of equals"] == 1
    again = Numbers(tmp_path / "numbers.json", CPU, "", wanted)
    again.time("equals", "seed 0", lambda: pytest.fail("it is there"), time.monotonic() + 100)
    for verdict, right in (("FASTER", True), ("SUSPECT", False)):  # one of a hundred may be told apart
        row["verdict"] = verdict
        assert numbers.summary()["right"]["equals"] == right
