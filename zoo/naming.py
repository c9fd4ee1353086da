"""Names: natural order, and the nearest ones to a name that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["natural_key", "unknown_name"]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts ``resnet18`` before ``resnet101``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def unknown_name(what: str, name: object, known: Iterable[str], *, remedy: str = "") -> ValueError:
    """A ValueError that says which name was got, and the nearest ones (all of them where they are few)."""
    names = sorted(known, key=natural_key)
    near = difflib.get_close_matches(str(name), names, n=5, cutoff=0.5)
    if len(names) <= 12:
        hint = f"known: {', '.join(names)}" if names else "none is known"
    elif near:
        hint = f"did you mean {', '.join(near)}?"
    else:
        hint = f"{len(names)} are known, none is near"
    return ValueError(f"unknown {what} {name!r}; {hint}{'. ' + remedy if remedy else ''}")
