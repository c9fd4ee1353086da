"""What a safetensors checkpoint says about itself: written into its header, and read back without trust."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.policy import Rule, policy_of, rules_from
from zoo.state_dict import plain_names
from zoo.version import __version__

if TYPE_CHECKING:
    from zoo.registry import ModelSpec

__all__ = ["describe", "described"]

_LONGEST = 1 << 16
_LOADERS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
_REMEDY = "; build the model yourself and load the weights into it: zoo.load_checkpoint(model, path)"


def describe(model: nn.Module, metadata: Mapping[str, Any] | None, where: str) -> dict[str, str]:
    """The header of the model's file: versions, what zoo.create was called with, the layer policy, and ``metadata``."""
    from zoo.registry import spec_of

    text = {"format": "pt", "zoo_version": __version__, "torch_version": torch.__version__}
    spec = spec_of(model)
    if spec is not None:
        try:
            told = {"name": spec.name, "options": spec.options}
            text["zoo_model"] = json.dumps(told, sort_keys=True, allow_nan=False)
            text["zoo_policy"] = json.dumps(_policies(model), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: {spec.name} could not be rebuilt from the file: {error}; "
                "or save as .pth, which holds the weights alone"
            ) from error
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or key in text or key.startswith("zoo_"):
            raise ValueError(f"{where}: the metadata key {key!r} is zoo's own, or no text; choose another")
        if not isinstance(value, (str, int, float)):
            kind = type(value).__name__
            raise ValueError(f"{where}: metadata {key!r} is {kind}, expected text or a number; use json.dumps")
        text[key] = str(value)
    return text


def described(metadata: Mapping[str, str], where: str) -> tuple[ModelSpec, dict[str, tuple[Rule, ...]]]:
    """The model that a header tells of, and the layer policy by name of the module that has it ("" is the model).

    Nothing in the header is trusted: raises ValueError for whatever save_checkpoint would not have written.
    """
    from zoo.registry import ModelSpec

    if "zoo_model" not in metadata:
        raise ValueError(f"{where}: does not say which model it holds, for that was not made by zoo.create{_REMEDY}")
    told = _parsed(metadata, "zoo_model", where)
    if not isinstance(told, dict) or told.keys() != {"name", "options"}:
        raise ValueError(f"{where}: zoo_model is {_short(told)}, expected an object with name and options{_REMEDY}")
    name, options = told["name"], told["options"]
    if not isinstance(name, str) or not isinstance(options, dict):
        raise ValueError(f"{where}: zoo_model is {_short(told)}, expected text and an object{_REMEDY}")
    if alien := sorted(_not_options() & options.keys()):
        raise ValueError(f"{where}: zoo_model has {', '.join(alien)} among its options, which no model takes{_REMEDY}")
    policies = _parsed(metadata, "zoo_policy", where)
    try:
        return ModelSpec(name, options), {module: rules_from(rules) for module, rules in policies.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: zoo_policy is {_short(policies)}: {error}{_REMEDY}") from error


def _policies(model: nn.Module) -> dict[str, list[dict[str, Any]]]:
    plain = plain_names(model)
    return {
        plain(f"{name}.").rstrip("."): [rule.to_json() for rule in rules]
        for name, module in model.named_modules()
        if (rules := policy_of(module))
    }


def _not_options() -> set[str]:
    # A header must not make zoo.create read another file, or fetch one.
    from zoo.factory import create

    parameters = inspect.signature(create).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
    return (named | _LOADERS) - {"num_classes"}


def _parsed(metadata: Mapping[str, str], key: str, where: str) -> Any:
    text = metadata.get(key, "")
    if len(text) > _LONGEST:
        raise ValueError(f"{where}: {key} has {len(text)} characters, expected at most {_LONGEST}{_REMEDY}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {key} is {_short(text)}, expected JSON ({error}){_REMEDY}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
