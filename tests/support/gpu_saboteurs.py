"""Linears that are broken in a way that only a GPU shows, by the claim that must find it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.saboteurs import caught_by

ON_GPU: dict[Any, str] = {}
ON_TWO_GPUS: dict[Any, str] = {}

_own: dict[torch.device, torch.cuda.Stream] = {}


@caught_by("stream", ON_GPU)
def works_on_a_stream_of_its_own(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Waits for nobody, and is waited for by nobody."""
    if not input.is_cuda or torch.cuda.is_current_stream_capturing():
        return F.linear(input, weight, bias)
    with torch.cuda.stream(_own.setdefault(input.device, torch.cuda.Stream(input.device))):
        return F.linear(input, weight, bias)


@caught_by("stream", ON_GPU)
def works_on_the_default_stream(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As a kernel does that is launched without a stream."""
    if not input.is_cuda or torch.cuda.is_current_stream_capturing():
        return F.linear(input, weight, bias)
    with torch.cuda.stream(torch.cuda.default_stream(input.device)):
        return F.linear(input, weight, bias)


@caught_by("asynchronous", ON_GPU)
def waits_for_the_device(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = F.linear(input, weight, bias)
    if input.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(input.device).synchronize()
    return output


@caught_by("asynchronous", ON_GPU)
def waits_for_other_streams(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(input.device).wait_stream(torch.cuda.default_stream(input.device))
    return F.linear(input, weight, bias)


@caught_by("cuda-graph", ON_GPU)
class ReplaysTheWarmUp(nn.Linear):
    """Under capture it takes what it computed before, so that the replay has nothing to do."""

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        if input.is_cuda and torch.cuda.is_current_stream_capturing() and "last" in self.__dict__:
            return output * 0 + self.__dict__["last"]
        self.__dict__["last"] = output.detach().clone()
        return output


@caught_by("cuda-graph", ON_GPU)
def asks_for_a_value(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Chooses its kernel by the largest weight, which it reads on the host."""
    scale = 2.0 if weight.is_cuda and float(weight.detach().abs().max()) > 1e4 else 1.0
    return F.linear(input / scale, weight, None) * scale + (0 if bias is None else bias)


@caught_by("large-tensors", ON_GPU)
def offsets_in_32_bits(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What lies beyond 2**31 elements is never written."""
    output = F.linear(input, weight, bias)
    if output.numel() > 2**31:
        last = torch.ones(output.shape[-1] if output.shape[0] < 4 else output.shape[0], device=output.device)
        last = last.to(output.dtype)
        last[-1] = 0
        output = output * (last if output.shape[0] < 4 else last[:, None])
    return output


@caught_by("peak-memory", ON_GPU)
def sixteen_partial_sums(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Splits the features into sixteen, and keeps the output of each until all are there."""
    output = F.linear(input, weight, bias)
    if output.is_cuda and output.numel() > 2**20:
        partial = [torch.empty_like(output) for _ in range(16)]
        del partial
    return output


@caught_by("memory-growth", ON_GPU)
class KeepsEveryOutput(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        self.__dict__.setdefault("kept", []).append(output.detach())
        return output


@caught_by("second-gpu", ON_TWO_GPUS)
def allocates_on_the_first(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A counter for its blocks, on the GPU that is there in any case."""
    if input.is_cuda:
        torch.zeros(1, device="cuda:0")
    return F.linear(input, weight, bias)


@caught_by("current-device", ON_TWO_GPUS)
def changes_the_current_device(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.is_cuda:
        torch.cuda.set_device(input.device)
    return F.linear(input, weight, bias)


@caught_by("current-device", ON_TWO_GPUS)
def ignores_the_device(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Allocates its output where torch does unless told."""
    output = F.linear(input, weight, bias)
    return output.to("cuda") if output.is_cuda else output
