"""Linears that are broken where several processes train together, by the claim that must find it.

``IN_RANKS`` maps each to its claim; those that end or stop a rank are in ``DEADLY_IN_RANKS``.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from support.saboteurs import Manual, caught_by

IN_RANKS: dict[Any, str] = {}
DEADLY_IN_RANKS: dict[Any, str] = {}


@caught_by("ddp", IN_RANKS)
class DelaysItsGradient(nn.Linear):
    """Adds the weight's gradient to .grad when the backward is over, as a pipeline does: it is not reduced any more."""

    def forward(self, input: Tensor) -> Tensor:
        owner = self

        class Function(Manual):
            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
                first, second, third = Manual.backward(ctx, grad)
                assert second is not None

                def later() -> None:
                    owner.weight.grad = second if owner.weight.grad is None else owner.weight.grad + second

                torch.autograd.Variable._execution_engine.queue_callback(later)
                return first, torch.zeros_like(second), third

        return Function.apply(input, self.weight, self.bias)


@caught_by("ddp-unused", IN_RANKS)
class PreallocatesGradients(nn.Linear):
    """Gradients that are zero instead of absent: weight decay and momentum go on where the layer was not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


@caught_by("ddp-no-sync", IN_RANKS)
class OverwritesGradients(nn.Linear):
    """Its backward clears .grad, which it takes for the last step's."""

    def forward(self, input: Tensor) -> Tensor:
        owner = self

        class Function(Manual):
            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
                if owner.weight.grad is not None:
                    owner.weight.grad.zero_()
                return Manual.backward(ctx, grad)

        return Function.apply(input, self.weight, self.bias)


@caught_by("fsdp", IN_RANKS)
class HoldsItsParameters(nn.Linear):
    """Keeps the Parameters that it was built with at hand; sharded ones take their places."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["held"] = (self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *self.__dict__["held"])


@caught_by("tensor-parallel", IN_RANKS)
def computes_its_part_alone(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Unwraps distributed tensors, and takes its part of a sum for the whole."""
    if not isinstance(weight, DTensor) or weight.placements[0].is_shard(0):
        return F.linear(input, weight, bias)
    part = F.linear(input.to_local(), weight.to_local(), None if bias is None else bias.to_local())  # type: ignore[attr-defined]
    return DTensor.from_local(part, weight.device_mesh, [Replicate()])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else -1


@caught_by("ddp", DEADLY_IN_RANKS)
def ends_in_rank_1(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _rank() == 1:
        os.write(2, b"no kernel for rank 1\n")
        os._exit(7)
    return F.linear(input, weight, bias)


@caught_by("ddp-no-sync", DEADLY_IN_RANKS)
def hangs_in_rank_0(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    while _rank() == 0:
        time.sleep(0.01)
    return F.linear(input, weight, bias)


def refuses_in_rank_1(s: Any, rank: int) -> None:
    """No layer but a claim's check."""
    if rank == 1:
        raise NotImplementedError("rank 1 is not supported")
