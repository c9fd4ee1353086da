"""Eager mode in C++ (csrc/eager.cpp) beside Python's: what it takes, what it gives, and what it leaves alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zoo import ops
from zoo.ops import _library
from zoo.ops._library import EAGER_MISSING, eager_linear, eager_mlp

pytestmark = pytest.mark.skipif(EAGER_MISSING is not None, reason=str(EAGER_MISSING))
ACTIVATIONS = (None, *ops.ACTIVATIONS)


def tensors(device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(device, dtype).requires_grad_() for t in made]


def layer(device: str, kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(2, 5, 8), (16, 8), (16,)]
    return tensors(device, *shapes, *([(6, 16), (6,)] if kind == "mlp" else []), dtype=dtype)


def by(kind: str, activation: str | None):
    """(in C++, by Python) of a kind of layer."""
    here = eager_mlp if kind == "mlp" else eager_linear
    function = ops.mlp if kind == "mlp" else ops.linear

    def python(*args: Tensor | None) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "eager_linear", _library._left_to_python)
            patch.setattr(ops, "eager_mlp", _library._left_to_python)
            return function(*args, activation=activation)

    return lambda *args: here(*args, activation), python


CASES = [("linear", a) for a in ACTIVATIONS] + [("mlp", a) for a in ops.ACTIVATIONS]


@pytest.mark.parametrize(("kind", "activation"), CASES)
@pytest.mark.parametrize("cast", [False, True])
def test_as_python_does_it(device, kind, activation, cast):
    """Values, gradients, and what is kept in memory for backward."""
    found = []
    for run in by(kind, activation):
        args = layer(device, kind)
        kept: list[Tensor] = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t),
            torch.autocast(device, torch.bfloat16, enabled=cast),
        ):
            y = run(*args)
        gradients = torch.autograd.grad(y, args, torch.ones_like(y))
        sizes = sorted((tuple(t.shape), str(t.dtype)) for t in kept)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=cast):
            final = run(*args)
        found.append((y, gradients, final, sizes))
    (y, gradients, final, sizes), (want, wanted, final_want, sizes_want) = found
    assert y.dtype == want.dtype == (torch.bfloat16 if cast else torch.float32)
    assert torch.equal(y, want) and torch.equal(final, final_want)
    assert [g.dtype for g in gradients] == [torch.float32] * len(gradients)
    for got, one in zip(gradients, wanted, strict=True):
        assert torch.equal(got, one)
    assert sizes == sizes_want


@pytest.mark.parametrize(("kind", "activation"), CASES)
def test_derivatives_to_the_second_order(device, kind, activation):
    run, _ = by(kind, activation)
    args = layer(device, kind, torch.float64)
    assert gradcheck(run, args) and gradgradcheck(run, args)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_second_derivatives_reach_parameters_that_were_cast(device, kind):
    run, python = by(kind, "gelu")
    found = []
    for way in (run, python):
        args = layer(device, kind)
        with torch.autocast(device, torch.bfloat16):
            y = way(*args)
        first = torch.autograd.grad(y.float().square().sum(), args, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("wanted", range(1, 5))
def test_what_no_gradient_needs_is_not_saved(device, kind, wanted):
    args = layer(device, kind)
    if wanted >= len(args):
        pytest.skip("a Linear has no such parameter")
    for i, t in enumerate(args):
        t.requires_grad_(i == wanted)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = by(kind, "relu")[0](*args)
    shapes = {tuple(t.shape) for t in kept}
    expected = {
        "linear": {1: {(2, 5, 8), (2, 5, 16)}, 2: {(2, 5, 16)}},
        "mlp": {
            1: {(2, 5, 8), (6, 16), (2, 5, 16)},
            2: {(6, 16), (2, 5, 16)},
            3: {(2, 5, 16)},
            4: set(),
        },
    }
    assert shapes == expected[kind][wanted]
    (got,) = torch.autograd.grad(y.sum(), [args[wanted]])
    assert got.shape == args[wanted].shape


def test_without_biases(device):
    x, w1, _, w2, _ = layer(device, "mlp")
    y = eager_mlp(x, w1, None, w2, None, "gelu")
    torch.testing.assert_close(y, nn.functional.gelu(x @ w1.T) @ w2.T, rtol=1e-4, atol=1e-4)
    for got in torch.autograd.grad(y.sum(), (x, w1, w2)):
        assert got.abs().sum() > 0
    assert eager_linear(x, w1, None, None).shape == (2, 5, 16)


class Subclass(Tensor):
    pass


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Hears(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_what_it_leaves_to_python(device):
    x, w, b = (t.detach() for t in layer(device, "linear"))
    assert torch.is_tensor(eager_linear(x, w, b, None))
    left = [
        (x.as_subclass(Subclass), w, b, None),
        (x, w.as_subclass(Subclass), b, None),
        (x.to("meta"), w.to("meta"), b.to("meta"), None),
        (x, w, b, "elu"),
        (x, w, b, 3),
        (x, w, b),
        (x, w, b, None, None),
        (None, w, b, None),
        (x, None, b, None),
        (1.0, w, b, None),
        (x.to_sparse(), w, b, None),
        (torch.complex(x, x).conj(), w, b, None),
    ]
    for args in left:
        assert eager_linear(*args) is NotImplemented
    assert eager_mlp(x, w, b, w, b, None) is NotImplemented
    for mode in (Sees(), Hears()):
        with mode:
            assert eager_linear(x, w, b, None) is NotImplemented
    with forward_ad.dual_level():
        assert eager_linear(forward_ad.make_dual(x, x), w, b, None) is NotImplemented
    seen = []
    torch.func.vmap(lambda t: seen.append(eager_linear(t, w, b, None)) or t)(x)
    torch.func.grad(lambda t: seen.append(eager_linear(t, w, b, None)) or t.sum())(x)
    assert seen == [NotImplemented] * 2
    with torch.autocast(device, torch.bfloat16):
        assert eager_linear(x.double(), w.double(), b.double(), None) is NotImplemented
        assert eager_linear(x, w.bfloat16(), b, None) is NotImplemented  # parameters of two dtypes
        computed = w.clone().requires_grad_() * 1
        assert eager_linear(x, computed, b, None) is NotImplemented  # it would be kept beside its cast
        assert eager_linear(x, w, b, None).dtype is torch.bfloat16
        assert eager_linear(x.bfloat16(), w.bfloat16(), b.bfloat16(), None).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: (x[..., :7], w, b), r"in_features \(8\), got input \(2, 5, 7\)"),
        (lambda x, w, b: (x, w, b[:3]), "out_features"),
        (lambda x, w, b: (x, w.double(), b), "must have the dtype of input"),
        (lambda x, w, b: (x.long(), w, b), "must be float64, float32"),
        (lambda x, w, b: (x[0, 0, 0], w, b), "at least 1 dimension"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_errors_are_pythons(device, change, words, recorded):
    args = [t.detach() for t in layer(device, "linear")]
    args = list(change(*args))
    args[1].requires_grad_(recorded)
    with pytest.raises(RuntimeError, match=words):
        eager_linear(*args, None)


def test_a_change_in_place_before_backward_is_found(device):
    x, w, b = layer(device, "linear")
    y = eager_linear(x, w, b, None)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_output_may_be_changed_in_place(device):
    x, w, b = layer(device, "linear")
    y = eager_linear(x, w, b, None)
    assert "zoo::LinearFunction" in y.grad_fn.name()
    got = torch.autograd.grad(y.relu_().sum(), (x, w, b))
    want = torch.autograd.grad(nn.functional.linear(x, w, b).relu().sum(), (x, w, b))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("way", [0, 1], ids=["cpp", "python"])
def test_a_parameter_that_was_cast_may_change_before_backward(device, kind, way):
    """As with torch's layers: what was multiplied is its cast. A second derivative needs the parameter itself."""
    run = by(kind, "gelu")[way]
    args = layer(device, kind)
    with torch.autocast(device, torch.bfloat16):
        want = torch.autograd.grad(run(*args).sum(), args)
        y = run(*args).sum()
    with torch.no_grad():
        for t in args[1:]:
            t.add_(1)
    for got, one in zip(torch.autograd.grad(y, args, retain_graph=True), want, strict=True):
        assert torch.equal(got, one)
    with pytest.raises(RuntimeError, match="a parameter was changed in place after a forward pass under autocast"):
        torch.autograd.grad(y, args, create_graph=True)


def test_a_graph_is_freed_and_says_so(device):
    args = layer(device, "mlp")
    y = eager_mlp(*args, "gelu")
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize(("kind", "activation"), CASES)
def test_gradients_that_are_mapped(device, kind, activation):
    """is_grads_batched: torch.func's vmap goes over a backward that was recorded outside it."""
    args = layer(device, kind, torch.float64)
    y = by(kind, activation)[0](*args)
    batch = torch.randn(3, *y.shape, device=device, dtype=torch.float64)
    together = torch.autograd.grad(y, args, batch, is_grads_batched=True, retain_graph=True)
    for i, g in enumerate(batch):
        for got, want in zip(together, torch.autograd.grad(y, args, g, retain_graph=True), strict=True):
            torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_parameters_are_cast_once_an_autocast(device, kind):
    """As torch's own layers do where no gradient is asked for; what changes in between is seen by the next one."""
    run, _ = by(kind, "relu")
    args = layer(device, kind)
    with torch.no_grad():
        with torch.autocast(device, torch.bfloat16), torch.profiler.profile() as first:
            y = run(*args)
            again = run(*args)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False), torch.profiler.profile() as uncached:
            assert torch.equal(run(*args), y) and torch.equal(run(*args), y)
        args[1].mul_(2)
        with torch.autocast(device, torch.bfloat16):
            changed = run(*args)
    assert torch.equal(y, again) and not torch.equal(y, changed)
    casts = [sum(e.count for e in p.key_averages() if e.key == "aten::_to_copy") for p in (first, uncached)]
    assert casts == [len(args) + 1, 2 * len(args)]  # the input, a leaf here, is not kept


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_cast_that_autocast_keeps_carries_gradients(device, kind):
    """A layer of torch that has the weight too finds it in autocast's cache."""
    args = layer(device, kind)
    with torch.autocast(device, torch.bfloat16):
        with torch.no_grad():
            by(kind, "relu")[0](*args)
        y = nn.functional.linear(args[0], args[1])
    assert torch.autograd.grad(y.float().sum(), [args[1]])[0].abs().sum() > 0


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_an_autocast_in_another_has_its_own_dtype(device, kind):
    run, _ = by(kind, "relu")
    args = layer(device, kind)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert run(*args).dtype is torch.bfloat16
        with torch.autocast(device, torch.float16):
            assert run(*args).dtype is torch.float16


def test_inference_mode(device):
    args = layer(device, "mlp")
    with torch.inference_mode():
        y = eager_mlp(*args, "silu")
    assert y.is_inference() and torch.equal(y, eager_mlp(*args, "silu"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, reentrant):
    args = layer(device, "mlp")
    want = torch.autograd.grad(eager_mlp(*args, "gelu").sum(), args)
    y = checkpoint(lambda *a: ops.mlp(*a, activation="gelu"), *args, use_reentrant=reentrant)
    y.sum().backward()
    for t, one in zip(args, want, strict=True):
        assert torch.equal(t.grad, one)


@pytest.mark.parametrize(("kind", "activation"), CASES)
@pytest.mark.parametrize("cast", [False, True])
def test_a_checkpoint_that_stops_early_keeps_nothing(device, kind, activation, cast):
    """It stops a recomputation by raising where the last tensor is saved."""
    freed = []

    def forward(x, *parameters):
        computed = x * 1
        freed.append(weakref.ref(computed))
        return by(kind, activation)[0](computed, *parameters)

    with torch.autocast(device, torch.bfloat16, enabled=cast):
        y = checkpoint(forward, *layer(device, kind), use_reentrant=False)
    y.sum().backward()
    del y
    gc.collect()
    assert len(freed) == 2 and [ref() for ref in freed] == [None, None]


def test_compiled_autograd(device):
    """torch.compile may trace a backward that was recorded here."""
    args = layer(device, "mlp")
    want = torch.autograd.grad(eager_mlp(*args, "gelu").sum(), args)
    y = eager_mlp(*args, "gelu").sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward()
    for t, one in zip(args, want, strict=True):
        torch.testing.assert_close(t.grad, one)


def test_it_can_be_left_out():
    code = "import torch, zoo.ops as ops; from zoo.ops._library import EAGER_MISSING, eager_linear; "
    code += "x = torch.ones(2, 3, requires_grad=True); ops.linear(x, x).sum().backward(); "
    code += "print(EAGER_MISSING, eager_linear(x, x, None, None))"
    environment = {**os.environ, "ZOO_EAGER": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "ZOO_EAGER=0 leaves it out NotImplemented"


def test_another_torch_does_not_load_it(monkeypatch):
    built = _library.build_info()
    monkeypatch.setattr(_library, "build_info", lambda: {**built, "torch": "2.10.0"})
    reason = _library._load_eager()
    assert reason is not None and "built with torch 2.10.0" in reason and torch.__version__ in reason


def test_one_of_older_sources_is_left(monkeypatch):
    old, before = SimpleNamespace(linear=None, mlp=None), _library.eager_linear
    monkeypatch.setattr(_library.importlib, "import_module", lambda name: old)
    assert "no attribute 'implement'); rebuild zoo" in str(_library._load_eager())
    assert _library.eager_linear is before is not None


@pytest.mark.parametrize("eager", [None, "_C_eager.cpython-39-x86_64-linux-gnu.so"])
def test_what_the_last_build_did_not_make_is_not_loaded(monkeypatch, eager):
    """A library of an earlier build, or of another Python's, lies there still; the record's torch is not its own."""
    built = _library.build_info()
    monkeypatch.setattr(_library, "build_info", lambda: {**built, "eager": eager})
    assert "the last build of zoo did not make it" in str(_library._load_eager())
