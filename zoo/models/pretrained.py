"""Trained weights by name or path: what there is for a model, what they ask of it, and how to get them.

==========================  ========================================================================================
weights                     for
==========================  ========================================================================================
``"IMAGENET1K_V1"``, ...    torchvision's names: ``torchvision/<name>``, and zoo's own ResNets of the same name
``"a1_in1k"``, ...          timm's tags: ``timm/<name>``, and zoo's own ResNets of the same name
``"mlp.digits"``, ...       zoo's own checkpoints (``weights/index.toml``): the model that they were trained with
a path                      any model: what ends in .safetensors, .pth or .pt, or has a path separator in it
==========================  ========================================================================================

Naming weights fetches nothing: what does not fit is refused before a download.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from zoo import weights_index
from zoo.models import timm as timm_door
from zoo.models.head import head_names
from zoo.models.resnet import ResNet
from zoo.registry import build, resolve

__all__ = ["Weights", "find", "timm_configs", "torchvision_members"]

Options = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

_SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that exist for a model, not fetched yet."""

    name: str
    model: str
    fetch: Callable[[Options], Tensors | Path] = dataclasses.field(repr=False)
    """From the model's options to the tensors, or the file that holds them."""
    num_classes: int | None = None
    """The classes that they were trained for: 0 without a classifier, None where only the file knows."""
    required: Options = dataclasses.field(default_factory=dict)
    """Options, ``num_classes`` aside, that a model of these weights has."""
    defaults: Options = dataclasses.field(default_factory=dict)
    """Options that it has unless it is told otherwise."""
    builder: Callable[..., nn.Module] | None = dataclasses.field(default=None, repr=False)
    """What builds the model for these weights, where that is not what builds it without."""

    def complete(self, options: Options, *, reset_head: bool) -> dict[str, Any]:
        """``options`` with what the weights add to them.

        Raises ValueError for an option that the weights contradict; of ``num_classes``, unless ``reset_head``.
        """
        for key, value in self.required.items():
            if key in options and _plain(options[key]) != _plain(value):
                raise ValueError(f"{self}: they are of {key}={value!r}, got {key}={options[key]!r}; leave it out")
        full = {**self.required, **self.defaults, **options}
        if self.num_classes is None:
            return full
        classes = full.setdefault("num_classes", self.num_classes)
        if classes != self.num_classes and not reset_head:
            theirs, asked = (self._head_shape({**full, "num_classes": n}) for n in (self.num_classes, classes))
            raise ValueError(
                f"num_classes={classes!r} does not fit {self}, which have {self.num_classes} classes: the classifier "
                f"is {theirs} in the weights and {asked} in the model; leave num_classes out, or pass reset_head=True "
                "to load all but the classifier"
            )
        return full

    def load(self, model: nn.Module, options: Options, *, reset_head: bool) -> None:
        """Fetch the weights and load them strictly into ``model``, which was built with ``options``."""
        from zoo.checkpoint import load_checkpoint

        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(f"{self}: the model is on the meta device, which holds no values; build it on another")
        load_checkpoint(model, self.fetch(options), reset_head=reset_head)

    def _head_shape(self, options: Options) -> str:
        with torch.device("meta"):
            model = build(self.model, options)
        weights = [getattr(model.get_submodule(name), "weight", None) for name in head_names(model)]
        return ", ".join(str(tuple(w.shape)) for w in weights if w is not None) or "absent"

    def __str__(self) -> str:
        return f"weights {self.name!r} of {self.model}"


def find(model: str, weights: str | os.PathLike[str]) -> Weights:
    """The weights of that name or path for a model of zoo.create.

    Raises ValueError, with the names that there are, for another name, and FileNotFoundError for a path where no file
    is.
    """
    if isinstance(weights, os.PathLike) or (isinstance(weights, str) and _is_path(weights)):
        return _file(model, Path(weights))
    library, _, twin = model.rpartition("/")
    if not library:
        builder = resolve(model)
        is_resnet = isinstance(builder, functools.partial) and builder.func is ResNet
        twin = model if is_resnet else ""
    from_torchvision = torchvision_members(twin) if twin and library in ("", "torchvision") else {}
    if isinstance(weights, enum.Enum) and weights in from_torchvision.values():
        weights = weights.name
    if isinstance(weights, str):
        if weights in from_torchvision:
            return _torchvision(model, twin, from_torchvision[weights])
        if weights in weights_index.names():
            return _indexed(model, weights)
    from_timm = timm_configs(twin) if twin and library in ("", "timm") else {}
    if isinstance(weights, str) and weights in from_timm:
        return _timm(model, twin, weights, from_timm[weights])
    known = {"torchvision's": list(from_torchvision), "timm's": list(from_timm), "zoo's": weights_index.names(model)}
    listed = "; ".join(f"{whose} {', '.join(names)}" for whose, names in known.items() if names)
    raise ValueError(
        f"unknown weights {weights!r} for model {model!r}: expected {listed + '; or ' if listed else ''}"
        "the path of a .safetensors or .pth file"
    )


def _is_path(weights: str) -> bool:
    return weights.endswith(_SUFFIXES) or os.sep in weights or (os.altsep is not None and os.altsep in weights)


def _file(model: str, path: Path) -> Weights:
    if not path.is_file():
        raise FileNotFoundError(
            f"weights {str(path)!r} for model {model!r}: there is no such file (what has a path separator in it, or "
            f"ends in {', '.join(_SUFFIXES)}, is taken as a path)"
        )
    return Weights(str(path), model, lambda options: path)


def _indexed(model: str, name: str) -> Weights:
    entry = weights_index.find(name)
    if entry.model != model:
        raise ValueError(f"weights {name!r} are of model {entry.model!r}, got model {model!r}")
    required = dict(entry.options)
    num_classes = required.pop("num_classes", None)
    return Weights(name, model, lambda options: entry.verified_path(), num_classes, required)


def torchvision_members(twin: str) -> dict[str, Any]:
    """The weights that torchvision has for its model of that name: name -> member of the enum."""
    from torchvision import models

    return dict(models.get_model_weights(twin).__members__)


def _torchvision(model: str, twin: str, member: Any) -> Weights:
    categories, min_size = member.meta["categories"], member.meta["min_size"]
    required: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    if model == twin:
        pass  # zoo's own: what follows are habits of torchvision's classes
    elif twin.startswith("vit_"):
        required = {"image_size": min_size[0]}
    elif twin in ("googlenet", "inception_v3"):
        # init_weights only takes time where everything is loaded.
        defaults = {"transform_input": True, "aux_logits": twin == "inception_v3", "init_weights": False}
    fetch = functools.partial(_torchvision_tensors, model, member)
    return Weights(member.name, model, fetch, len(categories) if categories else None, required, defaults)


def _torchvision_tensors(model: str, member: Any, options: Options) -> Tensors:
    file = _hub_file(member.url)
    try:
        tensors = dict(member.get_state_dict(progress=True, check_hash=True, map_location="cpu", weights_only=True))
    except Exception as error:
        _not_from_url(f"weights {member.name!r} of {model}", member.url, file, error)
    if (in_chans := options.get("in_chans", 3)) != 3:
        from timm.models import adapt_input_conv

        tensors["conv1.weight"] = adapt_input_conv(in_chans, tensors["conv1.weight"])
    if options.get("aux_logits") is False:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.lower().startswith("aux")}
    # DenseNet's files are older than its module names: norm.1 became norm1.
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2", key): t for key, t in tensors.items()}


def timm_configs(twin: str) -> dict[str, Any]:
    """The weights that timm has for its model of that name: tag -> pretrained config."""
    from timm.models import get_arch_pretrained_cfgs

    configs = get_arch_pretrained_cfgs(twin)
    return {name.partition(".")[2]: config for name, config in configs.items() if config.has_weights}


def _timm(model: str, twin: str, tag: str, config: Any) -> Weights:
    fetch = functools.partial(_timm_tensors, model, twin, tag, config)
    if model == twin:
        return Weights(tag, model, fetch, config.num_classes)
    builder = functools.partial(timm_door.build, twin, tag)  # for the tag's classes and preprocessing
    return Weights(tag, model, fetch, config.num_classes, builder=builder)


def _timm_tensors(model: str, twin: str, tag: str, config: Any, options: Options) -> Tensors:
    what = f"weights {tag!r} of {model}"
    theirs = dict(options) if model != twin else {key: options[key] for key in ("in_chans",) if key in options}
    theirs["num_classes"] = config.num_classes
    if config.hf_hub_id:
        _check_hub(what, config)
    else:
        _download(what, config.url)
    try:
        return timm_door.build_pretrained(twin, tag, theirs).state_dict()
    except OSError as error:
        _not_from_hub(what, config, error)


def _check_hub(what: str, config: Any) -> None:
    """Ask the hub once, with a short patience: timm would try for a minute before it gives up."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, revision = config.hf_hub_id.partition("@")
    files = [config.hf_hub_filename] if config.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]
    if any(isinstance(try_to_load_from_cache(repository, f, revision=revision or None), str) for f in files):
        return
    try:
        get_hf_file_metadata(hf_hub_url(repository, files[0], revision=revision or None), timeout=10)
    except EntryNotFoundError:
        pass  # an older repository, without this kind of file
    except Exception as error:  # whatever the hub's client raises for want of a network, of access or of the repository
        _not_from_hub(what, config, error)


def _not_from_hub(what: str, config: Any, error: Exception) -> NoReturn:
    from huggingface_hub.constants import HF_HUB_CACHE

    if not config.hf_hub_id:
        _not_from_url(what, config.url, _hub_file(config.url), error)
    repository = config.hf_hub_id
    raise OSError(
        f"{what}: could not be fetched from the Hugging Face repository {repository}, file "
        f"{config.hf_hub_filename or 'model.safetensors'}: {error}. Without a network: run `hf download {repository}` "
        f"elsewhere and copy its folder models--{repository.replace('/', '--')} into {HF_HUB_CACHE}; or pass the "
        "path of the file: weights='path/to/model.safetensors'"
    ) from error


def _hub_file(url: str) -> Path:
    return Path(torch.hub.get_dir(), "checkpoints", os.path.basename(urlparse(url).path))


def _download(what: str, url: str) -> None:
    """Put the file of ``url`` where timm looks for it, its hash checked, which timm leaves out."""
    file = _hub_file(url)
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = torch.hub.HASH_REGEX.search(file.name)
    try:
        torch.hub.download_url_to_file(url, str(file), digest[1] if digest else None, progress=True)
    except Exception as error:
        _not_from_url(what, url, file, error)


def _not_from_url(what: str, url: str, file: Path, error: Exception) -> NoReturn:
    if isinstance(error, OSError) and not file.is_file():
        raise OSError(
            f"{what}: could not be downloaded from {url}: {error}. Without a network: put that file at {file}, "
            "or pass its path: weights='path/to/file.pth'"
        ) from error
    raise ValueError(
        f"{what}: the file from {url}, kept at {file}, could not be read: {error!r}; delete it to download it again"
    ) from error


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
