"""A model out of Python: its package, and the C++ program that classifies photos with it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import zoo
from zoo.data import photos

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("export_package", EXAMPLES / "export_package.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program, built against the torch that is here."""
    from conftest import absent

    if shutil.which("cmake") is None:
        absent("there is no cmake; python -m pip install cmake")
    build = tmp_path_factory.mktemp("build")
    home = Path(torch.__file__).parent
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    for command in (
        ["cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(build), f"-DTORCH_HOME={home}"],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "classify"


def classify(program: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    bare = {"PATH": "/usr/bin:/bin"}  # whatever tells of a Python is gone
    return subprocess.run(
        [str(program), *map(str, files)], capture_output=True, text=True, check=False, env=bare, timeout=120
    )


def rows(text: str) -> list[tuple[int, float, str]]:
    found = (line.split(maxsplit=2) for line in text.splitlines())
    return [(int(index), float(logit), label) for index, logit, label in found]


def expected(folder: Path) -> list[tuple[int, float, str]]:
    told = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return [(row["index"], row["logit"], row["label"]) for row in told["top5"]]


def agree(got: list[tuple[int, float, str]], wanted: list[tuple[int, float, str]]) -> bool:
    same = [(index, label) for index, _, label in got] == [(index, label) for index, _, label in wanted]
    return same and all(abs(g[1] - w[1]) <= 2e-3 for g, w in zip(got, wanted, strict=True))


@pytest.mark.slow
def test_a_transformer_with_both_operators(tmp_path: Path, program: Path) -> None:
    out = run("export_package.py", str(tmp_path), "--model", "timm/vit_tiny_patch16_224", "-o", "depth=1")
    assert out.startswith("operators in the package: zoo::linear, zoo::mlp\n")
    assert out.count(": right\n") == 2
    files = [tmp_path / name for name in ("model.pt2", "photo.ppm", "labels.txt")]
    done = classify(program, *files)
    assert done.returncode == 0, done.stderr
    assert len(rows(done.stdout)) == 5 and agree(rows(done.stdout), expected(tmp_path))

    loaded = subprocess.run(
        [str(program), *map(str, files)], capture_output=True, text=True, check=True, env={"LD_DEBUG": "files"}
    ).stderr
    assert "libzoo_ops" in loaded and "libpython" not in loaded

    for arguments, code, message in (
        ([], 2, "usage: "),
        ([tmp_path / "none.pt2", files[1]], 1, "none.pt2: cannot be opened"),
        ([files[0], tmp_path / "none.ppm"], 1, "none.ppm: cannot be opened"),
        ([files[0], files[2]], 1, "expected a binary PPM"),
        ([files[2], files[1]], 1, "classify: "),
    ):
        failed = classify(program, *arguments)
        assert failed.returncode == code and message in failed.stderr
    cut = tmp_path / "cut.ppm"
    cut.write_bytes(files[1].read_bytes()[:-1])
    assert "ends before its last pixel" in classify(program, files[0], cut).stderr


@pytest.mark.slow
def test_real_weights_name_real_photos(tmp_path: Path, program: Path, lite0_weights: Path, photo_folder: Path) -> None:
    name = "timm/tf_efficientnet_lite0"
    theirs = torch.load(lite0_weights, weights_only=True)
    names = zoo.create(name, device="meta").state_dict()
    torch.save(dict(zip(names, theirs.values(), strict=True)), tmp_path / "lite0.pth")
    run("export_package.py", str(tmp_path), "--model", name, "--weights", str(tmp_path / "lite0.pth"))
    model, labels = tmp_path / "model.pt2", tmp_path / "labels.txt"

    def named(photo: Image.Image) -> tuple[int, str]:
        photo.save(tmp_path / "other.ppm")
        done = classify(program, model, tmp_path / "other.ppm", labels)
        assert done.returncode == 0, done.stderr
        index, _, label = rows(done.stdout)[0]
        return index, label

    done = classify(program, model, tmp_path / "photo.ppm", labels)
    assert agree(rows(done.stdout), expected(tmp_path))
    assert {key: named(photo)[1] for key, photo in photos().items()} == {"china": "palace", "flower": "daisy"}
    files = sorted(photo_folder.iterdir())[::4]
    right = sum(named(Image.open(file).convert("RGB"))[0] == int(file.stem.rpartition("_")[2]) for file in files)
    assert len(files) == 5 and right >= 4, f"{right} of {len(files)}"


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake; python -m pip install cmake")
def test_a_build_without_torch_says_how_to_name_it(tmp_path: Path) -> None:
    command = ["cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(tmp_path), f"-DTORCH_HOME={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "is not the folder of a torch >= 2.10" in " ".join(done.stderr.split())


def test_a_model_without_zoos_layers_is_refused(tmp_path: Path, example: ModuleType) -> None:
    photo = example.photo_model("mlp", zoo.create("mlp").eval(), None).eval()
    pixels = torch.zeros(40, 50, 3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="the exported program holds none of zoo's operators; patch the model first"):
        example.package(photo, pixels, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_wrong_is_found(example: ModuleType) -> None:
    photo = example.photo_model("mlp", zoo.create("mlp", weights="mlp.fashion_mnist", custom_linear=True).eval(), None)
    pixels = torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    right = example.check({"same": photo.eval()}, photo, pixels)
    assert torch.equal(right, photo(pixels))
    with pytest.raises(RuntimeError, match="wrong: the photo upright: error"):
        example.check({"wrong": lambda image: photo(image) * 1.001}, photo, pixels)
    with pytest.raises(RuntimeError, match="nan: the photo upright: 10 of 10 values are not finite"):
        example.check({"nan": lambda image: photo(image) * float("nan")}, photo, pixels)


def test_a_photo_is_prepared_as_the_model_was_trained(example: ModuleType) -> None:
    models = {
        "mlp": ((28, 1), [0.0], [1.0]),
        "resnet18": ((224, 3), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        "timm/vit_tiny_patch16_224": ((224, 3), [0.5] * 3, [0.5] * 3),
    }
    for name, (size, mean, std) in models.items():
        options = {"depth": 1} if name.startswith("timm") else {}
        photo = example.photo_model(name, zoo.create(name, **options), None)
        assert (photo.side, photo.channels) == size
        assert photo.mean.flatten().tolist() == pytest.approx(mean)
        assert photo.std.flatten().tolist() == pytest.approx(std)
