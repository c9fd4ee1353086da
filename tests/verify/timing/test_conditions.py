"""What nvidia-smi is asked, with one that is made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from zoo.verify.timing.conditions import conditions

SCRIPT = """#!/bin/sh
case "$*" in
  *clocks.sm*) echo "1980 MHz, 3201 MHz, 512.10 W, 41" ;;
  *clocks_event_reasons*) echo "unknown field"; exit 2 ;;
  *clocks_throttle_reasons*) echo "0x0000000000000004" ;;
  *compute-apps*) echo 11; echo 12 ;;
esac
"""


def test_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = conditions(torch.device("cuda:1"))
    assert found.pop("load").endswith("processors")
    assert found == {
        "clocks.sm": "1980 MHz",
        "clocks.mem": "3201 MHz",
        "power.draw": "512.10 W",
        "temperature.gpu": "41",
        "throttled": "0x0000000000000004",
        "processes on the GPU": "2",
    }


def test_where_nothing_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert set(conditions(torch.device("cuda:0"))) <= {"load"}
    assert set(conditions(torch.device("cpu"))) <= {"load", "clock"}
