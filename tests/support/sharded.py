"""What ranks compute together: calls of operators on DTensors, and models split over a mesh. Run by support.ranks."""

from __future__ import annotations

import copy
import itertools
import random
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import zoo
from zoo.judging import judge, measure
from zoo.train.ranks import Ranks
from zoo.train.strategies import spread

CPU = torch.device("cpu")
MANY = 10


def whole(value: Any) -> Any:
    """A result as one process has it."""
    if isinstance(value, (tuple, list)):
        return [whole(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def every_placement(op_name: str, args: tuple[Any, ...], device: torch.device = CPU) -> int:
    """Call an operator with its tensors placed in every way there is, or in MANY of them; how many agreed."""
    operator, mesh = getattr(torch.ops.zoo, op_name).default, init_device_mesh(device.type, (dist.get_world_size(),))
    ways = [
        [Replicate(), *(Shard(dim) for dim in range(arg.dim()))] if isinstance(arg, Tensor) else [None] for arg in args
    ]
    args = tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)
    expected, placements = whole(operator(*args)), list(itertools.product(*ways))
    if len(placements) > MANY:
        placements = random.Random(0).sample(placements, MANY)
    for placed in placements:
        given = [
            arg if place is None else distribute_tensor(arg, mesh, [place])
            for arg, place in zip(args, placed, strict=True)
        ]
        torch.testing.assert_close(
            whole(operator(*given)), expected, rtol=1e-9, atol=1e-9, msg=lambda text, p=placed: f"{op_name} {p}: {text}"
        )
    return len(placements)


def each_placement(calls: list[tuple[str, tuple[Any, ...]]]) -> list[int]:
    """:func:`every_placement` of each call."""
    return [every_placement(name, args) for name, args in calls]


def flags_that_change() -> list[tuple[int, ...]]:
    """The sizes of what is optional, from calls that differ in a flag or an absent tensor alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    square = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
    sizes = []
    with torch.no_grad():
        for save in (True, False, True):
            sizes.append(tuple(torch.ops.zoo.linear_activation(square, square, None, "gelu", save)[1].shape))
        for weight, x in ((square, None), (None, square), (square, None)):
            made = torch.ops.zoo.linear_backward(
                square, None, x, weight, "none", weight is not None, x is not None, False
            )
            sizes += [tuple(t.shape) for t in made[:2]]
    return sizes


# Models


def perceptron() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 32), nn.LayerNorm(32), nn.Linear(32, 36), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(36, 10)), torch.randn(8, 3, 24)


def transformer() -> tuple[nn.Module, Tensor]:
    return zoo.create("timm/test_vit", num_classes=12), torch.randn(4, 3, 160, 160)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"perceptron": perceptron, "transformer": transformer}


def tensor_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """As zoo.train splits it; and what else RowwiseParallel and ColwiseParallel may be asked for."""
    spread(model, "tp", Ranks(dist.get_rank(), dist.get_world_size(), device))
    if isinstance(model, nn.Sequential):
        # one that gathers its output, one that is given the whole input
        plan = {"4": ColwiseParallel(output_layouts=Replicate()), "6": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(model, init_device_mesh(device.type, (dist.get_world_size(),)), plan)
    return model


def fsdp(model: nn.Module, device: torch.device) -> nn.Module:
    return spread(model, "fsdp", Ranks(dist.get_rank(), dist.get_world_size(), device))


def both(model: nn.Module, device: torch.device) -> nn.Module:
    """FSDP2 over tensor parallel, two and two ranks."""
    mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def ddp(model: nn.Module, device: torch.device) -> nn.Module:
    return spread(model, "ddp", Ranks(dist.get_rank(), dist.get_world_size(), device))


WAYS = {"ddp": ddp, "tensor_parallel": tensor_parallel, "fsdp": fsdp, "both": both}


def values(
    model: nn.Module, x: Tensor, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients, whole and on the CPU."""
    cast = x.to(next(model.parameters()).dtype) if dtype is None else x.to(dtype)
    output = model(cast)
    (
        output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=x.device).view_as(output)
    ).sum().backward()
    grads = {name: whole(p.grad).cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach().cpu()}, grads


def of_all(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """:func:`values` where each rank takes a part of the batch: the whole output, and the gradients of the whole."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    output = model(x.chunk(ranks)[rank])
    parts = [torch.empty_like(output) for _ in range(ranks)]
    dist.all_gather(parts, output.detach())
    whole_output = torch.cat(parts)
    weights = torch.linspace(-1, 1, whole_output.numel(), dtype=output.dtype, device=x.device).view_as(whole_output)
    (output * weights.chunk(ranks)[rank]).sum().mul(ranks).backward()  # the ranks' gradients are averaged
    grads = {name.removeprefix("module."): p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": whole_output.cpu()}, grads


def all_compared(cases: list[tuple[str, str]]) -> list[str]:
    """:func:`compared` of each, on this rank's GPU; what is wrong with any."""
    wrong = []
    for kind, way in cases:
        try:
            ran = compared(kind, way, f"cuda:{torch.cuda.current_device()}")
            by_torch = sorted({name for name, _ in ran if name.startswith("aten::")})
            if by_torch or not any(name.startswith("zoo::linear_backward") for name, _ in ran):
                wrong.append(f"{kind} {way}: ran {sorted({name for name, _ in ran})}")
        except Exception:
            wrong.append(f"{kind} {way}: {traceback.format_exc()}")
    return wrong


def compared(kind: str, way: str, device: str = "cpu") -> list[tuple[str, list[list[int]]]]:
    """A split stock model and a split patched one, judged against one whole model in float64.

    Returns the products that ran in the patched one: the operator and the sizes of its inputs, on this rank.
    """
    place = torch.device(device)
    torch.manual_seed(0)
    model, x = MODELS[kind]()
    model, x = model.to(place), x.to(place)
    exact, custom = copy.deepcopy(model).double(), copy.deepcopy(model)
    report = zoo.patch(custom)
    assert report.swapped
    split = WAYS[way](model, place), WAYS[way](custom, place)
    references = values(exact, x)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        got = of_all(split[1], x) if way == "ddp" else values(split[1], x)
    stock = of_all(split[0], x) if way == "ddp" else values(split[0], x)
    for name, index in (("output", 0), ("gradient", 1)):
        errors = [
            {key: measure(value, references[index][key]) for key, value in result[index].items()}
            for result in (got, stock)
        ]
        wrong = [str(entry) for entry in judge(name, *errors) if not entry.ok]
        assert not wrong, "\n".join(wrong)
        assert errors[0].keys() == references[index].keys()
    names = ("zoo::", "aten::mm", "aten::addmm", "aten::linear")
    return [(event.name, event.input_shapes) for event in seen.events() if event.name.startswith(names)]


def compiled() -> None:
    """A split layer compiled whole, forward and backward, equals itself in eager mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    zoo.patch(model, layer="zoo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(6, 8)
    expected = values(model, x)
    model.zero_grad()
    got = values(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    torch.testing.assert_close(got[0]["output"], expected[0]["output"])
    for name, grad in expected[1].items():
        torch.testing.assert_close(got[1][f"_orig_mod.{name}"], grad)
