"""The images of a run, in batches whose order and content follow from the seed and the step alone.

An image is asked for by a key (epoch, index). What is random about it is seeded by (seed, epoch, index), so neither the
number of workers nor a resume in the middle of an epoch changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from zoo import data as sets
from zoo.preparing import channels_of, input_side, resized, transform_for
from zoo.train.config import TrainConfig
from zoo.train.randomness import seeded

__all__ = ["Batch", "Images", "Part", "Source", "batches_to_test", "open_data", "share", "training_batches"]

Keys = numpy.ndarray[Any, Any]
"""Of a batch: a row (epoch, index) for each image."""


class Batch(NamedTuple):
    """Images (N, C, H, W), their classes (N,), and what is wrong with the files that could not be read."""

    images: Tensor
    labels: Tensor
    corrupt: list[str]


class Images(Dataset[Any]):
    """Images by key (epoch, index), a batch at once."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, keys: Keys) -> Batch:
        raise NotImplementedError


class Source:
    """A data set: how many classes it has, and its two parts in the form that a model takes."""

    classes: int

    def train(self, model: nn.Module, config: TrainConfig) -> Images:
        """What to learn from, augmented where the data set is photographs."""
        raise NotImplementedError

    def test(self, model: nn.Module, config: TrainConfig) -> Images:
        """What accuracy is measured on."""
        raise NotImplementedError


def open_data(data: str) -> Source:
    """The data set of that name (see TrainConfig.data). ValueError or FileNotFoundError where there is none."""
    name, _, root = data.partition(":")
    if name == "digits" and not root:
        return _Grey(*(sets.digits(train=train).tensors for train in (True, False)))
    if name in ("fashion_mnist", "mnist"):
        load: Callable[..., Any] = getattr(sets, name)
        parts = [load(root or None, train=train) for train in (True, False)]
        return _Grey(*((part.data.unsqueeze(1), part.targets) for part in parts))
    if name in ("cifar10", "cifar100"):
        return _Cifar(int(name.removeprefix("cifar")), root)
    if not Path(data).is_dir():
        raise ValueError(
            f"data {data!r}: there is no such folder; expected a folder of images, digits, fashion_mnist[:DIR], "
            "mnist[:DIR], cifar10[:DIR] or cifar100[:DIR]"
        )
    return _Folder(Path(data))


Part = tuple[int, int]
"""(0, 2) is the first of two parts."""


def training_batches(
    images: Images, config: TrainConfig, *, start: int, steps_per_epoch: int, part: Part = (0, 1)
) -> Iterable[Batch]:
    """The batches from step ``start`` (of ``accumulate`` batches each) to the last one of the last epoch; of each batch
    a part."""
    return _loader(images, _Order(images, config, start, steps_per_epoch, part), config)


def batches_to_test(images: Images, config: TrainConfig, part: Part = (0, 1)) -> Iterable[tuple[Tensor, Tensor]]:
    """All images once, in their order. ValueError, naming the file, for one that cannot be read.

    Of several parts, each has as many batches as the others. Where it takes one more for that, it is one of another
    part with the class -1 for every image: of no model's.
    """
    index, parts = part
    batches = _batches(_keys(0, torch.arange(len(images))), max(config.batch_size // parts, 1))
    mine = range(index, _to_multiple(len(batches), parts), parts)
    order = [batches[at if at < len(batches) else 0] for at in mine]
    for batch, at in zip(_loader(images, order, config), mine, strict=True):
        if batch.corrupt:
            raise ValueError(f"{batch.corrupt[0]}; an image to test with is never replaced: mend it or remove it")
        yield batch.images, batch.labels if at < len(batches) else torch.full_like(batch.labels, -1)


def _to_multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _keys(epoch: int, order: Tensor) -> Keys:
    return torch.stack([torch.full_like(order, epoch), order]).t().numpy()  # a column lies in one piece


def _batches(keys: Keys, size: int) -> list[Keys]:
    """All keys, the last batch perhaps a smaller one."""
    return [keys[begin : begin + size] for begin in range(0, len(keys), size)]


def share(batch: Keys, part: Part) -> Keys:
    """One of equal parts of a batch. Where a part can be halved, it is from both ends: then each image and the one that
    mixup mixes with it, the first with the last and so on, are in the same part."""
    index, parts = part
    size, odd = divmod(len(batch), 2 * parts)
    if parts == 1:
        return batch
    if odd:
        return batch[index * len(batch) // parts : (index + 1) * len(batch) // parts]
    begin, end = index * size, len(batch) - index * size
    return numpy.concatenate([batch[begin : begin + size], batch[end - size : end]])


class _Order:
    """The keys of each batch, or of a part of each."""

    def __init__(self, images: Images, config: TrainConfig, start: int, steps_per_epoch: int, part: Part) -> None:
        self.count, self.config, self.start, self.steps, self.part = len(images), config, start, steps_per_epoch, part

    def __iter__(self) -> Iterator[Keys]:
        first, done = divmod(self.start, self.steps)
        passes = self.config.accumulate
        for epoch in range(first, self.config.epochs):
            # as torch's DistributedSampler orders an epoch
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.config.seed + epoch))
            batches = _batches(_keys(epoch, order), self.config.batch_size)
            skipped = done * passes if epoch == first else 0
            for batch in batches[skipped : self.steps * passes]:
                yield share(batch, self.part)


def _loader(images: Images, order: Iterable[Any], config: TrainConfig) -> Iterable[Batch]:
    if not config.workers:
        return map(images.__getitems__, order)
    # Its own generator: an iteration that begins would else take a number of the run's.
    own = torch.Generator().manual_seed(config.seed)
    return DataLoader(
        images,
        batch_sampler=order,
        num_workers=config.workers,
        collate_fn=_as_it_is,
        generator=own,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


# Small grey images, all in memory


class _Grey(Source):
    classes = 10

    def __init__(self, train: Sequence[Tensor], test: Sequence[Tensor]) -> None:
        self.parts = (train, test)

    def train(self, model: nn.Module, config: TrainConfig) -> Images:
        return self._part(self.parts[0], model, config)

    def test(self, model: nn.Module, config: TrainConfig) -> Images:
        return self._part(self.parts[1], model, config)

    def _part(self, part: Sequence[Tensor], model: nn.Module, config: TrainConfig) -> Images:
        side = config.size or input_side(model, transform_for(config.model, model, config.weights))
        channels = channels_of(model)
        images, labels = part
        whole = _brought(images, side, 1)
        if whole.numel() <= _READY * images.numel():
            images = whole
        device = next((parameter.device for parameter in model.parameters()), images.device)
        if device.type == "cuda" and not config.workers:  # all of them there: no batch has to be brought
            images, labels = images.to(device), labels.to(device)
        return GreyImages(images, labels, side=side, channels=channels)


_READY = 16
"""Images that grow by more than this are resized a batch at a time: 60,000 of 224 x 224 pixels would take 12 GB."""


class GreyImages(Images):
    """Images (N, 1, H, W), in [0, 1] or uint8, as a model takes them: in torch's default dtype, resized, the channels
    equal. Batches are where the images are."""

    def __init__(self, images: Tensor, labels: Tensor, *, side: int | None, channels: int) -> None:
        self.images, self.labels, self.side, self.channels = images, labels, side, channels
        # a batch of them needs nothing more: even a call that does nothing takes its time once a step
        self.ready = images.dtype == torch.get_default_dtype() and channels == 1 and side in (None, images.shape[-1])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Keys) -> Batch:
        chosen = torch.from_numpy(keys[:, 1])
        if self.labels.is_cuda:  # not blocking: a GPU that is waited for in each step has nothing to do until the next
            chosen = chosen.to(self.labels.device, non_blocking=True)
        images = self.images.index_select(0, chosen)  # a fraction of the time of images[chosen]
        if not self.ready:
            images = _brought(images, self.side, self.channels)
        return Batch(images, self.labels.index_select(0, chosen), [])


def _brought(images: Tensor, side: int | None, channels: int) -> Tensor:
    if images.dtype == torch.uint8:
        images = images.float().div_(255)
    images = images.to(torch.get_default_dtype())
    if side is not None and images.shape[-1] != side:
        images = resized(images, side)
    return images if channels == 1 else images.expand(-1, channels, -1, -1).contiguous()


# CIFAR


class _Cifar(Source):
    """Small colour images, moved by up to four pixels and mirrored at random, as CIFAR is trained on."""

    def __init__(self, classes: int, root: str) -> None:
        self.classes = classes
        self.parts = {train: sets.cifar(classes, root or None, train=train) for train in (True, False)}

    def train(self, model: nn.Module, config: TrainConfig) -> Images:
        moved = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        return self._part(True, moved, model, config)

    def test(self, model: nn.Module, config: TrainConfig) -> Images:
        return self._part(False, [], model, config)

    def _part(self, train: bool, before: list[Any], model: nn.Module, config: TrainConfig) -> Images:
        usual = transform_for(config.model, model, config.weights)
        normal, values = _normal(usual), getattr(model, "in_features", None)
        grey = values is not None and values != 3 * 32 * 32  # a perceptron's, of a square image
        side = config.size or (32 if values == 3 * 32 * 32 else input_side(model, usual))
        after: list[Any] = [transforms.Resize(side)] if side not in (None, 32) else []
        after += [*([transforms.Grayscale()] if grey else []), transforms.ToTensor()]
        if "mean" in normal and not grey:
            after.append(transforms.Normalize(normal["mean"], normal["std"]))
        return SmallImages(self.parts[train], transforms.Compose([*before, *after]), seed=config.seed)


class SmallImages(Images):
    """Images of a torchvision data set in memory, each transformed with random numbers of its own."""

    def __init__(self, images: Dataset[Any], transform: Callable[[Any], Tensor], *, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitems__(self, keys: Keys) -> Batch:
        images, labels = [], []
        for epoch, index in keys.tolist():
            image, label = self.images[index]
            with seeded(self.seed, epoch, index):
                images.append(self.transform(image))
            labels.append(label)
        return Batch(torch.stack(images), torch.tensor(labels), [])


# Photographs


class _Folder(Source):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = {part: self._open(part) for part in ("train", "val")}
        known, tested = (self.found[part].class_to_idx for part in ("train", "val"))
        strange = sorted(name for name, index in tested.items() if known.get(name) != index)
        if strange:
            raise ValueError(
                f"{path}: the classes of val are not those of train, first {strange[0]!r}; expected the same "
                "sub-folders in both"
            )
        self.classes = 1 + max(label for folder in self.found.values() for _, label in folder.samples)

    def _open(self, part: str) -> ImageFolder:
        path = self.path / part
        if not path.is_dir():
            raise FileNotFoundError(
                f"{self.path}: there is no folder {part}; expected train and val, each with the images of a class in a "
                "sub-folder"
            )
        return sets.image_folder(path, transform=lambda image: image)

    def train(self, model: nn.Module, config: TrainConfig) -> Images:
        normal = _normal(transform_for(config.model, model, config.weights))
        side = config.size or normal.pop("side")
        normal.pop("side", None)
        transform = create_transform(side, is_training=True, **normal)
        return Photographs(self.found["train"], transform, seed=config.seed)

    def test(self, model: nn.Module, config: TrainConfig) -> Images:
        transform = transform_for(config.model, model, config.weights)
        if config.size:
            normal = _normal(transform)
            normal.pop("side")
            transform = create_transform(config.size, **normal)
        return Photographs(self.found["val"], transform, seed=config.seed)


def _normal(transform: Any) -> dict[str, Any]:
    """Side, mean and deviation of what a model is evaluated with, whether timm or torchvision made it."""
    if hasattr(transform, "crop_size"):
        return {"side": transform.crop_size[0], "mean": tuple(transform.mean), "std": tuple(transform.std)}
    found: dict[str, Any] = {"side": 224}
    for step in transform.transforms:
        if hasattr(step, "mean"):
            found |= {name: tuple(torch.as_tensor(getattr(step, name)).flatten().tolist()) for name in ("mean", "std")}
        elif type(step).__name__ == "CenterCrop":
            found["side"] = step.size[0]
    return found


class Photographs(Images):
    """Photographs of an ImageFolder, each transformed with random numbers of its own.

    In the place of one that cannot be read stands the next that can; what was wrong is in ``Batch.corrupt``.
    """

    def __init__(self, folder: ImageFolder, transform: Callable[[Any], Tensor], *, seed: int) -> None:
        self.folder, self.transform, self.seed = folder, transform, seed

    def __len__(self) -> int:
        return len(self.folder.samples)

    def __getitems__(self, keys: Keys) -> Batch:
        corrupt: list[str] = []
        images, labels = [], []
        for epoch, index in keys.tolist():
            photograph, label = self._read(index, corrupt)
            with seeded(self.seed, epoch, index):
                images.append(self.transform(photograph))
            labels.append(label)
        return Batch(torch.stack(images), torch.tensor(labels), corrupt)

    def _read(self, index: int, corrupt: list[str]) -> tuple[Any, int]:
        for ahead in range(len(self)):
            path, label = self.folder.samples[(index + ahead) % len(self)]
            try:
                return self.folder.loader(path), label
            except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, ... for damaged files
                corrupt.append(f"{path}: this image cannot be read ({type(error).__name__}: {error})")
        raise ValueError(f"{self.folder.root}: none of its {len(self)} images can be read")
