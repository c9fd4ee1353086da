"""Climbs the ladder: compiles every step, checks it against float64, times it beside cuBLAS, and tells.

    python examples/ladder/ladder.py                                       # on a Hopper GPU, about half a minute
    python examples/ladder/ladder.py --step 5 --step 6                     # these alone
    python examples/ladder/ladder.py --json ladder.json --plot ladder.png
    python examples/ladder/ladder.py --build                               # compile only; needs no GPU
    python examples/ladder/ladder.py --readme                              # fill README.md's table from the results

README.md beside this is the chapter, steps.py the predictions.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import device
import typer
from building import build, library
from report import fill_readme, plot, table
from rich.console import Console
from steps import SHAPES, STEPS, Step, step_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "h200-ladder.json"
READY_S = 60.0
"""That all processes may take to make their contexts."""

sys.path.append(str(HERE.parent.parent))  # for step 10, where zoo is built in place and not installed


class Worker:
    """A step in a process of its own: if it crashes or hangs, only it is lost.

    The process makes its context and then waits for the word to go, so that the contexts are made side by side and the
    measurements one after the other. It is forked, and CUDA is never touched in this process.
    """

    def __init__(self, step: Step, path: Path | None, seconds: float) -> None:
        self.step = step
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs, step, path, seconds), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self, seconds: float) -> Any:
        """The process's next message. RuntimeError if it dies or none comes in time: then it is ended."""
        try:
            if self._connection.poll(max(0.0, seconds)):
                return self._connection.recv()
            problem = f"nothing came in {seconds:.0f} s"
        except EOFError:
            self._process.join(1)
            problem = f"its process ended with {self._process.exitcode}"
        self.end()
        raise RuntimeError(f"step {self.step.number}: {problem}")

    def measure(self, seconds: float) -> list[dict[str, Any]]:
        """Let it go, and wait for its rows. RuntimeError if it fails or takes longer than that."""
        self._connection.send("go")
        outcome = self.receive(seconds)
        self.end()
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return list(outcome)

    def end(self) -> None:
        self._process.kill()
        self._process.join(2)


def _work(connection: Connection, step: Step, path: Path | None, seconds: float) -> None:
    """The process: why it cannot run or None; then what it runs on; then, after the word to go, rows or an error."""
    problem = device.find_problem()
    connection.send(problem)
    if problem is not None:
        return
    connection.send(device.warm_up())
    connection.recv()
    try:
        connection.send(device.measure(step, path, seconds=seconds))
    except Exception as error:  # whatever it is, the other steps go on
        connection.send(f"{type(error).__name__}: {error}")


def climb(steps: list[Step], *, folder: Path, seconds: float, limit: float, into: Path | None) -> dict[str, Any]:
    """Build, check and time the steps. RuntimeError if there is no GPU for them, or no compiler.

    Args:
        steps: to run, in this order.
        folder: of compiled code.
        seconds: of timing, a step and shape.
        limit: seconds that a step may take as a whole.
        into: a JSON file, written anew after each step.

    Returns ``device, torch, cuda, date, rows, failed``: a row a step and shape with ``step, title, shape,
    predicted_tflops, us, cublas_us, tflops, cublas_tflops, share``, and what went wrong by step.
    """
    workers = [Worker(step, library(step, folder), seconds) for step in steps]
    try:
        if problem := workers[0].receive(READY_S):
            raise RuntimeError(f"{problem}; --build works without one")
        failed = {number: f"it does not compile: {words}" for number, words in build(steps, folder).items()}
        results: dict[str, Any] = {**_make_ready(workers, failed), "rows": [], "failed": {}}
        for worker in workers:
            step = worker.step
            if step.number not in failed:
                try:
                    results["rows"] += [_row(step, row) for row in worker.measure(limit)]
                except RuntimeError as error:
                    failed[step.number] = str(error)
            if step.number in failed:
                results["failed"][str(step.number)] = failed[step.number]
                print(f"step {step.number}: {failed[step.number]}", file=sys.stderr)
            if into is not None:
                into.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        return results
    finally:
        for worker in workers:
            worker.end()


def _make_ready(workers: list[Worker], failed: dict[int, str]) -> dict[str, Any]:
    """Wait until all contexts are made, and add to ``failed`` where that fails. Returns what the results are of."""
    facts: dict[str, Any] | None = None
    deadline = time.monotonic() + READY_S
    for worker in workers:
        try:
            if worker is not workers[0]:
                worker.receive(deadline - time.monotonic())
            facts = worker.receive(deadline - time.monotonic())
        except RuntimeError as error:
            failed.setdefault(worker.step.number, str(error))
    if facts is None:
        raise RuntimeError(f"no process could make a context on the GPU: {failed}")
    return {**facts, "date": datetime.date.today().isoformat()}


def _row(step: Step, measured: dict[str, Any]) -> dict[str, Any]:
    predicted = dict(zip(map(str, SHAPES), step.predicted, strict=True))[measured["shape"]]
    return {"step": step.number, "title": step.title, "predicted_tflops": predicted, **measured}


def main(
    step: Annotated[list[int] | None, typer.Option(help="Run these alone; may be given again.")] = None,
    build_only: Annotated[bool, typer.Option("--build", help="Compile the steps and stop. Needs no GPU.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results; with --readme, read.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Fill README.md's table and stop. Needs no GPU.")] = False,
    folder: Annotated[Path, typer.Option(help="Of compiled code.")] = HERE / "build",
    seconds: Annotated[float, typer.Option(min=0.01, help="Of timing, a step and shape.")] = 0.3,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a step may take.")] = 10.0,
) -> None:
    """Compile, check and time the steps from a naive product to zoo's own."""
    try:
        steps = [step_of(number) for number in step] if step else list(STEPS)
        if readme:
            fill_readme(HERE / "README.md", json.loads((json_file or RESULTS).read_text(encoding="utf-8")))
            failed: dict[Any, str] = {}
        elif build_only:
            failed = build(steps, folder)
            for number, words in failed.items():
                print(f"step {number} does not compile:\n{words}", file=sys.stderr)
        else:
            failed = _run(steps, folder, seconds, limit, json_file, plot_file)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"ladder: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if failed:
        raise typer.Exit(1)


def _run(
    steps: list[Step], folder: Path, seconds: float, limit: float, json_file: Path | None, plot_file: Path | None
) -> dict[Any, str]:
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: matplotlib is not installed; pip install 'layer-zoo[report]'")
    for file in (json_file, plot_file):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    results = climb(steps, folder=folder, seconds=seconds, limit=limit, into=json_file)
    Console(width=150).print(table(results))
    if plot_file is not None:
        plot(results, plot_file)
    return dict(results["failed"])


if __name__ == "__main__":
    typer.run(main)
