"""Plots as rows of text and small drawings (SVG), so that a phone shows them as well; positions are in percent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zoo.verify.page.markup import Markup, element

__all__ = ["divergence_plot", "error_plot", "speed_plot"]

Row = Mapping[str, Any]
Scale = Callable[[float], str]


def error_plot(verdicts: Sequence[Row]) -> Markup:
    """The layer's error (filled), the stock layer's (open) and the limit (bar) of each claim, on a logarithmic axis."""
    return _errors([(v["claim"], v["error_at"], v["error"], v["stock_error"], v["error_limit"]) for v in verdicts])


def divergence_plot(layers: Sequence[Row]) -> Markup:
    """The same for tensors of a model: ``verdicts[].tensors`` of the schema."""
    return _errors([(v["name"], "", v["error"], v["stock_error"], v["limit"]) for v in layers])


def _errors(rows: Sequence[tuple[str, str, Any, Any, Any]]) -> Markup:
    numbers = [[_finite(value) for value in row[2:]] for row in rows]
    known = [value for row in numbers for value in row if value]
    low, high = (math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))) if known else (-8, 0)
    low -= 1  # for those that are 0
    high = max(high, low + 2)

    def x(value: float) -> str:
        return _percent((math.log10(value) - low) / (high - low) if value > 0 else 0.0)

    lines = []
    for (name, at, error, stock, limit), (e, s, most) in zip(rows, numbers, strict=True):
        marks = []
        if most is not None:
            marks.append(element("line", x1=x(most), x2=x(most), y1="15%", y2="85%", class_="limit"))
        if s is not None:
            marks.append(element("circle", cx=x(s), cy="50%", r="6", class_="stock"))
        if e is not None:
            wrong = most is not None and e > most
            marks.append(element("circle", cx=x(e), cy="50%", r="4", class_="layer bad" if wrong else "layer"))
        title = f"{at + ': ' if at else ''}error {error}, the stock layer's {stock}, limit {limit}"
        text = "not finite" if e is None else f"{e:.1e}"
        lines.append(_line(name, _drawing(title, marks), text))
    step = max(1, math.ceil((high - low) / 6))
    ticks = [(x(10.0**n), f"1e{n}") for n in range(low + 1, high + 1, step)]
    key = "filled: the layer; open: the stock layer; bar: the limit"
    return _plot(lines, ticks, key)


def speed_plot(rows: Sequence[Row]) -> Markup:
    """Speedups with their intervals over the band of noise, on a logarithmic axis."""
    ends = [abs(math.log(row[key])) for row in rows for key in ("speedup_low", "speedup_high")]
    ends += [math.log1p(row["floor"]) for row in rows]
    reach = max(math.log(1.1), min(max(ends), math.log(16)) * 1.05)

    def x(ratio: float) -> str:
        return _percent(0.5 + math.log(max(ratio, 1e-9)) / reach / 2)

    lines = []
    for row in rows:
        low, high = x(1 / (1 + row["floor"])), x(1 + row["floor"])
        width = f"{float(high[:-1]) - float(low[:-1]):.2f}%"
        kind = f"layer {row['verdict'].lower()}"
        marks = [
            element("rect", x=low, y="0", width=width, height="100%", class_="noise"),
            element("line", x1="50%", x2="50%", y1="0", y2="100%", class_="axis"),
            element("line", x1=x(row["speedup_low"]), x2=x(row["speedup_high"]), y1="50%", y2="50%", class_=kind),
            element("circle", cx=x(row["speedup"]), cy="50%", r="4", class_=kind),
        ]
        title = (
            f"{row['layer_us']:.1f} µs, its peer {row['peer_us']:.1f} µs: {row['speedup']:.3f} times as fast "
            f"({row['speedup_low']:.3f} to {row['speedup_high']:.3f}), noise {row['floor']:.1%}"
        )
        name = f"{row['case']} {row['dtype']} {row['pass']} {row['state']} over {row['peer']}"
        lines.append(_line(name, _drawing(title, marks), f"{row['speedup']:.2f}x {row['verdict']}"))
    edge = math.exp(reach * 0.8)
    ticks = [(x(ratio), f"{ratio:.2f}x") for ratio in (1 / edge, 1.0, edge)]
    return _plot(lines, ticks, "right of the middle: the layer is faster")


def _plot(lines: Sequence[Markup], ticks: Iterable[tuple[str, str]], key: str) -> Markup:
    marks = [element("text", text, x=x, y="14", text_anchor="middle") for x, text in ticks]
    axis = element("div", element("span"), element("svg", *marks, class_="ticks", aria_hidden="true"), element("span"))
    return element(
        "figure", *lines, element("div", axis, class_="ticks-row"), element("figcaption", key), class_="plot"
    )


def _line(name: str, drawing: Markup, text: str) -> Markup:
    return element("div", element("span", name, class_="name"), drawing, element("span", text), class_="line")


def _drawing(title: str, marks: Iterable[Markup]) -> Markup:
    return element("svg", element("title", title), *marks, role="img")


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def _finite(value: Any) -> float | None:
    """JSON has "nan" and "inf" as text."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
