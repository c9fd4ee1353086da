"""``zoo bench``: runs a bench with progress on stderr, and writes its JSON and its plot."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zoo.bench import MODELS, LinearReport, ModelReport, ServeReport, bench_linear, bench_model, bench_serving
from zoo.bench.plot import plot, plot_file
from zoo.commands.output import progress
from zoo.preparing import choose_device
from zoo.report import Report

__all__ = ["json_file", "linear", "model", "serve", "write_report"]

_R = TypeVar("_R", LinearReport, ModelReport, ServeReport)


def linear(
    *,
    cases: Sequence[str],
    dtypes: str,
    precisions: str,
    passes: str,
    peers: str,
    device: str,
    quick: bool,
    repeats: int | None,
    seed: int,
    json: str | None,
    plot_to: str | None,
) -> LinearReport:
    """Bench the Linear. Args: as the command's, see ``zoo bench linear --help``; lists are comma-separated."""
    told = {
        "--case": list(cases),
        "--dtype": dtypes,
        "--precision": precisions,
        "--pass": passes,
        "--peer": peers,
        "--device": device,
        "--quick": quick,
        "--repeats": repeats,
        "--seed": seed,
    }

    def work(**watchers: Any) -> LinearReport:
        return bench_linear(
            cases=cases or None,
            dtypes=_words(dtypes),
            precisions=_words(precisions),
            passes=_words(passes),
            peers=_words(peers),
            device=choose_device(device),
            quick=quick,
            repeats=repeats,
            seed=seed,
            command=_command("zoo bench linear", told),
            **watchers,
        )

    return _run(work, json, plot_to)


def model(
    *,
    models: Sequence[str],
    modes: str,
    phases: str,
    peers: str,
    batch: int,
    image: int,
    device: str,
    seed: int,
    json: str | None,
    plot_to: str | None,
) -> ModelReport:
    """Bench models. Args: as the command's, see ``zoo bench model --help``; lists are comma-separated."""
    told = {
        "--mode": modes,
        "--phase": phases,
        "--peer": peers,
        "--batch": batch,
        "--image": image,
        "--device": device,
        "--seed": seed,
    }

    def work(**watchers: Any) -> ModelReport:
        return bench_model(
            models or MODELS,
            modes=_words(modes),
            phases=_words(phases),
            peers=_words(peers),
            batch=batch,
            image=image,
            device=choose_device(device),
            seed=seed,
            command=_command(" ".join(["zoo bench model", *map(shlex.quote, models)]), told),
            **watchers,
        )

    return _run(work, json, plot_to)


def serve(
    *,
    models: Sequence[str],
    modes: str,
    peers: str,
    batches: str,
    image: int,
    device: str,
    calls: int,
    seed: int,
    json: str | None,
) -> ServeReport:
    """Bench latencies. Args: as the command's, see ``zoo bench serve --help``; lists are comma-separated."""
    told = {
        "--mode": modes,
        "--peer": peers,
        "--batch": batches,
        "--image": image,
        "--device": device,
        "--calls": calls,
        "--seed": seed,
    }
    words = _words(batches)
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"batch {batches!r}: expected numbers separated by commas, such as 1,8")

    def work(**watchers: Any) -> ServeReport:
        return bench_serving(
            models or MODELS,
            modes=_words(modes),
            peers=_words(peers),
            batches=[int(word) for word in words],
            image=image,
            device=choose_device(device),
            calls=calls,
            seed=seed,
            command=_command(" ".join(["zoo bench serve", *map(shlex.quote, models)]), told),
            **watchers,
        )

    return _run(work, json, None)


def json_file(path: str) -> Path:
    """The path, checked before anything is measured. ValueError for one that cannot be meant."""
    file = Path(path)
    if file.suffix != ".json":
        raise ValueError(f"json {path!r}: expected a file named *.json, or - for the terminal")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"json {path!r}: there is no folder {file.absolute().parent}")
    return file


def _run(work: Callable[..., _R], json: str | None, plot_to: str | None) -> _R:
    file = None if json in (None, "-") else json_file(json)
    picture = None if plot_to is None else plot_file(plot_to)
    with contextlib.ExitStack() as stack:

        def track(measurements: Sequence[Any]) -> Iterable[Any]:
            bar = stack.enter_context(progress())  # not before the arguments are known to be right
            task = bar.add_task("", total=len(measurements))
            for measurement in measurements:
                bar.update(task, description=str(measurement))
                yield measurement
                bar.advance(task)

        # A run that is cut off leaves what it had measured.
        keep = (lambda report: write_report(report, file)) if file is not None else None
        report = work(progress=track, checkpoint=keep)
    if file is not None:
        write_report(report, file)
    if picture is not None:
        assert not isinstance(report, ServeReport)
        plot(report, picture)
    return report


def write_report(report: Report, file: Path) -> None:
    """Write a report as JSON in one step, so that the file is whole at any time."""
    beside = file.with_name(f".{file.name}.part")
    beside.write_text(report.to_json() + "\n", encoding="utf-8")
    os.replace(beside, file)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _command(start: str, told: dict[str, Any]) -> str:
    """What was asked for, without where the results go."""
    words = [start]
    for option, value in told.items():
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                words.append(option)
            elif one is not None and one is not False:
                words += [option, shlex.quote(str(one))]
    return " ".join(words)
