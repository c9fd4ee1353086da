"""``zoo report`` and ``zoo compare`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from support.verdicts import document
from zoo.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(json.dumps(document()), encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_page_of_a_verdict() -> None:
    result = run("report", "a.json", "-o", "page.html")
    assert (result.exit_code, result.stdout) == (0, "page.html: the verdict on hostile:<script>alert(1)</script>\n")
    assert Path("page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>\n")
    assert json.loads(run("report", "a.json", "-o", "page.html", "--json").stdout)["file"] == "page.html"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("report", "none.json", "-o", "page.html"), "none.json"),
        (("report", "a.json", "-o", "page.pdf"), "expected a file named *.html"),
        (("report", "a.json", "-o", "nowhere/page.html"), "there is no folder"),
        (("compare", "a.json", "none.json"), "none.json"),
        (("compare", "a.json", "bad.json"), "bad.json: not JSON"),
        (("verify", "zoo", "--html", "page.txt"), "expected a file named *.html"),
        (("verify", "zoo", "--timing", "--timing-form", "fast"), "expected one of quick, full"),
    ],
)
def test_errors(arguments: tuple[str, ...], text: str) -> None:
    Path("bad.json").write_text("{", encoding="utf-8")
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert text in result.stderr and "Traceback" not in result.stderr
    assert not list(Path().glob("page*"))


@pytest.mark.usefixtures("folder")
def test_comparing() -> None:
    assert run("compare", "a.json", "a.json").exit_code == 0
    data = document()
    data["verdicts"][0] |= {"status": "fail", "reason": "no longer"}
    Path("b.json").write_text(json.dumps(data), encoding="utf-8")
    result = run("compare", "a.json", "b.json")
    assert result.exit_code == 1 and result.stdout.endswith("1 got WORSE\n") and "no longer" in result.stdout
    assert run("compare", "b.json", "a.json").exit_code == 0
    told = json.loads(run("compare", "a.json", "b.json", "--json").stdout)
    assert told["ok"] is False and told["claims"][0]["worse"] is True


@pytest.mark.usefixtures("folder")
def test_verify_writes_a_page() -> None:
    result = run("verify", "torch.nn:Linear", "--claim", "values", "--html", "page.html")
    assert result.exit_code == 0, result.output
    page = Path("page.html").read_text(encoding="utf-8")
    assert "torch.nn:Linear" in page and "2 pass" in page
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []
