"""The results as a table, in the README and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from steps import CHIP, SHAPES, STEPS, Step

__all__ = ["fill_readme", "markdown", "plot", "row_of", "table"]

_BEGIN, _END = "<!-- results: filled in by ladder.py --readme -->", "<!-- end of results -->"


def row_of(results: dict[str, Any] | None, step: Step, which: int) -> dict[str, Any] | None:
    """The measurement of a step at SHAPES[which], or None."""
    for row in (results or {}).get("rows", ()):
        if (row["step"], row["shape"]) == (step.number, str(SHAPES[which])):
            return dict(row)
    return None


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 20 else f"{value:.0f}"


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}"


def _cells(results: dict[str, Any] | None, step: Step, which: int) -> tuple[str, str, str]:
    """Predicted, measured, and the share of cuBLAS's rate."""
    row = row_of(results, step, which)
    failed = str(step.number) in (results or {}).get("failed", {})
    measured = ("failed" if failed else "—", "—") if row is None else (_number(row["tflops"]), _percent(row["share"]))
    return _number(step.predicted[which]), *measured


def table(results: dict[str, Any]) -> Table:
    """For the terminal: TFLOP/s predicted and measured, and of cuBLAS."""
    shown = Table(box=box.SIMPLE_HEAD, title=f"{results['device']}, bf16, TFLOP/s", title_justify="left")
    shown.add_column("step")
    for shape in SHAPES:
        for name in (f"{shape}: predicted", "measured", "of cuBLAS"):
            shown.add_column(name, justify="right")
    for step in STEPS:
        shown.add_row(
            f"{step.number} {step.title}", *(cell for i in range(len(SHAPES)) for cell in _cells(results, step, i))
        )
    return shown


def markdown(results: dict[str, Any] | None) -> str:
    """For the README; without results, the predictions alone."""
    shapes = " | ".join(f"{shape}: predicted | measured | of cuBLAS" for shape in SHAPES)
    lines = [f"| step | {shapes} |", f"|---|{'---:|' * 3 * len(SHAPES)}"]
    for step in STEPS:
        cells = " | ".join(cell for i in range(len(SHAPES)) for cell in _cells(results, step, i))
        lines.append(f"| {step.number} {step.title} | {cells} |")
    if results is None:
        lines += [
            "",
            f"TFLOP/s. Not measured yet: run `python examples/ladder/ladder.py --json ...` on an {CHIP.name}.",
        ]
    else:
        peers = ", ".join(f"{_number(rate)} at {shape}" for shape, rate in _cublas(results).items())
        lines += ["", f"TFLOP/s on one {results['device']}, {results['date']}; cuBLAS in the same run: {peers}."]
    return "\n".join(lines)


def _cublas(results: dict[str, Any]) -> dict[str, float]:
    """The best that it did beside any step, by shape: slow steps leave it a cold chip or few samples."""
    rates: dict[str, float] = {}
    for row in results["rows"]:
        rates[row["shape"]] = max(rates.get(row["shape"], 0.0), row["cublas_tflops"])
    return rates


def fill_readme(readme: Path, results: dict[str, Any] | None) -> None:
    """Put the table between the README's two marks. ValueError if they are not there."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{readme}: expected the marks {_BEGIN!r} and {_END!r}, one after the other")
    readme.write_text(f"{before}{begin}\n{markdown(results)}\n{end}{after}", encoding="utf-8")


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars of what was measured, marks of what was predicted, on a logarithmic axis; a panel for each shape."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5 * len(SHAPES)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(SHAPES), 1, squeeze=False)[:, 0]
    places = range(len(STEPS))
    for which, (axis, shape) in enumerate(zip(panels, SHAPES, strict=True)):
        rows = [row_of(results, step, which) for step in STEPS]
        found = [(place, row) for place, row in zip(places, rows, strict=True) if row is not None]
        bars = axis.bar([place for place, _ in found], [row["tflops"] for _, row in found], 0.6, label="measured")
        labels = [f"{_number(row['tflops'])}\n{_percent(row['share'])}" for _, row in found]
        axis.bar_label(bars, labels, label_type="center", color="white", fontsize=7)
        predicted = [step.predicted[which] for step in STEPS]
        axis.plot(places, predicted, "_", color="black", markersize=22, label="predicted")
        rate = _cublas(results).get(str(shape))
        if rate is not None:
            axis.axhline(rate, color="#dd8452", linewidth=1, label="cuBLAS")
        axis.axhline(CHIP.tflops(CHIP.tensor), color="gray", linewidth=1, linestyle=":", label="data sheet")
        axis.set_yscale("log")
        axis.set_ylim(0.1, 2500)
        axis.set_ylabel("TFLOP/s")
        axis.set_xticks(places, [f"{step.number}\n{_folded(step.title)}" for step in STEPS], fontsize=7)
        axis.set_title(f"y = x Wᵀ, bf16, M x K x N = {shape}", fontsize=9, loc="left")
        axis.legend(fontsize=8, loc="upper left")
    figure.suptitle(f"The ladder, {results['device']}", fontsize=10)
    figure.savefig(path, dpi=130)


def _folded(title: str) -> str:
    return title.replace(", ", ",\n").replace(": ", ":\n")
