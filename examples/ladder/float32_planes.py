"""float32's accuracy from bf16 tensor cores, simulated on the CPU: which of its parts is worth what.

    python examples/ladder/float32_planes.py
    python examples/ladder/float32_planes.py --k 1024 --positive

A float32 number is split into planes of bf16: the number rounded, what that left, rounded, and what that left. A
product of two numbers is then the sum of products of planes, and a tensor core computes those exactly; but it adds
them up in an accumulator of its own. Hopper's, as far as its behaviour tells, aligns 16 products and the old sum to
the largest of them, keeps two bits under float32's last and drops the rest: it truncates. Truncation errors all point
the same way and so grow with K itself, where rounding errors grow with its root. Promotion ends a chain early: every
32 of K the accumulator is added, properly rounded, to a float32 register, and starts again at zero.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["SCHEMES", "errors", "planes", "sgemm", "tensor_core"]

Array = NDArray[np.float64]

_GROUP = 16  # of K, that the tensor core adds at once
_FRACTION = 25  # bits after the leading one that it keeps: float32's 23 and 2

PRODUCTS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((0, 0),),
    3: ((1, 0), (0, 1), (0, 0)),
    6: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)),
}
"""Which plane of a times which of b, small ones first; what is missing is under float32's last bit."""

SCHEMES: dict[str, tuple[int, int | None]] = {
    "1 product (bf16)": (1, None),
    "3 products": (3, None),
    "3 products, promoted": (3, 32),
    "6 products": (6, None),
    "6 products, promoted": (6, 32),
}
"""Products, and how much of K goes between promotions."""


def planes(x: Array, count: int) -> list[Array]:
    """x, exact in float32, as ``count`` arrays that are exact in bf16; three of them hold 24 bits."""
    parts, rest = [], torch.from_numpy(x).float()
    for _ in range(count):
        plane = rest.bfloat16().float()
        parts.append(plane.double().numpy())
        rest = rest - plane  # exact
    return parts


def sgemm(a: Array, b: Array) -> Array:
    """a (M, K) b (N, K)^T by a chain of float32 fused multiply-adds an output."""
    total = np.zeros((a.shape[0], b.shape[0]))
    for k in range(a.shape[1]):
        total = (total + np.outer(a[:, k], b[:, k])).astype(np.float32).astype(np.float64)
    return total


def _truncate(x: Array, quantum: Array) -> Array:
    """To a multiple of the quantum, toward zero."""
    whole: Array = np.trunc(x / quantum)
    return whole * quantum


def _quantum(x: Array, fraction: int) -> Array:
    """The step between numbers of so many bits after the leading one, at x."""
    exponent = np.frexp(x)[1] - 1
    step: Array = np.ldexp(1.0, np.maximum(exponent, -126) - fraction)
    return step


def tensor_core(total: Array, a: Array, b: Array) -> Array:
    """total + a (M, K) b (N, K)^T, K in groups of 16, as Hopper's tensor core adds."""
    for k in range(0, a.shape[1], _GROUP):
        terms = a[:, None, k : k + _GROUP] * b[None, :, k : k + _GROUP]
        terms = np.concatenate([terms, total[..., None]], axis=-1)
        quantum = _quantum(np.abs(terms).max(-1), _FRACTION)
        total = _truncate(terms, quantum[..., None]).sum(-1)
        total = _truncate(total, _quantum(np.abs(total), 23))
    return total


def split_product(a: Array, b: Array, products: int, promote: int | None) -> Array:
    """a (M, K) b (N, K)^T from so many products of planes, promoted every ``promote`` of K, or never."""
    pairs = PRODUCTS[products]
    count = 1 + max(max(pair) for pair in pairs)
    a_planes, b_planes = planes(a, count), planes(b, count)
    master = np.zeros((a.shape[0], b.shape[0]))
    chain = np.zeros_like(master)
    for k in range(0, a.shape[1], 32):
        for i, j in pairs:
            chain = tensor_core(chain, a_planes[i][:, k : k + 32], b_planes[j][:, k : k + 32])
        if promote is not None and (k + 32) % promote == 0:
            master = (master + chain).astype(np.float32).astype(np.float64)
            chain = np.zeros_like(master)
    return (master + chain).astype(np.float32).astype(np.float64)


def errors(*, k: int = 4096, size: int = 16, positive: bool = False, seed: int = 0) -> dict[str, float]:
    """The error of each scheme: root mean square, in units of the sum of the products' magnitudes.

    Args:
        k: terms of a sum, a multiple of 32.
        size: rows of both operands.
        positive: uniform data in (0, 1) rather than normal data, so that the sum grows all along.
        seed: of the data.
    """
    if k < 32 or k % 32:
        raise ValueError(f"k={k}: expected a positive multiple of 32, which is what lies between promotions")
    random = np.random.default_rng(seed)
    draw = random.random if positive else random.standard_normal
    a, b = (draw((size, k), dtype=np.float32).astype(np.float64) for _ in range(2))
    exact, scale = a @ b.T, np.abs(a) @ np.abs(b).T

    def error(y: Array) -> float:
        return float(np.sqrt(np.mean(((y - exact) / scale) ** 2)))

    found = {"float32 (SGEMM)": error(sgemm(a, b))}
    for name, (products, promote) in SCHEMES.items():
        found[name] = error(split_product(a, b, products, promote))
    return found


def main(
    k: Annotated[int, typer.Option(help="Terms of a sum, a multiple of 32.")] = 4096,
    size: Annotated[int, typer.Option(min=1, help="Rows of both operands.")] = 16,
    positive: Annotated[bool, typer.Option(help="Uniform data in (0, 1) rather than normal data.")] = False,
) -> None:
    """Print the error of float32 products made of bf16 ones."""
    try:
        found = errors(k=k, size=size, positive=positive)
    except ValueError as error:
        raise SystemExit(f"float32_planes: {error}") from None
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column(f"K = {k}, {'uniform(0, 1)' if positive else 'normal'} data")
    shown.add_column("rms error / Σ|a||b|", justify="right")
    shown.add_column("of SGEMM's", justify="right")
    for name, value in found.items():
        shown.add_row(name, f"{value:.1e}", f"{value / found['float32 (SGEMM)']:.2f}")
    Console(width=100).print(shown)


if __name__ == "__main__":
    typer.run(main)
