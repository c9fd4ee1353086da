"""``zoo verify``: judges a layer with progress on stderr, and writes its JSON as it goes."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Sequence

from zoo.commands.bench import json_file, write_report
from zoo.commands.output import progress, tell
from zoo.commands.page import page_file, write_page
from zoo.preparing import choose_device
from zoo.verify import MODELS, VerifyReport, verify

__all__ = ["run"]


def run(
    target: str,
    *,
    kind: str,
    against: str | None,
    claims: Sequence[str],
    models: str | None,
    device: str,
    seed: int,
    time_limit: float,
    memory_limit: str,
    timing: str | None,
    json: str | None,
    html: str | None,
) -> VerifyReport:
    """Verify a layer. Args: as the command's, see ``zoo verify --help``.

    Interrupted, it leaves the report so far in the file, or else on stderr, and passes KeyboardInterrupt on.
    """
    file = None if json in (None, "-") else json_file(json or "")
    page = None if html is None else page_file(html)
    limit = _bytes(memory_limit)
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    words = ["zoo verify", shlex.quote(target), "--kind", kind]
    if against is not None:
        words += ["--against", shlex.quote(against)]
    for glob in claims:
        words += ["--claim", shlex.quote(glob)]
    if models is not None:
        words += ["--models", shlex.quote(models)]
    words += ["--device", device, "--seed", str(seed), "--time-limit", f"{time_limit:g}"]
    words += ["--memory-limit", memory_limit]
    if timing is not None:
        words += ["--timing", *(["--timing-form", timing] if timing != "quick" else [])]
    so_far: list[VerifyReport] = []

    def keep(report: VerifyReport) -> None:
        so_far[:] = [report]
        if file is not None:
            write_report(report, file)
        if page is not None:
            write_page(report.to_dict(), page)

    try:
        with contextlib.ExitStack() as stack:

            def track(names: Sequence[str]) -> Iterable[str]:
                bar = stack.enter_context(progress())  # not before the arguments are known to be right
                task = bar.add_task("", total=len(names))
                for name in names:
                    bar.update(task, description=name)
                    yield name
                    last = so_far[0].verdicts
                    bad = next((v for v in last if v.claim == name and not v.ok), None)
                    if bad is not None:
                        bar.console.print(f"FAIL {name}: {bad.reason}", style="red", markup=False, highlight=False)
                    bar.advance(task)

            report = verify(
                target,
                kind=kind,
                against=against,
                device=choose_device(device),
                claims=claims or "*",
                models=MODELS if models is None else _names(models),
                seed=seed,
                time_limit=time_limit,
                memory_limit=limit,
                timing=timing,
                command=" ".join(words),
                progress=track,
                checkpoint=keep,
            )
    except KeyboardInterrupt:
        if so_far:
            kept = file or page
            tell(f"interrupted; what was judged is in {kept}" if kept else f"interrupted\n{so_far[0]}")
        raise
    keep(report)
    return report


def _names(text: str) -> list[str]:
    return [] if text == "none" else [name for name in map(str.strip, text.split(",")) if name]


def _bytes(text: str) -> int | None:
    if text == "none":
        return None
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not 1 <= gigabytes < 2**20:
        raise ValueError(f"memory_limit {text!r}: expected GiB, at least 1, or none")
    return int(gigabytes * 2**30)
