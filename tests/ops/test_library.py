"""Loading the libraries: what is said when one is missing, or there twice."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import zoo
from zoo.ops import _library


@pytest.fixture
def copy(tmp_path):
    """The installed package as a folder of links, from which a test may take something away."""
    package = tmp_path / "zoo"
    package.mkdir()
    for item in Path(zoo.__file__).parent.iterdir():
        (package / item.name).symlink_to(item)
    # modules find the package by their own place: the folder that does so must not be a link
    (package / "ops").unlink()
    (package / "ops").mkdir()
    for item in (Path(zoo.__file__).parent / "ops").iterdir():
        (package / "ops" / item.name).symlink_to(item)
    return package


def run(folder, code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


CALL_CUDA_KERNEL = """
    import torch
    from zoo.ops import _library
    assert not _library.CUDA_LOADED
    x = torch.ones(2, 2)
    for name, args in (("linear", (x, x, None)), ("matmul", (x, x)), ("linear_bias_grad", (x,))):
        try:
            getattr(torch.ops.zoo, name).default._op_dk(torch._C.DispatchKey.CUDA, *args)
        except RuntimeError as error:
            print(error)
    assert torch.ops.zoo.linear(x, x, None).sum() == 8
"""


def test_without_the_cuda_library_cuda_tensors_are_refused_in_plain_words(copy):
    for path in copy.glob("_C_cuda*"):
        path.unlink()
    done = run(copy.parent, CALL_CUDA_KERNEL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("was given CUDA tensors, but zoo was built without CUDA. Rebuild" in line for line in lines)


def test_a_cuda_library_that_does_not_load_is_no_crash(copy):
    for path in copy.glob("_C_cuda*"):
        path.unlink()
    (copy / "_C_cuda.abi3.so").write_bytes(b"no library")
    done = run(copy.parent, CALL_CUDA_KERNEL)
    assert done.returncode == 0, done.stderr
    assert "zoo's CUDA library does not load with this torch" in done.stdout


def test_sources_without_a_library_say_how_to_build(copy):
    for path in copy.glob("_C*"):
        path.unlink()
    done = run(copy.parent, "import zoo.ops")
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "pip install -e ." in done.stderr


def test_a_second_copy_is_refused_and_not_a_crash(copy):
    done = run(
        copy.parent,
        f"""
        import torch
        torch.ops.load_library({str(_library.library_path("_C"))!r})
        import zoo.ops
        """,
    )
    assert done.returncode == 1
    assert "another copy of zoo's library is already loaded" in done.stderr


def test_both_libraries_use_the_limited_api():
    assert _library.library_path("_C").name == "_C.abi3.so"
    assert _library.library_path("none") is None
