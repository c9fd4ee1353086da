"""Plans a swap: which modules become the custom layer, which of their parents must be adapted for it, and what not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from zoo.bypass import weights_read_past_forward
from zoo.layers._fallback import alters_torch_functions
from zoo.layers.adapters import adapter_of, computing, routes, unfit
from zoo.layers.patched import Patched
from zoo.layers.registry import custom_layer, get_layer, stock_of
from zoo.ops import DTYPES
from zoo.policy import NOT_SELECTED, Rule
from zoo.selection import names_of, selected, unswappable

__all__ = ["Plan", "plan", "runs"]


@dataclass
class Plan:
    """What a rule comes to in a model."""

    rule: Rule
    modules: dict[str, nn.Module]
    """All modules of the kind by name, in the model's order."""
    layers: dict[str, nn.Module]
    """Those that are, or are to become, the custom layer."""
    skipped: dict[str, str]
    """The others -> why."""
    past: dict[nn.Module, str]
    """Modules whose weight goes past their forward in a parent that cannot be adapted -> where."""
    parents: dict[nn.Module, list[str]]
    """What is to be adapted -> the names of the layers whose weights it reads."""

    def skip(self, reasons: dict[str, str], *, settled: Collection[nn.Module] = ()) -> list[nn.Module]:
        """Take layers out, and what cannot be without them. Returns the modules that are not to be patched after all.

        A parent that does the arithmetic runs one layer for all the weights that it reads, so they go together; but
        for the ``settled`` ones.
        """
        out: list[nn.Module] = []
        while reasons:
            self.skipped.update(reasons)
            out += [self.layers.pop(name) for name in reasons if name in self.layers]
            taken, reasons = reasons, {}
            for parent, names in list(self.parents.items()):
                left = [name for name in names if name in self.layers]
                gone = next((name for name in names if name in taken), None)
                if not left:
                    out.append(parent)
                    del self.parents[parent]
                elif gone and routes(parent, self.rule.kind) and parent not in settled:
                    one = f"{type(parent).__name__} runs one layer for all the weights that it reads"
                    reasons.update(dict.fromkeys(left, f"{one}, and {gone} is left alone: {self.skipped[gone]}"))
        return out


def plan(model: nn.Module, rule: Rule, *, strict: bool, probed: bool = False, but: Collection[nn.Module] = ()) -> Plan:
    """Plan a rule. ``probed``: a forward will show whether doubtful layers run, so they are not left out.

    The modules in ``but`` are left as they are. Raises ValueError as :func:`zoo.selection.selected`.
    """
    names = names_of(model, rule.kind)
    asked = selected(model, names, rule, strict=strict) - set(but)
    read_by = weights_read_past_forward(model)
    past: dict[nn.Module, str] = {}
    for module, places in read_by.items():
        for parent, where in places.items():
            if (why := _unadaptable(parent, rule)) is not None:
                past.setdefault(module, f"{where}{why}")
    named = {name: module for module, (name, *_) in names.items()}
    made = Plan(rule, named, dict(named), {}, past, {})
    skipped = {}
    for name, module in named.items():
        if runs(module, rule):
            continue
        if module not in asked:
            skipped[name] = NOT_SELECTED
        elif reason := unswappable(module, rule.kind, rule.layer):
            skipped[name] = reason
        elif module in past and not probed:
            skipped[name] = f"{past[module]}; pass example= to see whether it runs nevertheless"
    for name, module in named.items():
        for reader in read_by.get(module, ()):
            computes = computing(reader, rule.kind)
            adapter = None if computes is None else adapter_of(computes, rule.kind)
            if computes is not None and adapter and not adapter.asks and _unadaptable(computes, rule) is None:
                made.parents.setdefault(computes, []).append(name)
    made.skip(skipped, settled={parent for parent in made.parents if runs(parent, rule)})
    return made


def runs(module: nn.Module, rule: Rule) -> bool:
    """Whether a module runs the rule's layer already: as that layer, or as a parent that was adapted to it."""
    if isinstance(module, stock_of(rule.kind)):
        return custom_layer(module, rule.kind) == rule.layer
    if not isinstance(module, Patched):
        return False
    if module.zoo_kind != rule.kind:  # an adapted parent that only keeps off a fast path does so for both kinds
        return adapter_of(module, rule.kind) is not None and not routes(module, rule.kind)
    return module.zoo_layer == rule.layer


def _unadaptable(reader: nn.Module, rule: Rule) -> str | None:
    """Why a parent that reads weights cannot run the layer, as added to where it reads them; or None if it can."""
    parent = computing(reader, rule.kind)
    if parent is None or runs(parent, rule):
        return None
    adapter = adapter_of(parent, rule.kind)
    if adapter is None:
        return ""
    if adapter.asks or not routes(parent, rule.kind):
        return None
    if why := unfit(get_layer(rule.kind, rule.layer)):
        return f", and the layer {rule.layer!r} {why}"
    for name, weight in parent._parameters.items():
        if weight is not None and weight.dim() > 1 and (alters_torch_functions(weight) or weight.dtype not in DTYPES):
            return f", and its own {name} is a {type(weight).__name__} of {weight.dtype}"
    return None
