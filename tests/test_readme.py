"""The README's Python runs as it stands, and its commands exist."""

import re
from pathlib import Path

import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from zoo.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"my_kernel": F.linear, "nn": nn}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    for line in (
        "state dict agrees with torchvision/resnet50 of the same options (320 keys)",
        "parity: ok, 1 output, 162 gradients",
        "95.3% of 3.51e+10 FLOPs ran through custom layers; 37 custom",
        "74.8% of 4.66e+08 FLOPs ran through custom layers; 9 custom; 1 of 2 units as one",
        "  blocks.0.mlp: apart: act has a hook (1 of 1 calls)",
    ):
        assert line in README
        assert line in printed


def test_commands_exist():
    commands = {words[1] for words in re.findall(r"^(zoo) (\w+)", "\n".join(blocks("sh")), re.M)}
    assert {"list", "info", "check", "parity", "doctor"} <= commands
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
