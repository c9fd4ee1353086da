"""What the timings were taken on, and what it could do at best."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from zoo.version import __version__

__all__ = [
    "Machine",
    "Peak",
    "cache_bytes",
    "device_of",
    "examine",
    "float32_precision",
    "free_bytes",
    "peak_of",
    "present",
]


@dataclass(frozen=True)
class Machine:
    """Where and with what the timings were taken."""

    device: str
    """The name of the GPU, or of the CPU."""
    driver: str | None
    """NVIDIA's, where it can be told."""
    torch: str
    cuda: str | None
    """That torch was built with."""
    zoo: str
    python: str
    threads: int
    """Of torch on the CPU."""
    date: str
    """UTC, as ISO 8601."""


@dataclass(frozen=True)
class Peak:
    """What a device does at best, by its data sheet."""

    flops: float
    """Operations a second, dense."""
    bandwidth: float
    """Bytes a second, of its memory."""


_HOPPER = {"float64": 67e12, "float32": 67e12, "tf32": 495e12, "bfloat16": 989e12, "float16": 989e12}
_AMPERE = {"float64": 19.5e12, "float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12}
_PEAKS: tuple[tuple[str, dict[str, float], float], ...] = (
    ("NVIDIA H200", _HOPPER, 4.8e12),
    ("NVIDIA H100 80GB HBM3", _HOPPER, 3.35e12),
    ("NVIDIA A100-SXM4-80GB", _AMPERE, 2.04e12),
    ("NVIDIA A100-SXM4-40GB", _AMPERE, 1.56e12),
)
"""By the beginning of the name that the driver gives: rates by dtype, and bandwidth."""


def device_of(device: torch.device | str | None) -> torch.device:
    """The device of that name; the CPU unless told. A GPU without a number is the current one, and gets it.

    Some of torch's functions (``torch.cuda.set_device``) take no "cuda", and a tensor's device is never one.

    ValueError for what names no device, and for a GPU that is not here.
    """
    try:
        place = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r}: expected one such as cpu, cuda or cuda:0 ({error})") from error
    unnumbered = present(place).type == "cuda" and place.index is None
    return torch.device("cuda", torch.cuda.current_device()) if unnumbered else place


def present(device: torch.device) -> torch.device:
    """The same device. ValueError for a GPU that is not here."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device {str(device)!r}: torch sees {count} GPUs here; `zoo doctor` tells more")
    return device


def examine(device: torch.device) -> Machine:
    """The facts about a device and the libraries."""
    on_cuda = device.type == "cuda"
    return Machine(
        device=torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        driver=_driver() if on_cuda else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        zoo=__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def peak_of(name: str, dtype: str, precision: str) -> Peak | None:
    """The best that the device of that name does in a dtype, or None where it is not known.

    Args:
        name: as :attr:`Machine.device`.
        dtype: "float32" and the like.
        precision: of float32's products: "high" counts as tf32 and "medium" as bfloat16.
    """
    if dtype == "float32":
        dtype = {"high": "tf32", "medium": "bfloat16"}.get(precision, dtype)
    for beginning, rates, bandwidth in _PEAKS:
        if name.startswith(beginning) and dtype in rates:
            return Peak(rates[dtype], bandwidth)
    return None


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's largest cache; 32 MiB for a CPU that does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    for level in (3, 2):
        with contextlib.suppress(OSError, ValueError):
            text = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size").read_text(encoding="ascii").strip()
            return int(text.rstrip("K")) * 1024
    return 32 * 2**20


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free; on the CPU what the system says, or 4 GiB."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * 2**30


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Inside, ``torch.get_float32_matmul_precision()`` is this one."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return lines[0] if lines else None
    return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
