"""Packages on a GPU, and accuracy parity in small: what examples/ do there."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
LONG = 540


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_package_runs_zoos_operators(tmp_path):
    spec = importlib.util.spec_from_file_location("export_package", EXAMPLES / "export_package.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = zoo.create("timm/vit_tiny_patch16_224", depth=1, custom_linear=True, device="cuda").eval()
    photo = example.photo_model("timm/vit_tiny_patch16_224", model, None).cuda().eval()
    pixels = torch.randint(0, 256, (120, 160, 3), dtype=torch.uint8, device="cuda")
    found = example.package(photo, pixels, tmp_path)
    assert set(found) == {"exported.pt2", "model.pt2"}
    example.check(found, photo, pixels)


@pytest.mark.slow
def test_the_cpp_program_on_a_gpu(tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake; python -m pip install cmake")
    pytest.importorskip("sklearn")  # its photo
    out, build, home = tmp_path / "out", tmp_path / "build", Path(torch.__file__).parent
    run(sys.executable, EXAMPLES / "export_package.py", out, "--model", "mlp", "--weights", "mlp.fashion_mnist",
        "--device", "cuda")  # fmt: skip
    run("cmake", "-S", EXAMPLES / "cpp", "-B", build, f"-DTORCH_HOME={home}", "-DZOO_CUDA=ON")
    run("cmake", "--build", build, "-j", "16")
    told = json.loads((out / "expected.json").read_text())["top5"]
    rows = run(build / "classify", out / "model.pt2", out / "photo.ppm", out / "labels.txt").splitlines()
    assert [row.split(maxsplit=2)[2] for row in rows] == [row["label"] for row in told]


def test_accuracy_parity_in_small(tmp_path):
    pytest.importorskip("sklearn")
    file = tmp_path / "parity.json"
    words = ("--data", "digits", "--model", "mlp", "--seeds", "2", "--epochs", "2", "--device", "cuda")
    command = [sys.executable, str(EXAMPLES / "accuracy_parity.py"), str(file), *words, "--processes", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode in (0, 1), done.stderr  # two seeds may show nothing
    document = json.loads(file.read_text())
    assert len(document["runs"]) == 10
    if document["first_steps"]:  # scipy is here
        assert document["first_steps"][0]["ok"], document["first_steps"]
