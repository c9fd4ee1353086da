from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.bench import LinearReport, LinearRow, ModelReport, ModelRow
from zoo.bench.plot import plot, plot_file
from zoo.machine import examine

MACHINE = examine(torch.device("cpu"))
TIMES: dict[str, Any] = {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.7}


def linear(*rows: LinearRow) -> LinearReport:
    return LinearReport(MACHINE, "zoo bench linear", ("highest",), 0, rows)


def texts(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (the extra 'report')")
def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    rows = [
        LinearRow("vit_b/fc1", 1, 1, 1, dtype, "highest", None, "forward", peer, "k", **TIMES)
        for dtype in ("float32", "bfloat16")
        for peer in ("eager", "compiled")
    ]
    failed = LinearRow("failed", 1, 1, 1, "float16", "highest", None, "forward", "eager", "k", failure="no")
    plot(linear(*rows, failed), tmp_path / "a.svg")
    drawn = texts(tmp_path / "a.svg")
    for text in ("vit_b/fc1", "float32, forward", "bfloat16, forward", "over eager", "over compiled", MACHINE.device):
        assert text in drawn
    assert "float16, forward" not in drawn.replace("bfloat16, forward", "")
    model = ModelRow("resnet50", "fp32", "train", "eager", 64, 224, **TIMES)
    plot(ModelReport(MACHINE, "zoo bench model", 0, True, (model,)), tmp_path / "b.svg")
    assert "resnet50" in texts(tmp_path / "b.svg") and "fp32, train" in texts(tmp_path / "b.svg")
    plot(linear(), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_files_are_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected a file named \*.png"):
        plot_file(str(tmp_path / "a.jpg"))
    with pytest.raises(ValueError, match="there is no folder"):
        plot_file(str(tmp_path / "none" / "a.png"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'layer-zoo\[report\]'"):
        plot_file(str(tmp_path / "a.png"))
