"""What installed packages offer: layers by the entry-point group ``zoo.layers``, models by ``zoo.models``.

A package's pyproject.toml says so, and nothing of it is imported until the name is asked for::

    [project.entry-points."zoo.layers"]
    "linear.theirs" = "their_package.layers:TheirLinear"    # the kind, a dot, the name

    [project.entry-points."zoo.models"]
    their_net = "their_package.models:their_net"

zoo's own names stay its own: a package that offers one of them is told of in a warning.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

__all__ = ["LAYERS", "MODELS", "Offer", "claimed", "names_offered", "take"]

LAYERS, MODELS = "zoo.layers", "zoo.models"


@dataclass(frozen=True)
class Offer:
    """One entry point of an installed package."""

    package: str
    """Its name and version."""
    value: str
    """"module:attribute"."""

    def __str__(self) -> str:
        return f"{self.package} ({self.value})"

    def is_of(self, thing: Any) -> bool:
        """Whether the thing is the package's own, which may register it by itself when it is imported."""
        return self.value.split(":")[0].split(".")[0] == _home(thing)


def names_offered(group: str) -> list[str]:
    """All names of a group, of layers with their kind in front."""
    return list(_offers(group, tuple(sys.path)))


def claimed(group: str, name: str | None, thing: Any) -> Offer | None:
    """The offer of that name by a package whose it is not, or None."""
    if _home(thing) == "zoo":  # at import, when nothing is to be looked for
        return None
    return next((o for o in _offers(group, tuple(sys.path)).get(name or "", ()) if not o.is_of(thing)), None)


def take(group: str, name: str, register: Callable[[Any], object]) -> bool:
    """Load what is offered by that name and register it. False where nothing is.

    Raises:
        ValueError: two packages offer it; or it cannot be loaded or registered, with the package and its error.
    """
    found = _offers(group, tuple(sys.path)).get(name, ())
    if not found:
        return False
    what = group.removeprefix("zoo.").removesuffix("s")
    if len(found) > 1:
        raise ValueError(f"{what} {name!r} is offered by {' and by '.join(map(str, found))}; uninstall one of them")
    (offer,) = found
    try:
        register(metadata.EntryPoint(name, offer.value, group).load())
    except Exception as error:
        raise ValueError(
            f"{what} {name!r} is offered by {offer}, which could not be loaded: {type(error).__name__}: {error}"
        ) from error
    return True


@functools.lru_cache(maxsize=8)
def _offers(group: str, path: tuple[str, ...]) -> dict[str, tuple[Offer, ...]]:
    """By name, of what is installed along ``path``; a warning for each that is of no use."""
    from zoo.layers.kinds import KINDS

    found: dict[str, tuple[Offer, ...]] = {}
    for entry in metadata.entry_points(group=group):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package without a name"
        offer = Offer(package, entry.value)
        kind, dot, bare = entry.name.partition(".")
        if group == LAYERS and not (dot and bare and kind in KINDS):
            _warn(
                f"{offer}: its entry point {entry.name!r} in {group} is ignored: expected a kind, a dot and a name, "
                f"such as 'linear.{bare or entry.name}'; the kinds are {', '.join(KINDS)}"
            )
        elif _is_zoos(group, entry.name):
            _warn(f"{offer}: its entry point {entry.name!r} in {group} is ignored: the name is zoo's own")
        elif offer not in found.get(entry.name, ()):
            found[entry.name] = (*found.get(entry.name, ()), offer)
    return found


def _home(thing: Any) -> str:
    """The name of the package in which a class or function is defined; of a partial, what it calls."""
    return str(getattr(getattr(thing, "func", thing), "__module__", "")).partition(".")[0]


def _is_zoos(group: str, name: str) -> bool:
    if group == LAYERS:
        return name.partition(".")[2] == "zoo"
    from zoo import registry

    return name.partition("/")[0] in registry._DOORS or _home(registry._own().get(name)) == "zoo"


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)
