"""What changed between two verdicts, and what counts as worse."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from support.verdicts import document
from zoo.verify.comparing import compare, compare_files
from zoo.verify.reading import read


@pytest.fixture
def pair() -> tuple[dict[str, Any], dict[str, Any]]:
    return document(), copy.deepcopy(document())


def test_equals(pair: Any) -> None:
    report = compare(*pair)
    assert report.ok and "no claim, error or speed changed" in str(report)
    assert report.claims == report.errors == report.timing == report.environment == ()


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ("pass", "fail", True),
        ("pass", "refused", True),
        ("pass", "untested", True),
        ("untested", "fail", True),
        ("refused", "fail", True),
        ("refused", "untested", False),
        ("untested", "refused", False),
        ("fail", "refused", False),
        ("fail", "pass", False),
        ("untested", "pass", False),
    ],
)
def test_claims(pair: Any, before: str, after: str, worse: bool) -> None:
    for data, status in zip(pair, (before, after), strict=True):
        data["verdicts"][0]["status"] = status
    report = compare(*pair)
    (change,) = report.claims
    assert (change.what, change.before, change.after, change.worse) == ("build", before, after, worse)
    assert report.ok is not worse and ("1 got WORSE" in str(report)) is worse


def test_claims_that_come_and_go(pair: Any) -> None:
    before, after = pair
    gone = after["verdicts"].pop(1)
    assert compare(before, after).claims[0].worse
    assert not compare(after, before).claims[0].worse
    gone["status"] = "fail"
    assert compare(after, {**after, "verdicts": [*after["verdicts"], gone]}).claims[0].worse


def test_a_run_that_was_cut_off_is_worse(pair: Any) -> None:
    before, after = pair
    after["complete"] = False
    assert not compare(before, after).ok and compare(after, before).ok


def test_errors(pair: Any) -> None:
    before, after = pair
    after["verdicts"][1]["error"] *= 1.9
    assert compare(before, after).errors == ()
    after["verdicts"][1]["error"] *= 1.2
    (change,) = compare(before, after).errors
    assert (change.what, change.before, change.after, change.worse) == ("values", "2.0e-07", "4.6e-07", False)
    after["verdicts"][1]["error"] = "nan"
    assert compare(before, after).errors[0].after == "nan"
    before["verdicts"][1]["error"] = "nan"
    assert compare(before, after).errors == ()


def faster(row: dict[str, Any], factor: float) -> None:
    for key in ("speedup", "speedup_low", "speedup_high"):
        row[key] *= factor


def test_speed(pair: Any) -> None:
    before, after = pair
    row = after["timing"]["rows"][0]
    faster(row, 0.99)  # within the interval
    assert compare(before, after).timing == ()
    faster(row, 0.9)
    (change,) = compare(before, after).timing
    assert change.worse and change.before == "1.250x (1.220-1.280) FASTER"
    assert [c.worse for c in compare(after, before).timing] == [False]
    row["floor"] = 0.2  # lost in the noise of that run
    assert compare(before, after).timing == ()
    row["floor"], after["device"] = 0.01, "AMD Ryzen"  # another machine's ratio is another question
    report = compare(before, after)
    assert report.ok and report.timing[0].note == "another device" and report.environment[0].what == "device"


def test_a_time_that_can_no_longer_be_believed_is_worse(pair: Any) -> None:
    before, after = pair
    after["timing"]["rows"][0] |= {"verdict": "SUSPECT", "reason": "clocks disagree"}
    (change,) = compare(before, after).timing
    assert change.worse and change.note == "clocks disagree"
    assert compare(after, before).ok
    after["timing"] = None
    assert {c.after for c in compare(before, after).timing} == {"absent"} and compare(before, after).ok


def test_environment(pair: Any) -> None:
    before, after = pair
    after["torch"], after["libraries"] = "2.11.0", {"_C.abi3.so": "2" * 64}
    report = compare(before, after)
    assert [change.what for change in report.environment] == ["torch", "_C.abi3.so"] and report.ok
    after["kind"] = "layer_norm"
    with pytest.raises(ValueError, match="before is of kind 'linear' and after of 'layer_norm'"):
        compare(before, after)


def test_files(pair: Any, tmp_path: Path) -> None:
    names = [tmp_path / "a.json", tmp_path / "b.json"]
    for name, data in zip(names, pair, strict=True):
        name.write_text(json.dumps(data), encoding="utf-8")
    report = compare_files(*names)
    assert report.ok and json.loads(report.to_json())["before"] == str(names[0])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"ok": tr', "not JSON"),
        (b"[]", "not a verdict"),
        (b'{"ok": true, "rows": []}', "not a verdict"),
        (
            b'{"schema": 1, "verdicts": [], "command": "zoo verify x"}',
            "schema 1, expected 2; make it again: zoo verify x",
        ),
        (b'{"schema": "2", "verdicts": []}', "schema '2', expected 2"),
        (b'{"schema": 2, "verdicts": []}', "ok is missing"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=text) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("verdicts",), {}, "verdicts: got dict, expected an array"),
        (("verdicts", 0), "pass", r"verdicts\[\]: got str, expected an object"),
        (("verdicts", 0), {"claim": "x"}, r"verdicts\[\].says is missing"),
        (("verdicts", 0, "status"), "green", "'green', expected pass, fail"),
        (("verdicts", 0, "seconds"), "long", "got 'long', expected a number"),
        (("timing",), [], "timing: got list, expected an object"),
        (("timing", "rows", 0, "speedup"), True, "got True, expected a number"),
        (("timing", "rows", 0, "speedup_low"), None, "speedup_low: got None, expected a number of 0 or more"),
        (("timing", "rows", 0, "speedup_low"), 0.0, "speedup: got 0, expected more"),
    ],
)
def test_files_with_wrong_fields(tmp_path: Path, path: tuple[Any, ...], value: Any, text: str) -> None:
    data = json.loads(json.dumps(document()))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "x.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=text):
        read(tmp_path / "x.json")
