"""Running a model without leaving a trace."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zoo.isolation import nothing_kept, undisturbed


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("changed", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.register_buffer("none", None)

    def forward(self) -> None:
        self.changed += 1
        self.replaced = self.replaced + 1
        torch.rand(3)


@pytest.mark.parametrize("fails", [False, True])
def test_modes_buffers_and_random_state_come_back(fails: bool) -> None:
    models = nn.Sequential(Keeps(), nn.BatchNorm1d(2)), Keeps()
    models[0][1].eval()
    ids = [[id(b) for b in m.buffers()] for m in models]
    states, modes = copy.deepcopy([m.state_dict() for m in models]), [[s.training for s in m.modules()] for m in models]
    rng = torch.get_rng_state()

    def run() -> None:
        with undisturbed(*models):
            models[0].train()
            models[0][1](torch.randn(4, 2))
            models[0][0]()
            models[1].eval()()
            assert models[1].changed.sum() == 2 and not models[1].training
            if fails:
                raise KeyError("mine")

    if fails:
        with pytest.raises(KeyError, match="mine"):
            run()
    else:
        run()
    assert [[id(b) for b in m.buffers()] for m in models] == ids
    assert [[s.training for s in m.modules()] for m in models] == modes and torch.equal(torch.get_rng_state(), rng)
    for model, state in zip(models, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_buffers_of_every_sort() -> None:
    other = nn.Module()
    other.register_buffer("sparse", torch.eye(3).to_sparse())
    other.register_buffer("quantised", torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    other.register_buffer("nan", torch.tensor([float("nan")]))
    with undisturbed(nn.BatchNorm1d(2, device="meta"), nn.LazyBatchNorm1d(), other):
        other.sparse.mul_(2)
    assert torch.equal(other.sparse.to_dense(), torch.eye(3))
    with torch.inference_mode():
        model = nn.BatchNorm1d(2)
    with undisturbed(model), torch.inference_mode():
        model(torch.randn(4, 2))
    assert torch.equal(model.running_mean, torch.zeros(2))


def test_a_buffer_that_a_gradient_goes_through_is_not_written_to_when_nothing_changed() -> None:
    model = Keeps()
    weight = torch.ones(2, requires_grad=True)
    product = weight * model.changed
    with undisturbed(model):
        pass
    product.sum().backward()
    assert weight.grad is not None


class Caches(nn.Module):
    """Keeps what it computed wherever a module can keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("none", None)
        self.register_buffer("there", torch.zeros(2))
        self.attribute, self.table, self.rows, self.queue = None, {"in": {}}, [[1, 2]], deque([1], maxlen=4)
        self.old = {"of": torch.zeros(2)}
        self.calls, self.names = 0, ["first"]

    def forward(self) -> None:
        self.calls += 1
        self.names.append("more")
        result = self.weight * 2
        self.none = self.there = self.attribute = self.new = result
        self.table["in"]["cpu"] = self.table["more"] = result
        self.rows.append(result)
        self.rows[0].append((result,))
        self.queue.append(result)
        self.old.clear()
        self.old = {"of": result}


@pytest.mark.parametrize("around", [nothing_kept, undisturbed])
@pytest.mark.parametrize("fails", [False, True])
def test_no_results_stay(around: Callable[..., AbstractContextManager[None]], fails: bool) -> None:
    inner = Caches()
    model = nn.Sequential(inner)
    there, old, zeros, attributes = inner.there, inner.old, inner.old["of"], list(vars(inner))
    with contextlib.suppress(KeyError), around(model):
        inner()
        assert inner.attribute is not None
        inner()
        if fails:
            raise KeyError
    assert inner.none is None and inner.there is there and inner.attribute is None and not hasattr(inner, "new")
    assert inner.table == {"in": {}} and inner.rows == [[1, 2]] and list(inner.queue) == [1] and inner.queue.maxlen == 4
    assert inner.old is old and list(old) == ["of"] and old["of"] is zeros
    assert list(vars(inner)) == attributes and inner.calls == 0
    assert inner.names == ["first", "more", "more"]  # no tensors


class Grows(nn.Module):
    """Knows how long the table is that it keeps, as rotary embeddings do, and that it has made its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.made = 0, False
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length:
            self.length, self.table = len(x), torch.arange(float(len(x)))
        if not self.made:
            self.made, self.scale = True, nn.Parameter(torch.ones(()))
        return x * self.table[: len(x)] * self.scale


@pytest.mark.parametrize("around", [nothing_kept, undisturbed])
def test_what_a_module_knows_of_what_it_kept_goes_with_it(around: Callable[..., AbstractContextManager[None]]) -> None:
    model, plain = Grows(), nn.Linear(2, 2)
    plain.count = 1
    with around(model, plain):
        model(torch.ones(3))
        plain.count += 1
    assert model.length == 0 and model.table.shape == (0,) and plain.count == 2
    assert model(torch.ones(4)).tolist() == [0, 1, 2, 3]


def test_parameters_that_a_call_makes_or_gathers_stay() -> None:
    """What shards them knows whether it has gathered them: an FSDP model with its shards back would not run again."""
    model = nn.Linear(2, 2, bias=False)
    model.flat = [model.weight]  # as an LSTM has them
    gathered, made = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with nothing_kept(model):
        model.weight, model.scale, model.result = gathered, made, model.weight * 2
        model.flat[0] = gathered
    assert model.weight is gathered is model.flat[0] and model.scale is made and not hasattr(model, "result")
    with nothing_kept(model):
        del model.weight
        model.weight = gathered * 2
    assert model.weight is gathered and "weight" not in vars(model)


def test_a_sharded_model_runs_again() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        with undisturbed(model):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert model.weight.grad is not None


def test_a_list_of_many_numbers_is_soon_looked_at() -> None:
    model = nn.Linear(2, 2)
    model.big = list(range(1_000_000))
    model.big.append(model.big)
    start = time.process_time()
    kinds = [isinstance(value, (torch.Tensor, Mapping, list, tuple, deque)) for value in model.big]
    asked = time.process_time() - start
    start = time.process_time()
    with nothing_kept(model):
        model.cache = [model.weight * 2]
    assert time.process_time() - start < asked / 2
    assert sum(kinds) == 1 and not hasattr(model, "cache") and len(model.big) == 1_000_001


class Closed(Mapping):
    """A file of tensors that is closed."""

    def __getitem__(self, key: str) -> torch.Tensor:
        raise ValueError("not open")

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def test_what_cannot_be_read_stays() -> None:
    model = nn.Linear(2, 2)
    model.file, model.names = Closed(), ["first", Closed()]
    with undisturbed(model):
        model.result = model.weight * 2
    assert not hasattr(model, "result") and isinstance(model.file, Closed)


def test_parameters_that_a_lazy_module_makes_stay() -> None:
    lazy = nn.LazyLinear(3)
    with nothing_kept(lazy):
        lazy(torch.ones(2, 4))
    assert type(lazy) is nn.Linear and lazy.weight.shape == (3, 4) and lazy(torch.ones(1, 4)).shape == (1, 3)
