"""How a model is spread over several ranks, by torch's own means.

========  ==================================================  ========================================================
ddp       each rank has the model, and a part of each batch   ``DistributedDataParallel``
fsdp      each rank has a part of each weight and each batch  FSDP2, ``fully_shard`` on each block and on the whole
tp        each rank has a part of the layers, all the batch   ``parallelize_module``: of two Linears with an activation
                                                              between them, ColwiseParallel and RowwiseParallel
========  ==================================================  ========================================================
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from zoo.layers.units import chain_of, known_units
from zoo.models.mlp import MLP
from zoo.train.ranks import Ranks

__all__ = ["accumulating", "clip", "first_not_finite", "split_groups", "spread", "whole_weights"]


def spread(model: nn.Module, strategy: str, ranks: Ranks) -> nn.Module:
    """What the ranks call in the place of ``model``: a wrapper around it (ddp), or itself, changed in place.

    ValueError where ``tp`` finds nothing to split.
    """
    if strategy == "ddp":
        own = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=own, gradient_as_bucket_view=True)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    if strategy == "fsdp":
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    plan = tensor_plan(model)
    if not plan:
        raise ValueError(
            "strategy 'tp': the model has no two Linears with an activation between them, which is what is split; "
            "choose ddp or fsdp"
        )
    return parallelize_module(model, mesh, plan)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of lists and sequences, the outermost: what a model repeats, and what is gathered at a time."""
    for child in model.children():
        if not any(True for _ in child.parameters()):
            continue
        listed = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) and not listed:
            yield child
        else:
            yield from _blocks(child)


def tensor_plan(model: nn.Module) -> dict[str, Any]:
    """What of a model is split: by name, for parallelize_module.

    A dropout between two Linears that drops anything would need random numbers of its own on each rank: such two stay
    whole.
    """
    plan: dict[str, Any] = {}
    for path, parent in model.named_modules():
        chain = tuple(parent._modules) if isinstance(parent, MLP) else chain_of(parent)
        for unit in known_units(parent, chain or ()):
            inner = [parent._modules[name] for name in unit[1:-1]]
            if any(isinstance(module, nn.Dropout) and module.p for module in inner) or _normalizes(inner):
                continue
            first, last = (f"{path}.{name}" if path else name for name in (unit[0], unit[-1]))
            plan |= {first: ColwiseParallel(), last: RowwiseParallel()}
    return plan


def _normalizes(modules: Iterable[Any]) -> bool:
    """Whether one of the modules has weights of its own, of the whole width."""
    return any(True for module in modules if module is not None for _ in module.parameters())


@contextlib.contextmanager
def accumulating(runner: nn.Module, last: bool) -> Iterator[None]:
    """Around the backward pass of a step with several: gradients are brought together with the last one."""
    if isinstance(runner, DistributedDataParallel) and not last:
        with runner.no_sync():
            yield
        return
    if isinstance(runner, FSDPModule):
        runner.set_requires_gradient_sync(last)
    yield


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Plain tensors and DTensors, which torch takes in no call together."""
    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in tensors:
        kinds[isinstance(tensor, DTensor)].append(tensor)
    return [kind for kind in kinds if kind]


def split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give plain parameters and DTensors groups of their own, with the same settings."""
    for group in list(optimizer.param_groups):
        kinds = _by_kind(group["params"])
        group["params"] = kinds[0]
        for more in kinds[1:]:
            optimizer.add_param_group({**group, "params": more})


def clip(optimizer: torch.optim.Optimizer, largest: float) -> None:
    """torch's clip_grad_norm_ of all gradients, also where some are split over ranks and some are not."""
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    kinds = _by_kind(parameter for parameter in parameters if parameter.grad is not None)
    if len(kinds) == 1:
        nn.utils.clip_grad_norm_(kinds[0], largest)
        return
    norms = [
        _whole(nn.utils.get_total_norm([parameter.grad for parameter in kind]))  # type: ignore[misc]
        for kind in kinds
    ]
    if norms:
        total = torch.linalg.vector_norm(torch.stack(norms))
        for kind in kinds:
            nn.utils.clip_grads_with_norm_(kind, largest, total)


def first_not_finite(model: nn.Module, ranks: Ranks) -> str | None:
    """The name of the first parameter with a value, on any rank, that is not finite; or None."""
    parts = dict(_parts(model))
    finite = [torch.isfinite(part).all() for part in parts.values()]
    # one wait for the device, not one for each parameter
    mine = (
        None
        if not finite or bool(torch.stack(finite).all())
        else next(name for name, holds in zip(parts, finite, strict=True) if not bool(holds))
    )
    if ranks.all(mine is None):
        return None
    return next(name for name in ranks.gathered(mine) if name is not None)


def _parts(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model that is spread, on the CPU of rank 0; of the others an empty one. All must ask."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
