"""zoo's own checkpoints: the files are those of the index, and reach what it states."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.util
import os
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor
from typer.testing import CliRunner

from zoo import weights_index
from zoo.checkpoint import load, load_checkpoint, read_metadata
from zoo.cli import app
from zoo.data import accuracy, fashion_mnist
from zoo.factory import create
from zoo.registry import list_models, spec_of
from zoo.train import TrainConfig
from zoo.weights_index import WeightEntry, find, folder, names

DIGITS = find("mlp.digits").path
ENTRY = """
["mlp.{name}"]
model = "{model}"
options = {{}}
file = "{name}.safetensors"
sha256 = "{sha256}"
dataset = "digits"
split = "none"
recipe = {{ command = "make it" }}
metrics = {{ accuracy = 0.5 }}
license = "MIT"
"""


def _entry(name: str = "x", model: str = "mlp", content: bytes = b"weights") -> str:
    return ENTRY.format(name=name, model=model, sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of this test alone, in the place that an installed package has it."""
    (tmp_path / "_weights").mkdir()
    monkeypatch.setattr(weights_index, "__file__", str(tmp_path / "weights_index.py"))
    path = tmp_path / "_weights" / "index.toml"
    path.write_text(_entry("x10") + _entry("x9") + _entry("y", model="resnet18"))
    (path.parent / "x9.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits", folder() / "train_digits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What the project ships


def test_every_entry_has_its_file_and_every_file_its_entry() -> None:
    files = {find(name).verified_path() for name in names()}
    assert files == set(folder().glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) < 15 << 20
    for name in names():
        entry = find(name)
        assert entry.name == name and name.startswith(f"{entry.model}.")
        assert entry.model in list_models()
        assert 0 < entry.metrics["accuracy"] <= 1


@pytest.mark.parametrize("name", names())
def test_a_checkpoint_is_its_model(name: str) -> None:
    entry = find(name)
    model = create(entry.model, weights=name)
    again = load(entry.path)
    spec = spec_of(again)
    assert spec is not None and (spec.name, spec.options) == (entry.model, entry.options)
    assert str(model) == str(again)
    for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_digits_reach_the_stated_accuracy(recipe: ModuleType) -> None:
    model = create("mlp", weights="mlp.digits").eval()
    assert round(recipe.accuracy(model), 4) == find("mlp.digits").metrics["accuracy"] > 0.96
    assert round(float(read_metadata(find("mlp.digits").path)["accuracy"]), 4) == find("mlp.digits").metrics["accuracy"]
    _, images, _, labels = recipe.digits()
    swapped = create("mlp", weights="mlp.digits", custom_linear=True).eval()
    with torch.no_grad():
        assert (swapped(images).argmax(1) == labels).double().mean() == pytest.approx(
            recipe.accuracy(model), abs=1 / 360
        )


def test_digits_load_into_torchvisions_mlp(recipe: ModuleType) -> None:
    entry = find("mlp.digits")
    model = torchvision.ops.MLP(entry.options["in_features"], [*entry.options["hidden"], entry.options["num_classes"]])
    load_checkpoint(model, entry.path)
    _, images, _, _ = recipe.digits()
    with torch.no_grad():
        assert torch.equal(model.eval()(images), create("mlp", weights="mlp.digits").eval()(images))


def test_the_split_keeps_test_images_out_of_training(recipe: ModuleType) -> None:
    train, test, train_labels, test_labels = recipe.digits()
    assert train.shape == (1437, 64) and test.shape == (360, 64)
    assert train.min() >= 0 and train.max() == 1
    assert len(train_labels) == 1437 and torch.bincount(test_labels, minlength=10).min() >= 34
    assert not {tuple(image.tolist()) for image in train} & {tuple(image.tolist()) for image in test}


def test_the_recipe_makes_the_checkpoint(recipe: ModuleType) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = recipe.train()
    finally:
        torch.set_num_threads(threads)
    entry = find("mlp.digits")
    assert recipe.accuracy(model) == pytest.approx(entry.metrics["accuracy"], abs=0.01)
    assert (entry.name, entry.options) == (recipe.NAME, recipe.OPTIONS)
    assert tuple(entry.recipe[key] for key in ("seed", "epochs", "batch")) == (recipe.SEED, recipe.EPOCHS, recipe.BATCH)
    assert entry.recipe["command"] == "python weights/train_digits.py"
    shipped = create("mlp", weights=entry.name)  # bit-equal on one machine; elsewhere sums may round otherwise
    for one, other in zip(model.parameters(), shipped.parameters(), strict=True):
        assert (one - other).norm() < 0.1 * other.norm()  # of another seed it is over 1


@pytest.fixture(scope="module")
def fashion(fashion_mnist_root: Path) -> tuple[Tensor, Tensor]:
    """The 10,000 test images (10000, 1, 28, 28) in [0, 1], and their labels."""
    found = fashion_mnist(fashion_mnist_root, train=False)
    return found.data.unsqueeze(1).float() / 255, found.targets


def test_fashion_mnist_reaches_the_stated_accuracy(fashion: tuple[Tensor, Tensor]) -> None:
    entry = find("mlp.fashion_mnist")
    images, labels = fashion
    for custom in (False, True):
        model = create("mlp", weights="mlp.fashion_mnist", custom_linear=custom)
        found = accuracy(model, zip(images.split(1000), labels.split(1000), strict=True))
        # another machine's sums may put an image that lies between two classes into the other one
        assert found == pytest.approx(entry.metrics["accuracy"], abs=2e-4)


def test_fashion_mnist_is_the_data_of_the_index(fashion_mnist_root: Path) -> None:
    hashes = find("mlp.fashion_mnist").recipe["data_sha256"]
    assert len(hashes) == 4
    for name, expected in hashes.items():
        packed = fashion_mnist_root / f"{name}.gz"
        content = gzip.decompress(packed.read_bytes()) if packed.is_file() else (fashion_mnist_root / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected, name


def test_fashion_mnists_header_agrees_with_the_index() -> None:
    entry = find("mlp.fashion_mnist")
    header = read_metadata(entry.path)
    assert float(header["accuracy"]) == entry.metrics["accuracy"] >= 0.9
    assert (header["data"], int(header["step"])) == ("fashion_mnist", 60_000 // entry.recipe["batch"] * 60)


def test_fashion_mnists_recipe_is_a_command_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = find("mlp.fashion_mnist")
    asked: list[Any] = []

    def stop(config: TrainConfig, folder: Path, **others: Any) -> Any:
        asked.extend((config, folder))
        raise ValueError("as told")

    monkeypatch.setattr("zoo.commands.train.train", stop)
    words = shlex.split(entry.recipe["command"])
    assert words[0] == "zoo"
    assert "as told" in CliRunner().invoke(app, words[1:]).stderr
    config, folder = asked
    told = {key: entry.recipe[key] for key in ("seed", "epochs")}
    assert {"seed": config.seed, "epochs": config.epochs} == told and config.batch_size == entry.recipe["batch"]
    assert (config.model, config.data, config.autocast) == (entry.model, "fashion_mnist", "none")
    assert entry.recipe["result"].startswith(f"{folder}/final.safetensors")


# The index itself


def test_the_package_comes_before_the_project(index: Path) -> None:
    assert folder() == index.parent
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"no index of weights: neither .*_weights nor .*; reinstall zoo"):
        folder()


def test_the_project_is_found_where_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_index, "__file__", str(tmp_path / "zoo" / "weights_index.py"))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "index.toml").write_text(_entry())
    assert folder() == tmp_path / "weights" and names() == ["mlp.x"]


def test_names_are_in_natural_order_and_by_model(index: Path) -> None:
    assert names() == ["mlp.x9", "mlp.x10", "mlp.y"]
    assert names("mlp") == ["mlp.x9", "mlp.x10"] and names("resnet18") == ["mlp.y"] and names("resnet50") == []


def test_an_unknown_name_lists_the_known(index: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown weights 'mlp\.x8'; known: mlp\.x9, mlp\.x10, mlp\.y"):
        find("mlp.x8")


def test_the_file_is_verified(index: Path) -> None:
    entry = find("mlp.x9")
    assert entry.path == entry.verified_path() == index.with_name("x9.safetensors")
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.sha256 = ""  # type: ignore[misc]
    entry.path.write_bytes(b"weightz")
    got, expected = (hashlib.sha256(content).hexdigest() for content in (b"weightz", b"weights"))
    with pytest.raises(ValueError, match=rf"x9\.safetensors: .*'mlp\.x9'.* got sha256 {got}, expected {expected}"):
        entry.verified_path()
    with pytest.raises(
        FileNotFoundError, match=r"x10\.safetensors: the file of weights 'mlp\.x10' is not there; .*make it"
    ):
        find("mlp.x10").verified_path()


def test_create_verifies_what_it_loads(index: Path) -> None:
    content = bytearray(DIGITS.read_bytes())
    digest = hashlib.sha256(content).hexdigest()
    entry = ENTRY.format(name="digits", model="mlp", sha256=digest).replace("{}", "{ in_features = 64 }")
    target = index.with_name("digits.safetensors")
    index.write_text(entry)
    weights_index._read.cache_clear()
    target.write_bytes(content)
    create("mlp", weights="mlp.digits")
    content[-1] ^= 1
    target.write_bytes(content)
    with pytest.raises(ValueError, match=r"digits\.safetensors: .* is not the one that the index names"):
        create("mlp", weights="mlp.digits")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "not a TOML file"),
        ("x = 3", r"\['x'\] is int, expected a table"),
        ("[mlp.x]\n", r"\['mlp'\] lacks model, .* has x, which no entry has"),
        (_entry().replace('license = "MIT"', ""), r"\['mlp\.x'\] lacks license; expected exactly model,"),
        (_entry().replace("license", "licence"), "lacks license, has licence, which no entry has"),
        (_entry().replace("options = {}", 'options = "no"'), "options is str, expected dict"),
        (_entry().replace('sha256 = "', 'sha256 = "0'), "expected 64 hexadecimal digits"),
        (_entry().replace('file = "', 'file = "../'), r"file is '\.\./x\.safetensors', expected the name of a file"),
    ],
)
def test_a_broken_index_says_where(index: Path, text: str, reason: str) -> None:
    index.write_text(text)
    weights_index._read.cache_clear()
    with pytest.raises(ValueError, match=rf"index\.toml: .*{reason}"):
        names()


def test_the_index_is_read_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = names()
    monkeypatch.chdir(tmp_path)
    weights_index._read.cache_clear()
    assert names() == expected and os.path.isabs(folder()) and isinstance(find(expected[0]), WeightEntry)
