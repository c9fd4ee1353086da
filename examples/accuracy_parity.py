"""Accuracy parity as a result: the same models trained with torch's layers and with zoo's, many times over.

    python examples/accuracy_parity.py parity.json --data DIR      # on a GPU: sixty runs, all of them at once
    python examples/accuracy_parity.py parity.json --data DIR      # again: goes on with what is missing

DIR has Fashion-MNIST, as four idx files, gzipped or not (Debian's package dataset-fashion-mnist). Each model is trained
by zoo.train, with five seeds, stock and custom, in float32 and in bf16 autocast; a seed fixes the first weights and the
order of the images, so stock and custom differ in their layers alone. Many processes share the GPU, and the images lie
on it. What is asked:

* **Are the final accuracies equivalent?** Two one-sided t tests (TOST, Welch's) over the seeds: the means differ by
  less than half a point, at the 5% level. A test that only fails to find a difference proves nothing.
* **Are the first 20 steps right?** In float32, by the parity rule: the losses of all seeds against those of the same
  steps in float64, custom's error beside stock's. Later, training magnifies rounding, and losses part in honest layers.

The JSON has every run with its losses, and is written after each. `--plot parity.png` draws the curves. Statistics and
plot need scipy and matplotlib; where these are not, run the command again where they are: nothing is trained twice.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import zoo
from zoo.commands.output import progress
from zoo.judging import judge, measure
from zoo.machine import examine
from zoo.naming import unknown_name
from zoo.preparing import choose_device
from zoo.tables import columns, console
from zoo.tensor_files import replacing
from zoo.train import TrainConfig, train
from zoo.train.comparing import curve_of
from zoo.train.run import FIRST_STEPS

COMMON = {"batch_size": 512, "epochs": 8, "optimizer": "adamw", "weight_decay": 0.05, "warmup_epochs": 1, "size": 28}
RECIPES: dict[str, dict[str, Any]] = {
    "mlp": {"lr": 2e-3},
    "resnet18": {"lr": 2e-3},
    "timm/vit_tiny_patch16_224": {"lr": 1e-3, "clip_grad": 1.0, "options": {"img_size": 28, "patch_size": 7}},
}
LAYERS = ("stock", "custom")
AUTOCAST = ("none", "bf16")
MARGIN = 0.005
"""Of accuracy: half a point."""
LEVEL = 0.05
LOG_EVERY = 20
ROOM = 1 << 30
"""Bytes that a run's files take at most."""
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run; ``layers`` "exact" is stock in float64, of the first steps alone."""

    model: str
    layers: str
    autocast: str
    seed: int


class _Enough(Exception):
    """The first steps are done."""


def run(job: Job, settings: dict[str, Any], device: str, scratch: Path) -> dict[str, Any]:
    """Train one model from its seed, in a folder that is gone after it."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32 in convolutions, too
    try:
        return {**dataclasses.asdict(job), **_train(job, settings, device, folder)}
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        shutil.rmtree(folder, ignore_errors=True)


def _train(job: Job, settings: dict[str, Any], device: str, folder: Path) -> dict[str, Any]:
    recipe = settings["recipes"][job.model]
    torch.manual_seed(job.seed)
    weights = folder / "first.safetensors"
    zoo.save_checkpoint(zoo.create(job.model, num_classes=10, **recipe.get("options", {})), weights)
    config = TrainConfig(
        **recipe,
        model=job.model,
        data=settings["data"],
        weights=str(weights),
        custom_linear=job.layers == "custom",
        autocast=job.autocast,
        seed=job.seed,
        device=device,
        log_every=LOG_EVERY,
        keep_last=1,
    )
    began = time.perf_counter()
    if job.layers != "exact":
        report = train(config, folder / "run")
        curve = curve_of(folder / "run" / "log.jsonl")
        return {
            "accuracy": report.accuracy,
            "best_accuracy": report.best_accuracy,
            "seconds": round(time.perf_counter() - began, 2),
            "steps": curve.steps,
            "losses": curve.losses,
            "evaluated": curve.evaluated,
            "accuracies": curve.accuracies,
        }

    def stop(step: int, steps: int, text: str) -> None:
        if step == FIRST_STEPS:
            raise _Enough

    torch.set_default_dtype(torch.float64)  # of the model, and of the images
    try:
        train(config, folder / "run", watch=stop)
    except _Enough:
        pass
    finally:
        torch.set_default_dtype(torch.float32)
    curve = curve_of(folder / "run" / "log.jsonl")
    return {"steps": curve.steps[:FIRST_STEPS], "losses": curve.losses[:FIRST_STEPS]}


def jobs_of(models: list[str], seeds: int, autocasts: list[str]) -> list[Job]:
    """All runs, those that take longest first."""
    order = sorted(models, key=lambda name: ("vit" not in name, name == "mlp"))
    found = [
        Job(model, layers, autocast, seed)
        for model in order
        for autocast, seed, layers in itertools.product(autocasts, range(seeds), LAYERS)
    ]
    exact = [Job(model, "exact", "none", seed) for model in order for seed in range(seeds) if "none" in autocasts]
    return found + exact


def done(jobs: list[Job], settings: dict[str, Any], device: str, processes: int) -> Iterator[dict[str, Any]]:
    """The runs as they end."""
    shared = Path("/dev/shm")  # checkpoints of runs of a minute need no disk, if memory has room for them
    roomy = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > processes * ROOM
    place = shared if roomy else None
    with tempfile.TemporaryDirectory(prefix="zoo-parity-", dir=place, ignore_cleanup_errors=True) as scratch:
        yield from _done(jobs, settings, device, processes, Path(scratch))


def _done(
    jobs: list[Job], settings: dict[str, Any], device: str, processes: int, scratch: Path
) -> Iterator[dict[str, Any]]:
    if processes == 1:
        yield from (run(job, settings, device, scratch) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        waiting = [pool.submit(run, job, settings, device, scratch) for job in jobs]
        try:
            for one in concurrent.futures.as_completed(waiting):
                yield one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# What the runs say


def mean_and_interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95% interval, by Student's t."""
    from scipy import stats

    mean = statistics.fmean(values)
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def equivalence(custom: list[float], stock: list[float], margin: float = MARGIN) -> float:
    """The p value of TOST, Welch's: small where the means surely differ by less than ``margin``."""
    from scipy import stats

    if len({*custom}) == len({*stock}) == 1:  # no scatter: the difference is what it is
        return 0.0 if abs(custom[0] - stock[0]) < margin else 1.0
    over = stats.ttest_ind([value + margin for value in custom], stock, equal_var=False, alternative="greater")
    under = stats.ttest_ind([value - margin for value in custom], stock, equal_var=False, alternative="less")
    return float(max(over.pvalue, under.pvalue))


def common(
    runs: list[dict[str, Any]], model: str, autocast: str, layers: tuple[str, ...]
) -> dict[str, list[dict[str, Any]]]:
    """The runs by layers, of those seeds that all of ``layers`` have, in the order of the seeds."""
    found = {
        name: {r["seed"]: r for r in runs if (r["model"], r["autocast"], r["layers"]) == (model, autocast, name)}
        for name in layers
    }
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in found.values())))
    return {name: [by_seed[seed] for seed in seeds] for name, by_seed in found.items()}


def accuracies(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model and autocast: final accuracies of stock and custom, and whether they are equivalent."""
    rows = []
    for model, autocast in dict.fromkeys((run["model"], run["autocast"]) for run in runs if run["layers"] != "exact"):
        chosen = common(runs, model, autocast, LAYERS)
        values = {name: [run["accuracy"] for run in chosen[name]] for name in LAYERS}
        if len(values["stock"]) < 2:
            continue
        row: dict[str, Any] = {"model": model, "autocast": autocast, "seeds": len(values["stock"])}
        for name in LAYERS:
            row[name], row[f"{name}_low"], row[f"{name}_high"] = mean_and_interval(values[name])
        row["difference"] = row["custom"] - row["stock"]
        row["p"] = equivalence(values["custom"], values["stock"])
        row["equivalent"] = row["p"] < LEVEL
        rows.append(row)
    return rows


def first_steps(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model: the float32 losses of the first steps of all seeds, by the parity rule."""
    rows = []
    for model in dict.fromkeys(run["model"] for run in runs if run["layers"] == "exact"):
        losses = {
            layers: torch.tensor([run["losses"][:FIRST_STEPS] for run in chosen], dtype=torch.float64)
            for layers, chosen in common(runs, model, "none", (*LAYERS, "exact")).items()
        }
        if not losses["exact"].numel():
            continue
        measures = {name: measure(losses[name], losses["exact"]) for name in LAYERS}
        as_float32 = {name: dataclasses.replace(m, dtype=torch.float32) for name, m in measures.items()}
        (entry,) = judge("loss", {model: as_float32["custom"]}, {model: as_float32["stock"]})
        row = {"model": model, "losses": losses["exact"].numel(), "custom_error": entry.error}
        row |= {"stock_error": entry.reference_error, "limit": entry.limit, "ok": entry.ok, "reason": entry.reason}
        rows.append(row)
    return rows


def tables(document: dict[str, Any]) -> Iterator[Any]:
    """What the results look like at a terminal."""
    right = ("stock", "custom", "difference", "p")
    table = columns("model", "autocast", *right, "equivalent within 0.5 points", right=right)
    for row in document["accuracies"]:
        shown = (f"{row[n]:.2%} ({row[f'{n}_low']:.2%}-{row[f'{n}_high']:.2%})" for n in LAYERS)
        points, verdict = f"{100 * row['difference']:+.2f} points", "yes" if row["equivalent"] else "NOT shown"
        table.add_row(row["model"], row["autocast"], *shown, points, f"{row['p']:.1e}", verdict)
    yield table
    right = ("losses", "error of custom", "of stock", "limit")
    table = columns("model", *right, "first steps, float32", right=right)
    for row in document["first_steps"]:
        errors = (f"{row[key]:.1e}" for key in ("custom_error", "stock_error", "limit"))
        table.add_row(row["model"], str(row["losses"]), *errors, "right" if row["ok"] else row["reason"])
    yield table


def draw(document: dict[str, Any], file: Path) -> None:
    """The losses of every run: a row of panels for each model, a column for each autocast."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = [run for run in document["runs"] if run["layers"] != "exact"]
    models, autocasts = (list(dict.fromkeys(run[key] for run in runs)) for key in ("model", "autocast"))
    figure = Figure(figsize=(5 * len(autocasts), 3 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), len(autocasts), squeeze=False)
    for one in runs:
        panel = panels[models.index(one["model"])][autocasts.index(one["autocast"])]
        colour = "tab:orange" if one["layers"] == "custom" else "tab:blue"
        label = one["layers"] if one["seed"] == 0 else None
        panel.plot(one["steps"], one["losses"], color=colour, linewidth=0.8, alpha=0.7, label=label)
        panel.set_title(f"{one['model']}, {'float32' if one['autocast'] == 'none' else one['autocast'] + ' autocast'}")
        panel.set(xlabel="step", ylabel="training loss", yscale="log")
        panel.legend()
    figure.savefig(file, dpi=110)


# The command


def write(document: dict[str, Any], file: Path) -> None:
    """The whole document in one step, with a run a line."""
    text = json.dumps({**document, "runs": []}, indent=2)
    lines = ",\n".join(f"    {json.dumps(run)}" for run in document["runs"])
    with replacing(file) as temporary:
        temporary.write_text(text.replace('"runs": []', f'"runs": [\n{lines}\n  ]') + "\n", encoding="utf-8")


def begun(file: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that a file has already, of these models or of others.

    ``settings`` gets the recipes of the others. ValueError if the data or a model's recipe is another one.
    """
    if not file.exists():
        return []
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        data, recipes, runs = document["settings"]["data"], document["settings"]["recipes"], document["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not what this command writes ({error!r}); name another file") from error
    pairs = [("data", data, settings["data"])]
    pairs += [(name, recipes[name], recipe) for name, recipe in settings["recipes"].items() if name in recipes]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise ValueError(f"{file}: its runs have other settings: {name} {theirs}, not {ours}; name another file")
    settings["recipes"] = {**recipes, **settings["recipes"]}
    return list(runs)


def main(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.json", help="The results; runs that are in it are not repeated.")
    ],
    data: Annotated[str, typer.Option(metavar="DIR|digits", help="The folder of Fashion-MNIST.")],
    model: Annotated[list[str] | None, typer.Option(help="Of the recipes; repeatable. All, unless told.")] = None,
    seeds: Annotated[int, typer.Option(min=2)] = 5,
    epochs: Annotated[int, typer.Option(min=2)] = COMMON["epochs"],
    autocast: Annotated[str, typer.Option(help="Of none, bf16.")] = "none,bf16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "auto",
    processes: Annotated[int | None, typer.Option(min=1, help="At once; by default one a core, and 8 at most.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the losses.")] = None,
) -> None:
    """Train stock and custom with many seeds, and test whether their accuracies are equivalent."""
    models, autocasts = list(dict.fromkeys(model or RECIPES)), autocast.split(",")
    for name in models:
        if name not in RECIPES:
            raise unknown_name("model", name, RECIPES)
    for name in autocasts:
        if name not in AUTOCAST:
            raise unknown_name("autocast", name, AUTOCAST)
    recipes = {name: {**COMMON, "epochs": epochs, **RECIPES[name]} for name in models}
    settings = {"data": "digits" if data == "digits" else "fashion_mnist", "recipes": recipes}
    source = "digits" if data == "digits" else f"fashion_mnist:{data}"
    if data == "digits":
        for recipe in recipes.values():
            recipe["batch_size"] = 64
    place = choose_device(device)
    runs = begun(file, settings)
    known = {tuple(run[key] for key in ("model", "layers", "autocast", "seed")) for run in runs}
    missing = [job for job in jobs_of(models, seeds, autocasts) if dataclasses.astuple(job) not in known]
    machine = dataclasses.asdict(examine(place))
    document = {
        "schema": SCHEMA,
        "machine": machine,
        "settings": settings,
        "accuracies": [],
        "first_steps": [],
        "runs": runs,
    }
    if not missing:
        document["machine"] = json.loads(file.read_text(encoding="utf-8"))["machine"]
    count = processes or max(1, min(8, len(os.sched_getaffinity(0)) - 1))
    began = time.perf_counter()
    with progress() as bar:
        task = bar.add_task("runs", total=len(missing))
        for one in done(missing, {**settings, "data": source}, str(place), count) if missing else ():
            runs.append(one)
            write(document, file)
            bar.advance(task)
    if missing:
        print(f"{len(missing)} runs in {time.perf_counter() - began:.0f} s, {count} at once on {machine['device']}")
    order = list(RECIPES)
    runs.sort(key=lambda r: (order.index(r["model"]), r["autocast"], r["layers"], r["seed"]))
    write(document, file)
    try:
        document |= {"accuracies": accuracies(runs), "first_steps": first_steps(runs)}
        write(document, file)
        for table in tables(document):
            console().print(table)
        if plot is not None:
            draw(document, plot)
    except ImportError as error:
        print(f"{file} has the runs; {error}: run this again where scipy and matplotlib are, with the same options")
        raise typer.Exit(0) from None
    good = all(row["equivalent"] for row in document["accuracies"]) and all(
        row["ok"] for row in document["first_steps"]
    )
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
