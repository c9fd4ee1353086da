"""Real images without a network: what installed packages hold, and the folders of torchvision's datasets.

========================= ==============================================================================================
:func:`digits`            1,797 handwritten digits of 8x8 pixels, inside scikit-learn
:func:`photos`            two photographs, inside scikit-learn
:func:`fashion_mnist`     60,000 + 10,000 images of 28x28 pixels in ten classes; where the files are
:func:`mnist`             the handwritten digits of the same form; where the files are
:func:`cifar`             50,000 + 10,000 colour images of 32x32 pixels, in 10 or 100 classes; where the files are
:func:`image_folder`      any folder of photographs, with the preprocessing of a model (:func:`eval_transform`)
========================= ==============================================================================================

The folder of MNIST or Fashion-MNIST is looked for in ``root``, else in ``$ZOO_DATA``, else in ``./data`` and where
Debian's package puts it. It is torchvision's (``FashionMNIST/raw``) or any folder of idx files, gzipped or not.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zoo.naming import unknown_name

if TYPE_CHECKING:
    from PIL.Image import Image
    from torchvision.datasets import CIFAR10, MNIST, FashionMNIST, ImageFolder

__all__ = [
    "accuracy",
    "cifar",
    "count_right",
    "digits",
    "eval_transform",
    "fashion_mnist",
    "image_folder",
    "mnist",
    "photos",
    "top1",
]

Transform = Callable[[Any], Any]
Batches = Iterable[Any]

ROOTS = ("data", "/usr/share/datasets")
_IDX = [f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]


def digits(*, train: bool | None = None) -> TensorDataset:
    """scikit-learn's digits: images (N, 1, 8, 8), float32 in [0, 1], and labels (N,), int64 from 0 to 9.

    ``train=True`` gives 1,437 of them, ``False`` the other 360, always the same, each class in proportion; ``None`` all
    1,797.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16).view(-1, 1, 8, 8)
    labels = torch.from_numpy(classes).long()
    if train is None:
        return TensorDataset(images, labels)
    parts = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=classes)
    chosen = torch.tensor(parts[0 if train else 1])
    return TensorDataset(images[chosen], labels[chosen])


def photos() -> dict[str, Image]:
    """scikit-learn's photographs by name, "china" and "flower": RGB, 640 x 427 pixels."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    return {
        Path(name).stem: Image.fromarray(pixels) for name, pixels in zip(found.filenames, found.images, strict=True)
    }


def fashion_mnist(root: str | Path | None = None, *, train: bool, transform: Transform | None = None) -> FashionMNIST:
    """Fashion-MNIST: 60,000 images to train or 10,000 to test with, as PIL images of 28x28 grey pixels, and labels.

    FileNotFoundError, naming where was looked and how to get it, if there is none.
    """
    from torchvision.datasets import FashionMNIST

    return _mnist_like(FashionMNIST, ("FashionMNIST", "fashion-mnist"), root, train, transform)


def mnist(root: str | Path | None = None, *, train: bool, transform: Transform | None = None) -> MNIST:
    """MNIST, as :func:`fashion_mnist`."""
    from torchvision.datasets import MNIST

    return _mnist_like(MNIST, ("MNIST", "mnist"), root, train, transform)


def cifar(classes: int, root: str | Path | None = None, *, train: bool, transform: Transform | None = None) -> CIFAR10:
    """CIFAR-10 or CIFAR-100: 50,000 images to train or 10,000 to test with, as PIL images of 32x32 pixels, and labels.

    The folder, looked for as MNIST's, is torchvision's: ``cifar-10-batches-py``, or the folder above it. torchvision
    checks the files' sums before it unpickles them.

    Raises:
        FileNotFoundError: there is none, or a file of another sum: where was looked and how to get it.
        ValueError: neither 10 nor 100 classes.
    """
    from torchvision.datasets import CIFAR10, CIFAR100

    kinds = {10: CIFAR10, 100: CIFAR100}
    if classes not in kinds:
        raise ValueError(f"cifar: got {classes} classes, expected 10 or 100")
    kind = kinds[classes]
    given = root or os.environ.get("ZOO_DATA")
    folders = [Path(base) for base in ([given] if given else ROOTS)]
    for folder in folders:
        home = folder.parent if folder.name == kind.base_folder else folder
        if (home / kind.base_folder).is_dir():
            try:
                return kind(str(home), train=train, transform=transform, download=False)
            except RuntimeError:
                raise FileNotFoundError(
                    f"{home / kind.base_folder}: a file of {kind.__name__} is missing or damaged; fetch it again with "
                    f"torchvision.datasets.{kind.__name__}({str(home)!r}, download=True)"
                ) from None
    raise FileNotFoundError(
        f"{kind.__name__}: expected a folder {kind.base_folder} in one of {', '.join(map(str, folders))}; name a "
        "folder that has it (the argument root, or the environment variable ZOO_DATA), or fetch it with "
        f"torchvision.datasets.{kind.__name__}('data', download=True)"
    )


def _mnist_like(
    dataset: type[Any], names: tuple[str, str], root: str | Path | None, train: bool, transform: Transform | None
) -> Any:
    folder, files = _find_idx(names, root)
    # torchvision reads plain idx files of its own layout, at once into memory: it gets one for as long as that takes.
    with tempfile.TemporaryDirectory() as temporary:
        raw = Path(temporary, names[0], "raw")
        raw.mkdir(parents=True)
        for name, file in files.items():
            if file.suffix == ".gz" and name.startswith("train" if train else "t10k"):
                with gzip.open(file) as packed, open(raw / name, "wb") as plain:
                    shutil.copyfileobj(packed, plain)
            else:
                (raw / name).symlink_to(file.resolve())
        found = dataset(temporary, train=train, transform=transform)
    found.root = str(folder)
    return found


def _find_idx(names: tuple[str, str], root: str | Path | None) -> tuple[Path, dict[str, Path]]:
    given = root or os.environ.get("ZOO_DATA")
    folders = [
        folder
        for base in ([given] if given else ROOTS)
        for folder in (Path(base, names[0], "raw"), Path(base, names[1]), *([Path(base)] if given else []))
    ]
    for folder in folders:
        files = {n: f for n in _IDX for f in (folder / n, folder / f"{n}.gz") if f.is_file()}
        if len(files) == len(_IDX):
            return folder, files
    raise FileNotFoundError(
        f"{names[0]}: expected {_IDX[0]} and its like, plain or .gz, in one of {', '.join(map(str, folders))}; "
        "name a folder that has it (the argument root, or the environment variable ZOO_DATA), or fetch it with "
        f"torchvision.datasets.{names[0]}('data', download=True)"
        + (", or as Debian's package dataset-fashion-mnist" if names[0] == "FashionMNIST" else "")
    )


# Photographs


def image_folder(path: str | Path, *, transform: Transform) -> ImageFolder:
    """The photographs of a folder with their classes, as torchvision's ImageFolder.

    With sub-folders, one is a class: of that index if the names are numbers, of ImageNet's index if they are ImageNet's
    ids (n01440764), else in the order of their names. Without, the class is the number that ends each file's name
    (``cat_281.jpg``).

    Args:
        transform: what makes a tensor of a photograph, usually ``eval_transform(model)``.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: a file without sub-folder does not end in a number.
    """
    from torchvision.datasets import ImageFolder

    if not Path(path).is_dir():
        raise FileNotFoundError(
            f"{path}: expected a folder of images, got {'a file' if Path(path).exists() else 'none'}"
        )

    class Folder(ImageFolder):
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            names, indices = super().find_classes(directory)
            return names, _class_indices(names) or indices

    class Flat(ImageFolder):
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            return [], {}

        @staticmethod
        def make_dataset(directory: str | Path, *args: Any, **kwargs: Any) -> list[tuple[str, int]]:
            return [(str(file), _number_in(file)) for file in images]

    if any(entry.is_dir() for entry in Path(path).iterdir()):
        return Folder(path, transform=transform)
    suffixes = _image_suffixes()
    images = sorted(file for file in Path(path).iterdir() if file.suffix.lower() in suffixes)
    if not images:
        raise FileNotFoundError(
            f"{path}: expected images ({' '.join(suffixes)}) or a sub-folder of them for each class"
        )
    return Flat(path, transform=transform)


def _image_suffixes() -> tuple[str, ...]:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return IMG_EXTENSIONS


def _class_indices(names: Iterable[str]) -> dict[str, int] | None:
    from timm.data.imagenet_info import ImageNetInfo

    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in names}
    imagenet = {name: index for index, name in enumerate(ImageNetInfo().label_names())}
    return {name: imagenet[name] for name in names} if all(name in imagenet for name in names) else None


def _number_in(file: Path) -> int:
    number = re.search(r"(\d+)$", file.stem)
    if number is None:
        raise ValueError(
            f"{file}: expected the number of its class at the end of the name, as cat_281.jpg; or make a sub-folder of "
            "each class"
        )
    return int(number[1])


def eval_transform(model: str | nn.Module, *, weights: str | None = None) -> Transform:
    """What makes the input of a model, (3, H, W) float32, from a photograph, as its weights were evaluated with.

    Args:
        model: a name (``resnet50``, ``torchvision/vit_b_16``, ``timm/convnext_tiny``) or a model made by zoo or timm.
        weights: the name of torchvision's weights, or timm's tag. By default their best, or what a model of timm says.

    What neither library knows gets ImageNet's usual: shorter side 256, centre 224 x 224, ImageNet's mean and deviation.

    Raises:
        ValueError: for an unknown name of a model or of its weights.
    """
    from timm.data.config import resolve_data_config
    from timm.data.transforms_factory import create_transform
    from timm.models import get_pretrained_cfg, is_model, list_pretrained
    from torchvision.models import ResNet18_Weights, get_model_weights, list_models

    from zoo.registry import resolve, spec_of

    name = model if isinstance(model, str) else ""
    if isinstance(model, nn.Module):
        if getattr(model, "pretrained_cfg", None):
            return create_transform(**resolve_data_config({}, model=model))
        spec = spec_of(model)
        name = spec.name if spec else ""
    if name:
        resolve(name)
    source, _, name = name.rpartition("/")
    known = get_model_weights(name).__members__ if source != "timm" and name in list_models() else {}
    if known and (weights is None or weights in known):
        return known[weights or "DEFAULT"].transforms()
    if name and source != "torchvision" and is_model(name):
        tags = [tag.partition(".")[2] for tag in list_pretrained(f"{name}.*")]
        if weights is None or weights in tags:
            config = get_pretrained_cfg(f"{name}.{weights}" if weights else name)
            return create_transform(**resolve_data_config(pretrained_cfg=config.to_dict() if config else {}))
        known = {**known, **dict.fromkeys(tags)}
    if weights is not None:
        raise unknown_name(f"weights of {name or 'the model'}", weights, known)
    return ResNet18_Weights.IMAGENET1K_V1.transforms()


# Accuracy


def accuracy(
    model: nn.Module,
    loader: Batches,
    *,
    device: torch.device | str | None = None,
    progress: Callable[[Batches], Batches] | None = None,
) -> float:
    """Top-1 accuracy of ``model``, 0 to 1: as :func:`top1` of one model."""
    return top1({"model": model}, loader, device=device, progress=progress)["model"]


def top1(
    models: Mapping[str, nn.Module],
    loader: Batches,
    *,
    device: torch.device | str | None = None,
    progress: Callable[[Batches], Batches] | None = None,
) -> dict[str, float]:
    """Top-1 accuracies, 0 to 1, of several models over the same batches, which are loaded once.

    Args:
        models: by name; each gives logits (N, classes). They run in eval mode and get their own modes back.
        loader: batches (images, labels), as of a DataLoader.
        device: where batches go; by default where each model is.
        progress: wraps the loader, as ``rich.progress.track`` does.

    Raises:
        ValueError: for no batches, a label that a model has no logit for, or logits of another form.
    """
    right, seen = count_right(models, loader if progress is None else progress(loader), device=device)
    if not seen:
        raise ValueError("loader: got no batches, expected at least one image; see that its dataset is not empty")
    return {name: count / seen for name, count in right.items()}


def count_right(
    models: Mapping[str, nn.Module], loader: Batches, *, device: torch.device | str | None = None
) -> tuple[dict[str, int], int]:
    """How many images each model gets right, and how many there are: as :func:`top1`, which divides them."""
    right: dict[str, Any] = dict.fromkeys(models, 0)
    labelled: dict[str, tuple[int, Tensor]] = {}
    seen = 0
    modes = [(module, module.training) for model in models.values() for module in model.modules()]
    try:
        for model in models.values():
            model.eval()
        with torch.no_grad():
            for images, labels in loader:
                seen += len(labels)
                for name, model in models.items():
                    logits = _logits(name, model, images, labels, device)
                    right[name] += (logits.argmax(1) == labels.to(logits.device)).sum()
                    largest = labels.max()
                    if name in labelled:
                        largest = torch.maximum(labelled[name][1], largest)
                    labelled[name] = logits.shape[1], largest
                    if labels.device.type == "cpu":  # no wait for a GPU; what lies on one is looked at in the end
                        _check_labels(labelled)
        _check_labels(labelled)
    finally:
        for module, mode in modes:
            module.training = mode
    return {name: int(count) for name, count in right.items()}, seen


def _logits(name: str, model: nn.Module, images: Tensor, labels: Tensor, device: torch.device | str | None) -> Tensor:
    home = device if device is not None else next((p.device for p in model.parameters()), images.device)
    logits: Tensor = model(images.to(home))
    if logits.ndim != 2 or len(logits) != len(labels):
        raise ValueError(f"{name}: got logits {tuple(logits.shape)}, expected ({len(labels)}, classes)")
    return logits


def _check_labels(labelled: Mapping[str, tuple[int, Tensor]]) -> None:
    for name, (classes, largest) in labelled.items():
        if int(largest) >= classes:
            raise ValueError(
                f"{name}: got the label {int(largest)} for {classes} logits; expected data of the model's own classes"
            )
