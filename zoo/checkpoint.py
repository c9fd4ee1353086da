"""Checkpoints of models: saved, loaded strictly, and rebuilt from the file alone.

A ``.safetensors`` file describes itself: the name and options of zoo.create, the layer policy and the versions are in
its header, and :func:`load` makes the model from them. A ``.pth`` file is a plain state dict that any torch code loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zoo.checkpoint_header import describe, described
from zoo.loading import LoadReport, load_into
from zoo.state_dict import compare, plain_names, state_of, unwrap
from zoo.tensor_files import PathLike, check_suffix, file_kind, open_wrapper, read_metadata, read_tensors, write_tensors

if TYPE_CHECKING:
    from zoo.registry import ModelSpec

__all__ = ["LoadReport", "load", "load_checkpoint", "read_metadata", "save_checkpoint"]


def save_checkpoint(model: nn.Module, path: PathLike, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Save the model's parameters and buffers to ``path`` (``.safetensors``, or ``.pth``/``.pt``) and return the path.

    The keys are the model's own, without what torch.compile and DistributedDataParallel put in front. ``metadata``
    (text or numbers by name, kept as text) goes into the header of a safetensors file; a torch file has no place for
    it. Tensors keep their dtype and lose their device; tied ones come back equal under each of their keys.

    The file appears in one step: a save that fails, or is killed, leaves the old file as it was, and of several at once
    one wins whole. A symbolic link is written through.

    Raises ValueError for what cannot be saved this way, and OSError naming the file where the writing failed.
    """
    kind = check_suffix(path)
    target = unwrap(model)
    if kind == "safetensors":
        return write_tensors(path, state_of(target), metadata=describe(target, metadata, str(path)))
    if metadata:
        raise ValueError(f"{path}: got metadata, but a plain state dict has no place for it; save as .safetensors")
    plain = plain_names(target)
    versions = target.state_dict(keep_vars=True)._metadata  # type: ignore[attr-defined]
    named = {plain(f"{name}.").rstrip("."): entry for name, entry in versions.items()}
    return write_tensors(path, state_of(target), versions=named)


def load_checkpoint(
    model: nn.Module, source: PathLike | Mapping[str, Any], *, reset_head: bool = False, key: str | None = None
) -> LoadReport:
    """Load a file, or a mapping such as a state dict, into ``model``: all of it or nothing.

    Every key must be there with its shape, and no other. Exceptions: ``num_batches_tracked`` may be missing on either
    side; one key of tied parameters stands for the others; a floating dtype is converted to the model's (a value that
    this would make infinite is refused); with ``reset_head=True`` the classifier keeps the values it has, whatever the
    file holds for it. Keys of older versions are converted where the model's own modules know how.

    The state dict may lie under ``state_dict``, ``model`` or ``model_state_dict``, or an EMA name; if it lies under
    several, ``key="model_ema"`` chooses. Prefixes of wrappers come off where the keys then match. Nothing but tensors
    is unpickled.

    Raises OSError where the file cannot be opened and ValueError, naming the file, the keys and both shapes, where it
    does not fit. The model is then as it was.
    """
    if isinstance(source, Mapping):
        where = "the given state dict"
        tensors = open_wrapper(source, where=where, key=key)
    else:
        where = str(source)
        tensors = read_tensors(source, key=key)
    return load_into(model, tensors, where, reset_head=reset_head)


def load(path: PathLike) -> nn.Module:
    """The model that a ``.safetensors`` file of save_checkpoint describes: built, layers swapped, weights loaded.

    It comes on the CPU, in the dtypes of the file, in training mode as zoo.create gives it. Raises ValueError, naming
    the file, where it does not describe a model that can be built, or its tensors do not fit that model.
    """
    from zoo.swap import apply_rules

    where = str(path)
    if file_kind(path) == "torch":
        raise ValueError(
            f"{where}: a torch file does not say which model it holds; build that and load the weights into it: "
            "zoo.load_checkpoint(zoo.create(name, ...), path)"
        )
    spec, policies = described(read_metadata(path), where)
    tensors = read_tensors(path)
    # First without memory: what the header asks for must be what the file holds before it is built.
    planned = compare(tensors, _in_dtypes_of(tensors, _build(spec, where, device="meta")), reference=spec.name)
    if not planned.ok:
        lines = "\n".join(planned.lines())
        raise ValueError(
            f"{where}: its tensors ('got') are not those of the {spec.name} that it names ('expected')\n{lines}\n"
            "Where that model was changed after zoo.create, change it likewise and use zoo.load_checkpoint(model, path)"
        )
    floating = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    model = _build(spec, where, dtype=floating.pop() if len(floating) == 1 else None)
    _in_dtypes_of(tensors, model)
    for name, rules in policies.items():
        try:
            apply_rules(model.get_submodule(name), rules)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{where}: its layer policy cannot be followed: {error}") from error
    load_into(model, tensors, where)
    return model


def _build(spec: ModelSpec, where: str, **place: Any) -> nn.Module:
    from zoo.factory import create

    try:
        return create(spec.name, **spec.options, **place)
    except Exception as error:  # the options come from the file: a constructor may fail on them in any way
        raise ValueError(
            f"{where}: the {spec.name} that it names cannot be built with the options {spec.options}: {error}"
        ) from error


def _in_dtypes_of(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by key, each floating one brought to the dtype that ``tensors`` has for it."""
    own = state_of(model)
    for key, tensor in own.items():
        if key in tensors and tensor.is_floating_point() and tensors[key].is_floating_point():
            tensor.data = tensor.data.to(tensors[key].dtype)
    return own
