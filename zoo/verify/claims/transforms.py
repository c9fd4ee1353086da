"""Claims about torch.compile, torch.export and torch.func.

Compiled graphs run by aot_eager: capture, fake tensors and the split of forward and backward are the layer's part;
what inductor makes of a graph is torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zoo.verify.kinds import EVERY
from zoo.verify.outcome import Broken, Claim, Untested
from zoo.verify.subject import Case, Subject, Tensors

__all__ = ["CLAIMS"]


def compiled(s: Subject) -> None:
    _compiled(s, s.suite.cases["compile"](s), dynamic=False)


def compiled_dynamic(s: Subject) -> None:
    _compiled(s, [s.case(f"{m} rows", s.input(m), gradients=s.suite.all) for m in (33, 70)], dynamic=True)


def _compiled(s: Subject, cases: Sequence[Case], *, dynamic: bool) -> None:
    def transformed(layer: nn.Module) -> Any:
        torch._dynamo.reset()
        return torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    s.compare(cases, transformed=transformed)


def exported(s: Subject) -> None:
    def transformed(layer: nn.Module) -> nn.Module:
        rows = torch.export.Dim("rows", min=2, max=4096)
        return torch.export.export(layer, (s.input(8),), dynamic_shapes=({0: rows},)).module()

    s.compare([s.case("64 rows, exported with 8", s.input(64))], transformed=transformed)


def opchecked(s: Subject) -> None:
    custom, _ = s.pair()
    with _Recorder() as recorder:
        output = custom(s.input(64).requires_grad_())
        with contextlib.suppress(Exception):  # a backward that there is not: other claims judge that
            output.backward(s.gradient(64))
    if not recorder.calls:
        raise Untested("it calls no operators but torch's own")
    for op, (args, kwargs) in recorder.calls.items():
        try:
            # Without gradients: an operator may get its backward from an autograd.Function around it.
            torch.library.opcheck(op, args, kwargs, test_utils=_OPCHECKS)
        except Exception as error:
            text = " ".join(str(error.__cause__ or error).split())
            raise Broken(f"{op}: {text}") from None


_OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
_TORCHS = ("aten", "prim", "prims", "profiler", "mkl", "mkldnn", "onednn", "c10d", "_c10d_functional", "inductor")


class _Recorder(TorchDispatchMode):
    """Keeps the arguments of the first call of each operator that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _TORCHS and func not in self.calls:
            self.calls[func] = tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def vmapped(s: Subject) -> None:
    def run(layer: nn.Module, case: Case) -> Tensors:
        with torch.no_grad():
            return {
                "over dim 0": torch.func.vmap(layer)(case.input),
                "over dim 1": torch.func.vmap(layer, in_dims=1)(case.input),
            }

    s.compare([s.case("vmap", s.input(8, 16))], evaluate=run)


def per_sample(s: Subject) -> None:
    def run(layer: nn.Module, case: Case) -> Tensors:
        assert case.cotangent is not None
        parameters = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor, cotangent: Tensor) -> Tensor:
            return (torch.func.functional_call(layer, weights, (x,)) * cotangent).sum()

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, case.input, case.cotangent)
        return {f"each sample's {name}": value for name, value in grads.items()}

    s.compare([s.case("vmap of grad", s.input(16), gradients=s.suite.all)], evaluate=run)


def forward_mode(s: Subject) -> None:
    def run(layer: nn.Module, case: Case) -> Tensors:
        found = torch.func.jvp(layer, (case.input,), (case.input.roll(1, 0),))
        return {"tangent": found[1].detach()}

    s.compare([s.case("jvp", s.input(64))], evaluate=run)


CLAIMS = (
    Claim("compile", "compiles as one graph, forward and backward", compiled, EVERY),
    Claim("compile-dynamic", "compiles as one graph for any number of rows", compiled_dynamic, EVERY),
    Claim("export", "torch.export takes it, with a dynamic number of rows", exported, EVERY),
    Claim("opcheck", "its own operators keep to their schema, and their fake kernels tell the truth", opchecked, EVERY),
    Claim("vmap", "torch.func.vmap over any dimension", vmapped, EVERY),
    Claim("per-sample-gradients", "torch.func: vmap of grad of functional_call", per_sample, EVERY),
    Claim("forward-mode", "torch.func.jvp", forward_mode, EVERY),
)
