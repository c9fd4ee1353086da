"""The sweep itself: which models, in which order, into which file."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from zoo.registry import list_models
from zoo.sweep.lines import append, begin, held
from zoo.sweep.memory import fitted, need, room
from zoo.sweep.pool import examined
from zoo.sweep.report import SweepReport
from zoo.sweep.rows import SweepRow, Task

__all__ = ["MAX_PARAMETERS", "TIME_LIMIT", "chosen_models", "sweep"]

MAX_PARAMETERS = 700_000_000
TIME_LIMIT = 600.0

Watch = Callable[[Sequence[str], int, int], object]


def sweep(
    globs: Iterable[str] = ("*",),
    *,
    on: str = "data",
    device: str = "cpu",
    shard: str = "1/1",
    processes: int = 1,
    out: str | os.PathLike[str] | None = None,
    resume: bool = True,
    gradients: bool = True,
    small: bool = False,
    max_parameters: int | None = MAX_PARAMETERS,
    time_limit: float = TIME_LIMIT,
    time_budget: float | None = None,
    command: str = "zoo.sweep.sweep",
    watch: Watch = lambda under_way, done, total: None,
) -> SweepReport:
    """Build every model, patch it, run it, compare it with its source library's, and unpatch it.

    On data: FLOPs and what ran, in eval and in training mode; a backward; the state dict loaded strictly both ways;
    parity of outputs and gradients; and after ``unpatch`` the same modules, classes, parameters, keys and outputs, bit
    by bit. Weights are fresh ones from a fixed seed; batch norms give values of about one. On the meta device:
    build, patch, forward, state dict, unpatch.

    Each model is looked at in a worker process, which is replaced when a model fails. As it is spawned, a script that
    calls this does so under ``if __name__ == "__main__"``; models that it registers above that are known there too.

    Args:
        globs: patterns of names, as ``zoo.list_models`` takes them.
        on: "data", or "meta".
        device: where to run on data.
        shard: "k/n", every n-th model beginning with the k-th, counted from 1.
        processes: how many models are looked at together. The largest begin, as many as there is memory for. One that
            runs out of memory or time beside others, or whose process dies, is looked at again at the end, alone.
        out: a file named *.jsonl that each model's row is added to as soon as it is known.
        resume: leave out what is in the file already; else begin the file anew.
        gradients: on data, run a backward and compare gradients.
        small: on data, images of the smallest size that a model takes, instead of its own.
        max_parameters: a model with more is looked at on the meta device; None for no limit.
        time_limit: seconds for one model.
        time_budget: seconds after which no further model begins; what is under way is finished. None for no limit.
        command: what the report says was asked for.
        watch: is told, as it goes, the names of the models under way, how many are done, and how many there are to do.

    Raises:
        ValueError: an argument of the wrong form, a glob that matches nothing, or a file of another sweep.
        OSError: a file that cannot be written.
    """
    if on not in ("data", "meta"):
        raise ValueError(f"on={on!r}: expected 'data' or 'meta'")
    if not time_limit > 0:
        raise ValueError(f"time_limit={time_limit!r}: expected more than 0 seconds")
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes={processes!r}: expected a number of processes, 1 or more")
    if time_budget is not None and not time_budget > 0:
        raise ValueError(f"time_budget={time_budget!r}: expected more than 0 seconds, or None")
    until = None if time_budget is None else time.monotonic() + time_budget
    names = chosen_models(globs, shard=shard)
    tasks = {
        name: Task(name, on=on, device=device, gradients=gradients, small=small, max_parameters=max_parameters)
        for name in names
    }
    file = None if out is None else Path(out)
    rows: dict[str, SweepRow] = {}
    under_way: dict[str, None] = {}
    with contextlib.ExitStack() as stack:
        if file is not None:
            stack.enter_context(held(file))
            rows = begin(file, tasks.values(), resume=resume)
        resumed = len(rows.keys() & tasks.keys())
        todo = [tasks[name] for name in names if name not in rows]
        memory = room(device) if processes > 1 and on == "data" else None
        if memory is not None:
            todo = [fitted(task, memory) for task in todo]

        def tell() -> None:
            watch(tuple(under_way), sum(task.name in rows for task in todo), len(todo))

        def begun(name: str) -> None:
            under_way[name] = None
            tell()

        found = examined(
            todo,
            processes=processes,
            time_limit=time_limit,
            until=until,
            need=need,
            room=memory or 0,
            begun=begun,
        )
        for row in stack.enter_context(contextlib.closing(found)):
            rows[row.name] = row
            if file is not None:
                append(file, row)
            under_way.pop(row.name, None)
            tell()
    done = tuple(rows[name] for name in names if name in rows)
    return SweepReport(command, done, resumed, left=len(names) - len(done))


def chosen_models(globs: Iterable[str], *, shard: str = "1/1") -> list[str]:
    """The names that match any of the globs, each once, in the order of the globs, then of ``list_models``.

    ``shard`` "k/n": of these every n-th, beginning with the k-th. ValueError for another form, or a glob of nothing.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"shard {shard!r}: expected k/n with k from 1 to n, such as 3/8")
    names: dict[str, None] = {}
    for glob in globs:
        matching = list_models(glob)
        if not matching:
            raise ValueError(f"no model matches {glob!r}; `zoo list` shows them all")
        names |= dict.fromkeys(matching)
    return list(names)[part - 1 :: parts]
