"""Real data, and accuracies that are counted right."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.data import accuracy, digits, eval_transform, fashion_mnist, image_folder, mnist, photos, top1

# Sets


def test_digits() -> None:
    images, labels = digits().tensors
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    assert float(images.min()) == 0 and float(images.max()) == 1
    assert labels.dtype == torch.int64 and labels[:10].tolist() == list(range(10))


def test_the_split_of_digits_is_fixed_and_in_proportion() -> None:
    train, test = digits(train=True), digits(train=False)
    assert len(train) == 1437 and len(test) == 360
    assert torch.bincount(test.tensors[1]).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    assert torch.equal(test.tensors[0], digits(train=False).tensors[0])
    both = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1)
    everything = digits().tensors[0].flatten(1)
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, everything.tolist()))
    centres = [float(test.tensors[0][test.tensors[1] == n].mean(0)[0, 3:5, 3:5].mean()) for n in (0, 1)]
    assert centres[0] < 0.2 and centres[1] > 0.7, "images and labels belong together: a 0 is hollow, a 1 is not"


def test_photos() -> None:
    found = photos()
    assert list(found) == ["china", "flower"]
    assert all(photo.mode == "RGB" and photo.size == (640, 427) for photo in found.values())


IDX = {"train-images-idx3": 3, "train-labels-idx1": 1, "t10k-images-idx3": 3, "t10k-labels-idx1": 1}


def idx_files(folder: Path, *, zipped: bool) -> dict[str, Tensor]:
    """Small idx files with one image a class, written by their definition."""
    folder.mkdir(parents=True)
    contents = {}
    for seed, (name, rank) in enumerate(IDX.items()):
        generator = torch.Generator().manual_seed(seed)
        shape = (10, 28, 28)[:rank]
        values = torch.randint(256 if rank == 3 else 10, shape, generator=generator, dtype=torch.uint8)
        raw = struct.pack(f">HBB{rank}I", 0, 8, rank, *shape) + values.numpy().tobytes()
        if zipped:
            (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / f"{name}-ubyte").write_bytes(raw)
        contents[name] = values
    return contents


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("load", [fashion_mnist, mnist])
@pytest.mark.parametrize("layout", ["torchvision", "debian", "itself"])
def test_idx_folders(tmp_path: Path, load: Any, layout: str, zipped: bool) -> None:
    names = {fashion_mnist: ("FashionMNIST/raw", "fashion-mnist"), mnist: ("MNIST/raw", "mnist")}[load]
    where = {"torchvision": names[0], "debian": names[1], "itself": "."}[layout]
    contents = idx_files(tmp_path / "root" / where, zipped=zipped)
    before = sorted(tmp_path.rglob("*"))
    for train, part in ((True, "train"), (False, "t10k")):
        found = load(tmp_path / "root", train=train, transform=torchvision.transforms.functional.pil_to_tensor)
        assert isinstance(found, getattr(torchvision.datasets, {fashion_mnist: "FashionMNIST", mnist: "MNIST"}[load]))
        assert Path(found.root) == tmp_path / "root" / where
        image, label = found[3]
        assert torch.equal(image[0], contents[f"{part}-images-idx3"][3])
        assert label == contents[f"{part}-labels-idx1"][3]
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written beside the data"


def test_the_folder_can_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idx_files(tmp_path / "fashion-mnist", zipped=True)
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    assert len(fashion_mnist(train=True)) == 10
    monkeypatch.delenv("ZOO_DATA")
    monkeypatch.chdir(tmp_path)
    idx_files(tmp_path / "data" / "MNIST" / "raw", zipped=False)
    assert len(mnist(train=False)) == 10


def test_absent_files_are_told_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"MNIST: expected .* in one of .*; .*ZOO_DATA.*download=True"):
        mnist(tmp_path, train=True)
    idx_files(tmp_path / "FashionMNIST" / "raw", zipped=False)
    (tmp_path / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"FashionMNIST: expected .*Debian"):
        fashion_mnist(tmp_path, train=True)


# Photographs


def coloured(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (40, 30), shade).save(path)


def shades(folder: Any) -> list[tuple[int, int]]:
    return [(int(image[0, 0, 0]), label) for image, label in folder]


RAW = torchvision.transforms.functional.pil_to_tensor


def test_folders_named_by_number_are_those_classes(tmp_path: Path) -> None:
    for name, shade in (("9", 10), ("10", 20), ("2", 30)):
        coloured(tmp_path / name / "a.png", shade)
    found = image_folder(tmp_path, transform=RAW)
    assert sorted(shades(found)) == [(10, 9), (20, 10), (30, 2)]
    assert isinstance(found, torchvision.datasets.ImageFolder) and found[0][0].shape[0] == 3


def test_folders_named_by_imagenet_ids_are_those_classes(tmp_path: Path) -> None:
    for name, shade in (("n15075141", 10), ("n01440764", 20)):
        coloured(tmp_path / name / "a.jpg", shade)
    assert [label for _, label in image_folder(tmp_path, transform=RAW)] == [0, 999]


def test_other_folders_are_classes_in_their_order(tmp_path: Path) -> None:
    for name, shade in (("dog", 10), ("cat", 20), ("n01440764", 30)):
        coloured(tmp_path / name / "deep" / "a.png", shade)
    assert shades(image_folder(tmp_path, transform=RAW)) == [(20, 0), (10, 1), (30, 2)]


def test_files_named_by_their_class(tmp_path: Path) -> None:
    for name, shade in (("b_00_281.png", 10), ("a7.png", 20), ("c_3.JPEG", 30)):
        coloured(tmp_path / name, shade)
    (tmp_path / "notes.txt").write_text("no image")
    found = image_folder(str(tmp_path), transform=RAW)
    assert [label for _, label in found] == [7, 281, 3] and len(found) == 3


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone: expected a folder of images, got none"):
        image_folder(tmp_path / "gone", transform=RAW)
    with pytest.raises(FileNotFoundError, match=r"expected images \(\.jpg .*or a sub-folder"):
        image_folder(tmp_path, transform=RAW)
    coloured(tmp_path / "cat.png", 1)
    with pytest.raises(ValueError, match=r"cat\.png: expected the number of its class"):
        image_folder(tmp_path, transform=RAW)
    with pytest.raises(FileNotFoundError, match="got a file"):
        image_folder(tmp_path / "cat.png", transform=RAW)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError):
        image_folder(tmp_path, transform=RAW)


def prepared(model: str | nn.Module, **options: Any) -> Tensor:
    return eval_transform(model, **options)(photos()["china"])


def test_transforms_of_torchvision() -> None:
    weights = torchvision.models.ResNet50_Weights
    photo = photos()["china"]
    for options, expected in (
        ({}, weights.IMAGENET1K_V2),
        ({"weights": "IMAGENET1K_V1"}, weights.IMAGENET1K_V1),
        ({"weights": "DEFAULT"}, weights.IMAGENET1K_V2),
    ):
        for name in ("resnet50", "torchvision/resnet50"):
            assert torch.equal(prepared(name, **options), expected.transforms()(photo)), (name, options)
    assert prepared("torchvision/inception_v3").shape == (3, 299, 299)


def test_transforms_of_timm() -> None:
    by_name = prepared("timm/tf_efficientnet_lite0")
    assert by_name.shape == (3, 224, 224) and by_name.dtype == torch.float32
    model = timm.create_model("tf_efficientnet_lite0")
    assert torch.equal(by_name, prepared(model))
    assert float(by_name.max()) <= 1.0, "(x - 0.5) / 0.5"
    assert prepared("timm/convnext_tiny").shape == (3, 224, 224)
    assert prepared("timm/convnext_tiny", weights="fb_in22k_ft_in1k_384").shape == (3, 384, 384)
    assert prepared("resnet50", weights="a1_in1k").shape == prepared("timm/resnet50", weights="a1_in1k").shape


def test_the_usual_transform_for_the_rest() -> None:
    usual = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()(photos()["china"])
    for model in ("mlp", nn.Linear(2, 2)):
        assert torch.equal(prepared(model), usual)


def test_transforms_of_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown model 'resnet19'"):
        eval_transform("resnet19")
    with pytest.raises(ValueError, match=r"unknown weights of resnet50 'IMAGENET1K_V3'.*IMAGENET1K_V2"):
        eval_transform("resnet50", weights="IMAGENET1K_V3")
    with pytest.raises(ValueError, match="unknown weights of convnext_tiny 'nonsense'"):
        eval_transform("timm/convnext_tiny", weights="nonsense")


# Accuracy


class Says(nn.Module):
    """Names as the class the number that is the input."""

    def __init__(self, classes: int = 4, offset: int = 0) -> None:
        super().__init__()
        self.classes, self.offset = classes, offset
        self.drop = nn.Dropout()
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training or self.drop.training or torch.is_grad_enabled())
        return nn.functional.one_hot((x[:, 0].long() + self.offset) % self.classes, self.classes).float()


def batches(said: list[int], true: list[int]) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.tensor(said)[:, None].float(), torch.tensor(true)), batch_size=3)


def test_accuracy_counts_images_not_batches() -> None:
    assert accuracy(Says(), batches([0, 1, 2, 3], [0, 1, 2, 0])) == 0.75
    assert accuracy(Says(), batches([0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 2])) == pytest.approx(4 / 7)


def test_models_see_the_same_batches_once() -> None:
    loads = 0

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal loads
        for batch in batches([0, 1, 2, 3], [0, 1, 2, 0]):
            loads += 1
            yield batch

    assert top1({"a": Says(), "b": Says(offset=1)}, loader()) == {"a": 0.75, "b": 0.25}
    assert loads == 2


def test_models_are_evaluated_and_left_as_they_were() -> None:
    model = Says()
    model.train()
    model.drop.eval()
    accuracy(model, batches([0], [0]))
    assert model.modes == [False] and model.training and not model.drop.training
    with pytest.raises(ValueError, match="label"):
        accuracy(model, batches([0], [4]))
    assert model.training and not model.drop.training


def test_progress_sees_the_batches() -> None:
    seen: list[Any] = []

    def progress(loader: Iterable[Any]) -> Iterator[Any]:
        for batch in loader:
            seen.append(batch)
            yield batch

    assert accuracy(Says(), batches([0, 1, 2, 3], [0, 1, 2, 3]), progress=progress) == 1.0
    assert len(seen) == 2


def test_batches_go_where_the_model_is() -> None:
    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"got {x.device}")

    for device, expected in ((None, "meta"), ("cpu", "cpu")):
        with pytest.raises(RuntimeError, match=f"got {expected}"):
            accuracy(Watching(), batches([0], [0]), device=device)


@pytest.mark.parametrize(
    ("said", "true", "model", "reason"),
    [
        ([], [], Says(), "loader: got no batches"),
        ([0], [4], Says(), "model: got the label 4 for 4 logits"),
        ([0], [0], nn.Flatten(0), r"model: got logits \(1,\), expected \(1, classes\)"),
    ],
)
def test_what_cannot_be_counted(said: list[int], true: list[int], model: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        accuracy(model, [] if not said else batches(said, true))
