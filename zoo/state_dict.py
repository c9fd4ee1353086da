"""State dicts compared: which keys, shapes and dtypes differ, whatever wrappers and prefixes they come in."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zoo.report import Report
from zoo.tensor_files import PathLike, file_kind, open_wrapper, read_tensors

__all__ = [
    "Mismatch",
    "OrderDifference",
    "StateDictReport",
    "TensorSpec",
    "check_state_dict",
    "compare",
    "is_counter",
    "plain_names",
    "raw_keys",
    "state_of",
    "strip_prefixes",
    "unwrap",
]

Order = Literal["ignored", "reported", "strict"]

_PREFIXES = ("module.", "_orig_mod.")
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A key that both sides have, with another shape or dtype."""

    key: str
    got: TensorSpec
    expected: TensorSpec

    def __str__(self) -> str:
        return f"{self.key}: got {self.got}, expected {self.expected}"


@dataclasses.dataclass(frozen=True)
class OrderDifference:
    """Where the keys of both sides first stand in another order, and how many stand elsewhere."""

    position: int
    got: str
    expected: str
    moved: int

    def __str__(self) -> str:
        return f"{self.moved} keys stand elsewhere, first at {self.position}: got {self.got}, expected {self.expected}"


@dataclasses.dataclass(frozen=True)
class StateDictReport(Report):
    """How a state dict ("got") differs from a reference ("expected").

    ``missing`` are keys of the reference alone, ``unexpected`` those of the checked side alone. ``absent`` are the
    ``num_batches_tracked`` that one side lacks: allowed, as files of old torch have none. ``order`` fails the check
    only where ``strict_order`` is set: against a module, since optimizers know parameters by their position.
    ``prefix`` is what was taken off the reference's keys before comparing.
    """

    reference: str
    keys: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    absent: tuple[str, ...] = ()
    order: OrderDifference | None = None
    strict_order: bool = False
    prefix: str = ""

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or (self.order and self.strict_order))

    def __str__(self) -> str:
        verdict = "agrees with" if self.ok else "differs from"
        return "\n".join([f"state dict {verdict} {self.reference} ({self.keys} keys)", *self.lines()])

    def lines(self, *, shown: int = _SHOWN) -> list[str]:
        """One line a kind of difference, each with the first ``shown`` of it."""
        lines = []
        for label, items in (("missing", self.missing), ("unexpected", self.unexpected)):
            if items:
                lines.append(f"  {label} ({len(items)}): {_first(items, shown, ', ')}")
        if self.mismatched:
            several = _first(self.mismatched, shown, "\n    ")
            lines.append(f"  mismatched ({len(self.mismatched)}):\n    {several}")
        if self.order:
            lines.append(f"  order: {self.order}{'' if self.strict_order else ' (allowed)'}")
        if self.absent:
            lines.append(f"  num_batches_tracked absent on one side, allowed: {len(self.absent)}")
        if self.prefix:
            lines.append(f"  prefix {self.prefix!r} taken off the reference's keys")
        return lines


def _first(items: Iterable[Any], shown: int, separator: str) -> str:
    texts = [str(item) for item in items]
    more = [f"… and {len(texts) - shown} more"] if len(texts) > shown else []
    return separator.join(texts[:shown] + more)


def check_state_dict(
    model: nn.Module, reference: nn.Module | Mapping[str, Any] | PathLike | Literal["torchvision", "timm"]
) -> StateDictReport:
    """Compare the state dict of ``model`` ("got") with that of ``reference`` ("expected"): keys, shapes, dtypes, order.

    ``reference`` is a module, a mapping, a file, or ``"torchvision"`` or ``"timm"``: that library's model of the name
    and options that zoo.create was called with, in its default dtype. torch.compile, DataParallel and
    DistributedDataParallel are seen through; wrappers and prefixes of a mapping or file are opened as
    zoo.load_checkpoint opens them. Another order fails the check against a module; against a mapping or torch file it
    is only reported, and a safetensors file has none. Only ``num_batches_tracked`` may be absent, on either side.
    Values are not compared.

    Raises ValueError where the reference cannot be had, OSError where its file cannot be opened.
    """
    got = state_of(model)
    if isinstance(reference, str) and reference in ("torchvision", "timm"):
        name, other = _reference_model(unwrap(model), reference)
        return compare(got, state_of(other), reference=name, order="strict")
    if isinstance(reference, nn.Module):
        return compare(got, state_of(reference), reference=type(unwrap(reference)).__name__, order="strict")
    order: Order = "reported"
    if isinstance(reference, Mapping):
        name = "the given mapping"
        expected = open_wrapper(reference, where=name)
    elif isinstance(reference, (str, os.PathLike)):
        name = str(reference)
        order = "reported" if file_kind(reference) == "torch" else "ignored"
        expected = read_tensors(reference)
    else:
        raise ValueError(
            f"reference is {type(reference).__name__}, expected a module, a mapping, a path, 'torchvision' or 'timm'"
        )
    expected, prefix = strip_prefixes(expected, got)
    return dataclasses.replace(compare(got, expected, reference=name, order=order), prefix=prefix)


def compare(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, reference: str, order: Order = "ignored"
) -> StateDictReport:
    """The differences of two state dicts, as they are: nothing is opened or stripped."""
    for key, tensor in (*got.items(), *expected.items()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{key} is a lazy parameter without a shape; run the model once before it is compared")
    lost = [key for key in expected if key not in got]
    added = [key for key in got if key not in expected]
    both = [key for key in expected if key in got]
    pairs = [Mismatch(key, _spec(got[key]), _spec(expected[key])) for key in both]
    places = enumerate(zip([key for key in got if key in expected], both, strict=True))
    moved = [(place, one, other) for place, (one, other) in places if one != other]
    return StateDictReport(
        reference=reference,
        keys=len(expected),
        missing=tuple(key for key in lost if not is_counter(key)),
        unexpected=tuple(key for key in added if not is_counter(key)),
        mismatched=tuple(pair for pair in pairs if pair.got != pair.expected),
        absent=tuple(key for key in lost + added if is_counter(key)),
        order=OrderDifference(*moved[0], moved=len(moved)) if moved and order != "ignored" else None,
        strict_order=order == "strict",
    )


def is_counter(key: str) -> bool:
    """Whether ``key`` is a BatchNorm's ``num_batches_tracked``, which state dicts of torch < 0.4.1 lack."""
    return key.rpartition(".")[2] == "num_batches_tracked"


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def strip_prefixes(tensors: Mapping[str, Tensor], known: Iterable[str]) -> tuple[dict[str, Tensor], str]:
    """``tensors`` under the keys ``known``, without the wrappers' prefixes in front of them; and the prefix taken off.

    A prefix (``module.``, ``_orig_mod.``, repeated) goes only where every key has it and more keys are known without
    it: a model may own a child that is really called ``module``.
    """
    names = set(known)
    best, taken, prefix = dict(tensors), "", ""
    stripped = best
    while stripped and (part := next((p for p in _PREFIXES if all(key.startswith(p) for key in stripped)), None)):
        prefix += part
        stripped = {key.removeprefix(part): value for key, value in stripped.items()}
        if len(names & stripped.keys()) > len(names & best.keys()):
            best, taken = stripped, prefix
    return best, taken


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel, however they are nested."""
    while attribute := _wrapped_attribute(model):
        model = getattr(model, attribute)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors themselves (parameters included, not detached) by the keys that the model has without wrappers.

    Raises ValueError for an entry that is no tensor, as get_extra_state may give.
    """
    plain = plain_names(model)
    state = {plain(key): value for key, value in model.state_dict(keep_vars=True).items()}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{type(model).__name__}: {key} is {type(value).__name__}, expected a tensor")
    return state


def raw_keys(model: nn.Module) -> dict[str, str]:
    """The keys of the model's own state dict by those it has without wrappers."""
    plain = plain_names(model)
    return {plain(key): key for key in model.state_dict(keep_vars=True)}


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """A function from a key of ``model`` to the key it has without wrappers, those around inner modules included."""
    wrappers = [
        (f"{name}." if name else "", attribute)
        for name, module in model.named_modules(remove_duplicate=False)
        if (attribute := _wrapped_attribute(module))
    ]
    wrappers.sort(key=lambda wrapper: len(wrapper[0]), reverse=True)

    def plain(key: str) -> str:
        for name, attribute in wrappers:  # the innermost first: the outer names are still in front of it
            if key.startswith(f"{name}{attribute}."):
                key = name + key[len(name) + len(attribute) + 1 :]
        return key

    return plain


def _wrapped_attribute(module: nn.Module) -> str | None:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds; nothing is compiled without it
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return "_orig_mod"
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    return None


def _reference_model(model: nn.Module, library: str) -> tuple[str, nn.Module]:
    # Here, as only this kind of reference knows of zoo's models.
    from zoo.registry import build, options_of, resolve, spec_of

    spec = spec_of(model)
    if spec is None:
        raise ValueError(
            f"reference {library!r} needs a model of zoo.create, got a {type(model).__name__} that carries no name; "
            "give the reference model itself"
        )
    name = f"{library}/{spec.name.rpartition('/')[2]}"
    try:
        with torch.device("meta"):
            if name == "torchvision/mlp":
                options = {**(options_of(resolve("mlp")) or {}), **spec.options}
                return "torchvision.ops.MLP", _torchvision_mlp(**options)
            return f"{name} of the same options", build(name, spec.options)
    except TypeError as error:
        raise ValueError(f"{name} is no reference for {spec.name}: {error}; give the reference model itself") from error


def _torchvision_mlp(in_features: int, hidden: Sequence[int], num_classes: int, **_: Any) -> nn.Module:
    from torchvision.ops import MLP

    return MLP(in_features, [*hidden, num_classes] if num_classes else [*hidden])
