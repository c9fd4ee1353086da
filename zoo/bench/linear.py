"""``zoo bench linear``: zoo's Linear beside eager torch's and torch.compile's, on the shapes of real models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from zoo.bench.cases import CASES, Case, cases_named
from zoo.bench.linear_report import LinearReport
from zoo.bench.measuring import DTYPES, Measurement, measured
from zoo.bench.options import chosen
from zoo.machine import device_of, examine

__all__ = ["PASSES", "PEERS", "PRECISIONS", "bench_linear"]

_ALIASES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}
PRECISIONS = ("highest", "high", "medium")
PASSES = ("forward", "forward+backward")
PEERS = ("eager", "compiled")

REPEATS, QUICK_REPEATS = 25, 7


def bench_linear(
    *,
    cases: Iterable[Case | str] | None = None,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    precisions: Iterable[str] = ("highest",),
    passes: Iterable[str] = PASSES,
    peers: Iterable[str] = PEERS,
    device: torch.device | str = "cpu",
    quick: bool = False,
    repeats: int | None = None,
    seed: int = 0,
    command: str = "zoo.bench.bench_linear",
    progress: Callable[[Sequence[Measurement]], Iterable[Measurement]] = iter,
    checkpoint: Callable[[LinearReport], None] | None = None,
) -> LinearReport:
    """Time ``zoo.ops.linear`` beside ``F.linear`` and torch's activation, eager and compiled, and check the results.

    With a compiled peer, what torch.compile keeps in this process is dropped before each measurement.

    Args:
        cases: cases, or globs over the names in :data:`zoo.bench.CASES`; None is all of them, or the quick ones.
        dtypes: float32 (or f32), bfloat16 (bf16), float16 (f16), float64 (f64).
        precisions: settings of ``torch.set_float32_matmul_precision`` for the float32 measurements.
        passes: "forward" (without gradients), "forward+backward" (through autograd, all gradients).
        peers: "eager", "compiled".
        device: where to run.
        quick: fewer repetitions and, unless told, the small cases alone.
        repeats: repetitions, at most; None is 25, or 7 for a quick run.
        seed: of the data and of the orders in which the contestants run.
        command: what the report says was asked for.
        progress: wraps the sequence of measurements that is gone through.
        checkpoint: called after each measurement with what there is so far.

    Raises:
        ValueError: an unknown name.
    """
    place = device_of(device)
    given = list(cases) if cases is not None else [case for case in CASES if case.quick or not quick]
    globs = [case for case in given if isinstance(case, str)]
    taken = [*(case for case in given if isinstance(case, Case)), *cases_named(globs)]
    dtype_names = chosen("dtype", [_ALIASES.get(name, name) for name in dtypes], tuple(DTYPES))
    precision_names = chosen("precision", precisions, PRECISIONS)
    pass_names, peer_names = chosen("pass", passes, PASSES), chosen("peer", peers, PEERS)
    measurements = [
        Measurement(case, dtype, precision, pass_)
        for case, dtype in itertools.product(taken, dtype_names)
        for precision in (precision_names if dtype == "float32" else PRECISIONS[:1])
        for pass_ in pass_names
    ]
    report = LinearReport(examine(place), command, precision_names, seed, (), complete=False)
    most = repeats if repeats is not None else QUICK_REPEATS if quick else REPEATS
    for measurement in progress(measurements):
        rows = measured(measurement, peer_names, report.machine, place, repeats=most, seed=seed)
        report = replace(report, rows=(*report.rows, *rows))
        if checkpoint is not None:
            checkpoint(report)
    return replace(report, complete=True)
