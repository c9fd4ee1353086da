"""``zoo verify`` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import zoo
from zoo.cli import app

LAYERS = """
import time
import torch.nn.functional as F


def right(input, weight, bias):
    return F.linear(input, weight, bias)


def no_bias(input, weight, bias):
    return F.linear(input, weight)


def slow_without_rows(input, weight, bias):
    if not input.numel():
        time.sleep(60)
    return F.linear(input, weight, bias)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with layers that no path leads to."""
    (tmp_path / "brought_layers.py").write_text(LAYERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


def test_a_right_layer_is_0_and_a_wrong_one_1(folder: Path) -> None:
    result = run("brought_layers:right", "--claim", "values", "--claim", "nan", "--json", "verdict.json", "--seed", "4")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "3 pass"
    data = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    assert data["ok"] and data["complete"] and data["seed"] == 4
    assert data["command"] == (
        "zoo verify brought_layers:right --kind linear --claim values --claim nan --device cpu --seed 4 "
        "--time-limit 120 --memory-limit 8"
    )
    result = run("brought_layers:no_bias", "--claim", "values", "--json")
    assert result.exit_code == 1
    assert [v["status"] for v in json.loads(result.stdout)["verdicts"]] == ["pass", "fail"]
    assert "FAIL values: (64, 784)->256 output: error" in " ".join(result.stderr.split())


def test_in_a_model(folder: Path) -> None:
    result = run("brought_layers:no_bias", "--claim", "model-outputs*", "--models", "mlp", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and " --models mlp " in data["command"]
    assert [(v["claim"], v["status"]) for v in data["verdicts"]] == [("build", "pass"), ("model-outputs@mlp", "fail")]
    assert "the first layer to part is 0: error" in data["verdicts"][1]["reason"]


def test_errors_are_told_before_anything_runs(folder: Path) -> None:
    for arguments, text in (
        (["brought_layers:wrong"], "there is no 'wrong'; there are no_bias, right"),
        (["zoo", "--claim", "x"], "no claim matches 'x'"),
        (["zoo", "--models", "mlp,resnet81", "--claim", "model-runs*"], "unknown model 'resnet81'"),
        (["zoo", "--models", "none", "--claim", "model-*"], "no claim matches 'model-*'"),
        (["zoo", "--kind", "layer_norm"], "unknown layer_norm layer 'zoo'"),
        (["zoo", "--kind", "norm"], "unknown kind of layer 'norm'; known: conv2d, layer_norm, linear, mlp"),
        (["zoo", "--json", "verdict.txt"], "expected a file named *.json"),
        (["zoo", "--memory-limit", "0.5"], "expected GiB, at least 1, or none"),
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert text in result.stderr


def test_ctrl_c_leaves_a_valid_partial_report(folder: Path) -> None:
    paths = [str(Path(zoo.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = ["brought_layers:slow_without_rows", "--claim", "values", "--claim", "edge-shapes", "--claim", "nan"]
    process = subprocess.Popen(
        [sys.executable, "-m", "zoo", "verify", *words, "--json", "verdict.json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    file, until = folder / "verdict.json", time.monotonic() + 100
    while time.monotonic() < until and not (file.exists() and '"pass": 2' in file.read_text(encoding="utf-8")):
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert stdout == "" and "interrupted; what was judged is in verdict.json" in stderr and "Traceback" not in stderr
    data = json.loads(file.read_text(encoding="utf-8"))
    assert (data["ok"], data["complete"]) == (False, False)
    assert [v["status"] for v in data["verdicts"]] == ["pass", "pass", "untested", "untested"]
    assert data["verdicts"][-1]["reason"] == "not reached"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
