"""Swaps layers in a model, in place and reversibly, and says what was swapped and what was not, and why.

A swap changes the class of a module. The module object, its Parameters, hooks, flags, extra attributes and its place
in the model stay, so optimizers, tied weights and state dicts do not notice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.fusing import Place, linears_of, plan_units
from zoo.isolation import undisturbed
from zoo.layers.patched import Patched, adopt, all_or_nothing, release
from zoo.layers.registry import get_layer, kind_of
from zoo.planning import plan, runs
from zoo.policy import NOT_SELECTED, Only, Rule, forget, policy_of, remember
from zoo.report import Report
from zoo.state_dict import unwrap
from zoo.watching import Watch, watch

__all__ = ["Rule", "SwapReport", "apply_rules", "patch", "policy_of", "unpatch"]


@dataclass(frozen=True)
class SwapReport(Report):
    """What :func:`patch` did.

    ``ok``: every layer that was asked for runs as the custom one.
    """

    kind: str
    layer: str
    swapped: tuple[str, ...]
    """Names of the modules that are the custom layer now (before this call already, or by it)."""
    skipped: dict[str, str]
    """Name of each other module of the kind -> why it was left alone."""
    proven: bool = False
    """Whether a probe forward (``example``) showed that each swapped one runs."""

    @property
    def ok(self) -> bool:
        return all(reason == NOT_SELECTED for reason in self.skipped.values())

    def __str__(self) -> str:
        total = len(self.swapped) + len(self.skipped)
        lines = [f"{len(self.swapped)} of {total} {self.kind} layers run as {self.layer!r}"]
        lines[0] += " (shown by a probe forward)" if self.proven else ""
        lines += [f"  {name or '(the model itself)'}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def patch(
    model: nn.Module, kind: str = "linear", *, layer: str = "zoo", only: Only | list[str] = None, example: Any = None
) -> SwapReport:
    """Swap the layers of a kind for a registered one, in place.

    Args:
        model: any module; one that is itself such a layer is swapped too.
        kind: the kind of layer: "linear", "layer_norm", "conv2d", or "mlp", the unit Linear, activation, (dropout),
            Linear. zoo brings layers of its own for "linear" and "mlp" alone.
        layer: the registered name of the layer to put in (:func:`zoo.list_layers`).
        only: which ones: None (all), "head" (the classifier), globs over module names, or a predicate (name, module).
        example: an input of the model, or the tuple of its positional arguments. With it a probe forward in training
            and one in eval mode without gradients prove that what is reported as swapped runs; what did not run is put
            back. The probe leaves the model's modes and buffers and the random number generators as they were.

    A parent that reads the weight of a layer past its forward is patched with it where zoo has an adapter for its class
    (:func:`zoo.register_adapter`): MultiheadAttention, for one, whose in-projection then runs as the layer too, and
    TransformerEncoderLayer, which then leaves out its fused fast path. A parent that does the arithmetic runs one layer
    for all the weights that it reads, so ``only`` selects all of them or none. In any other parent the layer is left
    alone, unless the probe shows it running in both modes.

    A unit is named after its parent (timm's Mlp), or in an nn.Sequential by its first and its last module
    (``classifier.0-3``); ``only`` selects it by that name, or with both of its Linears. It runs as one layer where that
    is exact, which is seen at each call: not while a dropout in it drops values, nor while one of its modules has a
    hook; its modules run then, as whatever they were swapped for, and :func:`zoo.coverage` says so.

    A second patch adds to the first; :func:`unpatch` undoes all. The choice stays with the model: a head that
    ``reset_classifier`` makes, deep copies and EMA copies follow it.

    Raises:
        ValueError: unknown kind or layer, an ``only`` of the wrong form, a glob that matches nothing, "head" where the
            model has none, a layer whose ``adopt`` breaks the module, an example that the model does not take. The
            model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"patch: model must be an nn.Module, got {type(model).__name__}")
    rule = Rule(kind, layer, only)  # type: ignore[arg-type]
    report = _apply(model, rule, example=example, strict=True)
    remember(model, rule)
    return report


def unpatch(model: nn.Module) -> None:
    """Undo every :func:`patch` of the model exactly. A layer that was built as zoo's own stays what it is."""
    forget(model)
    for module in model.modules():
        if isinstance(module, Patched):
            release(module)


def apply_rules(model: nn.Module, rules: Iterable[Rule], *, but: Collection[nn.Module] = ()) -> None:
    """Apply a stored policy to a model, and keep it as its policy. Globs that match nothing here are passed over.

    The modules in ``but`` are left as they are.
    """
    for rule in rules:
        _apply(model, rule, strict=False, but=but)
        remember(model, rule)


def _apply(
    model: nn.Module, rule: Rule, *, strict: bool, example: Any = None, but: Collection[nn.Module] = ()
) -> SwapReport:
    get_layer(rule.kind, rule.layer)
    if kind_of(rule.kind).stock is None:
        return _apply_to_units(model, rule, example=example, strict=strict, but=but)
    planned = plan(model, rule, strict=strict, probed=example is not None, but=but)
    with all_or_nothing([*planned.layers.values(), *planned.parents]):
        for module in [*planned.layers.values(), *planned.parents]:
            if not runs(module, rule):
                if isinstance(module, Patched):
                    release(module)
                adopt(module, rule.kind, rule.layer)
        if example is not None:
            for module in planned.skip(_idle(model, planned.layers, planned.past, example), settled=planned.parents):
                if isinstance(module, Patched) and module.zoo_kind == rule.kind:
                    release(module)
    return _report(rule, planned.modules, planned.layers, planned.skipped, proven=example is not None)


def _apply_to_units(
    model: nn.Module, rule: Rule, *, strict: bool, example: Any, but: Collection[nn.Module]
) -> SwapReport:
    planned = plan_units(model, rule, strict=strict, but=but)
    with all_or_nothing(planned.parents):
        planned.make()
        if example is not None:
            apart = _apart(model, planned.units, example)
            planned.put_back([planned.units[name] for name in apart])
            planned.skip(apart)
    return _report(rule, planned.places, planned.units, planned.skipped, proven=example is not None)


def _report(
    rule: Rule, known: Collection[str], swapped: Collection[str], skipped: Mapping[str, str], *, proven: bool
) -> SwapReport:
    return SwapReport(
        rule.kind,
        rule.layer,
        tuple(name for name in known if name in swapped),
        {name: skipped[name] for name in known if name in skipped},
        proven=proven,
    )


def _idle(model: nn.Module, layers: dict[str, nn.Module], past: dict[nn.Module, str], example: Any) -> dict[str, str]:
    """The layers that do not run, with the reason, as probe forwards in training and in eval mode show."""
    probes = _probes(model, {module: name for name, module in layers.items()}, example)
    idle: dict[str, str] = {}
    for name, module in layers.items():
        key = id(module)
        if bypass := next((mode for mode, seen in probes.items() if key in seen.past and not seen.calls[key]), None):
            idle[name] = f"its weight goes past its forward into {probes[bypass].past[key]} in {bypass} mode"
        elif fell_back := [reason for seen in probes.values() for reason in seen.fallbacks.get(key, ())]:
            idle[name] = f"it falls back: {fell_back[0]}"
        elif not any(seen.calls[key] for seen in probes.values()):
            idle[name] = f"not called in the probe forward in {' or '.join(probes)} mode"
        elif module in past and "training" not in probes:
            idle[name] = f"{past[module]}, and the example cannot show otherwise: it does not run in training mode"
    return idle


def _apart(model: nn.Module, units: Mapping[str, Place], example: Any) -> dict[str, str]:
    """The units that run as one in no probe forward, with the reason."""
    probes = _probes(model, {m: name for name, place in units.items() for m in (place[0], *linears_of(place))}, example)
    apart: dict[str, str] = {}
    for name, place in units.items():
        first, _ = linears_of(place)
        if not any(seen.given_calls[id(first)] for seen in probes.values()):
            why = [reason for seen in probes.values() for reason in seen.fallbacks.get(id(place[0]), ())]
            apart[name] = why[0] if why else f"not called in the probe forward in {' or '.join(probes)} mode"
    return apart


def _probes(model: nn.Module, names: Mapping[nn.Module, str], example: Any) -> dict[str, Watch]:
    """What forwards showed of the named modules, by mode, "training" and "eval"."""
    if any(isinstance(module, nn.modules.lazy.LazyModuleMixin) for module in model.modules()):
        raise ValueError("example: the model has lazy modules, which a probe would initialise; run it once first")
    arguments = example if isinstance(example, tuple) else (example,)
    probes: dict[str, Watch] = {}
    for mode in ("training", "eval"):
        training = mode == "training"
        with_grad = training and not torch.is_inference_mode_enabled()
        with undisturbed(model), torch.set_grad_enabled(with_grad), watch(names, model.modules()) as seen:
            model.train(training)
            try:
                unwrap(model)(*arguments)
            except Exception as error:
                if failed := [names[module] for module, _ in seen.running if module in names]:
                    where = f"the layer swapped in at {failed[-1]!r} failed"
                elif training:  # as BatchNorm on a batch of one
                    continue
                else:
                    where = "the model does not take it"
                raise ValueError(f"example: {where} in {mode} mode: {type(error).__name__}: {error}") from error
        probes[mode] = seen
    return probes
