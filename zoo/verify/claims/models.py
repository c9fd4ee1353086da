"""Claims about whole models with the layer in them, beside the stock model: see :func:`claims_of`.

Each builds the model anew, stock, and puts the layer into a copy of it, as :func:`zoo.verify.models.swapped` says.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from zoo.coverage import coverage
from zoo.isolation import undisturbed
from zoo.parity import ParityReport, parity
from zoo.passes import named_tensors
from zoo.state_dict import check_state_dict
from zoo.swap import unpatch
from zoo.sweep.exactness import Snapshot, outputs_of
from zoo.verify.claims import captured, learning
from zoo.verify.kinds import EVERY
from zoo.verify.models import Swap, stock_model, swapped
from zoo.verify.outcome import Broken, Claim, Untested
from zoo.verify.subject import Subject, saying

__all__ = ["MODELS", "claims_of", "named"]

MODELS = ("mlp", "timm/vit_tiny_patch16_224")
"""What is tried unless told otherwise."""

Check = Callable[[Subject, str], None]


@contextlib.contextmanager
def _both(s: Subject, name: str) -> Iterator[tuple[nn.Module, nn.Module, Tensor, Swap]]:
    """The model with the layer in it, the stock one, and images."""
    stock, images = stock_model(name, s.device)
    custom = copy.deepcopy(stock)
    with swapped(custom, s) as swap:
        yield custom, stock, images, swap


def runs(s: Subject, name: str) -> None:
    with _both(s, name) as (custom, stock, images, swap):
        for training in (True, False):
            mode = "training" if training else "eval"
            with undisturbed(stock, custom), torch.set_grad_enabled(training):
                idle = _idle(custom.train(training), stock.train(training), images, swap)
            if idle:
                first = next(iter(idle))
                raise Broken(
                    f"in {mode} mode {len(idle)} of {len(swap.names)} swapped layers do not run as the layer; "
                    f"first {first}: {idle[first]}"
                )


def _idle(custom: nn.Module, stock: nn.Module, images: Tensor, swap: Swap) -> dict[str, str]:
    """The swapped layers that do not run, and why. What the stock model does not call is not looked for."""
    wanted = _called(stock, images, swap)
    if swap.built:
        seen = _called(custom, images, swap)
        return {name: "it was not called" for name in wanted if name not in seen}
    ran = coverage(custom, images)
    units = {u.name: u.reason or "; ".join(u.apart) or u.status for u in ran.units if u.status != "as one"}
    layers = {
        m.name: m.reason or "; ".join(m.fallbacks) or m.status
        for m in ran.modules
        if m.status != "custom" and m.name in wanted
    }
    return {name: why for name, why in (units | layers).items() if name in swap.names}


def _called(model: nn.Module, images: Tensor, swap: Swap) -> list[str]:
    called: dict[str, None] = {}
    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: called.setdefault(name))
        for name, module in model.named_modules()
        if name in swap.names
    ]
    model(images)
    for handle in handles:
        handle.remove()
    return list(called)


def outputs(s: Subject, name: str) -> None:
    with _both(s, name) as (custom, stock, images, _):
        _hold(parity(custom, stock, images))


def gradients(s: Subject, name: str) -> None:
    with _both(s, name) as (custom, stock, images, _):
        _hold(parity(custom, stock, images, gradients=True))


def autocast(s: Subject, name: str) -> None:
    with _both(s, name) as (custom, stock, images, _), torch.autocast(s.device.type, torch.bfloat16):
        _hold(parity(custom, stock, images, gradients=True))


def _hold(report: ParityReport) -> None:
    if report.ok:
        return
    first, worst = report.first_divergence, report.worst
    where = "" if first is None else f"; the first {first.kind} to part is {saying(first)}"
    failed = sum(not entry.ok for entry in report.entries)
    raise Broken(f"{failed} of {len(report.entries)} tensors are wrong, worst {saying(worst)}{where}")


def state_dict(s: Subject, name: str) -> None:
    with _both(s, name) as (custom, stock, images, _):
        report = check_state_dict(custom, stock)
        if not report.ok:
            raise Broken("; ".join(report.lines()))
        before = outputs_of(custom.eval(), images)
        for what, source, target in (("to the stock model", custom, stock), ("back", stock, custom)):
            # copies, so that nothing is loaded onto itself
            state = {key: value.clone() for key, value in source.state_dict().items()}
            target.load_state_dict(state, strict=True)
            for key, value in target.state_dict().items():
                if not torch.equal(value, state[key]):
                    raise Broken(f"{key} was changed on the way {what}")
        fresh, _ = stock_model(name, s.device)
        for key, value in fresh.state_dict().items():
            if not torch.equal(value, stock.state_dict()[key]):
                raise Broken(f"{key} is not what the stock model has")
        _equal(outputs_of(custom, images), before, "after its own weights were loaded again, the model's outputs")


def unpatched(s: Subject, name: str) -> None:
    stock, images = stock_model(name, s.device)
    stock.eval()
    before, again = outputs_of(stock, images), outputs_of(stock, images)
    snapshot, attributes = Snapshot(stock), {n: set(vars(m)) for n, m in stock.named_modules()}
    weights = {n: p.detach().clone() for n, p in stock.named_parameters()}
    with swapped(stock, s) as swap:
        if swap.built:
            raise Untested(f"it was not patched in, but built: {swap.built}")
        with undisturbed(stock):
            for _, tensor in named_tensors(stock.train()(images), "output"):
                if tensor.requires_grad:
                    tensor.sum().backward()
        outputs_of(stock, images)
        stock.zero_grad(set_to_none=True)
        unpatch(stock)
    for n, module in stock.named_modules():
        if left := set(vars(module)) - attributes.get(n, set()):
            raise Broken(f"after unpatch {n} still has {', '.join(sorted(left))}; set such attributes in adopt()")
    if wrong := snapshot.differences(stock):
        raise Broken(f"after unpatch {'; '.join(wrong)}")
    if changed := [n for n, p in stock.named_parameters() if not torch.equal(p, weights[n])]:
        raise Broken(f"after unpatch {changed[0]} has other values")
    if all(torch.equal(again[n], value) for n, value in before.items()):
        _equal(outputs_of(stock, images), before, "after unpatch the model's outputs")


def _equal(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    if got.keys() != want.keys() or not all(torch.equal(got[n], want[n]) for n in want):
        raise Broken(f"{what} are other ones than before")


_CHECKS: dict[str, tuple[str, Check]] = {
    "model-runs": ("wherever it was swapped in, it runs, in training and eval mode", runs),
    "model-outputs": ("the model's outputs hold against float64 as the stock model's do", outputs),
    "model-gradients": ("every parameter's gradient holds, as the outputs do", gradients),
    "model-autocast": ("outputs and gradients hold under autocast to bfloat16", autocast),
    "model-captured": ("right on the activations and gradients that each stock layer had, alone", captured.replayed),
    "model-sgd": ("losses and weights of 20 steps of SGD are as near to float64's as stock's", learning.sgd),
    "model-sgd-autocast": ("20 steps of SGD under autocast to bfloat16 do so, too", learning.sgd_autocast),
    "model-adamw": ("losses and weights of 20 steps of AdamW are as near to float64's as stock's", learning.adamw),
    "model-top-1": ("trained weights name real images as they do with the stock layer", learning.top1),
    "model-state-dict": ("the model's state dict is the stock model's, both ways", state_dict),
    "model-unpatch": ("zoo.unpatch gives the stock model back exactly", unpatched),
}


def claims_of(model: str) -> tuple[Claim, ...]:
    """The claims about one model, each with the model's name behind an @, as ``model-outputs@mlp``."""
    return tuple(
        Claim(f"{name}@{model}", f"{model}: {says}", functools.partial(_checked, check, model), EVERY)
        for name, (says, check) in _CHECKS.items()
    )


def named(name: str) -> Claim | None:
    """The claim about a model that has this name."""
    _, at, model = name.partition("@")
    return next((claim for claim in claims_of(model) if claim.name == name), None) if at else None


def _checked(check: Check, model: str, s: Subject) -> None:
    if s.against is not None:
        raise Untested("it is compared with a twin, and models have the stock layer")
    check(s, model)
