"""What else may move a time: clocks, power, temperature, throttling, neighbours, load."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import torch

__all__ = ["conditions"]

_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_THROTTLED = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The newer name and the older one."""


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
    values = _ask(index, f"--query-gpu={','.join(_FIELDS)}")
    found.update(zip(_FIELDS, (value.strip() for value in values.split(",")), strict=False) if values else ())
    throttled = next(filter(None, (_ask(index, f"--query-gpu={name}") for name in _THROTTLED)), None)
    if throttled is not None:
        found["throttled"] = throttled
    others = _ask(index, "--query-compute-apps=pid")
    if others is not None:
        found["processes on the GPU"] = str(len(others.split()))
    return found


def _ask(index: str, query: str) -> str | None:
    """What nvidia-smi says of a GPU; None where there is none, or where it does not know the query."""
    command = ["nvidia-smi", "--id", index, query, "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return None
