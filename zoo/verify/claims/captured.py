"""The layer alone on what the layers of a stock model were given: their inputs and their outputs' gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.judging import Measure
from zoo.layers.kinds import stock_kind
from zoo.passes import private_copy
from zoo.verify.claims.learning import cross_entropy
from zoo.verify.models import stock_model, swapped
from zoo.verify.outcome import REFUSED, Broken, Refused, Untested, outcome_of
from zoo.verify.subject import ALL, Case, Subject, evaluate, hold, measures, terms_of

__all__ = ["Call", "calls_of", "replayed"]


@dataclass
class Call:
    """One call of a layer in a model, with copies that have the strides of what was there."""

    name: str
    module: nn.Module
    input: Tensor
    cotangent: Tensor | None = None

    def __str__(self) -> str:
        shape, made = tuple(self.input.shape), () if self.cotangent is None else tuple(self.cotangent.shape)
        out = made[-1] if made[:-1] == shape[:-1] else made
        return f"{self.name} {shape}->{out}" if made else f"{self.name} {shape}"


def calls_of(model: nn.Module, images: Tensor, names: Collection[str]) -> list[Call]:
    """What each of the named layers is called with in a training step, in the order of the calls."""
    calls: list[Call] = []

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            call = Call(name, module, private_copy(args[0]))
            calls.append(call)
            if output.requires_grad:
                output.register_hook(lambda grad: setattr(call, "cotangent", private_copy(grad)))

        return keep

    chosen = [(name, module) for name, module in model.named_modules() if name in names]
    handles = [module.register_forward_hook(hook(name)) for name, module in chosen]
    try:
        cross_entropy(model, images).backward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def replayed(s: Subject, name: str) -> None:
    got: dict[str, Measure | None] = {}
    want: dict[str, Measure | None] = {}
    refused: list[str] = []
    for half in (False, True):
        model, images = stock_model(name, s.device)
        custom = copy.deepcopy(model)
        with swapped(custom, s) as swap:
            # a unit is no layer, and has no parameters of its own
            layers = [name for name, module in model.named_modules() if name in swap.names and stock_kind(module)]
            with _precision(s, half):
                calls = calls_of(model, images, layers)
            for call in calls:
                what = f"{call} under autocast" if half else str(call)
                right = evaluate(copy.deepcopy(call.module).double(), _case(call, torch.float64))
                with _precision(s, half):
                    try:
                        values = evaluate(custom.get_submodule(call.name), _case(call))
                    except Exception as error:
                        status, reason = outcome_of(error)
                        if status != REFUSED:
                            raise Broken(f"{what}: {reason}") from None
                        refused.append(f"{what}: {reason}")
                        continue
                    stock = evaluate(copy.deepcopy(call.module), _case(call))
                got.update(measures(what, values, right))
                terms = terms_of(call.module, right["output"])
                want.update({name: m and m.of_sum(terms) for name, m in measures(what, stock, right).items()})
    if not want and not refused:
        raise Untested(f"the stock model calls no {s.kind} layer that can be swapped")
    hold(got, want)
    if refused:
        raise Refused(f"{len(refused)} calls, first {refused[0]}")


def _case(call: Call, dtype: torch.dtype | None = None) -> Case:
    names = {"input", *(name for name, _ in call.module.named_parameters())}
    asked = () if call.cotangent is None else tuple(name for name in ALL if name in names)
    cotangent = None if call.cotangent is None else call.cotangent.to(dtype or call.cotangent.dtype)
    return Case(call.name, call.input.to(dtype or call.input.dtype), gradients=asked, cotangent=cotangent)


@contextlib.contextmanager
def _precision(s: Subject, half: bool) -> Iterator[None]:
    with torch.autocast(s.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        yield
