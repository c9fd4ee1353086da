"""Operators on DTensors: every rule by itself, every placement, and models that torch splits over ranks."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from support import sharded
from support.ranks import run_on
from zoo.ops import _sharding
from zoo.ops._library import OPERATORS

T, F = True, False


def made(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def small(*shape, dtype=torch.float32, times=1):
    """Whole numbers, so that sums are exact in bfloat16 in any order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-1, 2, shape, generator=generator).mul(times).to(dtype)


X, W, B, G = made(3, 6, 4), made(8, 4), made(8), made(3, 6, 8)
W2, B2, G2, HIDDEN = made(5, 8), made(5), made(3, 6, 5), made(3, 6, 8).relu()
CALLS = {
    "linear": [(X, W, B), (X, W, None), (made(4), W, B)],
    "linear_activation": [(X, W, B, *options) for options in (("gelu", T), ("relu", T), ("silu", F), ("none", F))],
    "linear_input_grad": [(G, W)],
    "linear_weight_grad": [(G, X)],
    "linear_bias_grad": [(G,)],
    "linear_backward": [
        (G, None, X, W, "none", T, T, T),
        (G, HIDDEN, X, W, "relu", T, T, F),
        (G, made(3, 6, 8), None, W, "gelu", T, F, T),
        (G, None, X, None, "none", F, T, F),
        (G, None, X, W, "none", T, T, T, T),
    ],
    "linear_cast": [
        (small(3, 6, 4, dtype=torch.bfloat16), small(8, 4), small(8, times=12), "none", F),
        (small(3, 6, 4, dtype=torch.bfloat16), small(8, 4), None, "gelu", T),
    ],
    "mlp_cast": [
        (*(small(3, 6, 4, dtype=torch.bfloat16), small(8, 4), small(8)), small(5, 8), small(5, times=12), "relu", T),
    ],
    "activation_grad": [(G, made(3, 6, 8), "silu")],
    "mlp": [(X, W, B, W2, B2, "gelu", T), (X, W, None, W2, B2, "relu", T), (X, W, B, W2, None, "silu", F)],
    "mlp_backward": [
        (G2, HIDDEN, made(3, 6, 8), X, W, W2, "gelu", T, T, T, T, T),
        (G2, HIDDEN, HIDDEN, None, W, W2, "relu", T, F, T, T, F),
        (G2, HIDDEN, None, None, None, None, "relu", F, F, F, T, T, T),
    ],
    "matmul": [(made(3, 5, 4), made(3, 4, 6)), (made(5, 4), made(4, 6))],
}
EACH = [pytest.param(name, args, id=f"{name}-{i}") for name, calls in CALLS.items() for i, args in enumerate(calls)]


def test_every_operator_has_its_rules():
    assert set(_sharding._RULES) == set(CALLS) == set(OPERATORS)


def split(value, placement, ranks):
    """What each rank holds."""
    if placement == Replicate():
        return [value] * ranks
    if placement == Partial():
        return [value / ranks] * ranks
    return value.tensor_split(ranks, placement.dim)


def joined(parts, placement):
    if placement == Partial():
        return sum(parts)
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-12, atol=1e-12)
    return parts[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "args"), EACH)
def test_each_rule_is_true(name, args, ranks):
    """By hand, without ranks: what each would compute from its part, put together."""
    operator = getattr(torch.ops.zoo, name)
    expected, rules = operator(*args), list(_sharding._RULES[name](_sharding._Placements(), *args))
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(rules) >= 2
    for outputs, inputs in rules:
        placed = [*inputs, *[None] * (len(args) - len(inputs))]
        parts = [
            split(arg, placement, ranks) if isinstance(arg, torch.Tensor) else [arg] * ranks
            for arg, placement in zip(args, placed, strict=True)
        ]
        results = [operator(*(part[rank] for part in parts)) for rank in range(ranks)]
        results = [result if isinstance(result, tuple) else (result,) for result in results]
        for want, placement, found in zip(expected, outputs, zip(*results, strict=True), strict=True):
            torch.testing.assert_close(joined(found, placement), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensors_placed_in_every_way(ranks):
    calls = [(name, args) for name, every in CALLS.items() for args in every]
    counts = run_on(ranks, sharded.each_placement, calls)
    assert min(counts[0]) >= 3 and counts[0] == counts[-1]


def test_a_choice_is_not_kept_for_calls_of_other_flags():
    square, nothing = (4, 4), (0,)
    kept = [square, nothing, square]
    gradients = [square, nothing, nothing, square, square, nothing]
    assert run_on(2, sharded.flags_that_change) == [kept + gradients] * 2


@pytest.mark.parametrize(
    ("ranks", "kind", "way"),
    [
        (2, "perceptron", "tensor_parallel"),
        (4, "perceptron", "tensor_parallel"),
        pytest.param(2, "transformer", "tensor_parallel", marks=pytest.mark.slow),
        (2, "perceptron", "fsdp"),
        (2, "perceptron", "ddp"),
        pytest.param(4, "transformer", "fsdp", marks=pytest.mark.slow),
        (4, "perceptron", "both"),
    ],
)
def test_split_models_compute_the_same_by_the_operator(ranks, kind, way):
    for ran in run_on(ranks, sharded.compared, kind, way):
        names = {name for name, _ in ran}
        assert "zoo::linear" in names
        assert "zoo::linear_backward" in names or names >= {"zoo::linear_input_grad", "zoo::linear_weight_grad"}
        assert not [name for name, _ in ran if name.startswith("aten::")]
        if (kind, way) == ("perceptron", "tensor_parallel"):
            share = 40 // ranks
            assert ("zoo::linear", [[8, 3, 24], [share, 24], [share]]) in ran  # by columns
            assert ("zoo::linear", [[8, 3, share], [32, share], [32]]) in ran  # by rows


def test_compiled_with_tensors_split():
    run_on(2, sharded.compiled)


@pytest.mark.parametrize("first", ["zoo", "torch.distributed.tensor"])
def test_whichever_is_imported_first(first):
    second = "torch.distributed.tensor" if first == "zoo" else "zoo"
    code = f"""
import sys, {first}
if {first == "zoo"}:
    assert "torch.distributed.tensor" not in sys.modules  # it takes longer than zoo
import {second}
import torch
known = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
assert torch.ops.zoo.linear.default in known
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("zoo")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
