"""``zoo check``: a model with custom layers beside the model that it should equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from torch import nn

from zoo import weights_index
from zoo.models.mlp import ACTIVATIONS
from zoo.parity import ParityReport, parity
from zoo.preparing import choose_device, make, real_inputs
from zoo.registry import options_of, resolve, spec_of
from zoo.state_dict import StateDictReport, check_state_dict
from zoo.swap import SwapReport, patch
from zoo.tables import TableReport, verdict

__all__ = ["CheckReport", "check"]


@dataclass(frozen=True)
class CheckReport(TableReport):
    """What :func:`check` found. ``ok``: the state dicts agree, and the outputs as well as float arithmetic allows."""

    model: str
    reference: str
    weights: str | None
    device: str
    state_dict: StateDictReport
    swap: SwapReport | None
    """None, as ``parity`` is, where the state dicts differ."""
    parity: ParityReport | None

    @property
    def ok(self) -> bool:
        return self.state_dict.ok and self.parity is not None and self.parity.ok

    def to_dict(self) -> dict[str, Any]:
        nested = {key: part.to_dict() for key in ("state_dict", "swap", "parity") if (part := getattr(self, key))}
        return {**super().to_dict(), **nested}

    def __rich__(self) -> RenderableType:
        weights = f"weights {self.weights}" if self.weights else "fresh weights"
        parts = [f"{self.model} with custom layers, {weights}, on {self.device}", "", str(self.state_dict)]
        if self.swap is not None and self.parity is not None:
            parts += ["", str(self.swap), "", str(self.parity)]
        else:
            parts += ["", "outputs not compared: models whose state dicts differ cannot hold equal weights"]
        end = "is" if self.ok else "is NOT"
        return Group(*parts, "", verdict(self.ok, f"{self.model} with custom layers {end} what {self.reference} is"))


def check(
    name: str, *, against: str | None, weights: str | None, gradients: bool, device: str, options: Mapping[str, Any]
) -> CheckReport:
    """Build the model and its reference, and compare them.

    The reference loads the same weights in its own library's way; where there are none, or its library does not know
    them, it is given the model's. ValueError for names, options or weights that do not go together.
    """
    place = choose_device(device)
    source, _, bare = name.rpartition("/")
    library = against or source or "torchvision"
    reference_name = f"{library}/{bare}"
    model = make(name, options, weights=weights, custom_linear=True, device=place)
    give = weights is None or weights in weights_index.names() or bare == "mlp"
    if bare == "mlp":
        reference_name, reference = "torchvision.ops.MLP", _torchvision_mlp(library, model).to(place)
    else:
        reference = make(reference_name, options, weights=None if give else weights, device=place)
    state_dict = replace(check_state_dict(model, reference), reference=reference_name)
    swap = found = None
    if state_dict.ok:
        if give:
            reference.load_state_dict(model.state_dict())
        inputs = real_inputs(name, model).to(place)
        swap = patch(model, example=inputs)
        found = parity(model, reference, inputs.flatten(1) if bare == "mlp" else inputs, gradients=gradients)
    return CheckReport(name, reference_name, weights, str(place), state_dict, swap, found)


def _torchvision_mlp(library: str, model: nn.Module) -> nn.Module:
    """torchvision has no ``mlp`` among its classifiers; its building block of that name is the same network."""
    from torchvision.ops import MLP

    if library != "torchvision":
        raise ValueError(f"{library} has no mlp to compare with; leave --against out")
    spec = spec_of(model)
    assert spec is not None  # it came from zoo.create
    options = {**(options_of(resolve("mlp")) or {}), **spec.options}
    widths = [*options["hidden"], *filter(None, [options["num_classes"]])]
    return MLP(options["in_features"], widths, activation_layer=ACTIVATIONS[options["activation"]])
