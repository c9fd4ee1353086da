"""Which kernel would run, and why not the others."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
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
    """The kernel that an operator would run, how it is set up, and the trace of what was rejected."""

    kernel: str
    reason: str
    rejected: tuple[Rejected, ...]
    configuration: str = ""
    """Its tiles and passes, in words."""

    def __str__(self) -> str:
        lines = [f"{self.kernel}{f' ({self.configuration})' if self.configuration else ''}: {self.reason}"]
        lines += [f"  not {r.kernel}: {r.reason}" for r in self.rejected]
        return "\n".join(lines)


def explain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gpu: tuple[int, int] | None = None,
) -> Choice:
    """Which kernel ``linear`` would run for these arguments, and why; nothing is computed.

    The environment's ``ZOO_LINEAR_KERNEL`` forces a CUDA kernel: tiled, gemv, cublas, mma, small, wgmma, split3 or
    split6. A number may follow: a tile shape (``wgmma:2``), or for small the blocks that share a tile (``small:4``).
    ``torch.get_float32_matmul_precision()`` says how exact float32 products must be: "highest" means float32's
    accuracy (split6, by six products of bf16 planes), "high" and "medium" allow torch's own tf32 and split3 (by three).

    Args:
        input, weight, bias, activation: as :func:`zoo.ops.linear`. Raises what it raises.
        gpu: for CPU or meta tensors, as if they were on a GPU: (compute capability, streaming multiprocessors), such as
            (90, 132) for an H200; the build is taken to have code for it.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: None, {', '.join(ACTIVATIONS)}")
    meta: list[Any] = [None if t is None else t.detach().to("meta") for t in (input, weight, bias)]
    _library.operators.linear_activation(*meta, activation or "none", False)
    devices = {str(t.device) for t in (input, weight, bias) if t is not None}
    if len(devices) > 1:
        raise RuntimeError(f"zoo::linear: all operands must be on one device, got {', '.join(sorted(devices))}")
    device = input.device.type
    if gpu is None and device == "cuda":
        if not _library.CUDA_LOADED:
            raise RuntimeError(f"zoo::linear was given CUDA tensors, but {_library.CUDA_MISSING}")
        chip = torch.cuda.get_device_properties(input.device)
        return _on_cuda(
            input, weight, activation, (10 * chip.major + chip.minor, chip.multi_processor_count), _has_sm90a()
        )
    if gpu is not None:
        return _on_cuda(input, weight, activation, gpu, True)
    if device == "cpu":
        cuda = tuple(Rejected(kernel, "runs on CUDA; these are on cpu") for kernel in _library.CUDA_KERNELS)
        return Choice("aten", "the CPU core: oneDNN or MKL through aten, the activation on its result", cuda)
    none = tuple(Rejected(kernel, f"does not run on {device}") for kernel in ("aten", *_library.CUDA_KERNELS))
    return Choice("none", f"zoo has no kernel for {device}", none)


def _on_cuda(input: Tensor, weight: Tensor, activation: str | None, gpu: tuple[int, int], hopper: bool) -> Choice:
    """As the CUDA core chooses: by the same function, from what it would see of the operands."""
    import zoo._C as core

    rows = input if input.dim() == 2 else input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    kernel, configuration, reason, _, rejected = core.choose(
        1,
        rows.shape[0],
        weight.shape[0],
        weight.shape[1],
        str(input.dtype).removeprefix("torch."),
        (rows.stride(0), rows.stride(1), _aligned(rows)),
        (weight.stride(0), weight.stride(1), _aligned(weight)),
        activation or "none",
        torch.get_float32_matmul_precision(),
        *gpu,
        hopper,
        os.environ.get("ZOO_LINEAR_KERNEL"),
    )
    aten = Rejected("aten", "runs on the CPU")
    return Choice(kernel, reason, (*(Rejected(*r) for r in rejected), aten), configuration)


def _aligned(t: Tensor) -> bool:
    return t.is_meta or t.data_ptr() % 16 == 0


@cache
def _has_sm90a() -> bool:
    return "sm_90a" in _library.build_info().get("architectures", [])
