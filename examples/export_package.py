"""Out of Python: a patched model as a package that a C++ program runs, zoo's operators in it.

    python examples/export_package.py out --model resnet50 --weights IMAGENET1K_V2 --photo photo.jpg
    cmake -S examples/cpp -B build -DTORCH_HOME="$(python -c 'import torch; print(torch.__path__[0])')"
    cmake --build build
    build/classify out/model.pt2 out/photo.ppm out/labels.txt

The package takes a photo as it comes, pixels (H, W, 3) in uint8, of any size from 32 to 8192 a side: cutting out the
middle, resizing and normalising are part of the model, so that Python and C++ cannot prepare it differently. It is
exported by torch.export, where zoo's Linear is one operator, `zoo::linear` (and `zoo::mlp`), and compiled by
AOTInductor, which leaves it one; so the C++ program needs zoo's library of operators (`examples/cpp` builds it) and
libtorch, and no Python. In `out`:

    exported.pt2    the exported program, for torch.export.load (after `import zoo`)
    model.pt2       the package, for torch._inductor.aoti_load_package and for C++
    photo.ppm       the photo, for the C++ program
    labels.txt      the name of each class
    expected.json   what Python finds: the five likeliest classes

Both are run here, and judged as everything in zoo is: by their error against float64, beside the stock model's own.
"""

from __future__ import annotations

import copy
import json
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo
from torch import Tensor, nn

import zoo
from zoo.data import photos
from zoo.judging import judge, measure
from zoo.model_card import DATASETS
from zoo.preparing import channels_of, choose_device, input_side, make, options_from, transform_for

CROP = 0.875
"""Of the shorter side."""


class Photo(nn.Module):
    """A classifier of images, as one of photos: pixels (H, W, 3) uint8 -> logits (1, classes)."""

    def __init__(self, model: nn.Module, *, side: int, channels: int, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.model, self.side, self.channels = model, side, channels
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        image = pixels.permute(2, 0, 1).unsqueeze(0).to(self.mean.dtype) / 255
        height, width = image.shape[-2:]
        edge = torch.sym_min(height, width) * int(1000 * CROP) // 1000
        top, left = (height - edge) // 2, (width - edge) // 2
        middle = image[..., top : top + edge, left : left + edge]
        small = F.interpolate(middle, (self.side, self.side), mode="bilinear", antialias=True)
        if self.channels == 1:
            small = small.mean(1, keepdim=True)
        return self.model((small - self.mean) / self.std)


def photo_model(name: str, model: nn.Module, weights: str | None) -> Photo:
    """The model with the size and the normalisation that it was made for."""
    transform = transform_for(name, model, weights)
    side, channels = input_side(model, transform) or 224, channels_of(model)
    mean, std = [0.0] * channels, [1.0] * channels
    if not isinstance(getattr(model, "in_features", None), int):  # an mlp of zoo takes values in [0, 1]
        for step in getattr(transform, "transforms", [transform]):
            mean, std = (list(map(float, getattr(step, key, old))) for key, old in (("mean", mean), ("std", std)))
    return Photo(model, side=side, channels=channels, mean=mean, std=std)


def package(model: Photo, pixels: Tensor, folder: Path) -> dict[str, Any]:
    """Export and compile. Returns what runs, by file. RuntimeError where zoo's operators are not in a file."""
    sizes = {
        "pixels": {0: torch.export.Dim("height", min=32, max=8192), 1: torch.export.Dim("width", min=32, max=8192)}
    }
    with torch.no_grad():  # with gradients, AOTInductor would ask the operators to keep what a backward needs
        program = torch.export.export(model, (pixels,), dynamic_shapes=sizes)
        operators = sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("zoo.")})
        if not operators:
            raise RuntimeError("the exported program holds none of zoo's operators; patch the model first")
        torch.export.save(program, folder / "exported.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    names = [name.rpartition(".")[0].replace(".", "::") for name in operators]
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        texts = [archive.read(entry) for entry in archive.namelist() if entry.endswith((".json", ".cpp"))]
    for name in names:
        if not any(name.encode() in text or name.replace("::", ".").encode() in text for text in texts):
            raise RuntimeError(f"{folder / 'model.pt2'}: {name} is not in the compiled package")
    print(f"operators in the package: {', '.join(names)}")
    return {
        "exported.pt2": torch.export.load(folder / "exported.pt2").module(),
        "model.pt2": torch._inductor.aoti_load_package(str(folder / "model.pt2")),
    }


@torch.no_grad()
def check(found: dict[str, Any], custom: Photo, pixels: Tensor) -> Tensor:
    """Judge what the files give for the photo, upright and on its side. Returns the package's logits of the first."""
    stock = copy.deepcopy(custom)
    zoo.unpatch(stock)
    exact = copy.deepcopy(stock).double()
    views = {"upright": pixels, "on its side": pixels.transpose(0, 1).contiguous()}
    for name, run in found.items():
        logits = {view: run(image) for view, image in views.items()}
        references = {view: exact(image) for view, image in views.items()}
        entries = judge(
            "output",
            {view: measure(logits[view], references[view]) for view in views},
            {view: measure(stock(views[view]), references[view]) for view in views},
        )
        for entry in entries:
            if not entry.ok:
                raise RuntimeError(f"{name}: the photo {entry.name}: {entry.reason}")
        worst = max(entries, key=lambda entry: entry.excess)
        print(f"{name}: error {worst.error:.1e}, of the stock model {worst.reference_error:.1e}: right")
    return logits["upright"]


def labels_of(weights: str | None, classes: int) -> list[str]:
    """The names of the classes as far as they are known."""
    dataset = DATASETS.get((weights or "").rpartition(".")[2])
    if dataset is not None:
        return list(dataset.classes)
    if classes == 1000:
        info = ImageNetInfo()
        return [info.index_to_description(index) for index in range(classes)]
    return [f"class {index}" for index in range(classes)]


def main(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    model: Annotated[str, typer.Option(help="A name of zoo.list_models().")] = "resnet18",
    weights: Annotated[
        str | None, typer.Option(help="Trained weights by name or file. Without, the names are noise.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the model: KEY=VALUE.")
    ] = None,
    photo: Annotated[Path | None, typer.Option(help="An image file; by default scikit-learn's photo of China.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N: where the package will run.")] = "cpu",
) -> None:
    """Write the package of a patched model, check it, and say what it sees in a photo."""
    place = choose_device(device)
    folder.mkdir(parents=True, exist_ok=True)
    given = {} if weights is None else {"weights": weights}
    built = make(model, options_from(option or ()), device=place, custom_linear=True, **given).eval()
    whole = photo_model(model, built, weights).to(place).eval()
    picture = (photos()["china"] if photo is None else Image.open(photo)).convert("RGB")
    if not 32 <= min(picture.size) <= max(picture.size) <= 8192:
        raise ValueError(f"photo: got {picture.width} x {picture.height} pixels, expected 32 to 8192 a side; resize it")
    picture.save(folder / "photo.ppm")
    pixels = torch.from_numpy(numpy.array(picture)).to(place)
    logits = check(package(whole, pixels, folder), whole, pixels).flatten().cpu()
    labels = labels_of(weights, len(logits))
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    values, indices = logits.topk(min(5, len(logits)))
    top = [
        {"index": index, "logit": round(value, 4), "label": labels[index]}
        for index, value in zip(indices.tolist(), values.tolist(), strict=True)
    ]
    for row in top:
        print(f"{row['index']:5d}  {row['logit']:9.4f}  {row['label']}")
    told = {"model": model, "weights": weights, "device": str(place), "torch": torch.__version__, "top5": top}
    (folder / "expected.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
