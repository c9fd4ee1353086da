"""Which kernel would run, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.ops import _library
from zoo.ops._fake import ACTIVATIONS

__all__ = ["Choice", "Rejected", "explain"]


@dataclass(frozen=True)
class Rejected:
    """A kernel that was not chosen."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The kernel that an operator would run, and the trace of what was rejected."""

    kernel: str
    reason: str
    rejected: tuple[Rejected, ...]

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.reason}"]
        lines += [f"  not {r.kernel}: {r.reason}" for r in self.rejected]
        return "\n".join(lines)


def explain(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Choice:
    """Which kernel ``linear`` would run for these arguments, and why; nothing is computed.

    Args: as :func:`zoo.ops.linear`. Raises what it raises.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: None, {', '.join(ACTIVATIONS)}")
    meta: list[Any] = [None if t is None else t.detach().to("meta") for t in (input, weight, bias)]
    _library.operators.linear_activation(*meta, activation or "none", False)
    devices = {str(t.device) for t in (input, weight, bias) if t is not None}
    if len(devices) > 1:
        raise RuntimeError(f"zoo::linear: all operands must be on one device, got {', '.join(sorted(devices))}")
    device = input.device.type
    on_cpu, on_cuda = device == "cpu", device == "cuda"
    if on_cuda and not _library.CUDA_LOADED:
        raise RuntimeError(f"zoo::linear was given CUDA tensors, but {_library.CUDA_MISSING}")
    aten, tiled = (
        Rejected("aten", f"runs on the CPU; these are on {device}"),
        Rejected("tiled", f"runs on CUDA; these are on {device}"),
    )
    if on_cpu:
        return Choice("aten", "the CPU core: oneDNN or MKL through aten, the activation on its result", (tiled,))
    if on_cuda:
        return Choice("tiled", "64×64 tiles in plain CUDA, any shape, stride and dtype; activation fused in", (aten,))
    return Choice("none", f"zoo has no kernel for {device}", (aten, tiled))
