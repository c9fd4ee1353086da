"""Compiles the steps, all at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from steps import Step

__all__ = ["build", "find_nvcc", "library"]

_HERE = Path(__file__).resolve().parent
_INCLUDE = _HERE.parent.parent / "csrc" / "cuda" / "sm90"
_FLAGS = (
    *("-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17"),
    "-gencode=arch=compute_90a,code=sm_90a",  # sm_90a: wgmma and setmaxnreg are in no other target
)


def find_nvcc() -> str | None:
    """The compiler: on PATH, or under CUDA_HOME."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def library(step: Step, folder: Path) -> Path | None:
    """Where the step's compiled code belongs; None for zoo's own kernel."""
    return None if step.file is None else folder / Path(step.file).with_suffix(".so").name


def build(steps: Iterable[Step], folder: Path) -> dict[int, str]:
    """Compile what is not yet, or has changed. Returns the compiler's words for each step that does not compile.

    RuntimeError if there is something to compile and no nvcc.
    """
    headers = [*_HERE.glob("*.cuh"), _INCLUDE / "ptx.cuh"]
    stale: list[tuple[int, Path, Path]] = []
    for step in steps:
        to = library(step, folder)
        if step.file is None or to is None:
            continue
        source = _HERE / step.file
        newest = max(path.stat().st_mtime for path in (source, *headers))
        if not to.exists() or to.stat().st_mtime < newest:
            stale.append((step.number, source, to))
    if not stale:
        return {}
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc was found, on PATH or in CUDA_HOME; the steps need CUDA 12.5 or later")
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path, to: Path) -> str | None:
        unfinished = to.with_suffix(".part")
        command = [nvcc, *_FLAGS, "-I", str(_INCLUDE), "-o", str(unfinished), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return (done.stderr or done.stdout).strip()
        unfinished.replace(to)
        return None

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = list(pool.map(lambda job: compile_one(*job[1:]), stale))
    return {number: problem for (number, _, _), problem in zip(stale, problems, strict=True) if problem is not None}
