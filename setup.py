"""Builds zoo's libraries; everything else about the package is in pyproject.toml.

``zoo._C``        schemas, checks and the CPU core; always built.
``zoo._C_cuda``   the CUDA core; built where nvcc and torch agree on CUDA's major version.
``zoo._C_eager``  autograd of eager mode in C++, which saves host time; left out where it does not compile.

The first two use LibTorch's stable ABI and Python's limited API, so a wheel built against one torch (>= 2.10) and
Python (>= 3.10) runs on others. The third is used with the torch and the Python of its build alone; elsewhere Python
does what it does. Environment:

``ZOO_CUDA``              auto (default): build the CUDA core if possible; 1: it is an error if not; 0: do not.
``ZOO_EAGER``             0: do not build zoo._C_eager (and, when zoo is imported, do not load it).
``TORCH_CUDA_ARCH_LIST``  architectures, as torch spells them ("8.0;9.0a+PTX"); default "8.0+PTX;9.0a".
``MAX_JOBS``              compilers at once; default: as many as cores and memory allow.
"""

from __future__ import annotations

import json
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


def architecture_list(text: str) -> list[str]:
    """The entries of a list as torch spells it, separated by semicolons, commas or spaces."""
    entries = [entry for entry in re.split(r"[;,\s]+", text) if entry]
    for entry in entries:
        if not re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", entry):
            raise SystemExit(
                f"zoo: TORCH_CUDA_ARCH_LIST has {entry!r}; "
                "expected entries such as 8.0, 9.0a or 8.0+PTX, separated by ;"
            )
    return entries


def code_name(architecture: str) -> str:
    """nvcc's name for an entry: "sm_90a" is code for that chip, "compute_80" is PTX, which serves every later chip
    too. An entry with +PTX is built as PTX alone, which keeps the library small."""
    number = architecture.removesuffix("+PTX").replace(".", "")
    return f"{'compute' if architecture.endswith('+PTX') else 'sm'}_{number}"


def gencode_flags(architectures: list[str]) -> list[str]:
    """nvcc's flags. Not left to torch: it gives none at all when any other flag holds the letters "arch", and fails
    where no GPU and no list is."""
    return [f"-gencode=arch=compute_{code_name(a).split('_')[1]},code={code_name(a)}" for a in architectures]


def check_cxx_runtime(library: Path) -> None:
    """Refuse a library with a C++ runtime of its own: an exception that it throws crashes in torch, whose runtime is
    the shared one, instead of becoming a Python exception."""
    if sys.platform == "linux" and b"libstdc++.so" not in library.read_bytes():
        library.unlink()
        raise SystemExit(
            f"zoo: the C++ compiler ({os.environ.get('CXX', 'c++')}) links a static libstdc++ into {library.name}; "
            "its errors would crash Python. Set CXX to a compiler that links the shared one (usually: unset CC CXX)"
        )


def recording(build: type, record: dict) -> type:
    """The build command that also leaves beside the libraries how they were built, for `zoo doctor`."""

    class Build(build):  # type: ignore[misc]
        def run(self) -> None:
            record["eager"] = None
            super().run()
            for extension in self.extensions:
                library = Path(self.get_ext_fullpath(extension.name))
                if not extension.optional or library.name == record["eager"]:
                    check_cxx_runtime(library)
            folder = Path(self.get_ext_fullpath("zoo._C")).parent
            (folder / "_build_info.json").write_text(json.dumps(record, indent=2) + "\n")

        def build_extension(self, extension: Extension) -> None:
            if not extension.optional:
                super().build_extension(extension)
                return
            # one that is there may be of another torch, which neither its sources nor its date tell
            library = Path(self.get_ext_fullpath(extension.name))
            library.unlink(missing_ok=True)
            try:
                super().build_extension(extension)
                record["eager"] = library.name
            except Exception as error:
                print(
                    f"zoo: building without {extension.name}, which does not compile with torch {record['torch']} "
                    f"here: {str(error).splitlines()[0]}",
                    file=sys.stderr,
                )

    return Build


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


def release_of(nvcc: Path) -> str | None:
    """nvcc's CUDA version, such as "13.0"."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def cuda_problem(torch_cuda: str | None, cuda_home: str | None) -> str | None:
    """Why the CUDA core cannot be built here, in plain words, or None if it can."""
    if torch_cuda is None:
        return "the torch that zoo is built with has no CUDA"
    if cuda_home is None or not (nvcc := Path(cuda_home) / "bin" / "nvcc").exists():
        return f"no nvcc was found (CUDA_HOME is {cuda_home or 'not set'}); install the CUDA {torch_cuda} toolkit"
    release = release_of(nvcc)
    if release is None:
        return f"{nvcc} does not say its version"
    if release.split(".")[0] != torch_cuda.split(".")[0]:
        return f"nvcc is CUDA {release} and torch was built with CUDA {torch_cuda}; their majors must agree"
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
    headers = sorted(str(path) for pattern in ("*.h", "*.cuh") for path in Path("csrc").rglob(pattern))
    options = {"include_dirs": ["csrc"], "depends": headers, "py_limited_api": True}
    extensions = [
        cpp_extension.CppExtension(
            "zoo._C",
            ["csrc/choice.cpp", "csrc/choice_backward.cpp", "csrc/linear.cpp", "csrc/module.cpp"],
            extra_compile_args={"cxx": ["-O3", "-fvisibility=hidden", *STABLE_ABI]},
            extra_link_args=["-s"],
            **options,
        )
    ]
    if os.environ.get("ZOO_EAGER") != "0":
        extensions.append(
            cpp_extension.CppExtension(
                "zoo._C_eager",
                ["csrc/eager.cpp", "csrc/eager_kernels.cpp"],
                extra_compile_args={"cxx": ["-O2", "-fvisibility=hidden"]},
                extra_link_args=["-s"],
                optional=True,
            )
        )
    wanted = os.environ.get("ZOO_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"zoo: ZOO_CUDA is {wanted!r}; expected auto, 0 or 1")
    problem = "ZOO_CUDA=0 asks for none" if wanted == "0" else cuda_problem(torch.version.cuda, cpp_extension.CUDA_HOME)
    architectures = architecture_list(os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES)
    if problem is None:
        hopper = ["-DZOO_SM90A"] if "sm_90a" in map(code_name, architectures) else []
        nvcc_flags = ["-O3", "-std=c++17", "-DUSE_CUDA", "--expt-relaxed-constexpr", *STABLE_ABI]
        extensions.append(
            cpp_extension.CUDAExtension(
                "zoo._C_cuda",
                [
                    "csrc/choice.cpp",
                    "csrc/choice_backward.cpp",
                    *sorted(str(path) for pattern in ("*.cpp", "*.cu") for path in Path("csrc/cuda").rglob(pattern)),
                ],
                extra_compile_args={
                    "cxx": ["-O3", "-fvisibility=hidden", "-DUSE_CUDA", *hopper, *STABLE_ABI],
                    "nvcc": [*nvcc_flags, *gencode_flags(architectures)],
                },
                extra_link_args=["-s"],
                **options,
            )
        )
    elif wanted == "1":
        raise SystemExit(f"zoo: ZOO_CUDA=1 asks for the CUDA core, but {problem}")
    elif not METADATA_ONLY & set(sys.argv):
        print(f"zoo: building without the CUDA core: {problem}", file=sys.stderr)
    record = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if problem is None else None,
        "architectures": [] if problem else [code_name(a) for a in architectures],
        "compiler": None if problem else f"nvcc {release_of(Path(cpp_extension.CUDA_HOME) / 'bin' / 'nvcc')}",
    }
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": recording(cpp_extension.BuildExtension, record)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


if __name__ == "__main__":
    setup(**build_options())
