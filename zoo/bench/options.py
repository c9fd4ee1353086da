"""Checks the names that a bench is asked for."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["chosen"]


def chosen(what: str, names: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """The names, each once, in the order given. ValueError for an unknown one, or for none."""
    names = tuple(dict.fromkeys(names))
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r}: expected one or more of {', '.join(known)}")
    if not names:
        raise ValueError(f"{what}: none given; expected one or more of {', '.join(known)}")
    return names
