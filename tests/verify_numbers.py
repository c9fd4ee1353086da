"""How often ``zoo verify`` is right: saboteurs caught, honest layers flagged, equals told apart, planted effects found.

    python tests/verify_numbers.py --device cuda --json examples/results/verify/h200-numbers.json --seconds 460

Four parts: "planted" and "equals" are timings, one after the other, in fresh processes, and need the device for
themselves; "saboteurs" and "honest" are verdicts, ``--jobs`` processes at a time. The file is written after each unit
of work, and what it has is not done again: a run that is cut off, by ``--seconds`` or otherwise, goes on with the same
command. Exit code 1 if a number is not what it should be, 2 if not all is done.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes find support by it, too

from support import gpu_saboteurs, honest, layer_norms, other_kinds, saboteurs
from support.gpu_memory import memory_in_turn
from zoo.bench.cases import Case, cases_named
from zoo.machine import device_of, examine
from zoo.verify.claims import cuda, processes
from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED, Verdict
from zoo.verify.running import chosen_claims, judge_claim, judging
from zoo.verify.subject import Subject
from zoo.verify.timing.judging import FASTER, SLOWER, SUSPECT
from zoo.verify.timing.plan import Plan
from zoo.verify.timing.running import Timer

PARTS = ("planted", "equals", "saboteurs", "honest")
COMPILING = ("compile", "compile-dynamic", "export")
ALONE = {gpu_saboteurs.asks_for_a_value}
"""After it, its process is of no use: a failed capture is not got over."""
LAST_SEEDS = 3
"""Misses and flags that are told in full, of each layer."""
KINDS = ("linear", "layer_norm", "conv2d", "mlp")
CONTROLS: dict[str, dict[Any, set[str]]] = {
    "linear": {layer: honest.REFUSED_BY_REFUSES if layer is honest.Refuses else set() for layer in honest.LAYERS},
    "layer_norm": {
        layer: refusals
        for layer, refusals in layer_norms.HONEST.items()
        if layer not in (layer_norms.Compiled, layer_norms.OneNumberOnly)
    },
    **other_kinds.HONEST,
}
"""Kind -> right layers, and the claims that each refuses."""


@dataclass(frozen=True)
class Unit:
    """One verdict, or one run of a right layer through all its claims."""

    part: str
    kind: str
    index: int
    """Of the layer, in its table."""
    seed: int
    device: str

    @property
    def layer(self) -> Any:
        table: Any = _caught(self.device) if self.part == "saboteurs" else CONTROLS[self.kind]
        return list(table)[self.index]

    @property
    def claim(self) -> str:
        return _caught(self.device)[self.layer] if self.part == "saboteurs" else "*"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layer.__name__}" + (f" by {self.claim}" if self.part == "saboteurs" else "")


def _caught(device: str) -> dict[Any, str]:
    """The saboteurs of Linear, and the claim that must find each."""
    return {**saboteurs.CAUGHT_BY, **(gpu_saboteurs.ON_GPU if device.startswith("cuda") else {})}


def units(device: str, repeats: int, runs: int, only: str) -> Iterator[Unit]:
    """Seed by seed, so that what is cut off has all layers."""
    for seed in range(repeats):
        for index, layer in enumerate(_caught(device)):
            if only in layer.__name__:
                yield Unit("saboteurs", "linear", index, seed, device)
    right = [(kind, i) for kind in KINDS for i, layer in enumerate(CONTROLS[kind]) if only in layer.__name__]
    for number in range(runs if right else 0):
        kind, index = right[number % len(right)]
        yield Unit("honest", kind, index, number // len(right), device)


def found_by(unit: Unit) -> list[str]:
    """What is not as it should be: a saboteur that was not caught, a right layer that was flagged."""
    torch.set_num_threads(1)
    if unit.part == "saboteurs":
        verdict = _alone(unit) if unit.layer in ALONE else _judged(unit, unit.claim)
        return [] if verdict.status == FAIL and verdict.reason else [str(verdict)]
    wrong = []
    refused = CONTROLS[unit.kind][unit.layer]
    for claim in chosen_claims("*", unit.kind):
        if claim.name in (*COMPILING, "large-tensors") or claim in processes.CLAIMS:
            continue
        verdict = _judged(unit, claim.name)
        if verdict.status == UNTESTED and (claim.name == "opcheck" or claim in cuda.CLAIMS):
            continue
        if verdict.status != (REFUSED if claim.name in refused else PASS):
            wrong.append(str(verdict))
    return wrong


def _judged(unit: Unit, name: str) -> Verdict:
    (claim,) = (claim for claim in chosen_claims(name, unit.kind) if claim.name == name)
    torch._dynamo.reset() if name in COMPILING else None
    with memory_in_turn() if name == "large-tensors" else contextlib.nullcontext():
        return judge_claim(claim, Subject(unit.layer, device_of(unit.device), kind=unit.kind), seed=unit.seed)


def _alone(unit: Unit) -> Verdict:
    target = f"{unit.layer.__module__}:{unit.layer.__name__}"
    with judging(target, kind=unit.kind, device=unit.device, seed=unit.seed) as judge:
        return judge(unit.claim)


# what is timed

SMALL = Case("tiny", 8, 32, 16)
PLANTED = {
    "cuda": {
        "2% of 20 us": ("SlowerBy2Percent", "Spins", SLOWER),
        "3% of 100 us": ("Spins100SlowerBy3Percent", "Spins100", SLOWER),
    },
    "cpu": {"5% of 500 us": ("SlowerBy5Percent", "Spins", SLOWER)},
}
EQUALS = ("vit_b/head", "vit_b/proj", "convnext_t/stage4_fc2", "resnet*", "mnist/*", "vector/4096")
"""Thirteen cases, and two passes and states of each: 52 comparisons a run."""


def planted_plan(device: torch.device) -> Plan:
    """As the full form, on one case."""
    blocks = 40 if device.type == "cuda" else 10
    return Plan("full", 5, blocks, (SMALL,), ("float32",), ("eager",), ("forward",), ("warm",))


def equals_plan(device: torch.device) -> Plan:
    """As the quick form, on more cases."""
    cases = tuple(
        replace(case, activation=None) for case in cases_named(EQUALS if device.type == "cuda" else ["mnist/fc3"])
    )
    return Plan("quick", 3, 10 if device.type == "cuda" else 6, cases, ("float32",), ("eager",))


# the file


class Numbers:
    """What has been found so far, in a file."""

    def __init__(self, file: Path, device: torch.device, command: str, wanted: dict[str, int]) -> None:
        self.file = file
        self.data: dict[str, Any] = {"schema": 1, **{part: {} for part in PARTS}}
        if file.exists():
            self.data |= json.loads(file.read_text(encoding="utf-8"))
        self.data |= {"machine": asdict(examine(device)), "command": command, "wanted": wanted}

    def done(self, unit: Unit) -> bool:
        return unit.seed in self.data[unit.part].get(unit.name, {}).get("seeds", ())

    def add(self, unit: Unit, wrong: list[str]) -> None:
        entry = self.data[unit.part].setdefault(unit.name, {"seeds": [], "wrong": 0, "told": []})
        entry["seeds"].append(unit.seed)
        entry["wrong"] += bool(wrong)
        entry["told"] = [*entry["told"], *(f"seed {unit.seed}: {text}" for text in wrong)][:LAST_SEEDS]
        self.write()

    def time(self, part: str, key: str, make: Callable[[], Timer], until: float) -> None:
        """Run all processes of a timing, unless it is there; nothing of it is kept if there is no time for all."""
        if key in self.data[part]:
            return
        timer = make()
        for _ in timer.steps:
            if time.monotonic() > until:
                return
            timer.step()
        kept = ("case", "M", "K", "N", "pass", "state", "verdict", "reason", "layer_us", "peer_us")
        kept += ("speedup", "speedup_low", "speedup_high", "floor", "detectable", "blocks", "dropped")
        rows = timer.report().to_dict()["rows"]
        self.data[part][key] = [{name: row[name] for name in kept} for row in rows]
        self.write()

    def summary(self) -> dict[str, Any]:
        """The numbers."""
        wanted, data = self.data["wanted"], self.data
        caught = [len(e["seeds"]) - e["wrong"] for e in data["saboteurs"].values()]
        tried = [len(e["seeds"]) for e in data["saboteurs"].values()]
        runs = sum(len(e["seeds"]) for e in data["honest"].values())
        verdicts = Counter(row["verdict"] for rows in data["equals"].values() for row in rows)
        planted = {
            key: [(row["verdict"], _rounded(row)) for row in rows] for key, rows in sorted(data["planted"].items())
        }
        found = {
            "saboteurs": len(tried),
            "caught each time": sum(c == t for c, t in zip(caught, tried, strict=True)),
            "times each": min(tried, default=0),
            "honest layers": len(data["honest"]),
            "honest runs": runs,
            "honest runs flagged": sum(e["wrong"] for e in data["honest"].values()),
            "comparisons of equals": sum(verdicts.values()),
            "of them": dict(verdicts),
            "planted": planted,
        }
        told_apart = verdicts[FASTER] + verdicts[SLOWER]
        right = {
            "saboteurs": found["caught each time"] == found["saboteurs"],
            "honest": not found["honest runs flagged"],
            "equals": 100 * told_apart <= max(100, sum(verdicts.values())) and not verdicts[SUSPECT],
            "planted": all(verdict == SLOWER for rows in planted.values() for verdict, _ in rows),
        }
        complete = {
            "saboteurs": found["times each"] >= wanted["repeats"],
            "honest": runs >= wanted["honest"],
            "equals": sum(verdicts.values()) >= wanted["equals"],
            "planted": len(planted) >= wanted["planted"],
        }
        return {**found, "right": right, "complete": complete}

    def write(self) -> None:
        self.data["summary"] = self.summary()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_name(self.file.name + ".part")
        beside.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.file)


def _rounded(row: dict[str, Any]) -> list[float | None]:
    return [None if row[k] is None else round(row[k], 4) for k in ("speedup", "speedup_low", "speedup_high")]


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Written to, and gone on from.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="No unit of work is begun after so many.")] = 460.0,
    repeats: Annotated[int, typer.Option(help="Of each saboteur, with a seed of its own.")] = 10,
    runs: Annotated[int, typer.Option("--honest", help="Of right layers, all together.")] = 300,
    equals: Annotated[int, typer.Option(help="Comparisons of the stock layer with itself, at least.")] = 100,
    effects: Annotated[
        bool, typer.Option("--planted/--no-planted", help="Time layers that are a little slower.")
    ] = True,
    only: Annotated[str, typer.Option(help="Layers whose name has this in it.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes at a time, for verdicts.")] = min(8, (os.cpu_count() or 2) // 2),
) -> None:
    """Measure, or go on measuring."""
    until = time.monotonic() + seconds
    try:
        place = device_of(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    table = PLANTED[place.type] if effects else {}
    wanted = {"repeats": repeats, "honest": runs, "equals": equals, "planted": len(table)}
    numbers = Numbers(json_file, place, " ".join(["python", "tests/verify_numbers.py", *sys.argv[1:]]), wanted)
    for key, (layer, against, _) in table.items():
        numbers.time("planted", key, lambda a=layer, b=against: _timer(a, place, 0, planted_plan(place), b), until)
    seed = 0
    while _comparisons(numbers) < equals and time.monotonic() < until:
        numbers.time("equals", f"seed {seed}", lambda s=seed: _timer("", place, s, equals_plan(place)), until)
        seed += 1
    left = [unit for unit in units(str(place), repeats, runs, only) if not numbers.done(unit)]
    for unit, wrong in _answers(left, jobs, until):
        numbers.add(unit, wrong)
        for text in wrong:
            print(f"{unit.name}, seed {unit.seed}: {text}", flush=True)
    numbers.write()
    found = numbers.data["summary"]
    print(json.dumps(found, indent=1))
    raise typer.Exit(1 if not all(found["right"].values()) else 0 if all(found["complete"].values()) else 2)


def _comparisons(numbers: Numbers) -> int:
    return sum(map(len, numbers.data["equals"].values()))


def _timer(layer: str, place: torch.device, seed: int, plan: Plan, against: str | None = None) -> Timer:
    named = [f"support.timing_saboteurs:{name}" if name else None for name in (layer, against)]
    return Timer(named[0] or "torch.nn:Linear", kind="linear", device=place, seed=seed, plan=plan, against=named[1])


def _answers(left: list[Unit], jobs: int, until: float) -> Iterator[tuple[Unit, list[str]]]:
    """The units with what each gave, as they come; none is begun when the time is over."""
    rest, over = iter(left), False
    while not over:
        waiting: dict[Any, Unit] = {}
        lost: list[Unit] = []
        with _pool(jobs) as pool:
            while not lost:
                while len(waiting) < jobs and time.monotonic() < until and (unit := next(rest, None)) is not None:
                    waiting[pool.submit(found_by, unit)] = unit
                if over := not waiting:
                    break
                done, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    unit = waiting.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        lost.append(unit)
                    else:
                        yield unit, _told(future)
        for unit in (*lost, *waiting.values()):  # one of them ended its process: which, shows when each is alone
            with _pool(1) as pool:
                yield unit, _told(pool.submit(found_by, unit))


def _pool(jobs: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


def _told(future: concurrent.futures.Future[list[str]]) -> list[str]:
    error = future.exception()
    return future.result() if error is None else [f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    typer.run(main)
