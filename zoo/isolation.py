"""Runs a model without leaving a trace: modes, buffers and what else modules keep, random number generators and cuDNN's
settings come back."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy

from zoo.meta_device import within
from zoo.readout import equalities

__all__ = ["cudnn_set", "float32_convolutions", "nothing_kept", "undisturbed"]


@contextlib.contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """Inside, the models may be run and their modes set; after, also after an exception, all is as before:
    every module's ``training``, every buffer's value, which tensors modules hold (:func:`nothing_kept`), and the RNG
    state of the CPU and of the models' GPUs."""
    modules = [module for model in models for module in model.modules()]
    modes = [(module, module.training) for module in modules]
    buffers = [b for module in modules for b in module._buffers.values() if b is not None and _has_value(b)]
    values = {b: b.detach().clone() for b in buffers}
    devices = {t.device for model in models for t in (*model.parameters(), *model.buffers())}
    with torch.random.fork_rng(devices=[d.index for d in devices if d.type == "cuda"]):
        try:
            with nothing_kept(*models):
                yield
        finally:
            for module, training in modes:
                module.training = training
            for (buffer, value), same in zip(values.items(), _unchanged(values.items()), strict=True):
                if not same:
                    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                        buffer.copy_(value)


@contextlib.contextmanager
def nothing_kept(*models: nn.Module) -> Iterator[None]:
    """After it, the models' modules hold those tensors that they held before, also after an exception.

    A model may keep a result for the next call, in an attribute, a buffer, or a dict or list in one. Kept with its
    graph it cannot be differentiated twice; kept without one it has no gradient. Where a module's are put back, so are
    its other attributes: a flag, a length or a shape may say what is kept. Parameters stay as they are, made in a first
    call or gathered from shards, and so do values changed in place.
    """
    modules = [module for model in models for module in model.modules()]
    held = [
        (value, dict(value) if isinstance(value, dict) else list(value))
        for value in within(vars(module) for module in modules)
        if isinstance(value, (dict, list, deque))
    ]
    held.reverse()  # what holds a container asks whether it holds tensors
    try:
        yield
    finally:
        changed = {id(container) for container, before in held if _put_back(container, before)}
        if changed:
            attributes: dict[int, Any] = {id(container): before for container, before in held}
            for own in map(vars, modules):
                if id(own) in attributes and any(id(value) in changed for value in within([own])):
                    _exactly(own, attributes[id(own)])


@contextlib.contextmanager
def cudnn_set(**settings: bool) -> Iterator[None]:
    """Inside, these settings of ``torch.backends.cudnn`` hold, and all others as they are; after, what held before."""
    before = {name: getattr(torch.backends.cudnn, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(torch.backends.cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.backends.cudnn, name, value)


@contextlib.contextmanager
def float32_convolutions() -> Iterator[None]:
    """Inside, cuDNN does not compute in TF32; after, its settings are as before.

    Whichever of torch's switches were set: the newer ones outdo ``allow_tf32``, or make it raise when it is read.
    """
    cudnn: Any = torch.backends.cudnn
    parts = cudnn.conv, cudnn.rnn
    before = [part.fp32_precision for part in parts]
    try:
        allowed = cudnn.allow_tf32
    except RuntimeError:
        allowed = None
    try:
        if allowed is not None:
            cudnn.allow_tf32 = False
        for part in parts:
            if allowed is None or part.fp32_precision == "tf32":
                part.fp32_precision = "ieee"
        yield
    finally:
        if allowed is not None:
            cudnn.allow_tf32 = allowed
        for part, precision in zip(parts, before, strict=True):
            if part.fp32_precision != precision:
                part.fp32_precision = precision


def _put_back(container: Any, before: Any) -> bool:
    """Undo the changes by which a dict, list or deque holds other tensors, or other containers of tensors.

    Returns whether there were any."""
    if not isinstance(container, dict):
        same = len(container) == len(before) and (
            all(map(operator.is_, before, container)) or all(map(_same_or_made, before, container))
        )
        if same or not _has_tensors(*container, *before):
            return False
        container.clear()
        container.extend(before)
        return True
    other = []
    for key in dict.fromkeys((*before, *container)):
        old, new = before.get(key), container.get(key)
        if not _same_or_made(old, new) and _has_tensors(old, new):
            other.append(key)
    for key in other:
        if key in before:
            container[key] = before[key]
        else:
            del container[key]
    return bool(other)


def _same_or_made(old: Any, new: Any) -> bool:
    """Whether nothing changed, or a parameter is new or in the place of another."""
    return old is new or (isinstance(new, nn.Parameter) and (old is None or isinstance(old, nn.Parameter)))


def _exactly(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for key in attributes.keys() - before.keys():
        del attributes[key]
    attributes.update(before)


def _has_tensors(*values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in within(values))


def _unchanged(pairs: Collection[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Whether each buffer has its value still; not for certain where its layout is not strided."""
    comparable = [(b, v) for b, v in pairs if b.layout is torch.strided and type(b) in (torch.Tensor, nn.Buffer)]
    same = dict(zip((id(b) for b, _ in comparable), equalities(comparable), strict=True))
    return [same[id(b)] if id(b) in same else b.layout is torch.strided and torch.equal(b, v) for b, v in pairs]


def _has_value(buffer: torch.Tensor) -> bool:
    return not (is_lazy(buffer) or buffer.is_meta or is_fake(buffer))
