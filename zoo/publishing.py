"""``zoo publish``: a trained model as a folder that others load: weights, config.json, and a card that says what it is.

The folder has the layout of a Hugging Face repository. ``model.safetensors`` describes itself, for zoo.load; where timm
has the architecture, ``timm.create_model("local-dir:DIR", pretrained=True)`` loads it too, and that was tried, and the
logits compared bit for bit, before the folder appears.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from timm.data.constants import DEFAULT_CROP_PCT
from torch import Tensor, nn

from zoo import weights_index
from zoo.checkpoint import load, read_metadata, save_checkpoint
from zoo.model_card import DATASETS, Published, card
from zoo.preparing import channels_of, input_side, transform_for
from zoo.registry import spec_of
from zoo.swap import unpatch
from zoo.tables import TableReport, rows
from zoo.tensor_files import PathLike
from zoo.train.config import TrainConfig, read_config, write_config

__all__ = ["PublishReport", "publish"]

_OWN = ("format", "torch_version", "zoo_model", "zoo_policy", "zoo_version")


@dataclasses.dataclass(frozen=True)
class PublishReport(TableReport):
    """What was written."""

    folder: str
    model: str
    source: str
    license: str
    accuracy: float | None
    """0 to 1, as the checkpoint states it; None where it states none."""
    timm: str | None
    """The architecture by which timm loads the folder, its logits equal to the bit."""
    timm_missing: str
    """Why timm does not load it; empty where it does."""
    files: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return True

    def __rich__(self) -> RenderableType:
        table = rows()
        table.add_row("model", f"{self.model}, from {self.source}")
        table.add_row("accuracy", "not stated" if self.accuracy is None else f"{self.accuracy:.2%}")
        table.add_row("licence", self.license)
        loads = f"timm.create_model('local-dir:{self.folder}', pretrained=True): the same logits, bit for bit"
        table.add_row("timm", loads if self.timm else f"does not load it: {self.timm_missing}")
        table.add_row("zoo", f"zoo.load('{self.folder}/model.safetensors')")
        return Group(f"{self.folder}: {', '.join(self.files)}", table)


@dataclasses.dataclass(frozen=True)
class _Source:
    """What is to be published: the file, and what is known of how it was made. Nothing in it names a local folder."""

    file: Path
    text: str
    config: TrainConfig | None = None
    entry: weights_index.WeightEntry | None = None


def publish(source: PathLike, folder: PathLike, *, license: str | None = None) -> PublishReport:
    """Write the model of ``source`` into ``folder``, which appears whole or not at all.

    Args:
        source: a run's folder (zoo.train), whose ``final.safetensors`` is taken; a ``.safetensors`` file of
            zoo.save_checkpoint; or a name of zoo's own weights.
        folder: a path where nothing is, or an empty folder.
        license: of the weights, as Hugging Face spells it ("mit", "apache-2.0"); of zoo's own weights it is known.

    Raises:
        ValueError: a source that does not say which model it holds, weights that are not finite, no licence.
        FileNotFoundError: no such source.
        FileExistsError: there is something in ``folder``.
        OSError: it cannot be written; nothing of it is left.
    """
    target = Path(folder)
    _refuse_to_overwrite(target)
    found = _find(source)
    license = license or (found.entry.license if found.entry else None)
    if not license or not license.strip():
        raise ValueError("license: got none; say under which one the weights go out, as --license mit")
    model = load(found.file).eval()
    spec = spec_of(model)
    assert spec is not None
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{found.file}: {name} is not finite; publish a checkpoint from before that")
    header = {key: value for key, value in read_metadata(found.file).items() if key not in _OWN}
    if found.config is not None:
        header["data"] = found.config.data
    elif "data" in header:
        header["data"] = _public(header["data"])
    with _appearing(target) as temporary:
        save_checkpoint(model, temporary / "model.safetensors", metadata=header)
        stock = copy.deepcopy(model).float()
        unpatch(stock)
        size = _size(stock, found.config, header)
        prepared = _preparation(stock, size, found.config, header)
        architecture, missing = _for_timm(stock, temporary, size, prepared, header)
        config = temporary / "config.json"
        if architecture is None:
            told = {"architecture": spec.name, "zoo_model": {"name": spec.name, "options": spec.options}}
            config.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        if found.config is not None:
            write_config(found.config, temporary / "config.toml")
        about = Published(
            name=target.resolve().name,
            model=spec.name,
            options=spec.options,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            license=license.strip().lower(),
            header=header,
            entry=found.entry,
            config=found.config,
            architecture=architecture,
            size=size,
        )
        (temporary / "README.md").write_text(card(about), encoding="utf-8")
        files = tuple(sorted(path.name for path in temporary.iterdir()))
    return PublishReport(
        folder=str(target),
        model=spec.name,
        source=found.text,
        license=about.license,
        accuracy=about.accuracy,
        timm=architecture,
        timm_missing=missing,
        files=files,
    )


def _find(source: PathLike) -> _Source:
    text = os.fspath(source)
    path = Path(text)
    if path.is_dir():
        if not (path / "config.toml").is_file():
            raise ValueError(
                f"{text}: there is no config.toml in this folder; expected one that zoo train wrote, a .safetensors "
                "file, or a name of zoo's own weights"
            )
        file = path / "final.safetensors"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: the run has not come to its end; go on with zoo train --resume, or publish "
                f"{path / 'best.safetensors'}"
            )
        return _Source(file, path.name + "/final.safetensors", config=_public_config(path))
    if path.is_file():
        return _Source(path, path.name, config=_public_config(path.parent) if _is_of_run(path) else None)
    if text in weights_index.names():
        entry = weights_index.find(text)
        return _Source(entry.verified_path(), f"zoo's weights {text}", entry=entry)
    raise FileNotFoundError(
        f"{text}: there is no such file or folder; expected a run of zoo train, a .safetensors file, or one of zoo's "
        f"own weights: {', '.join(weights_index.names())}"
    )


def _is_of_run(file: Path) -> bool:
    return file.name in ("best.safetensors", "final.safetensors") and (file.parent / "config.toml").is_file()


def _public_config(folder: Path) -> TrainConfig:
    config = TrainConfig(**read_config(folder / "config.toml"))
    weights = None if config.weights is None else Path(config.weights).name
    return dataclasses.replace(config, data=_public(config.data), weights=weights)


def _public(data: str) -> str:
    """A data set's name without the folder that it lies in here."""
    name = data.partition(":")[0]
    return name if name in DATASETS else Path(data).name


def _refuse_to_overwrite(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder}: it is there already and stays as it is; name another folder, or remove it")
    if not folder.resolve().parent.is_dir():
        raise FileNotFoundError(f"{folder}: there is no folder {folder.resolve().parent}; make it first")


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place if the body succeeds, and is removed if it does not."""
    target = folder.resolve()
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes it private
        try:
            os.rename(temporary, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(f"{folder}: it appeared meanwhile and stays as it is; name another") from error
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _for_timm(
    stock: nn.Module,
    folder: Path,
    size: tuple[int, int, int],
    prepared: Mapping[str, Any],
    header: Mapping[str, str],
) -> tuple[str | None, str]:
    """Write timm's config.json beside the weights and load them by it. The architecture, or None and why not."""
    import timm
    from timm.models._hub import save_config_for_hf

    spec = spec_of(stock)
    assert spec is not None
    name = spec.name.rpartition("/")[2]
    if not timm.is_model(name):
        return None, f"timm has no architecture {name}"
    config = folder / "config.json"
    labels = {}
    try:
        twin: Any = timm.create_model(name, **spec.options)
        twin.pretrained_cfg = {**twin.pretrained_cfg, **prepared, "input_size": size}
        if data := DATASETS.get(header.get("data", "")):
            labels = {"label_names": list(data.classes)}
        options = {key: value for key, value in spec.options.items() if key != "num_classes"}
        save_config_for_hf(twin, str(config), model_config=labels, model_args=options)
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours, theirs = stock(images), loaded(images)
    except Exception as error:  # timm's factories raise whatever their models raise
        config.unlink(missing_ok=True)
        return None, f"timm's {name} is another: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if not (isinstance(theirs, Tensor) and torch.equal(ours, theirs)):
        config.unlink()
        return None, f"the logits of timm's {name} are not the same to the bit"
    return name, ""


def _size(model: nn.Module, config: TrainConfig | None, header: Mapping[str, str]) -> tuple[int, int, int]:
    """Channels, height and width of the images that the model takes."""
    spec = spec_of(model)
    assert spec is not None
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if fixed:
        return channels_of(model), int(fixed[0]), int(fixed[1])
    data = DATASETS.get(header.get("data", ""))
    side = (config and config.size) or input_side(model, transform_for(spec.name, model, None))
    side = side or (data.side if data else 224)
    return channels_of(model), side, side


def _preparation(
    model: nn.Module, size: tuple[int, int, int], config: TrainConfig | None, header: Mapping[str, str]
) -> dict[str, Any]:
    """How images were prepared when the accuracy was measured, in timm's words, where timm would not say the same."""
    channels = size[0]
    if header.get("data", "") in DATASETS:
        return {"mean": (0.0,) * channels, "std": (1.0,) * channels, "crop_pct": 1.0, "interpolation": "bilinear"}
    spec = spec_of(model)
    assert spec is not None
    transform: Any = transform_for(spec.name, model, None)
    prepared: dict[str, Any] = {}
    if hasattr(transform, "crop_size") and channels == len(transform.mean):  # torchvision's
        prepared = {
            "mean": tuple(transform.mean),
            "std": tuple(transform.std),
            "crop_pct": transform.crop_size[0] / transform.resize_size[0],
            "interpolation": transform.interpolation.value,
        }
    if config is not None and config.size:  # then zoo.train lets timm make the transform
        prepared |= {"crop_pct": DEFAULT_CROP_PCT, "interpolation": "bilinear"}
    return prepared
