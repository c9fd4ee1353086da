"""Runs a model without leaving a trace: modes, buffers, random number generators and cuDNN's settings come back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy

from zoo.readout import equalities

__all__ = ["cudnn_set", "float32_convolutions", "undisturbed"]


@contextlib.contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """Inside, the models may be run and their modes set; after, also after an exception, all is as before:
    every module's ``training``, every buffer's value, and the RNG state of the CPU and of the models' GPUs."""
    modules = [module for model in models for module in model.modules()]
    modes = [(module, module.training) for module in modules]
    buffers = [(module, dict(module._buffers)) for module in modules]
    values = {b: b.detach().clone() for _, held in buffers for b in held.values() if b is not None and _has_value(b)}
    devices = {t.device for model in models for t in (*model.parameters(), *model.buffers())}
    with torch.random.fork_rng(devices=[d.index for d in devices if d.type == "cuda"]):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, held in buffers:
                for name, buffer in held.items():
                    module._buffers[name] = buffer
            for (buffer, value), same in zip(values.items(), _unchanged(values.items()), strict=True):
                if not same:
                    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                        buffer.copy_(value)


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


def _unchanged(pairs: Collection[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Whether each buffer has its value still; not for certain where its layout is not strided."""
    comparable = [(b, v) for b, v in pairs if b.layout is torch.strided and type(b) in (torch.Tensor, nn.Buffer)]
    same = dict(zip((id(b) for b, _ in comparable), equalities(comparable), strict=True))
    return [same[id(b)] if id(b) in same else b.layout is torch.strided and torch.equal(b, v) for b, v in pairs]


def _has_value(buffer: torch.Tensor) -> bool:
    return not (is_lazy(buffer) or buffer.is_meta or is_fake(buffer))
