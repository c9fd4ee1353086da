"""How DTensor may split the operators over the ranks of a mesh.

Each rule lists, for one dimension of the mesh, the placements of the inputs with which every rank can run the operator
itself on what it holds, and the placements of the outputs that follow. torch chooses among them what costs the least
to move. With no rule DTensor refuses an operator; it is never taken apart into torch's own.

Of the sizes of ``y = x Wᵀ + b``, x (*, K) and W (N, K):

========  =========================================  =======================================================
split     forward                                    as in
========  =========================================  =======================================================
rows      y is split as x is                         data and sequence parallel; weights' gradients are sums
N         y is split in its last dimension           ColwiseParallel; the input's gradient is a sum
K         y is a sum over the ranks                  RowwiseParallel; each rank adds its part of the bias
========  =========================================  =======================================================
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from zoo.ops._fake import needs_preactivation
from zoo.ops._library import operators as _ops

__all__ = ["register"]

_TENSORS = "torch.distributed.tensor"

Rule = tuple[list[Any], list[Any]]
"""The placements of the outputs, and of the arguments: None for what is no tensor."""


class _Placements:
    """torch's three placements; imported when DTensor is, for that takes longer than zoo."""

    def __init__(self) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self.whole, self.sum, self.split = Replicate(), Partial(), Shard


def register() -> None:
    """Give DTensor the rules of all operators."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    place = _Placements()
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for name, rules in _RULES.items():
        op = getattr(_ops, name).default

        def acceptable(*args: Any, rules: Callable[..., Iterator[Rule]] = rules) -> list[Rule]:
            found = []
            for outputs, inputs in rules(place, *args):
                placed = [None if arg is None else placement for arg, placement in zip(args, inputs, strict=False)]
                found.append((outputs, placed + [None] * (len(args) - len(inputs))))
            return found

        register_sharding(op)(acceptable)
        # torch keeps what it chose, by the placements of the tensors and what follows the first int among the
        # arguments. Here flags and absent tensors decide, too.
        infos[op].static_argnum = 0


def _linear(place: _Placements, x: Any, weight: Any, bias: Any) -> Iterator[Rule]:
    whole, last = place.whole, x.ndim - 1
    yield [whole], [whole, whole, whole]
    for dim in range(last):
        yield [place.split(dim)], [place.split(dim), whole, whole]
    yield [place.split(last)], [whole, place.split(0), place.split(0)]
    yield [place.sum], [place.split(last), place.split(1), place.sum]


def _linear_activation(
    place: _Placements, x: Any, weight: Any, bias: Any, activation: str, save: bool
) -> Iterator[Rule]:
    keep = save and needs_preactivation(activation)
    for (output,), inputs in _linear(place, x, weight, bias):
        if output != place.sum or activation == "none":
            yield [output, output if keep else place.whole], inputs


def _linear_cast(place: _Placements, x: Any, weight: Any, bias: Any, activation: str, save: bool) -> Iterator[Rule]:
    for outputs, inputs in _linear_activation(place, x, weight, bias, activation, save):
        yield [*outputs, inputs[1]], inputs


def _linear_input_grad(place: _Placements, grad: Any, weight: Any) -> Iterator[Rule]:
    for (dx, _, _), (g, _, _, w) in _linear_backward(place, grad, None, None, weight, "none", True, False, False):
        yield [dx], [g, w]


def _linear_weight_grad(place: _Placements, grad: Any, x: Any) -> Iterator[Rule]:
    for (_, dw, _), (g, _, x_, _) in _linear_backward(place, grad, None, x, None, "none", False, True, False):
        yield [dw], [g, x_]


def _linear_bias_grad(place: _Placements, grad: Any) -> Iterator[Rule]:
    for (_, _, db), (g, *_) in _linear_backward(place, grad, None, None, None, "none", False, False, True):
        yield [db], [g]


def _linear_backward(
    place: _Placements, grad: Any, saved: Any, x: Any, weight: Any, activation: str, *needs: bool
) -> Iterator[Rule]:
    whole, last = place.whole, grad.ndim - 1
    cases: list[Rule] = [
        ([whole, whole, whole], [whole, whole, whole, whole]),
        *(
            ([place.split(dim), place.sum, place.sum], [place.split(dim), place.split(dim), place.split(dim), whole])
            for dim in range(last)
        ),
        (
            [place.sum, place.split(0), place.split(0)],
            [place.split(last), place.split(last), whole, place.split(0)],
        ),
        ([place.split(last), place.split(1), whole], [whole, whole, place.split(last), place.split(1)]),
    ]
    for outputs, inputs in cases:
        yield _requested(place, outputs, needs[:3]), inputs


def _mlp(
    place: _Placements, x: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any, activation: str, save: bool
) -> Iterator[Rule]:
    whole, last = place.whole, x.ndim - 1
    keeps = (True, save, save and needs_preactivation(activation))
    cases: list[Rule] = [
        ([whole, whole, whole], [whole, whole, whole, whole, whole]),
        *(([place.split(dim)] * 3, [place.split(dim), whole, whole, whole, whole]) for dim in range(last)),
        # the hidden layer is split
        (
            [place.sum, place.split(last), place.split(last)],
            [whole, place.split(0), place.split(0), place.split(1), place.sum],
        ),
        # the output is split
        ([place.split(last), whole, whole], [whole, whole, whole, place.split(0), place.split(0)]),
    ]
    for outputs, inputs in cases:
        yield _requested(place, outputs, keeps), inputs


def _mlp_cast(
    place: _Placements, x: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any, activation: str, save: bool
) -> Iterator[Rule]:
    for outputs, inputs in _mlp(place, x, weight1, bias1, weight2, bias2, activation, save):
        yield [*outputs, inputs[1], inputs[3]], inputs


def _mlp_backward(
    place: _Placements,
    grad: Any,
    hidden: Any,
    saved: Any,
    x: Any,
    weight1: Any,
    weight2: Any,
    activation: str,
    *needs: bool,
) -> Iterator[Rule]:
    whole, add, split, last = place.whole, place.sum, place.split, grad.ndim - 1
    cases: list[Rule] = [
        ([whole] * 5, [whole] * 6),
        *(([split(dim), add, add, add, add], [split(dim)] * 4 + [whole, whole]) for dim in range(last)),
        # the hidden layer is split
        ([add, split(0), split(0), split(1), whole], [whole, split(last), split(last), whole, split(0), split(1)]),
        # the output is split: the first layer's gradients are sums, as the activation's derivative is a factor
        ([add, add, add, split(0), split(0)], [split(last), whole, whole, whole, whole, split(0)]),
        # the input is split
        ([split(last), split(1), whole, whole, whole], [whole, whole, whole, split(last), split(1), whole]),
    ]
    for outputs, inputs in cases:
        yield _requested(place, outputs, needs[:5]), inputs


def _requested(place: _Placements, outputs: list[Any], needs: tuple[bool, ...]) -> list[Any]:
    """An output that is not asked for is empty on every rank."""
    return [output if need else place.whole for output, need in zip(outputs, needs, strict=True)]


def _activation_grad(place: _Placements, grad: Any, saved: Any, activation: str) -> Iterator[Rule]:
    yield [place.whole], [place.whole, place.whole]
    for dim in range(grad.ndim):
        yield [place.split(dim)], [place.split(dim), place.split(dim)]
    yield [place.sum], [place.sum, place.whole]


def _matmul(place: _Placements, a: Any, b: Any) -> Iterator[Rule]:
    whole, split, rows, columns = place.whole, place.split, a.ndim - 2, a.ndim - 1
    yield [whole], [whole, whole]
    for dim in range(rows):
        yield [split(dim)], [split(dim), split(dim)]
    yield [split(rows)], [split(rows), whole]
    yield [split(columns)], [whole, split(columns)]
    yield [place.sum], [split(columns), split(rows)]


_RULES: dict[str, Callable[..., Iterator[Rule]]] = {
    "linear": _linear,
    "linear_activation": _linear_activation,
    "linear_input_grad": _linear_input_grad,
    "linear_weight_grad": _linear_weight_grad,
    "linear_bias_grad": _linear_bias_grad,
    "linear_backward": _linear_backward,
    "linear_cast": _linear_cast,
    "activation_grad": _activation_grad,
    "mlp": _mlp,
    "mlp_backward": _mlp_backward,
    "mlp_cast": _mlp_cast,
    "matmul": _matmul,
}


# When


class _WithTensors(MetaPathFinder):
    """Registers the rules as soon as DTensor is imported, whoever does it: zoo itself has no need of it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _TENSORS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _TENSORS in sys.modules:
    register()
else:
    sys.meta_path.insert(0, _WithTensors())
