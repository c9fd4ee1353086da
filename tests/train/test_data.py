"""The order and the content of batches: of the seed and the step, and of nothing else."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from zoo.factory import create
from zoo.train import TrainConfig
from zoo.train.data import Batch, batches_to_test, open_data, training_batches

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of noise, 20 images of 40 x 40 pixels to train and 6 to test with."""
    root, noise = tmp_path_factory.mktemp("images"), numpy.random.default_rng(0)
    for part, count in (("train", 10), ("val", 3)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = noise.integers(0, 256, (40, 40, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{index}.png")
    return root


def config_for(data: str, **fields: Any) -> TrainConfig:
    own = {"model": "mlp"} if data == "digits" else {"model": "resnet18", "size": 32}
    return TrainConfig(**{**own, "data": data, "batch_size": 6, "epochs": 2, **fields})


def batches_of(config: TrainConfig, start: int = 0) -> list[Batch]:
    source = open_data(config.data)
    images = source.train(create(config.model, num_classes=source.classes, device="meta"), config)
    return list(training_batches(images, config, start=start, steps_per_epoch=STEPS))


def assert_same(got: list[Batch], expected: list[Batch]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


def test_begun_anywhere_or_read_by_others_the_batches_are_the_same(folder: Path) -> None:
    whole = batches_of(config_for(str(folder)))
    assert [tuple(batch.images.shape) for batch in whole] == [(6, 3, 32, 32)] * 6
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    for start in (1, 3, 5, 6):
        assert_same(batches_of(config_for(str(folder)), start), whole[start:])
    assert_same(batches_of(config_for(str(folder), workers=2), 1), whole[1:])


def test_every_epoch_has_its_own_order_and_its_own_augmentation(folder: Path) -> None:
    config = config_for(str(folder))
    source = open_data(config.data)
    images = source.train(create("resnet18", num_classes=2, device="meta"), config)
    first, again, second = (images.__getitems__(numpy.array([(epoch, 4)])).images for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    digits = batches_of(config_for("digits", batch_size=64))
    assert not torch.equal(digits[0].labels, digits[STEPS].labels)
    assert not torch.equal(batches_of(config_for("digits", batch_size=64, seed=1))[0].labels, digits[0].labels)


def test_an_epoch_has_no_image_twice() -> None:
    batches = batches_of(config_for("digits", batch_size=64))[:STEPS]
    rows = torch.cat([batch.images.flatten(1) for batch in batches])
    assert len(rows.unique(dim=0)) == 3 * 64


def test_the_runs_random_numbers_are_not_touched(folder: Path) -> None:
    config = config_for(str(folder))
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = (random.random(), numpy.random.rand(), torch.rand(1))
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    batches_of(config)
    assert (random.random(), numpy.random.rand(), torch.rand(1)) == expected


def test_grey_images_have_the_form_that_the_model_takes() -> None:
    whole = batches_of(config_for("digits", batch_size=64))[0]
    assert whole.images.shape == (64, 1, 28, 28)
    coloured = batches_of(config_for("digits", batch_size=64, model="resnet18"))[0]
    assert coloured.images.shape == (64, 3, 8, 8)
    assert torch.equal(coloured.labels, whole.labels)
    # resized a batch at a time where that is much: the same but for the order of its sums
    large = batches_of(config_for("digits", batch_size=64, size=64))[0].images
    assert large.shape == (64, 1, 64, 64)


@pytest.mark.parametrize("name", ["fashion_mnist", "mnist"])
def test_idx_files(name: str, tmp_path: Path) -> None:
    for part, count in (("train", 12), ("t10k", 3)):
        pixels = bytes(index % 256 for index in range(count * 28 * 28))
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, count, 28, 28) + pixels)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + bytes(range(count)))
    config = config_for(f"{name}:{tmp_path}", model="mlp", size=None)
    source, model = open_data(config.data), create("mlp", device="meta")
    assert [len(part) for part in (source.train(model, config), source.test(model, config))] == [12, 3]
    ((images, labels),) = batches_to_test(source.test(model, config), config)
    assert (images.shape, labels.tolist()) == ((3, 1, 28, 28), [0, 1, 2])
    assert images[0, 0, 0, 17] == 17 / 255


def test_uint8_images_are_divided() -> None:
    from zoo.train.data import GreyImages

    images = torch.arange(0, 256, dtype=torch.uint8).view(1, 1, 16, 16)
    batch = GreyImages(images, torch.tensor([3]), side=None, channels=3).__getitems__(numpy.array([(0, 0)]))
    assert torch.equal(batch.images[0, 1], torch.arange(0.0, 256.0).view(16, 16) / 255)


def test_test_images_come_once_in_order_with_the_models_normalisation(folder: Path) -> None:
    config = config_for(str(folder), batch_size=4)
    tests = open_data(config.data).test(create("resnet18", num_classes=2, device="meta"), config)
    found = list(batches_to_test(tests, config))
    assert [len(labels) for _, labels in found] == [4, 2]
    assert torch.cat([labels for _, labels in found]).tolist() == [0, 0, 0, 1, 1, 1]
    assert found[0][0].min() < -1  # ImageNet's mean taken off


def test_a_damaged_image_is_replaced_by_the_next_and_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damaged = copy / "train" / "cat" / "9.png"
    damaged.write_bytes(damaged.read_bytes()[:200])
    config = config_for(str(copy))
    images = open_data(str(copy)).train(create("resnet18", num_classes=2, device="meta"), config)
    batch = images.__getitems__(numpy.array([(0, 9)]))
    assert batch.labels.tolist() == [1]  # a dog's, as the next image is the first dog
    assert batch.corrupt[0].startswith(f"{damaged}: this image cannot be read (")
    for path in copy.rglob("train/*/*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match="none of its 20 images can be read"):
        images.__getitems__(numpy.array([(0, 0)]))
    tested = copy / "val" / "dog" / "1.png"
    tested.write_bytes(b"no image")
    tests = open_data(str(copy)).test(create("resnet18", num_classes=2, device="meta"), config)
    with pytest.raises(ValueError, match=r"dog/1.png: this image cannot be read .*never replaced"):
        list(batches_to_test(tests, config))


def test_test_images_of_other_classes_are_refused(folder: Path, tmp_path: Path) -> None:
    """Without cats to test with, a dog would be of class 0 there."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "val" / "cat")
    with pytest.raises(ValueError, match="the classes of val are not those of train, first 'dog'"):
        open_data(str(copy))


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data 'nowhere': there is no such folder; expected .* fashion_mnist\[:DIR\]"):
        open_data("nowhere")
    with pytest.raises(FileNotFoundError, match="expected train and val"):
        open_data(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="FashionMNIST: expected"):
        open_data(f"fashion_mnist:{tmp_path}")


@pytest.fixture(scope="module")
def cifar_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchvision's two folders, of few images each; its sums of the real files do not hold for them."""
    import pickle

    root, noise = tmp_path_factory.mktemp("cifar"), numpy.random.default_rng(0)

    def write(file: Path, count: int, **entries: Any) -> None:
        file.parent.mkdir(exist_ok=True)
        pixels = noise.integers(0, 256, (count, 3072), dtype=numpy.uint8)
        file.write_bytes(pickle.dumps({"data": pixels, **entries}))

    for index in range(1, 6):
        write(root / "cifar-10-batches-py" / f"data_batch_{index}", 4, labels=[0, 1, 2, 9])
    write(root / "cifar-10-batches-py" / "test_batch", 3, labels=[7, 8, 9])
    (root / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps({"label_names": list("0123456789")}))
    write(root / "cifar-100-python" / "train", 8, fine_labels=[0, 1, 2, 3, 4, 5, 6, 99])
    write(root / "cifar-100-python" / "test", 2, fine_labels=[7, 99])
    names = {"fine_label_names": [str(number) for number in range(100)]}
    (root / "cifar-100-python" / "meta").write_bytes(pickle.dumps(names))
    return root


@pytest.mark.parametrize(("name", "counts"), [("cifar10", (20, 3)), ("cifar100", (8, 2))])
def test_cifar(name: str, counts: tuple[int, int], cifar_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    source = open_data(f"{name}:{cifar_root}")
    assert source.classes == int(name.removeprefix("cifar"))
    for model, options, shape in (
        ("resnet18", {}, (3, 32, 32)),
        ("mlp", {"in_features": 3072}, (3, 32, 32)),
        ("mlp", {}, (1, 28, 28)),
        ("timm/test_vit", {}, (3, 160, 160)),
    ):
        config = config_for(f"{name}:{cifar_root}", model=model, size=None, options=options)
        built = create(model, num_classes=source.classes, device="meta", **options)
        images, tests = source.train(built, config), source.test(built, config)
        assert (len(images), len(tests)) == counts
        first, again, second = (images.__getitems__(numpy.array([(epoch, 1)])) for epoch in (0, 0, 1))
        assert first.images.shape == (1, *shape)
        assert torch.equal(first.images, again.images) and not torch.equal(first.images, second.images)
        assert torch.equal(
            tests.__getitems__(numpy.array([(0, 0)])).images, tests.__getitems__(numpy.array([(1, 0)])).images
        )
        assert tests.__getitems__(numpy.array([(0, 0)])).labels.tolist() == [7]
    assert open_data(f"{name}:{cifar_root / ('cifar-10-batches-py' if name == 'cifar10' else 'cifar-100-python')}")


def test_cifar_that_is_not_there(cifar_root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"CIFAR10: expected a folder cifar-10-batches-py in one of .*download"):
        open_data(f"cifar10:{tmp_path}")
    with pytest.raises(FileNotFoundError, match=r"cifar-100-python: a file of CIFAR100 is missing or damaged; fetch"):
        open_data(f"cifar100:{cifar_root}")  # noise, and not the files that torchvision knows
