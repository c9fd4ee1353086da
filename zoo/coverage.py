"""What really ran: which custom layers a forward called, and which share of the FLOPs went through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from zoo.fusing import Place, places_of, plan_units
from zoo.isolation import undisturbed
from zoo.layers.registry import custom_layer, kind_of, stock_kind
from zoo.layers.units import FusedParent, inside_units
from zoo.planning import plan
from zoo.policy import NOT_SELECTED, Rule, policy_of
from zoo.report import Report
from zoo.state_dict import unwrap
from zoo.watching import Watch, watch

__all__ = ["CoverageReport", "ModuleCoverage", "UnitCoverage", "coverage"]

Status = Literal["custom", "never called", "skipped", "fell back"]
UnitStatus = Literal["as one", "never called", "skipped", "apart"]
_LOST = "the policy asks for it, but it is a stock layer made after the patch; patch again"


@dataclass(frozen=True)
class ModuleCoverage:
    """What happened to one layer in the forward."""

    name: str
    kind: str
    status: Status
    """"custom": its own kernel ran in every call, be it a call of the layer or one in an adapted parent on its weight.
    "fell back": some calls went to torch. "never called": a custom layer whose forward nobody called. "skipped": not a
    custom layer."""
    layer: str | None
    """The registered name of the custom layer, or None."""
    calls: int
    fallbacks: dict[str, int]
    """Reason -> number of calls that fell back."""
    flops: int
    """Of its forwards, 2 M N K a product; of a custom layer's never less than the stock layer's would have been.
    What an adapted parent multiplies by weights of its own, as MultiheadAttention does for its in-projection, counts
    with the first layer below it."""
    reason: str
    """Why it was never called or skipped; empty for the others."""
    fault: bool
    """Whether the model's policy is not kept here: a fallback, a weight that went past the custom layer, or a stock
    layer that took a custom one's place. A layer that is merely idle in this forward is none."""


@dataclass(frozen=True)
class UnitCoverage:
    """What happened to one unit of several modules in the forward. Its Linears are told of by themselves, too."""

    name: str
    kind: str
    status: UnitStatus
    """"as one": its layer ran. "apart": its modules ran, in some calls at least. "never called": neither. "skipped":
    the policy asks for it, but it was not made one."""
    layer: str | None
    """The registered name of its layer, or None."""
    calls: int
    """How often the layer ran."""
    apart: dict[str, int]
    """Why its modules ran instead -> number of calls. No fault: they are what they were swapped for."""
    reason: str
    """Why it was skipped; empty for the others."""


@dataclass(frozen=True)
class CoverageReport(Report):
    """What really ran in one forward. ``ok``: no layer has a fault (see :class:`ModuleCoverage`)."""

    modules: tuple[ModuleCoverage, ...]
    flops: int
    """Of the whole forward."""
    custom_flops: int
    """Of those, the ones that ran through custom layers."""
    units: tuple[UnitCoverage, ...] = ()
    """The units that run as one layer, or that the policy asks for."""

    @property
    def ok(self) -> bool:
        return not any(module.fault for module in self.modules)

    @property
    def share(self) -> float:
        """The share of the forward's FLOPs that ran through custom layers, 0 to 1."""
        return self.custom_flops / self.flops if self.flops else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "share": self.share}

    def __str__(self) -> str:
        counts = Counter(module.status for module in self.modules)
        summary = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no layer of a known kind"
        together = sum(unit.status == "as one" for unit in self.units)
        summary += f"; {together} of {len(self.units)} units as one" if self.units else ""
        lines = [f"{self.share:.1%} of {self.flops:.3g} FLOPs ran through custom layers; {summary}"]
        for module in self.modules:
            if module.status != "custom":
                fallbacks = (f"{reason} ({n} of {module.calls} calls)" for reason, n in module.fallbacks.items())
                why = module.reason or "; ".join(fallbacks)
                lines.append(f"  {module.name or '(the model itself)'}: {module.status}: {why}")
        for unit in self.units:
            if unit.status != "as one":
                reasons = (f"{reason} ({n} of {unit.calls + n} calls)" for reason, n in unit.apart.items())
                why = unit.reason or "; ".join(reasons)
                lines.append(f"  {unit.name or '(the model itself)'}: {unit.status}{': ' if why else ''}{why}")
        return "\n".join(lines)


def coverage(model: nn.Module, *inputs: Any) -> CoverageReport:
    """Run ``model(*inputs)`` once, in the mode it is in, and report which custom layers really ran.

    It tells of all Linears, and of the other kinds of layers that the model was patched with or has custom ones of.
    The model's modes and buffers and the random number generators are left as they were. What is compiled runs
    uncompiled, and of DataParallel and DistributedDataParallel the module inside.
    """
    kinds = {"linear", *(rule.kind for _, rule in _rules(model))}
    modules_of_kinds = [(name, module, kind) for name, module in model.named_modules() if (kind := stock_kind(module))]
    kinds |= {kind for _, module, kind in modules_of_kinds if kind not in kinds and custom_layer(module, kind)}
    named = [(name, module, kind) for name, module, kind in modules_of_kinds if kind in kinds]
    fused = [module for module in model.modules() if isinstance(module, FusedParent)]
    within = {module: p.zoo_layer for p in fused for module in inside_units(p, below=False)}
    with undisturbed(model), watch([*(m for _, m, _ in named), *fused], model.modules()) as seen:
        unwrap(model)(*inputs)
    reasons = _Reasons(model)
    modules, custom_flops = [], 0
    for name, module, kind in named:
        key, layer = id(module), custom_layer(module, kind)
        if layer is None and 0 < seen.given_calls[key] == seen.calls[key]:  # a stock layer that only its unit ran
            layer = within.get(module)
        calls, flops, fallbacks = seen.calls[key], seen.flops[key], dict(seen.fallbacks.get(key, {}))
        passed = f"its weight went past its forward into {seen.past[key]}" if key in seen.past and not calls else ""
        reason, fault = "", bool(fallbacks)
        status: Status
        if layer is None:
            status = "skipped"
            reason = passed or reasons.of(module)
            fault = reason == _LOST
        elif not calls:
            status = "never called"
            reason, fault = passed or "idle in this forward", bool(passed)
        else:
            status = "fell back" if fallbacks else "custom"
            custom_flops += 0 if fallbacks else flops
        modules.append(ModuleCoverage(name, kind, status, layer, calls, fallbacks, flops, reason, fault))
    return CoverageReport(tuple(modules), seen.total, custom_flops, tuple(_units(model, seen)))


def _units(model: nn.Module, seen: Watch) -> Iterator[UnitCoverage]:
    skipped: dict[Place, tuple[Rule, str]] = {}
    for part, rule in _rules(model):
        if kind_of(rule.kind).stock is None:
            planned = plan_units(part, rule, strict=False)
            skipped |= {planned.places[n]: (rule, why) for n, why in planned.skipped.items() if why != NOT_SELECTED}
            skipped |= dict.fromkeys(planned.units.values(), (rule, _LOST))
    for name, (parent, unit) in places_of(model, made=True).items():
        if isinstance(parent, FusedParent) and parent.zoo_units.get(unit[0]) == unit:
            calls, apart = seen.given_calls[id(parent._modules.get(unit[0]))], dict(seen.fallbacks.get(id(parent), {}))
            status: UnitStatus = "apart" if apart else "as one" if calls else "never called"
            yield UnitCoverage(name, parent.zoo_kind, status, parent.zoo_layer, calls, apart, "")
        elif (parent, unit) in skipped:
            rule, reason = skipped[parent, unit]
            yield UnitCoverage(name, rule.kind, "skipped", None, 0, {}, reason)


def _rules(model: nn.Module) -> Iterator[tuple[nn.Module, Rule]]:
    """The policies that lie on a model and its parts."""
    return ((part, rule) for part in model.modules() for rule in policy_of(part))


class _Reasons:
    """Why layers are stock ones, in the light of the policies that lie on the model and its parts."""

    def __init__(self, model: nn.Module) -> None:
        rules = [(part, rule) for part, rule in _rules(model) if kind_of(rule.kind).stock is not None]
        plans = [plan(part, rule, strict=False) for part, rule in rules]
        self._kinds = {rule.kind for _, rule in rules}
        self._reasons: dict[nn.Module, str] = {}
        for made in plans:
            for name, reason in made.skipped.items():
                if reason != NOT_SELECTED:
                    self._reasons.setdefault(made.modules[name], reason)
            self._reasons |= dict.fromkeys(made.layers.values(), _LOST)

    def of(self, module: nn.Module) -> str:
        if not self._kinds:
            return "the model was not patched"
        if (kind := stock_kind(module)) not in self._kinds:
            return f"no patch is for {kind} layers"
        return self._reasons.get(module, NOT_SELECTED)
