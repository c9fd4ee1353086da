"""``zoo report`` and ``--html``: a verdict as a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.report import Report
from zoo.verify.page import page_of
from zoo.verify.reading import read

__all__ = ["PageReport", "make", "page_file", "write_page"]


@dataclass(frozen=True)
class PageReport(Report):
    """A page that was written."""

    file: str
    target: str

    @property
    def ok(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"{self.file}: the verdict on {self.target}"


def make(file: str, out: str) -> PageReport:
    """Make the page of a verdict's JSON. ValueError for a file that is none, or a place that cannot be meant."""
    page = page_file(out)
    data = read(file)
    write_page(data, page)
    return PageReport(str(page), data["target"])


def page_file(path: str) -> Path:
    """The path, checked before anything is measured. ValueError for one that cannot be meant."""
    file = Path(path)
    if file.suffix not in (".html", ".htm"):
        raise ValueError(f"html {path!r}: expected a file named *.html")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"html {path!r}: there is no folder {file.absolute().parent}")
    return file


def write_page(data: Mapping[str, Any], file: Path) -> None:
    """Write the page in one step, so that the file is whole at any time."""
    beside = file.with_name(f".{file.name}.part")
    beside.write_text(page_of(data), encoding="utf-8")
    os.replace(beside, file)
