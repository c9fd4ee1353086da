"""Speedups as a picture."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from zoo.bench.linear_report import LinearReport
from zoo.bench.model_report import ModelReport

__all__ = ["plot", "plot_file"]

_SUFFIXES = (".png", ".svg", ".pdf")


def plot_file(path: str) -> Path:
    """The path, checked before anything is measured. ValueError if nothing could be drawn into it."""
    file = Path(path)
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"plot {path!r}: expected a file named {' or '.join('*' + s for s in _SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"plot {path!r}: there is no folder {file.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; pip install 'layer-zoo[report]'")
    return file


def plot(report: LinearReport | ModelReport, path: Path) -> None:
    """Draw the speedups of a report as bars with their intervals, on a logarithmic axis; a panel for each kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for row in report.rows:
        if row.speedup is not None:
            kind, label = _kind_and_label(row)
            panels[kind][label][row.peer] = row
    peers = sorted({row.peer for row in report.rows}, reverse=True)
    lengths = [len(bars) for bars in panels.values()] or [1]
    height = 0.9 * len(lengths) + 0.16 * (len(peers) + 1) * sum(lengths)
    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lengths), 1, squeeze=False, height_ratios=lengths)[:, 0]
    for axis, (kind, bars) in zip(axes, panels.items(), strict=False):
        for offset, peer in enumerate(peers):
            found = [(place, by_peer[peer]) for place, by_peer in enumerate(bars.values()) if peer in by_peer]
            thick = 0.8 / len(peers)
            axis.barh(
                [place + (offset - (len(peers) - 1) / 2) * thick for place, _ in found],
                [math.log2(row.speedup) for _, row in found],
                thick,
                xerr=[
                    [max(0.0, math.log2(row.speedup / row.speedup_low)) for _, row in found],
                    [max(0.0, math.log2(row.speedup_high / row.speedup)) for _, row in found],
                ],
                label=f"over {peer}",
                color={"eager": "#4c72b0", "compiled": "#dd8452"}[peer],
                error_kw={"elinewidth": 0.8},
            )
        axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
        axis.invert_yaxis()
        axis.axvline(0, color="black", linewidth=0.8)
        axis.xaxis.set_major_formatter(lambda value, _: f"{2**value:.2f}x")
        axis.set_title(kind, fontsize=9, loc="left")
        axis.grid(axis="x", linewidth=0.3)
    if panels:
        figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside upper right", ncols=2)
    figure.suptitle(f"Speed of zoo's Linear in units of torch's, {report.machine.device}", fontsize=10)
    figure.savefig(path, dpi=130)


def _kind_and_label(row: Any) -> tuple[str, str]:
    if hasattr(row, "case"):
        precision = "" if row.precision == "highest" else f" {row.precision}"
        return f"{row.dtype}{precision}, {row.pass_}", row.case
    return f"{row.mode}, {row.phase}", row.model
