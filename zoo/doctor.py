"""What of zoo is built here, what would run, and what is wrong, with the remedy.

Nothing is believed: on every device a small Linear really runs, forward and backward, and is compared with torch's.
Facts are gathered first and judged by :func:`diagnose`, which is a pure function of them.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from zoo.tables import TableReport, rows, verdict
from zoo.version import __version__

__all__ = ["Build", "Device", "DoctorReport", "Library", "Problem", "diagnose", "examine", "serving"]

LIBRARIES = ("_C", "_C_cuda", "_C_eager")
_PACKAGE = Path(__file__).parent
_REBUILD = "python -m pip install --force-reinstall --no-deps ."
_REBUILD_CUDA = f"ZOO_CUDA=1 {_REBUILD}"


@dataclass(frozen=True)
class Version:
    """An installed library: its version, or why it cannot be imported."""

    name: str
    version: str | None
    error: str | None = None


@dataclass(frozen=True)
class Build:
    """What zoo was built with, as the build recorded it."""

    torch: str
    cuda: str | None
    architectures: tuple[str, ...]
    """As nvcc spells them: ``sm_90a`` is code for that chip, ``compute_80`` is PTX for it and later ones."""
    compiler: str | None


@dataclass(frozen=True)
class Library:
    """One of zoo's libraries."""

    name: str
    path: str | None
    loaded: bool
    reason: str | None = None
    """Why it is not loaded."""


@dataclass(frozen=True)
class Device:
    """A device that zoo would use, and what came of a small Linear on it."""

    device: str
    name: str
    capability: str | None = None
    """A GPU's compute capability, as "9.0"."""
    served_by: str | None = None
    """The architecture in the library that would run on the GPU; None if none would, or the build left no record."""
    kernel: str | None = None
    error: float | None = None
    """The largest relative error of output and gradients against float64."""
    failure: str | None = None


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and what to do about it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Facts:
    """Everything that :func:`diagnose` judges by."""

    versions: tuple[Version, ...]
    libraries: tuple[Library, ...]
    build: Build | None
    torch_cuda: str | None
    """The CUDA that torch was built with."""
    nvcc: str | None
    """Path of the nvcc that a build would use."""
    nvcc_cuda: str | None
    devices: tuple[Device, ...]
    driver_gpus: int
    """GPUs that the driver offers, whether torch sees them or not."""
    hidden_by: str | None
    """The value of CUDA_VISIBLE_DEVICES, if it is set."""


@dataclass(frozen=True)
class DoctorReport(TableReport):
    """What :func:`examine` found. ``ok``: nothing is wrong. No GPU is not wrong; a GPU that zoo cannot use is."""

    zoo: str
    python: str
    platform: str
    facts: Facts
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        facts = data.pop("facts")
        return {**data, **facts}

    def __rich__(self) -> RenderableType:
        facts, table = self.facts, rows()
        table.add_row("zoo", f"{self.zoo}, Python {self.python}, {self.platform}")
        for v in facts.versions:
            suffix = f" (CUDA {facts.torch_cuda})" if v.name == "torch" and facts.torch_cuda else ""
            table.add_row(v.name, f"{v.version}{suffix}" if v.version else f"not usable: {v.error}")
        for library in facts.libraries:
            state = "loaded" if library.loaded else f"not loaded: {library.reason}"
            table.add_row(library.name, state + (f", {library.path}" if library.path else ""))
        if facts.build:
            built = f"against torch {facts.build.torch}"
            built += f", CUDA {facts.build.cuda}" if facts.build.cuda else ", without CUDA"
            built += f", for {', '.join(facts.build.architectures)}" if facts.build.architectures else ""
            table.add_row("built", built + (f", by {facts.build.compiler}" if facts.build.compiler else ""))
        else:
            table.add_row("built", "the build left no record (zoo/_build_info.json)")
        table.add_row("nvcc", f"{facts.nvcc}, CUDA {facts.nvcc_cuda}" if facts.nvcc else "none found")
        for d in facts.devices:
            table.add_row(d.device, _describe(d))
        for note in self.notes:
            table.add_row("note", note)
        for problem in self.problems:
            table.add_row("WRONG", problem.what)
            table.add_row("  remedy", problem.remedy)
        if self.ok:
            end = f"ok: zoo runs on {', '.join(d.device for d in facts.devices)}"
        else:
            end = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''} found"
        return Group(table, "", verdict(self.ok, end))


def _describe(device: Device) -> str:
    parts = [device.name]
    if device.capability:
        parts.append(f"compute capability {device.capability}")
    if device.served_by:
        parts.append(f"served by {device.served_by}")
    if device.failure:
        parts.append(f"FAILED: {device.failure}")
    else:
        parts.append(f"a Linear ran forward and backward (kernel {device.kernel}, largest error {device.error:.0e})")
    return ", ".join(parts)


def serving(capability: tuple[int, int], architectures: Iterable[str]) -> str | None:
    """Which of the architectures in a CUDA library runs on a GPU of that compute capability, or None.

    Code for ``sm_XY`` runs on X.Y and on later chips of the same major; with ``a`` on X.Y alone, with ``f`` on later
    ones of its family. PTX, ``compute_XY``, is compiled by the driver for X.Y and everything later, with ``a`` and
    ``f`` as above. Code is taken before PTX, and the nearest before others.
    """
    runs = []
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            raise ValueError(f"architecture {name!r}: expected names such as sm_90a or compute_80")
        kind, target, only = match[1], (int(match[2]), int(match[3])), match[4]
        same_major = target[0] == capability[0] and target[1] <= capability[1]
        if only == "a":
            fits = target == capability
        elif only == "f" or kind == "sm":
            fits = same_major
        else:
            fits = target <= capability
        if fits:
            runs.append((kind == "sm", target, name))
    return max(runs)[2] if runs else None


def diagnose(facts: Facts) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """(problems, notes) of these facts."""
    problems = [
        Problem(
            f"{v.name} cannot be imported: {v.error}",
            f"install it to suit the other libraries: pip install -U {v.name}",
        )
        for v in facts.versions
        if v.error
    ]
    core, _, eager = facts.libraries
    torch_runs = not any(v.name == "torch" and v.error for v in facts.versions)
    if torch_runs and not core.loaded:
        problems.append(Problem(f"zoo's library is not loaded: {core.reason}", _REBUILD))
    notes = []
    if core.loaded and not eager.loaded:
        notes.append(f"eager mode takes more host time than it could: {eager.reason}")
    if torch_runs:
        for finding in (_about_gpus(facts), *(_about_device(d, facts) for d in facts.devices)):
            if isinstance(finding, Problem):
                problems.append(finding)
            elif finding:
                notes.append(finding)
    return tuple(problems), tuple(notes)


def _about_gpus(facts: Facts) -> Problem | str | None:
    core, cuda, _ = facts.libraries
    gpus = [d for d in facts.devices if d.capability]
    if gpus:
        if core.loaded and not cuda.loaded:
            return Problem(f"there is a GPU ({gpus[0].name}), but {cuda.reason}", _how_to_build(facts))
        return None
    if not facts.driver_gpus:
        return "no GPU here; zoo runs on the CPU"
    if facts.hidden_by is not None:
        return f"CUDA_VISIBLE_DEVICES={facts.hidden_by!r} hides this machine's GPU; zoo runs on the CPU"
    if facts.torch_cuda is None:
        what = "this machine has an NVIDIA GPU, but the installed torch was built without CUDA"
        return Problem(what, "install a CUDA build of torch: https://pytorch.org/get-started/locally")
    what = f"this machine has an NVIDIA GPU, but torch (CUDA {facts.torch_cuda}) cannot use it"
    return Problem(what, "run nvidia-smi: the driver must support the CUDA that torch was built with")


def _about_device(device: Device, facts: Facts) -> Problem | None:
    if device.failure is None or (device.capability and not facts.libraries[1].loaded):
        return None
    architectures = facts.build.architectures if facts.build else ()
    if device.capability and architectures and device.served_by is None:
        what = f"zoo was built for {', '.join(architectures)}; none of them runs on {device.device}, {device.name}"
        return Problem(what, f"rebuild zoo: TORCH_CUDA_ARCH_LIST={device.capability} {_REBUILD_CUDA}")
    what = f"a small Linear fails on {device.device}: {device.failure}"
    return Problem(what, f"rebuild zoo: {_REBUILD_CUDA if device.capability else _REBUILD}")


def _how_to_build(facts: Facts) -> str:
    if facts.torch_cuda is None:
        return "install a CUDA build of torch, then rebuild zoo"
    major = facts.torch_cuda.split(".")[0]
    if facts.nvcc is None:
        return f"install the CUDA {major} toolkit (nvcc), then rebuild zoo: {_REBUILD_CUDA}"
    if facts.nvcc_cuda is None or facts.nvcc_cuda.split(".")[0] != major:
        return (
            f"nvcc is CUDA {facts.nvcc_cuda} and torch was built with CUDA {facts.torch_cuda}: install the CUDA "
            f"{major} toolkit and set CUDA_HOME, then rebuild zoo: {_REBUILD_CUDA}"
        )
    return f"rebuild zoo: {_REBUILD_CUDA}"


def examine() -> DoctorReport:
    """Look at this installation and this machine."""
    versions = tuple(_version(name) for name in ("torch", "torchvision", "timm", "safetensors", "sklearn"))
    torch_cuda, build, nvcc = None, _build_record(_PACKAGE / "_build_info.json"), _find_nvcc()
    failed = versions[0].error
    if failed:
        libraries: tuple[Library, ...] = tuple(Library(name, None, False, failed) for name in LIBRARIES)
        devices: tuple[Device, ...] = ()
    else:
        torch_cuda = importlib.import_module("torch").version.cuda
        libraries = _libraries()
        devices = _devices(build) if libraries[0].loaded else ()
    facts = Facts(
        versions=versions,
        libraries=libraries,
        build=build,
        torch_cuda=torch_cuda,
        nvcc=nvcc,
        nvcc_cuda=_cuda_of(nvcc) if nvcc else None,
        devices=devices,
        driver_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        hidden_by=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    where = f"{platform.system()} {platform.machine()}"
    return DoctorReport(__version__, platform.python_version(), where, facts, *diagnose(facts))


def _version(name: str) -> Version:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # torchvision beside another torch raises RuntimeError, a broken wheel OSError
        return Version(name, None, f"{type(error).__name__}: {error}".splitlines()[0])
    return Version(name, module.__version__)


def _build_record(path: Path) -> Build | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Build(data["torch"], data["cuda"], tuple(data["architectures"]), data["compiler"])


def _find_nvcc() -> str | None:
    homes = [home for key in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(key))]
    places = [shutil.which("nvcc", path=str(Path(home) / "bin")) for home in homes]
    places += [shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]
    return next(filter(None, places), None)


def _cuda_of(nvcc: str) -> str | None:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def _libraries() -> tuple[Library, Library, Library]:
    paths = {
        name: next((p for p in _PACKAGE.glob(f"{name}.*") if p.suffix in (".so", ".pyd")), None) for name in LIBRARIES
    }
    places = {name: str(path) if path else None for name, path in paths.items()}
    try:
        library = importlib.import_module("zoo.ops._library")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        core, cuda, eager = (Library(name, places[name], False, reason) for name in LIBRARIES)
        return core, cuda, eager
    reasons = (None, library.CUDA_MISSING, library.EAGER_MISSING)
    core, cuda, eager = (Library(n, places[n], r is None, r) for n, r in zip(LIBRARIES, reasons, strict=True))
    return core, cuda, eager


def _devices(build: Build | None) -> tuple[Device, ...]:
    import torch

    found = [_try(Device("cpu", f"{torch.get_num_threads()} threads"))]
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        served = serving(capability, build.architectures) if build else None
        major, minor = capability
        gpu = Device(f"cuda:{index}", torch.cuda.get_device_name(index), f"{major}.{minor}", served)
        found.append(_try(gpu))
    return tuple(found)


def _try(device: Device) -> Device:
    """The device, with what came of a small Linear on it."""
    import torch

    from zoo.layers import Linear
    from zoo.ops import explain
    from zoo.parity import parity

    try:
        generator = torch.Generator().manual_seed(0)
        stock = torch.nn.Linear(37, 19).to(device.device)
        custom = Linear(37, 19).to(device.device)
        with torch.no_grad():
            for a, b in zip(stock.parameters(), custom.parameters(), strict=True):
                a.copy_(torch.randn(a.shape, generator=generator) / 6)
                b.copy_(a)
        x = torch.randn(11, 37, generator=generator).to(device.device)
        kernel = explain(x, custom.weight, custom.bias).kernel
        report = parity(custom, stock, x, gradients=True)
    except (RuntimeError, ValueError) as error:
        return replace(device, failure=str(error).splitlines()[0])
    worst = report.worst
    failure = None if report.ok else f"{worst.kind} {worst.name}: {worst.reason}"
    return replace(device, kernel=kernel, error=max(entry.error for entry in report.entries), failure=failure)
