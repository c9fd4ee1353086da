"""Judges the claims one by one, in this process or in a worker process with limits."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zoo import registry
from zoo.judging import Entry, judged_entries
from zoo.layers.kinds import kind_of
from zoo.machine import device_of
from zoo.machine import examine as examine_machine
from zoo.sweep.worker import Ended, Worker
from zoo.verify.claims import CLAIMS
from zoo.verify.claims.models import MODELS, claims_of, named
from zoo.verify.kinds import EVERY
from zoo.verify.outcome import FAIL, PASS, UNTESTED, Claim, TensorError, Verdict, outcome_of
from zoo.verify.report import VerifyReport
from zoo.verify.subject import Subject
from zoo.verify.target import Source, name_of, resolve, source_of

if TYPE_CHECKING:
    from zoo.verify.timing.plan import Plan
    from zoo.verify.timing.running import Timer

__all__ = [
    "BUILD",
    "MEMORY_LIMIT",
    "TIME_LIMIT",
    "Found",
    "Task",
    "chosen_claims",
    "judge_claim",
    "judging",
    "look",
    "verify",
]

TIME_LIMIT = 120.0
MEMORY_LIMIT = 8 * 2**30
BUILD = "build"
MOST_TENSORS = 40
"""That a verdict about a model ("model-gradients@resnet18") tells the errors of."""


@dataclass(frozen=True)
class Task:
    """What the worker is asked: the verdict on a claim, or with none where the layer's source is."""

    target: Any
    kind: str
    claim: str | None
    device: str
    seed: int
    memory_limit: int | None
    against: Any = None


@dataclass(frozen=True)
class Found:
    """Where a target's source is; or why there is no such target."""

    source: Source
    refusal: str = ""
    ok: bool = True


class Judge(Protocol):
    """Answers a task, in this process or in another."""

    def __call__(self, task: Task) -> Any: ...


def verify(
    target: Any,
    *,
    kind: str = "linear",
    against: Any = None,
    device: str | torch.device | None = None,
    models: str | Iterable[str] = MODELS,
    claims: str | Iterable[str] = "*",
    seed: int = 0,
    isolate: bool = True,
    time_limit: float = TIME_LIMIT,
    memory_limit: int | None = MEMORY_LIMIT,
    timing: str | Plan | None = None,
    command: str | None = None,
    progress: Callable[[Sequence[str]], Iterable[str]] = iter,
    checkpoint: Callable[[VerifyReport], object] | None = None,
) -> VerifyReport:
    """Judge every claim about a layer: pass, fail, refused (a clear error) or untested (why).

    Values are judged by :mod:`zoo.judging`: by error against float64, relative to the stock layer's own.

    Args:
        target: "module:Name", the name of a registered layer, a class that is built as the stock layer is, or a
            function of what its kind's functions take (:func:`zoo.register_layer`).
        kind: "linear", "layer_norm", "conv2d" or "mlp", whose layers are functions.
        against: a class, or "module:Name" of one, to compare with in the place of the stock layer, built as that is. A
            layer that approximates is wrong beside the stock layer; whether it is a right approximation shows beside
            its twin, which does the same in plain operators.
        device: where to run; the CPU unless told.
        models: names of :func:`zoo.list_models` that the layer is tried in too, each with claims of its own.
        claims: globs over the names of claims.
        seed: of weights and inputs; each claim has a stream of its own, so that one alone gives the same values.
        isolate: judge each claim in a worker process, so that a hang, a crash or an exit costs that claim alone. The
            worker is spawned: a script calls this under ``if __name__ == "__main__"``, and a class or function must be
            importable by its name. Without, nothing limits what the layer does.
        time_limit: seconds for one claim, if isolated.
        memory_limit: bytes that a worker on the CPU may allocate, or None.
        timing: "quick" or "full", or a :class:`zoo.verify.timing.Plan`, to time the layer too, in fresh processes
            whatever ``isolate`` says; see :mod:`zoo.verify.timing`.
        command: what the report says was asked for.
        progress: wraps the sequence of claims, and then of timing's processes, that is gone through.
        checkpoint: called with the report so far after each of them.

    Raises:
        ValueError: an unknown kind, target, model or claim; a target that cannot be sent to the worker.
    """
    chosen = chosen_claims(claims, kind, models=models)
    where = device_of(device)
    if not time_limit > 0:
        raise ValueError(f"time_limit={time_limit!r}: expected more than 0 seconds")
    timer = None if timing is None else _timer(target, against, kind, where, seed, timing)
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(_isolated((target, against), time_limit)) if isolate else look
        limit = memory_limit if isolate and where.type == "cpu" else None
        task = Task(target, kind, None, str(where), seed, limit, against)
        found = judge(task)
        if isinstance(found, Found) and found.refusal:
            raise ValueError(found.refusal)
        source = found.source if isinstance(found, Found) else Source(None, None)
        verdicts = [] if isinstance(found, Found) else [found]
        report = VerifyReport(
            name_of(target),
            kind,
            source.source_file,
            source.source_sha256,
            source.libraries,
            examine_machine(where),
            seed,
            command or _call(target, against, kind, where, seed),
            tuple(verdicts),
            complete=False,
            against=None if against is None else name_of(against),
        )
        by_name = {claim.name: claim for claim in chosen}
        claims_left = [name for name in by_name if not any(v.claim == name for v in verdicts)]
        for name in progress([*claims_left, *(timer.steps if timer is not None else ())]):
            if timer is not None and name in timer.steps:
                if not any(v.claim == BUILD and v.status != PASS for v in verdicts):
                    timer.step()
                    report = replace(report, timing=timer.report())
            elif any(v.claim == BUILD and v.status != PASS for v in verdicts):
                verdicts.append(_verdict(by_name[name], UNTESTED, "the layer could not be built"))
            else:
                verdicts.append(judge(replace(task, claim=name)))
            if checkpoint is not None:
                checkpoint(replace(report, verdicts=_padded(verdicts, chosen)))
    return replace(report, verdicts=tuple(verdicts), complete=True)


@contextlib.contextmanager
def judging(
    target: str,
    *,
    kind: str = "linear",
    device: str | torch.device | None = None,
    seed: int = 0,
    time_limit: float = TIME_LIMIT,
    memory_limit: int | None = MEMORY_LIMIT,
) -> Iterator[Callable[[str], Verdict]]:
    """What gives the verdict on a claim by its name, in one worker process. Args: as of :func:`verify`.

    ValueError for a target that leads nowhere.
    """
    where = device_of(device)
    task = Task(target, kind, None, str(where), seed, memory_limit if where.type == "cpu" else None)
    with _isolated((target,), time_limit) as judge:
        found = judge(task)
        if isinstance(found, Found) and found.refusal:
            raise ValueError(found.refusal)
        failed = {} if isinstance(found, Found) else {BUILD: found}
        yield lambda claim: failed.get(claim) or judge(replace(task, claim=claim))


def chosen_claims(
    globs: str | Iterable[str] = "*", kind: str = "linear", *, models: str | Iterable[str] = ()
) -> list[Claim]:
    """The claims about a kind that match any of the globs, in the table's order: ``build`` first, those of models last.

    ValueError for no kind, a glob that matches none, and for a model that there is not.
    """
    kind_of(kind)
    globs = [globs] if isinstance(globs, str) else list(globs)
    names = list(dict.fromkeys([models] if isinstance(models, str) else models))
    table = [c for c in (*_TABLE, *(claim for name in names for claim in claims_of(name))) if kind in c.kinds]
    for glob in globs:
        if not any(fnmatch.fnmatchcase(claim.name, glob) for claim in table):
            of = "" if kind == "linear" else f" about {kind} layers"
            raise ValueError(f"no claim{of} matches {glob!r}; there are {', '.join(claim.name for claim in table)}")
    chosen = [c for c in table if c.name == BUILD or any(fnmatch.fnmatchcase(c.name, glob) for glob in globs)]
    for name in names:
        if any(claim.name.endswith(f"@{name}") for claim in chosen):  # to know timm's names takes seconds
            registry.resolve(name)
    return chosen


def claim_named(name: str | None) -> Claim:
    """The claim of that name, one about a model too."""
    return next((c for c in _TABLE if c.name == name), None) or (named(name) if name else None) or _BUILD


def look(task: Task, note: Callable[[str], object] = lambda step: None) -> Verdict | Found:
    """Answer a task here."""
    if task.memory_limit is not None:
        _limit_memory(task.memory_limit)
    if task.claim is None:
        try:
            _against(task)
            return Found(source_of(resolve(task.target, task.kind)))
        except ValueError as error:
            return Found(Source(None, None), refusal=str(error))
        except Exception as error:  # of the module that defines it
            return _verdict(_BUILD, FAIL, f"it could not be imported: {type(error).__name__}: {error}")
    claim = claim_named(task.claim)
    note(claim.name)
    layer = resolve(task.target, task.kind)
    subject = Subject(layer, device_of(task.device), kind=task.kind, against=_against(task), target=task.target)
    return judge_claim(claim, subject, seed=task.seed)


def _against(task: Task) -> Any:
    """The class to compare with, or None for the stock layer."""
    if task.against is None:
        return None
    try:
        found = resolve(task.against, task.kind)
    except ValueError as error:
        raise ValueError(f"against: {error}") from None
    if not isinstance(found, type):
        raise ValueError(f"against {name_of(task.against)}: expected a class, got {found!r}")
    return found


def judge_claim(claim: Claim, subject: Subject, *, seed: int = 0) -> Verdict:
    """The verdict on one claim about a layer, in this process; torch's random state comes back as it was."""
    begun = time.monotonic()
    with torch.random.fork_rng(devices=[] if subject.device.type == "cpu" else None):
        torch.manual_seed(zlib.crc32(f"{seed} {claim.name}".encode()))
        with judged_entries() as entries:
            try:
                claim.check(subject)
                status, reason = PASS, ""
            except Exception as error:
                status, reason = outcome_of(error)
    return _with_error(_verdict(claim, status, reason, time.monotonic() - begun), entries)


def _with_error(verdict: Verdict, entries: Sequence[Entry]) -> Verdict:
    comparable = [entry for entry in entries if entry.comparable and math.isfinite(entry.limit)]
    if verdict.status == PASS:  # what was over its limit was looked at again, with more evidence
        comparable = [entry for entry in comparable if entry.ok]
    if not comparable:
        return verdict
    ranked = sorted(comparable, key=lambda entry: -entry.excess)
    worst, shown = ranked[0], ranked[:MOST_TENSORS] if "@" in verdict.claim else ()
    return replace(
        verdict,
        error=worst.error,
        stock_error=worst.reference_error,
        error_limit=worst.limit,
        error_at=worst.name,
        tensors=tuple(
            TensorError(e.name, e.error, e.reference_error, e.limit) for e in comparable if any(e is s for s in shown)
        ),
    )


def _build(s: Subject) -> None:
    for options in s.suite.required:
        s.pair(**options)


_BUILD = Claim(BUILD, "it is built as the stock layer is, and takes its state dict", _build, EVERY)
_TABLE: tuple[Claim, ...] = (_BUILD, *CLAIMS)


@contextlib.contextmanager
def _isolated(targets: tuple[Any, ...], time_limit: float) -> Iterator[Judge]:
    for target in targets:
        _sendable(target, "define it at a module's top level, or pass isolate=False")
    with Worker(look) as worker:

        def judge(task: Task) -> Any:
            begun = time.monotonic()
            try:
                return worker.ask(task, time_limit=time_limit)
            except Ended as error:
                return _verdict(claim_named(task.claim), FAIL, str(error), time.monotonic() - begun)

        yield judge


def _timer(target: Any, against: Any, kind: str, device: torch.device, seed: int, timing: str | Plan) -> Timer:
    from zoo.verify.timing.plan import plan_for  # the bench's modules, which `import zoo` has no need of
    from zoo.verify.timing.running import Timer

    for one in (target, against):
        _sendable(one, "define it at a module's top level, for timing")
    plan = plan_for(device, timing, kind) if isinstance(timing, str) else timing
    return Timer(target, kind=kind, device=device, seed=seed, plan=plan, against=against)


def _sendable(target: Any, remedy: str) -> None:
    if not isinstance(target, str):
        try:
            pickle.dumps(target)
        except Exception as error:
            raise ValueError(
                f"target {name_of(target)}: it cannot be sent to a worker process ({error}); {remedy}"
            ) from None


def _call(target: Any, against: Any, kind: str, where: torch.device, seed: int) -> str:
    twin = "" if against is None else f", against={name_of(against)!r}"
    return f"zoo.verify({name_of(target)!r}, kind={kind!r}{twin}, device={str(where)!r}, seed={seed})"


def _verdict(claim: Claim, status: str, reason: str = "", seconds: float = 0.0) -> Verdict:
    return Verdict(claim.name, claim.says, status, reason, seconds)


def _padded(verdicts: Sequence[Verdict], chosen: Sequence[Claim]) -> tuple[Verdict, ...]:
    reached = {verdict.claim for verdict in verdicts}
    return (*verdicts, *(_verdict(c, UNTESTED, "not reached") for c in chosen if c.name not in reached))


def _limit_memory(limit: int) -> None:
    """Allocations beyond the limit fail. Not for CUDA, which reserves address space by the hundred gigabytes."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
