"""The Linear in float64, as a reference: in slices of rows, so that the largest case fits beside what is timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.judging import Entry, Measure, judge, measure
from zoo.ops._linear import activate

__all__ = ["Operands", "combined", "names_of", "verdicts", "worst_error", "wrongness"]

SLICE = 2**25
"""Values of the widest matrix that one slice has, in float64: 256 MiB."""

_SPOKEN_OF = {"high": torch.float16, "medium": torch.bfloat16}
"""float32 products under "high" may keep 10 bits of mantissa, as float16 does, under "medium" 7, as bfloat16."""


@dataclass(frozen=True, eq=False)
class Operands:
    """One buffer set: what a Linear is called with, and the gradient that its backward is given."""

    x: Tensor
    """(M, K)"""
    weight: Tensor
    """(N, K)"""
    bias: Tensor | None
    """(N)"""
    grad: Tensor | None
    """(M, N), or None where only the forward is asked for."""

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.x, self.weight, self.bias

    def leaves(self) -> tuple[Tensor, ...]:
        """Those that gradients are asked for."""
        return tuple(t for t in self.arguments() if t is not None)


def names_of(operands: Operands) -> tuple[str, ...]:
    """The names of the results, in the order in which a contestant returns them."""
    if operands.grad is None:
        return ("y",)
    return ("y", "dx", "dw") if operands.bias is None else ("y", "dx", "dw", "db")


def wrongness(
    results: Mapping[str, Sequence[Tensor]], operands: Operands, activation: str | None
) -> dict[str, dict[str, Measure]]:
    """How far the results of several contestants on one set are from float64: contestant -> result -> measure.

    ValueError for a contestant that returned another number of results.
    """
    names = names_of(operands)
    m, k = operands.x.shape
    n = operands.weight.shape[0]
    shapes = {"y": (m, n), "dx": (m, k), "dw": (n, k), "db": (n,)}
    parts: dict[str, dict[str, list[Measure]]] = {who: {name: [] for name in names} for who in results}
    named: dict[str, dict[str, Tensor]] = {}
    for who, tensors in results.items():
        if len(tensors) != len(names):
            raise ValueError(f"{who}: got {len(tensors)} results, expected {len(names)} ({', '.join(names)})")
        named[who] = {}
        for name, tensor in zip(names, tensors, strict=True):
            if tuple(tensor.shape) == shapes[name]:
                named[who][name] = tensor.detach()
            else:  # its measure says so, and has no errors
                parts[who][name].append(measure(tensor, torch.empty(shapes[name], device="meta")))

    def compare(name: str, exact: Tensor, rows: slice | None = None) -> None:
        for who, tensors in named.items():
            if name in tensors:
                tensor = tensors[name] if rows is None else tensors[name][rows]
                parts[who][name].append(measure(tensor, exact))

    weight = operands.weight.detach().double()
    bias = None if operands.bias is None else operands.bias.detach().double()
    dw, db = (torch.zeros(shape, dtype=torch.float64, device=weight.device) for shape in ((n, k), (n,)))
    step = max(1, SLICE // max(n, k))
    for start in range(0, m, step):
        rows = slice(start, start + step)
        x = operands.x.detach()[rows].double()
        z = x @ weight.T
        if bias is not None:
            z += bias
        if operands.grad is None:
            compare("y", activate(z, activation or "none"), rows)
            continue
        with torch.enable_grad():
            y = activate(z.requires_grad_(), activation or "none")
            (dz,) = torch.autograd.grad(y, z, operands.grad[rows].double())
        compare("y", y.detach(), rows)
        compare("dx", dz @ weight, rows)
        dw += dz.T @ x
        db += dz.sum(0)
    if operands.grad is not None:
        compare("dw", dw)
        if bias is not None:
            compare("db", db)
    return {who: {name: combined(found) for name, found in by_name.items()} for who, by_name in parts.items()}


def combined(parts: Sequence[Measure]) -> Measure:
    """The measure of a tensor from those of its parts, or of several tensors as if they were one."""
    if len(parts) == 1:
        return parts[0]
    fault = next((part.fault for part in parts if part.fault), "")
    return replace(
        parts[0],
        norm=math.hypot(*(part.norm for part in parts)),
        peak=_largest(part.peak for part in parts),
        exact_norm=math.hypot(*(part.exact_norm for part in parts)),
        exact_peak=_largest(part.exact_peak for part in parts),
        sample=sum(part.sample for part in parts),
        fault=fault,
    )


def worst_error(measures: Mapping[str, Measure]) -> float:
    """The largest relative error (Frobenius) of the results; nan if any has none."""
    return _largest(m.error for m in measures.values())


def verdicts(
    measures: Mapping[str, Measure], stock: Mapping[str, Measure], *, precision: str, depth: int
) -> tuple[Entry, ...]:
    """Judge results beside those of the eager torch, by the rule of :mod:`zoo.judging`.

    Args:
        measures: of the results to judge.
        stock: of eager torch's, on the same sets.
        precision: of float32's products.
        depth: the longest sum. In float64 the reference itself is rounded, so that two honest results differ by about
            the square root of it, in units of eps, even where stock's happens to equal the reference.
    """
    limits = {}
    for name, m in stock.items():
        if m.dtype == torch.float64:
            slack = torch.finfo(m.dtype).eps * math.sqrt(depth)
            m = m.at_least(replace(m, norm=slack * m.exact_norm, peak=slack * m.exact_peak))  # noqa: PLW2901
        limits[name] = _spoken(m, precision)
    return judge("result", {name: _spoken(m, precision) for name, m in measures.items()}, limits)


def _spoken(m: Measure, precision: str) -> Measure:
    return m.scaled(1.0, _SPOKEN_OF.get(precision, m.dtype)) if m.dtype == torch.float32 else m


def _largest(values: Iterable[float]) -> float:
    values = tuple(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)
