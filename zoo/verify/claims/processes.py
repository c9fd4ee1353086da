"""Claims about two processes that train together: each is judged in both, beside the stock layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from zoo.verify.outcome import Broken, Claim, Untested
from zoo.verify.ranks import SIZE, Check, gathered, judge_in_ranks
from zoo.verify.subject import Subject, Tensors, judged

__all__ = ["CLAIMS"]

ROWS = 24


def _nets(s: Subject) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Two layers in a row: with the layer, stock, and stock in float64; the same weights in all, and in all ranks."""
    first, second = s.pair(96, 64), s.pair(64, 10)
    custom, stock = (nn.Sequential(one, nn.Tanh(), two) for one, two in zip(first, second, strict=True))
    return custom, stock, copy.deepcopy(stock).double()


def _values(s: Subject, rank: int, *shape: int) -> Tensor:
    """Normally distributed values, other ones in each rank, that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1000 + rank + SIZE * sum(shape))
    return torch.randn(shape, generator=generator).half().bfloat16().to(s.device, s.dtype)


def _compare(s: Subject, nets: tuple[nn.Module, ...], run: Callable[[nn.Module, torch.dtype], Tensors]) -> Tensors:
    """Run all three and judge; what the stock layer does not do is untested. Returns the layer's own."""
    custom, stock, exact = nets
    try:
        right, want = run(exact, torch.float64), run(stock, s.dtype)
    except Exception as error:
        raise Untested(f"the stock layer itself raised {type(error).__name__}: {error}") from None
    got = run(custom, s.dtype)
    judged(got, want, right)
    return got


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[f"gradient of {name.removeprefix('module.')}"] = None if grad is None else grad.clone()
    return found


def _same_in_all(values: Tensors) -> None:
    for name, value in values.items():
        if value is not None and not all(torch.equal(value, other) for other in gathered(value)):
            raise Broken(f"{name} is not the same in all ranks")


def _parallel(s: Subject, model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, device_ids=[s.device] if s.device.type == "cuda" else None, **options)


def ddp(s: Subject, rank: int) -> None:
    x, cotangent = _values(s, rank, ROWS, 96), _values(s, rank, ROWS, 10)
    for views in (False, True):

        def run(net: nn.Module, dtype: torch.dtype, views: bool = views) -> Tensors:
            model = _parallel(s, net, gradient_as_bucket_view=views)
            for _ in range(2):  # the second in buckets of another order
                model.zero_grad()
                model(x.to(dtype)).backward(cotangent.to(dtype))
            return _gradients(model)

        _same_in_all(_compare(s, _nets(s), run))


class _Branches(nn.Module):
    """The second layer is used in rank 0 alone, the third in none."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = layers

    def forward(self, x: Tensor, use_second: bool) -> Tensor:
        return self.first(x) + self.second(x) if use_second else self.first(x)


def unused(s: Subject, rank: int) -> None:
    x, cotangent = _values(s, rank, ROWS, 96), _values(s, rank, ROWS, 10)
    pairs = [s.pair(96, 10) for _ in range(3)]
    custom, stock = (_Branches(*(pair[which] for pair in pairs)) for which in (0, 1))

    def run(net: nn.Module, dtype: torch.dtype) -> Tensors:
        model = _parallel(s, net, find_unused_parameters=True)
        model(x.to(dtype), rank == 0).backward(cotangent.to(dtype))
        return _gradients(model)

    _same_in_all(_compare(s, (custom, stock, copy.deepcopy(stock).double()), run))


def no_sync(s: Subject, rank: int) -> None:
    x, cotangent = _values(s, rank, 3 * ROWS, 96), _values(s, rank, 3 * ROWS, 10)

    def run(net: nn.Module, dtype: torch.dtype) -> Tensors:
        model = _parallel(s, net)
        parts = list(zip(x.to(dtype).split(ROWS), cotangent.to(dtype).split(ROWS), strict=True))
        with model.no_sync():
            for part, grad in parts[:-1]:
                model(part).backward(grad)
        model(parts[-1][0]).backward(parts[-1][1])
        return _gradients(model)

    _same_in_all(_compare(s, _nets(s), run))


def fsdp(s: Subject, rank: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    x, cotangent = _values(s, rank, ROWS, 96), _values(s, rank, ROWS, 10)
    mesh = init_device_mesh(s.device.type, (SIZE,))
    for half in (False, True):

        def run(net: nn.Module, dtype: torch.dtype, half: bool = half) -> Tensors:
            policy = MixedPrecisionPolicy()
            if half and dtype != torch.float64:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (net[0], net[2], net):  # type: ignore[index]
                fully_shard(module, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            found: dict[str, Tensor | None] = {}
            for step in range(2):
                optimizer.zero_grad()
                output = net(x.to(dtype))
                output.backward(cotangent.to(output.dtype))
                found |= {f"{name}, step {step}": grad for name, grad in _gradients(net).items()}
                optimizer.step()
            return {"output": output.detach(), **found}

        got = _compare(s, _nets(s), run)
        _same_in_all({name: value for name, value in got.items() if name != "output"})


def tensor_parallel(s: Subject, rank: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    nets = _nets(s)
    if not isinstance(nets[0][0], nn.Linear):  # type: ignore[index]
        raise Untested("torch's ColwiseParallel and RowwiseParallel take an nn.Linear, and this is none")
    x, cotangent = _values(s, 0, ROWS, 96), _values(s, 0, ROWS, 10)  # the same in all ranks
    mesh = init_device_mesh(s.device.type, (SIZE,))

    def run(net: nn.Module, dtype: torch.dtype) -> Tensors:
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        input = x.to(dtype).requires_grad_()
        output = net(input)
        output.backward(cotangent.to(dtype))
        return {"output": output.detach(), "gradient of input": input.grad, **_gradients(net)}

    _same_in_all(_compare(s, nets, run))


def _claim(name: str, says: str, check: Check) -> Claim:
    return Claim(name, says, lambda s: judge_in_ranks(check, s))


CLAIMS = (
    _claim("ddp", "under DDP its gradients are the mean over the ranks, the same in each", ddp),
    _claim("ddp-unused", "under DDP a layer may go unused, in one rank or in all", unused),
    _claim("ddp-no-sync", "under DDP gradients add up within no_sync, and are reduced once", no_sync),
    _claim("fsdp", "sharded by FSDP2 it trains as the stock layer, in float32 and in bfloat16", fsdp),
    _claim("tensor-parallel", "split by columns and by rows it computes as a whole", tensor_parallel),
)
