"""What else may move a time: clocks, power, temperature, throttling, neighbours, load."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import torch

__all__ = ["conditions"]

_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")


def conditions(device: torch.device) -> dict[str, str]:
    """The state of the device now, as it tells it, with units; what it does not tell is absent."""
    found = {"load": f"{os.getloadavg()[0]:.2f} of {os.cpu_count()} processors"} if hasattr(os, "getloadavg") else {}
    if device.type != "cuda":
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            found["clock"] = (
                next(line.partition(":")[2].strip() for line in lines if line.startswith("cpu MHz")) + " MHz"
            )
        return found
    index = str(device.index if device.index is not None else torch.cuda.current_device())
    values = _ask(["--id", index, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"])
    found.update(zip(_FIELDS, (value.strip() for value in values.split(",")), strict=False) if values else ())
    others = _ask(["--id", index, "--query-compute-apps=pid", "--format=csv,noheader"])
    found["processes on the GPU"] = str(len(others.split())) if others is not None else "unknown"
    return found


def _ask(arguments: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    return ""
