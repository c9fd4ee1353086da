"""Reports that are shown as tables: with colour on a terminal, as plain text anywhere else."""

from __future__ import annotations

import io
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from zoo.report import Report

__all__ = ["TableReport", "columns", "console", "plain", "rows", "verdict"]

_WIDTH = 120


class TableReport(Report):
    """A report whose text is what :meth:`__rich__` lays out."""

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __str__(self) -> str:
        return plain(self)


def console(**options: Any) -> Console:
    """A Console that prints brackets and colons in names as they are."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def plain(renderable: RenderableType, *, width: int = _WIDTH) -> str:
    """The renderable as text without colour, its lines at most ``width`` characters long."""
    file = io.StringIO()
    console(file=file, width=width, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def columns(*names: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """An empty table with these headings; those in ``right`` hold numbers. Long text is folded, never cut."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def rows() -> Table:
    """An empty two-column table for label and value."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def verdict(ok: bool, text: str) -> Text:
    """The line a report ends with."""
    return Text(text, style="bold green" if ok else "bold red")
