"""The build's decisions: which libraries, for which chips, and what it says where it cannot."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("zoo_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_nvcc(folder, text):
    (folder / "bin").mkdir()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho '{text}'\n")
    nvcc.chmod(0o755)
    return str(folder)


def test_architectures_become_flags(build):
    assert build.gencode_flags(build.architecture_list("8.0+PTX;9.0a")) == [
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert build.architecture_list("8.0, 9.0 10.0f") == ["8.0", "9.0", "10.0f"]
    assert build.gencode_flags(["10.0f"]) == ["-gencode=arch=compute_100f,code=sm_100f"]


@pytest.mark.parametrize("text", ["sm_90", "9", "9.0x", "Hopper"])
def test_an_architecture_that_torch_would_not_know_is_named(build, text):
    with pytest.raises(SystemExit, match=f"'{text}'; expected entries such as 8.0"):
        build.architecture_list(f"8.0;{text}")


def test_why_cuda_cannot_be_built(build, tmp_path):
    assert build.cuda_problem(None, "/usr/local/cuda") == "the torch that zoo is built with has no CUDA"
    assert "no nvcc was found (CUDA_HOME is /nonexistent)" in build.cuda_problem("13.0", "/nonexistent")
    assert "CUDA_HOME is not set" in build.cuda_problem("13.0", None)
    home = fake_nvcc(tmp_path, "Cuda compilation tools, release 12.8, V12.8.93")
    assert build.cuda_problem("13.0", home) == (
        "nvcc is CUDA 12.8 and torch was built with CUDA 13.0; their majors must agree"
    )
    assert build.cuda_problem("12.6", home) is None


def test_an_nvcc_without_a_version(build, tmp_path):
    assert "does not say its version" in build.cuda_problem("13.0", fake_nvcc(tmp_path, "hello"))


def run_setup(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_package_is_installed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.search(r"^packages = \[(.*?)\]", text, re.S | re.M)[1].replace('"', "").replace(",", "").split())
    elsewhere = dict(re.findall(r'"([\w.]+)" = "([\w/]+)"', re.search(r"^package-dir = (.*)", text, re.M)[1]))
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "zoo").rglob("*.py")}
    own = {".".join(folder.parts) for folder in folders if folder.as_posix() not in elsewhere.values()}
    assert listed == own | elsewhere.keys() and elsewhere.keys() == {"zoo._weights", "zoo_pytest"}


def test_the_weights_travel_with_the_package(tmp_path):
    # the metadata goes there too: left in this folder, it would be found by whatever runs here
    metadata = ("egg_info", "--egg-base", str(tmp_path))
    done = run_setup("-q", *metadata, "build_py", "--build-lib", str(tmp_path), ZOO_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "zoo_pytest" / "__init__.py").is_file()
    shipped = {path.name for path in (tmp_path / "zoo" / "_weights").iterdir()}
    assert {path.name for path in (ROOT / "weights").iterdir() if path.suffix in (".toml", ".safetensors")} <= shipped


def test_zoo_cuda_1_is_an_error_where_it_cannot_be():
    done = run_setup("build_ext", "--dry-run", ZOO_CUDA="1", CUDA_HOME="/nonexistent")
    assert done.returncode != 0
    assert "ZOO_CUDA=1 asks for the CUDA core, but" in done.stderr


def test_zoo_cuda_takes_three_values():
    done = run_setup("build_ext", "--dry-run", ZOO_CUDA="yes")
    assert done.returncode != 0
    assert "ZOO_CUDA is 'yes'; expected auto, 0 or 1" in done.stderr


def test_without_torch_metadata_works_and_a_build_says_what_is_missing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
    assert run_setup("--version", PYTHONPATH=str(tmp_path)).returncode == 0
    done = run_setup("build_ext", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "--no-build-isolation" in done.stderr
    assert "Traceback" not in done.stderr


def test_max_jobs_of_the_user_is_kept_and_the_default_is_modest(build):
    assert 1 <= build.default_jobs() <= (os.cpu_count() or 1)


def test_the_toolkit_is_found_behind_a_wrapper(build, tmp_path, monkeypatch):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={tmp_path}/real' >&2\n")
    (bin_ / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}{os.environ['PATH']}")
    assert build.toolkit_of_nvcc() == os.path.realpath(tmp_path / "real")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.toolkit_of_nvcc() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the C++ runtime is checked on Linux")
def test_a_static_cxx_runtime_is_refused(build, tmp_path):
    library = tmp_path / "_C.abi3.so"
    library.write_bytes(b"... libstdc++.so.6 ...")
    build.check_cxx_runtime(library)
    library.write_bytes(b"... libc.so.6 ...")
    with pytest.raises(SystemExit, match=r"links a static libstdc\+\+ into _C.abi3.so"):
        build.check_cxx_runtime(library)
    assert not library.exists()


@pytest.mark.parametrize(
    ("fails", "recorded"), [((), "_C_eager.so"), (("zoo._C_eager",), None), (("zoo._C", "zoo._C_eager"), "raises")]
)
def test_what_is_optional_may_fail_and_leaves_nothing_old(build, tmp_path, capsys, fails, recorded):
    class Base:
        extensions = (
            SimpleNamespace(name="zoo._C", optional=False),
            SimpleNamespace(name="zoo._C_eager", optional=True),
        )

        def get_ext_fullpath(self, name):
            return str(tmp_path / f"{name.removeprefix('zoo.')}.so")

        def run(self):
            for extension in self.extensions:
                self.build_extension(extension)

        def build_extension(self, extension):
            library = Path(self.get_ext_fullpath(extension.name))
            assert extension.name == "zoo._C" or not library.exists()  # it would be taken for up to date
            if extension.name in fails:
                raise RuntimeError(f"{extension.name}: no such header")
            library.write_bytes(b"libstdc++.so.6")

    (tmp_path / "_C_eager.so").write_bytes(b"of another torch")
    command = build.recording(Base, {"torch": "2.99"})()
    if recorded == "raises":
        with pytest.raises(RuntimeError, match=r"zoo\._C: no such header"):
            command.run()
        return
    command.run()
    assert json.loads((tmp_path / "_build_info.json").read_text()) == {"torch": "2.99", "eager": recorded}
    assert (tmp_path / "_C_eager.so").exists() is bool(recorded)
    said = capsys.readouterr().err
    assert ("without zoo._C_eager, which does not compile with torch 2.99" in said) is (recorded is None)


def test_which_libraries_are_built(build, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ZOO_CUDA", "0")
    monkeypatch.delenv("ZOO_EAGER", raising=False)
    extensions = build.build_options()["ext_modules"]
    assert [(e.name, e.py_limited_api, bool(e.optional)) for e in extensions] == [
        ("zoo._C", True, False),
        ("zoo._C_eager", False, True),  # bound to a torch and a Python; zoo works without it
    ]
    monkeypatch.setenv("ZOO_EAGER", "0")
    assert [e.name for e in build.build_options()["ext_modules"]] == ["zoo._C"]
