"""``zoo bench serve``: the latency of single requests, with zoo's Linears and torch's, eager and in CUDA graphs."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zoo.bench.exact import combined
from zoo.bench.model import MODELS, MODES, OUTPUT_TOLERANCE, PEERS, batches_for, forward_mode
from zoo.bench.options import chosen
from zoo.bench.serving_report import ServeReport, ServeRow
from zoo.bench.timing import finish, ratio
from zoo.coverage import coverage
from zoo.factory import create
from zoo.judging import Measure, judge, measure
from zoo.machine import device_of, examine, float32_precision
from zoo.registry import resolve

__all__ = ["BATCHES", "ServeMeasurement", "bench_serving"]

BATCHES = (1, 8)
CALLS = 500
FEWEST = 100
"""Calls that are made whatever they cost, if as many are asked for."""
SECONDS = 30.0
"""That the calls of one measurement may take, before there are fewer of them."""
RUN = 6
"""Calls of one side in a row. The first of them is not counted: it finds the other side's data in the caches."""
WARM_UP = 5
"""Calls before any that counts: a compiled model is compiled in the first, and captured in the next ones."""


@dataclass(frozen=True)
class ServeMeasurement:
    """One row to be."""

    model: str
    mode: str
    peer: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.peer} batch {self.batch}"


def bench_serving(
    models: Iterable[str] = MODELS,
    *,
    modes: Iterable[str] = ("fp32", "bf16"),
    peers: Iterable[str] = PEERS,
    batches: Iterable[int] = BATCHES,
    image: int = 224,
    device: torch.device | str = "cpu",
    calls: int = CALLS,
    seed: int = 0,
    command: str = "zoo.bench.bench_serving",
    progress: Callable[[Sequence[ServeMeasurement]], Iterable[ServeMeasurement]] = iter,
    checkpoint: Callable[[ServeReport], None] | None = None,
) -> ServeReport:
    """Time requests to models of ``zoo.create(name, custom_linear=True)`` beside the same without, from equal weights.

    Both sides answer the same requests, in short runs of calls in random order. Their logits are compared with the
    stock model's in float64: zoo's error is judged beside the peer's by the rule of :mod:`zoo.judging`. With a compiled
    peer, what torch.compile keeps in this process is dropped before each measurement.

    Args:
        models: names, as in ``zoo.list_models()``, of image classifiers.
        modes: "fp32", "tf32", "bf16".
        peers: "eager"; "compiled", where both sides are compiled with mode "reduce-overhead", which on a GPU replays
            CUDA graphs.
        batches: images of a request.
        image: their height and width.
        device: where to run.
        calls: timed calls of each side; fewer where they would take over 30 s, but not under 100.
        seed: of the weights, the data and the order.
        command: what the report says was asked for.
        progress: wraps the sequence of measurements that is gone through.
        checkpoint: called after each measurement with what there is so far.

    Raises:
        ValueError: an unknown name, or a model that does not take such images.
    """
    place, names, sizes = device_of(device), tuple(dict.fromkeys(models)), tuple(dict.fromkeys(batches))
    for name in names:
        resolve(name)
    for what, number, least in (*(("batch", size, 1) for size in sizes), ("image", image, 1), ("calls", calls, 2)):
        if number < least:
            raise ValueError(f"{what}={number}: expected at least {least}")
    if not sizes:
        raise ValueError("batches: none given; expected one or more numbers of images")
    words = itertools.product(names, chosen("mode", modes, MODES), chosen("peer", peers, PEERS), sizes)
    measurements = [ServeMeasurement(*word) for word in words]
    report = ServeReport(examine(place), command, seed, torch.backends.cudnn.allow_tf32, (), complete=False)
    for m in progress(measurements):
        report = replace(report, rows=(*report.rows, _measure(m, image, place, calls=calls, seed=seed)))
        if checkpoint is not None:
            checkpoint(report)
    return replace(report, complete=True)


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model under torch.compile, with the least work left for the host."""
    return torch.compile(model, mode="reduce-overhead", dynamic=False)


def _measure(m: ServeMeasurement, image: int, device: torch.device, *, calls: int, seed: int) -> ServeRow:
    row = ServeRow(m.model, m.mode, m.peer, m.batch, image)
    if m.peer == "compiled":
        torch._dynamo.reset()
    gc.collect()
    precision = "high" if m.mode == "tf32" else "highest"
    with float32_precision(precision), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        stock = create(m.model, device=device).eval()
        requests = [images for images, _ in batches_for(m.model, stock, m.batch, image, device)]
        custom = create(m.model, custom_linear=True, device=device).eval()
        custom.load_state_dict(stock.state_dict())
        with forward_mode(m.mode, "serve", device):
            share = coverage(custom, requests[0]).share
            eager = [stock(images).clone() for images in requests]
        with torch.no_grad():
            double = copy.deepcopy(stock).double()
            exact = [double(images.double()) for images in requests]
            del double
        with forward_mode(m.mode, "serve", device):
            try:
                graphs = _GraphSkips()
                sides = {"zoo": custom, "peer": stock}
                answers = {name: _answering(model, m.peer, device) for name, model in sides.items()}
                errors: dict[str, list[Measure]] = {name: [] for name in sides}
                for turn in range(WARM_UP):
                    for answer in answers.values():
                        answer(requests[turn % len(requests)])
                _compare(answers, requests, exact, errors)
                taken = _times(answers, requests, calls=calls, seed=seed)
                _compare(answers, requests, exact, errors)
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                return replace(row, custom_share=share, failure=f"{type(error).__name__}: {lines[0]}")
    found = ratio(taken["peer"], taken["zoo"], seed=seed)
    whole = {name: combined(parts) for name, parts in errors.items()}
    whole["eager"] = combined([measure(got, right) for got, right in zip(eager, exact, strict=True)])
    figures: dict[str, Any] = {
        f"{name}_p{percent}_us": float(numpy.percentile(times, percent))
        for name, times in taken.items()
        for percent in (50, 90, 99)
    }
    return replace(
        row,
        **figures,
        speedup=found.value,
        speedup_low=found.low,
        speedup_high=found.high,
        calls=len(taken["zoo"]),
        cuda_graphs=graphs.none() if m.peer == "compiled" and device.type == "cuda" else None,
        custom_share=share,
        zoo_error=whole["zoo"].error,
        peer_error=whole["peer"].error,
        eager_error=whole["eager"].error,
        failure="; ".join(_wrong(whole["zoo"], whole["peer"], whole["eager"], m)),
    )


def _wrong(custom: Measure, peer: Measure, eager: Measure, m: ServeMeasurement) -> list[str]:
    """What is wrong with the logits. The peer is only asked for answers to these requests, as torch compiles it."""
    least = OUTPUT_TOLERANCE[m.mode]
    rounded = replace(eager, norm=max(eager.norm, least * eager.exact_norm), peak=max(eager.peak, eager.exact_peak))
    found = [entry for entry in judge("logits", {"peer": peer}, {"peer": rounded}) if not entry.ok]
    found += [e for e in judge("logits", {"zoo": custom}, {"zoo": eager if found else peer}) if not e.ok]
    told = f" (torch's eagerly {eager.error:.1e}, {m.peer} {peer.error:.1e})"
    return [f"the logits of {entry.name}: {entry.reason}{told}" for entry in found]


def _answering(model: nn.Module, peer: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """From a request to its logits, which are there when it returns, and valid until the next call."""
    forward = compiled(model) if peer == "compiled" else model

    def answer(images: Tensor) -> Tensor:
        if peer == "compiled":
            torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = forward(images)
        finish(device)
        return logits

    return answer


def _compare(
    answers: dict[str, Callable[[Tensor], Tensor]],
    requests: list[Tensor],
    exact: list[Tensor],
    errors: dict[str, list[Measure]],
) -> None:
    """Add how far each side's answers are from float64."""
    for name, answer in answers.items():
        errors[name] += [measure(answer(images), right) for images, right in zip(requests, exact, strict=True)]


def _times(
    answers: dict[str, Callable[[Tensor], Tensor]], requests: list[Tensor], *, calls: int, seed: int
) -> dict[str, list[float]]:
    """Microseconds of the calls that count, by side; as many of each."""
    taken: dict[str, list[float]] = {name: [] for name in answers}
    order, turn = random.Random(seed), itertools.count()
    began = time.perf_counter()
    while len(taken["zoo"]) < calls:
        if len(taken["zoo"]) >= min(FEWEST, calls) and time.perf_counter() - began > SECONDS:
            break
        first = next(turn)
        for name in order.sample(sorted(answers), len(answers)):
            answer = answers[name]
            for i in range(RUN):
                images = requests[(first + i) % len(requests)]
                started = time.perf_counter()
                answer(images)
                elapsed = time.perf_counter() - started
                if i and len(taken[name]) < calls:
                    taken[name].append(elapsed * 1e6)
    return taken


class _GraphSkips:
    """How often torch.compile left CUDA graphs out since this was made."""

    def __init__(self) -> None:
        self.before = self._count()

    def none(self) -> bool:
        return self._count() == self.before

    @staticmethod
    def _count() -> int:
        from torch._dynamo.utils import counters

        return int(counters["inductor"]["cudagraph_skips"])
