"""How a command ends: its report on stdout, what it says meanwhile on stderr, its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from zoo.report import Report
from zoo.tables import console

__all__ = ["AsJson", "deliver", "progress", "tell"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

_INTERRUPTED = 130
_BROKEN_PIPE = 141


def deliver(work: Callable[[], Report], *, as_json: bool, rank: int = 0) -> None:
    """Do the work, print its report and leave: 0 if it is ok, 1 if not or if an error that zoo explains stopped it.

    Whatever is printed during the work goes to stderr, so that stdout holds the report alone. Of several processes that
    do the work together the one of rank 0 prints the report; each may have an error of its own.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            report = work()
    except (ValueError, OSError) as error:
        if as_json and not rank:
            _write(json.dumps({"ok": False, "error": str(error)}, indent=2))
        _stderr().print(f"zoo: {f'rank {rank}: ' if rank else ''}{error}", style="red")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    if rank:
        pass
    elif as_json:
        _write(report.to_json())
    elif sys.stdout.isatty() and hasattr(report, "__rich__"):
        console().print(report)
    else:
        _write(str(report))
    raise typer.Exit(0 if report.ok else 1)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has gone; without this the interpreter would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from None


def progress() -> Progress:
    """A progress bar on stderr that is gone when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def tell(text: str) -> None:
    """Say on stderr what comes next."""
    _stderr().print(f"... {text}", style="dim")


def _stderr() -> Console:
    return console(stderr=True, soft_wrap=True)
