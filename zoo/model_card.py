"""The card of a published model: README.md with the header that Hugging Face reads."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

from zoo.train.config import TrainConfig
from zoo.version import __version__
from zoo.weights_index import WeightEntry

__all__ = ["DATASETS", "Dataset", "Published", "card"]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set that zoo trains on by name: grey images in [0, 1], of ten classes."""

    title: str
    hub: str | None
    """Its name on Hugging Face."""
    side: int
    classes: tuple[str, ...]


_DIGITS = tuple("0123456789")
_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
DATASETS = {
    "digits": Dataset("scikit-learn digits", None, 8, _DIGITS),
    "fashion_mnist": Dataset("Fashion-MNIST", "zalando-datasets/fashion_mnist", 28, tuple(_FASHION.split(", "))),
    "mnist": Dataset("MNIST", "ylecun/mnist", 28, _DIGITS),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """What the card tells."""

    name: str
    model: str
    options: Mapping[str, Any]
    parameters: int
    license: str
    header: Mapping[str, str]
    """What the checkpoint says about itself: data, accuracy, step, as far as it does."""
    entry: WeightEntry | None
    """Of zoo's own weights."""
    config: TrainConfig | None
    """Of the run that made it."""
    architecture: str | None
    """timm's, where it loads the folder."""
    size: tuple[int, int, int]
    """Channels, height and width of an image."""

    @property
    def data(self) -> str | None:
        """The data set's name or the folder's."""
        return self.header.get("data") or None

    @property
    def accuracy(self) -> float | None:
        """Top-1, 0 to 1, as the checkpoint states it."""
        try:
            found = float(self.header.get("accuracy", ""))
        except ValueError:
            return None
        return found if 0 <= found <= 1 else None


def card(about: Published) -> str:
    """The text of README.md."""
    return f"---\n{_header(about)}\n---\n\n" + "\n\n".join(filter(None, _sections(about))) + "\n"


def _header(about: Published) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    known = DATASETS.get(about.data or "")
    results = None
    if about.accuracy is not None and about.data:
        results = [
            EvalResult(
                task_type="image-classification",
                task_name="Image classification",
                dataset_type=known.hub if known and known.hub else about.data,
                dataset_name=known.title if known else about.data,
                dataset_split="test" if known else "val",
                metric_type="accuracy",
                metric_name="top-1",
                metric_value=about.accuracy,
            )
        ]
    data = ModelCardData(
        license=about.license,
        library_name="timm" if about.architecture else "zoo",
        pipeline_tag="image-classification",
        tags=["image-classification", *(["timm"] if about.architecture else []), "zoo"],
        datasets=[known.hub] if known and known.hub else None,
        metrics=["accuracy"],
        model_name=about.name,
        eval_results=results,
    )
    return data.to_yaml().strip()


def _sections(about: Published) -> list[str]:
    known = DATASETS.get(about.data or "")
    title = known.title if known else about.data
    options = "".join(f", {key}={value!r}" for key, value in about.options.items())
    measured = "not stated by its checkpoint" if about.accuracy is None else f"{about.accuracy:.2%}"
    part = "the test part" if known else "the validation part"
    where = f", on {part} of {title}, when it was trained" if about.accuracy is not None and title else ""
    channels, height, width = about.size
    values = "float32 in [0, 1], equal in all channels"
    if not known:
        by = "config.json says" if about.architecture else f"`zoo.data.eval_transform({about.model!r})` does"
        values = "float32" if channels == 1 else f"float32, prepared as {by}"
    return [
        f"# {about.name}",
        f"`zoo.create({about.model!r}{options})` with trained weights: an image classifier of {about.parameters:,} "
        f"parameters, saved by zoo {__version__}.",
        f"| | |\n|---|---|\n| top-1 | {measured}{where} |\n| licence of the weights | {about.license} |\n"
        f"| input | images (N, {channels}, {height}, {width}), {values} |"
        + (f"\n| classes | {', '.join(known.classes)} |" if known else ""),
        "## Loading",
        '```python\nimport zoo\n\nmodel = zoo.load("model.safetensors").eval()\n```',
        _by_timm(about),
        "## How it was made",
        *_recipe(about),
    ]


def _by_timm(about: Published) -> str:
    if about.architecture is None:
        return ""
    return (
        f"Or without zoo, as timm's `{about.architecture}`, from this folder. The logits are the same, bit for bit: "
        "they were compared, on a CPU, when the folder was written.\n\n"
        '```python\nimport timm\n\nmodel = timm.create_model("local-dir:.", pretrained=True).eval()\n```'
    )


def _recipe(about: Published) -> list[str]:
    if about.config is not None:
        step = f"The weights are those after step {about.header['step']}. " if "step" in about.header else ""
        return [
            f"{step}`config.toml` is the whole run; data and weights are named without the folders that they lay in:",
            "```sh\nzoo train --config config.toml --out runs/again\n```",
        ]
    if about.entry is not None:
        lines = [
            f"- {key}: {value}" for key, value in about.entry.recipe.items() if isinstance(value, (str, int, float))
        ]
        data = f"Data: {about.entry.dataset}. Split: {about.entry.split}."
        return [
            data,
            textwrap.dedent("\n".join(line for line in lines if not line.startswith("- command"))),
            f"```sh\n{about.entry.recipe.get('command', '')}\n```",
        ]
    return ["Not told: the checkpoint was published without the folder of its run."]
