"""``zoo sweep``: runs a sweep with progress on stderr."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence

from zoo.commands.output import progress, tell
from zoo.preparing import choose_device
from zoo.sweep import SweepReport, save_fields, sweep

__all__ = ["number_of", "run"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def run(
    *,
    globs: Sequence[str],
    on: str,
    device: str,
    shard: str,
    processes: int,
    out: str | None,
    resume: bool,
    gradients: bool,
    small: bool,
    max_parameters: str,
    time_limit: float,
    time_budget: float | None,
    save: bool,
) -> SweepReport:
    """Sweep the models. Args: as the command's, see ``zoo sweep --help``."""
    limit = number_of(max_parameters)
    place = str(choose_device(device)) if on == "data" else "cpu"
    words = ["zoo sweep", *map(shlex.quote, globs), "--on", on]
    if on == "data":
        words += ["--device", place, "--max-parameters", max_parameters]
        words += [] if gradients else ["--no-gradients"]
        words += ["--small"] if small else []
    words += [] if shard == "1/1" else ["--shard", shard]
    words += [] if processes == 1 else ["--processes", str(processes)]
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress())
        line = bar.add_task("")

        def watch(under_way: Sequence[str], done: int, total: int) -> None:
            name = under_way[0] if under_way else ""
            others = f" and {len(under_way) - 1} more" if len(under_way) > 1 else ""
            bar.update(line, description=name + others, completed=done, total=total)

        report = sweep(
            globs or ("*",),
            on=on,
            device=place,
            shard=shard,
            processes=processes,
            out=out,
            resume=resume,
            gradients=gradients,
            small=small,
            max_parameters=limit,
            time_limit=time_limit,
            time_budget=time_budget,
            command=" ".join(words),
            watch=watch,
        )
    if save:
        tell(f"figures are in {save_fields(report.rows)}")
    return report


def number_of(text: str) -> int:
    """The number that a text such as 700M, 1.5G or 20000 stands for. ValueError for another form."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip().upper())
    if not found:
        raise ValueError(f"number {text!r}: expected one such as 700M, 1.5G or 20000")
    return round(float(found[1]) * _UNITS[found[2]])
