"""Builds zoo's two libraries; everything else about the package is in pyproject.toml.

``zoo._C``       schemas, checks and the CPU core; always built.
``zoo._C_cuda``  the CUDA core; built where nvcc and torch agree on CUDA's major version.

Both use LibTorch's stable ABI and Python's limited API, so a wheel built against one torch (>= 2.10) and Python
(>= 3.10) runs on others. Environment:

``ZOO_CUDA``              auto (default): build the CUDA core if possible; 1: it is an error if not; 0: do not.
``TORCH_CUDA_ARCH_LIST``  architectures, as torch spells them ("8.0;9.0a+PTX"); default "8.0+PTX;9.0a".
``MAX_JOBS``              compilers at once; default: as many as cores and memory allow.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup

DEFAULT_ARCHITECTURES = "8.0+PTX;9.0a"
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
METADATA_ONLY = {"egg_info", "dist_info", "sdist", "--version", "--help", "clean"}


def gencode_flags(architectures: str) -> list[str]:
    """nvcc's flags for a list as torch spells it. Not left to torch: it gives none at all when any other flag
    holds the letters "arch", and fails where no GPU and no list is."""
    flags = []
    for entry in filter(None, re.split(r"[;,\s]+", architectures)):
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", entry)
        if match is None:
            raise SystemExit(
                f"zoo: TORCH_CUDA_ARCH_LIST has {entry!r}; "
                "expected entries such as 8.0, 9.0a or 8.0+PTX, separated by ;"
            )
        number = match[1] + match[2]
        # one PTX entry alone serves every later chip, and keeps the library small
        code = f"compute_{number}" if match[3] else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return flags


def toolkit_of_nvcc() -> str | None:
    """The CUDA toolkit of the nvcc on PATH, as nvcc itself tells: the one on PATH may be a link or a wrapper."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    ).stderr
    match = re.search(r"^#\$ TOP=(.+)$", text, re.M)
    return os.path.realpath(match[1]) if match else None


def cuda_problem(torch_cuda: str | None, cuda_home: str | None) -> str | None:
    """Why the CUDA core cannot be built here, in plain words, or None if it can."""
    if torch_cuda is None:
        return "the torch that zoo is built with has no CUDA"
    if cuda_home is None or not (nvcc := Path(cuda_home) / "bin" / "nvcc").exists():
        return f"no nvcc was found (CUDA_HOME is {cuda_home or 'not set'}); install the CUDA {torch_cuda} toolkit"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        return f"{nvcc} does not say its version"
    if match[1] != torch_cuda.split(".")[0]:
        return f"nvcc is CUDA {match[1]}.{match[2]} and torch was built with CUDA {torch_cuda}; their majors must agree"
    return None


def default_jobs() -> int:
    """Compilers at once: one a core, and 2 GiB of memory each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    return max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, memory >> 31))


def build_options() -> dict:
    if not {"CUDA_HOME", "CUDA_PATH"} & set(os.environ) and (toolkit := toolkit_of_nvcc()):
        os.environ["CUDA_HOME"] = toolkit
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        if METADATA_ONLY & set(sys.argv):
            return {"ext_modules": [Extension("zoo._C", [])]}  # the metadata says "binary" without a build
        raise SystemExit(
            "zoo: torch is needed to build. Run `pip install .` (it brings one), or install torch>=2.10, "
            "'setuptools<82', wheel and ninja first and add --no-build-isolation"
        ) from None
    os.environ.setdefault("MAX_JOBS", str(default_jobs()))
    options = {"include_dirs": ["csrc"], "py_limited_api": True}
    extensions = [
        cpp_extension.CppExtension(
            "zoo._C",
            ["csrc/linear.cpp"],
            extra_compile_args={"cxx": ["-O3", "-fvisibility=hidden", *STABLE_ABI]},
            extra_link_args=["-s"],
            **options,
        )
    ]
    wanted = os.environ.get("ZOO_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"zoo: ZOO_CUDA is {wanted!r}; expected auto, 0 or 1")
    problem = "ZOO_CUDA=0 asks for none" if wanted == "0" else cuda_problem(torch.version.cuda, cpp_extension.CUDA_HOME)
    if problem is None:
        flags = gencode_flags(os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES)
        extensions.append(
            cpp_extension.CUDAExtension(
                "zoo._C_cuda",
                sorted(
                    str(path)
                    for folder in ("csrc/cuda",)
                    for path in Path(folder).glob("*.c[up]*")
                    if path.suffix in (".cu", ".cpp")
                ),
                extra_compile_args={
                    "cxx": ["-O3", "-fvisibility=hidden", "-DUSE_CUDA", *STABLE_ABI],
                    "nvcc": ["-O3", "-std=c++17", "-DUSE_CUDA", "--expt-relaxed-constexpr", *STABLE_ABI, *flags],
                },
                extra_link_args=["-s"],
                **options,
            )
        )
    elif wanted == "1":
        raise SystemExit(f"zoo: ZOO_CUDA=1 asks for the CUDA core, but {problem}")
    elif not METADATA_ONLY & set(sys.argv):
        print(f"zoo: building without the CUDA core: {problem}", file=sys.stderr)
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


if __name__ == "__main__":
    setup(**build_options())
