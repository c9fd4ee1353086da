"""Tensors by name into a model: all of them or none, and what may differ."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zoo.meta_device import without_values
from zoo.report import Report
from zoo.state_dict import StateDictReport, compare, plain_names, raw_keys, state_of, strip_prefixes, unwrap

__all__ = ["LoadReport", "load_into"]

_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class LoadReport(Report):
    """What a load did: always ``ok``, for a load that is not is refused with an error.

    ``loaded`` counts the tensors; ``fresh`` are the keys of the head that ``reset_head`` left as they were;
    ``absent`` the ``num_batches_tracked`` that the file or the model lacks; ``converted`` the keys whose floating dtype
    in the file was another than the model's; ``prefix`` what was taken off the file's keys.
    """

    source: str
    loaded: int
    fresh: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    prefix: str = ""

    @property
    def ok(self) -> bool:
        return True

    def __str__(self) -> str:
        notes = [f"{self.loaded} tensors loaded from {self.source}"]
        if self.fresh:
            notes.append(f"the head kept as it was ({', '.join(self.fresh)})")
        if self.absent:
            notes.append(f"{len(self.absent)} num_batches_tracked not in both, left as they were")
        if self.converted:
            notes.append(f"{len(self.converted)} converted to the model's dtype")
        if self.prefix:
            notes.append(f"prefix {self.prefix!r} taken off")
        return "; ".join(notes)


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], where: str, *, reset_head: bool = False) -> LoadReport:
    """Copy ``tensors`` into the model by zoo.load_checkpoint's rules; ``where`` names their source in errors."""
    target = unwrap(model)
    own = state_of(target)
    _refuse_unusable(tensors, own, where)
    given, prefix = strip_prefixes(tensors, own)
    wanted = own
    if reset_head:
        head = _head_prefixes(target)
        if not head:
            raise ValueError(f"{where}: got reset_head=True, but {type(target).__name__} has no classifier to reset")
        given, wanted = ({key: t for key, t in each.items() if not key.startswith(head)} for each in (given, own))
    fitted, converted, report = _fit(given, wanted, where)
    versions = _versions(tensors, prefix)
    if report.missing and report.unexpected and (renamed := _through_own_conversions(target, given, versions)):
        fitted, converted, report = _fit(renamed, wanted, where)
        versions = {}
    _refuse_difference(report, where, target)

    # A module that the file gives no version for is taken as the present one: its keys are.
    state = _raw_state(target, {key: tensor.detach() for key, tensor in fitted.items() if key in own})
    present = target.state_dict(keep_vars=True)._metadata  # type: ignore[attr-defined]
    state._metadata = present | _raw_versions(target, versions)  # type: ignore[attr-defined]
    target.load_state_dict(state, strict=False)  # not strict for the keys that _fit allows to be absent
    return LoadReport(
        source=where,
        loaded=len(state),
        fresh=tuple(key for key in own if key not in wanted),
        absent=report.absent,
        converted=converted,
        prefix=prefix,
    )


def _head_prefixes(model: nn.Module) -> tuple[str, ...]:
    from zoo.models.head import head_names

    plain = plain_names(model)
    return tuple(plain(f"{name}.") if name else "" for name in head_names(model))


def _refuse_unusable(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> None:
    """Refuse what torch would find out only after some tensors were copied."""
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{where}: {key} is on the meta device and has no values to load")
    for key, tensor in own.items():
        if nn.parameter.is_lazy(tensor):
            reason, remedy = "is a lazy parameter without a shape", "run the model once"
        elif tensor.is_meta:
            reason, remedy = "is on the meta device, which holds no values", "build the model on a real device"
        elif tensor.is_inference():
            reason, remedy = "was made under torch.inference_mode", "build the model outside of it"
        elif any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            reason, remedy = "is expanded: several of its elements share one place", "clone() it"
        else:
            continue
        raise ValueError(f"{where}: cannot be loaded, for {key} of the model {reason}; {remedy} before loading")


def _fit(
    given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str
) -> tuple[dict[str, Tensor], tuple[str, ...], StateDictReport]:
    """What is given, ties completed and in the wanted dtypes; the keys converted; and what still differs."""
    fitted = _with_ties(given, wanted, where)
    converted = []
    for key in (key for key in wanted if key in fitted):
        tensor, dtype = fitted[key], wanted[key].dtype
        if tensor.dtype != dtype and tensor.is_floating_point() and dtype.is_floating_point:
            fitted[key] = _converted(tensor, dtype, f"{where}: {key}")
            converted.append(key)
    return fitted, tuple(converted), compare(fitted, wanted, reference=where)


def _with_ties(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """One key of tied parameters stands for all of them; several must agree, for the model has room for one value."""
    groups: dict[int, list[str]] = {}
    for key, tensor in wanted.items():
        groups.setdefault(id(tensor), []).append(key)
    filled = dict(given)
    for keys in groups.values():
        present = [key for key in keys if key in given]
        for key in present[1:]:
            if not _same(given[present[0]], given[key]):
                raise ValueError(
                    f"{where}: {present[0]} and {key} differ, but are one parameter in the model; "
                    "untie them in the model before loading, or load a file of the tied model"
                )
        filled.update({key: given[present[0]] for key in keys if present and key not in given})
    return filled


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other or one.shape != other.shape:
        return one is other
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _converted(tensor: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = converted.double().isfinite() != tensor.double().isfinite()
        if lost.any():
            raise ValueError(
                f"{where}: {int(lost.sum())} values of the {_name(tensor.dtype)} tensor do not fit into the model's "
                f"{_name(dtype)}; build the model with dtype=torch.{_name(tensor.dtype)}"
            )
    return converted


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _versions(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, int]:
    """The versions of modules that a state dict was written by, by module name without ``prefix``; as far as told."""
    told = getattr(tensors, "_metadata", None)
    versions = {}
    for name, entry in told.items() if isinstance(told, Mapping) else ():
        version = entry.get("version") if isinstance(entry, Mapping) else None
        if isinstance(version, int) and f"{name}.".lstrip(".").startswith(prefix):
            versions[f"{name}.".removeprefix(prefix).rstrip(".")] = version
    return versions


def _raw_versions(model: nn.Module, versions: Mapping[str, int]) -> dict[str, dict[str, int]]:
    plain = plain_names(model)
    names = {name: plain(f"{name}.").rstrip(".") for name, _ in model.named_modules(remove_duplicate=False)}
    return {name: {"version": versions[known]} for name, known in names.items() if known in versions}


def _raw_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
    raw = raw_keys(model)
    return OrderedDict((raw.get(key, key), tensor) for key, tensor in tensors.items())


def _through_own_conversions(
    model: nn.Module, given: Mapping[str, Tensor], versions: Mapping[str, int]
) -> dict[str, Tensor] | None:
    """``given`` under the model's present keys, where its modules know how to read older ones; else None.

    Some modules rename the keys of earlier releases while they load. They do it here on a copy that has no memory.
    """
    state = _raw_state(model, given)
    state._metadata = _raw_versions(model, versions)  # type: ignore[attr-defined]
    try:
        shadow = without_values(model)
        outcome = shadow.load_state_dict(state, strict=False, assign=True)
    except Exception:  # a model that cannot be copied, or refuses: the comparison has said what is wrong
        return None
    if outcome.unexpected_keys:
        return None
    return {key: tensor for key, tensor in state_of(shadow).items() if not tensor.is_meta}


def _refuse_difference(report: StateDictReport, where: str, model: nn.Module) -> None:
    if report.ok:
        return
    keys = {*report.missing, *report.unexpected, *(pair.key for pair in report.mismatched)}
    head = _head_prefixes(model)
    if all(key.startswith(head) for key in keys):
        remedy = (
            "Only the classifier differs: build the model with the file's number of classes, or pass reset_head=True "
            "to keep the model's own classifier"
        )
    else:
        remedy = "Build the model that the file was saved from; zoo.check_state_dict(model, file) lists them all"
    lines = "\n".join(report.lines(shown=_SHOWN))
    raise ValueError(
        f"{where}: does not fit the model, which is as it was ('got' is the file's, 'expected' the model's)\n"
        f"{lines}\n{remedy}"
    )
