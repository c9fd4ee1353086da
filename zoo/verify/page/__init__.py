"""One self-contained HTML page of a verdict, made from its JSON: no network, no library, readable without scripts.

The text of a verdict is written by whoever wrote the layer: all of it is escaped, and the page's own policy lets no
script run but the one in it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from zoo.verify.page.markup import Markup, element, raw
from zoo.verify.page.plots import divergence_plot, error_plot, speed_plot
from zoo.verify.timing.judging import INCONCLUSIVE

__all__ = ["page_of"]

_STATES = ("pass", "fail", "refused", "untested")
_FACTS = (
    *("device", "driver", "torch", "cuda", "zoo", "python", "threads", "date", "seed"),
    *("against", "source_file", "source_sha256", "schema"),
)

Data = Mapping[str, Any]


def page_of(data: Data) -> str:
    """The page.

    Args:
        data: a verdict as :meth:`VerifyReport.to_dict` gives it, or its JSON read back.
    """
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", f"zoo verify {data['target']}"),
        element("style", raw(style)),
    )
    body = element("body", element("main", *_sections(data)), element("script", raw(script)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _sections(data: Data) -> Iterator[Markup]:
    yield _header(data)
    yield _claims(data["verdicts"])
    errors = [v for v in data["verdicts"] if v["error"] is not None]
    if errors:
        note = "Relative error against float64 of the tensor nearest to its limit, for each claim that compares values."
        yield element("section", element("h2", "Errors"), element("p", note), error_plot(errors), id="errors")
    if data["timing"] is not None:
        yield _timing(data["timing"])
    for verdict in data["verdicts"]:
        if verdict["tensors"]:
            yield _divergence(verdict)
    yield _environment(data)


def _header(data: Data) -> Markup:
    word = "all is well" if data["ok"] else "not proved" if not data["complete"] else "something is wrong"
    counts = [element("span", f"{n} {state}", class_=f"state {state}") for state, n in data["counts"].items() if n]
    beside = f", against {data['against']}" if data["against"] else ""
    lines = [element("h1", data["target"]), element("p", element("strong", word), class_="ok" if data["ok"] else "bad")]
    lines.append(element("p", f"{data['kind']}{beside}, on {data['device']}, {data['date']}"))
    if not data["complete"]:
        lines.append(element("p", "The run was stopped before its end."))
    return element("header", *lines, element("p", *counts))


def _claims(verdicts: list[Data]) -> Markup:
    states = [state for state in _STATES if any(v["status"] == state for v in verdicts)]
    chips = [
        element("button", state, type="button", class_=f"chip {state}", aria_pressed="true", data_state=state)
        for state in states
    ]
    tools = element(
        "div",
        *chips,
        element("input", type="search", id="text", placeholder="text", aria_label="Filter by text"),
        element("output", f"{len(verdicts)} of {len(verdicts)}", id="shown"),
        class_="tools",
    )
    names = (
        ("claim", "text"),
        ("verdict", "text"),
        ("error", "number"),
        ("seconds", "number"),
        ("what is claimed", "text"),
    )
    heads = [
        element("th", element("button", name, type="button"), data_sort=kind, scope="col", aria_sort="none")
        for name, kind in names
    ]
    rows = [_claim(v) for v in verdicts]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows), id="claims")
    return element("section", element("h2", "Claims"), tools, table)


def _claim(v: Data) -> Markup:
    error = v["error"]
    what = [element("span", v["says"])]
    if v["reason"]:
        what.append(element("span", v["reason"], class_="reason"))
    return element(
        "tr",
        element("th", v["claim"], scope="row", data_value=v["claim"]),
        element("td", element("span", v["status"], class_=f"state {v['status']}"), data_value=v["status"]),
        element(
            "td", "" if error is None else _number(error), data_value="" if error is None else error, class_="number"
        ),
        element("td", f"{v['seconds']:.1f}", data_value=v["seconds"], class_="number"),
        element("td", *what, data_value=v["says"]),
        data_state=v["status"],
    )


def _timing(timing: Data) -> Markup:
    parts = [element("h2", "Speed")]
    clocks = ", ".join(timing["clocks"])
    parts.append(
        element(
            "p",
            f"{timing['form']} form: {timing['processes']} of {timing['planned']} fresh processes, "
            f"{timing['blocks']} blocks each; clocks: {clocks}. How many times as fast as its peer the layer is, with "
            "the 95% interval; the band is the noise, the stock layer against itself.",
        )
    )
    rows = [row for row in timing["rows"] if row["speedup"] is not None]
    if rows:
        parts.append(speed_plot(rows))
    said = [row for row in timing["rows"] if row["reason"]]
    plain = [row for row in said if row["verdict"] == INCONCLUSIVE]
    lines = [_said(row) for row in said if row not in plain]
    lines += [element("li", note) for note in (timing["note"], *timing["notes"]) if note]
    if lines:
        parts.append(element("ul", *lines))
    if plain:
        summary = element("summary", f"Why {len(plain)} are inconclusive")
        parts.append(element("details", summary, element("ul", *map(_said, plain))))
    states = [", ".join(f"{key} {value}" for key, value in found.items()) for found in timing["conditions"]]
    if states:
        parts.append(
            element(
                "details",
                element("summary", "The machine before each process, and after the last"),
                element("ol", *(element("li", state) for state in states)),
            )
        )
    return element("section", *parts, id="speed")


def _said(row: Data) -> Markup:
    return element("li", element("b", row["verdict"]), f" {_row_name(row)}: {row['reason']}")


def _row_name(row: Data) -> str:
    return f"{row['case']} {row['dtype']} {row['pass']} {row['state']} over {row['peer']}"


def _divergence(verdict: Data) -> Markup:
    """How far a model's tensors are from float64, module by module."""
    note = f"{verdict['says']}; the {len(verdict['tensors'])} tensors nearest to their limits, in the model's order."
    head = element("h2", verdict["claim"])
    return element("section", head, element("p", note), divergence_plot(verdict["tensors"]), class_="divergence")


def _environment(data: Data) -> Markup:
    facts = [(key, data[key]) for key in _FACTS if data.get(key) is not None]
    facts += [(f"sha256 of {name}", value) for name, value in data["libraries"].items()]
    rows = [element("tr", element("th", key, scope="row"), element("td", value)) for key, value in facts]
    return element(
        "section",
        element("h2", "Environment"),
        element("table", element("tbody", *rows), class_="facts"),
        element("h2", "Reproduce"),
        element("pre", element("code", data["command"])),
    )


def _number(value: Any) -> str:
    return f"{float(value):.1e}"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
