"""The page of a verdict: what is in it, and how it behaves in a browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from support.verdicts import REPORT, TIMING, document
from zoo.verify.page import page_of
from zoo.verify.page.markup import element, raw

MODEL = "model-gradients@mlp"
VOID = {"meta", "link", "input", "line", "circle", "rect"}


class Elements(HTMLParser):
    """The tags, which must be balanced, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.said.append(data)


def test_everything_is_there_and_escaped() -> None:
    page = page_of(document())
    found = Elements(page)
    assert [tag for tag, _ in found.tags].count("script") == 1
    text = " ".join(found.said)
    for words in (
        "hostile:<script>alert(1)</script>",
        "</td><script>alert(2)</script> is wrong",
        "clocks disagree: <b>much</b>",
        "UNTIMED x float32 forward+backward cold over eager: no backward",
        "0" * 64,
        "1" * 64,
        "3 pass",
        "1 untested",
        "something is wrong",
    ):
        assert words in " ".join(text.split()), words


def test_no_address_is_in_it() -> None:
    page = page_of(document())
    assert not re.search(r"https?:|//[a-z]|url\(|@import|src=", page.replace("data:,", ""))
    for tag, attributes in Elements(page).tags:
        assert tag not in ("img", "iframe", "object", "base") and not any(name.startswith("on") for name in attributes)
        assert "style" not in attributes  # the page's own policy forbids it


def test_partial_reports_and_those_without_times() -> None:
    page = page_of(replace(REPORT, timing=None, complete=False, verdicts=()).to_dict())
    said = " ".join(Elements(page).said)
    assert "stopped before its end" in said and "Speed" not in said and "Errors" not in said
    nothing = replace(TIMING, rows=(), processes=0)
    assert "0 of 5 fresh processes" in page_of(replace(REPORT, timing=nothing).to_dict())


def test_numbers_that_are_none() -> None:
    data = document()
    data["verdicts"][1] |= {"error": "nan", "stock_error": None, "error_limit": "inf"}
    data["verdicts"][2] |= {"error": 0.0, "stock_error": 0.0, "error_limit": 0.0}
    assert "not finite" in page_of(data)


def test_a_models_tensors_are_drawn() -> None:
    said = " ".join(Elements(page_of(document())).said)
    assert said.count("model-gradients@mlp") == 3  # the claim, its error, and its tensors
    assert "blocks.0.<fc1>.weight" in said and "head.bias" in said


def test_markup() -> None:
    assert element("p", "<&>", class_='a"b') == '<p class="a&quot;b">&lt;&amp;&gt;</p>'
    with pytest.raises(ValueError, match="would end the element"):
        raw("x = '</script>'")


# in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens the page: it fails for a request, or for anything on the console."""
    (tmp_path / "report.html").write_text(page_of(document()), encoding="utf-8")
    complaints: list[str] = []
    address = (tmp_path / "report.html").as_uri()

    def open_page(**options: Any) -> Any:
        page = browser.new_page(**options)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: complaints.append(request.url) if request.url != address else None)
        page.goto(address)
        return page

    yield open_page
    assert complaints == []


def claims(page: Any) -> list[str]:
    return page.locator("#claims tbody tr:visible th").all_inner_texts()


def test_it_sorts(opened: Any) -> None:
    page = opened()
    assert claims(page) == ["build", "values", "strides", MODEL, "vmap", "device"]
    page.get_by_role("button", name="seconds").click()
    assert claims(page) == ["device", "vmap", "build", "values", MODEL, "strides"]
    page.get_by_role("button", name="seconds").click()
    assert claims(page)[0] == "strides"
    page.get_by_role("button", name="error", exact=True).click()
    page.get_by_role("button", name="error", exact=True).click()
    assert claims(page)[:3] == ["strides", MODEL, "values"]
    page.get_by_role("button", name="claim", exact=True).click()
    assert claims(page) == ["build", "device", MODEL, "strides", "values", "vmap"]
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("claim")


def test_it_filters(opened: Any) -> None:
    page = opened()
    page.get_by_role("button", name="pass").click()
    assert claims(page) == ["strides", "vmap", "device"]
    assert page.locator("#shown").inner_text() == "3 of 6"
    page.get_by_placeholder("text").fill("WRONG strides")
    assert claims(page) == ["strides"]
    page.get_by_placeholder("text").fill("no such words")
    assert claims(page) == []
    page.get_by_placeholder("text").fill("")
    page.get_by_role("button", name="pass").click()
    assert len(claims(page)) == 6


def luminance(colour: str) -> float:
    """As WCAG defines it, of rgb(r, g, b)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1200])
def test_it_is_readable(opened: Any, scheme: str, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    back = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (back < 0.1) == (scheme == "dark")
    seen = page.evaluate(
        "[...document.querySelectorAll('h1, p, td, .state, .reason, output, figcaption, .name, .facts th')]"
        ".map(e => getComputedStyle(e).color)"
    )
    assert len(seen) > 20
    for colour in set(seen):
        light, dark = sorted((luminance(colour), back), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour
    # every drawing is wide enough to be read, and no text is cut off at the side
    assert page.evaluate("Math.min(...[...document.querySelectorAll('svg[role=img]')].map(e => e.clientWidth))") > 200
    over = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName + e.className)"
    )
    assert [name for name in over if not name.startswith(("text", "circle"))] == []


def test_it_is_readable_without_scripts(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert claims(page) == ["build", "values", "strides", MODEL, "vmap", "device"]
