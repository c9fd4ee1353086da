"""Plans and makes units: which parents run Linear, activation, Linear as one layer of kind "mlp", and which do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from zoo.layers.patched import Patched, release
from zoo.layers.units import FusedParent, Unit, adopt_units, unfusable, units_in
from zoo.policy import NOT_SELECTED, Rule
from zoo.selection import Names, selected

__all__ = ["Place", "UnitPlan", "linears_of", "places_of", "plan_units", "runs_as_one"]

Place = tuple[nn.Module, Unit]
"""A unit, by its parent."""


@dataclass
class UnitPlan:
    """What a rule for units comes to in a model."""

    rule: Rule
    places: dict[str, Place]
    """All units by name, in the model's order."""
    units: dict[str, Place]
    """Those that run, or are to run, as one."""
    skipped: dict[str, str]
    """The others -> why."""

    @property
    def parents(self) -> list[nn.Module]:
        return list(dict.fromkeys(parent for parent, _ in self.units.values()))

    def skip(self, reasons: dict[str, str]) -> None:
        """Take units out."""
        self.skipped.update(reasons)
        self.units = {name: place for name, place in self.units.items() if name not in reasons}

    def make(self) -> None:
        """Bring the parents to what is planned."""
        wanted: dict[nn.Module, list[Unit]] = {parent: [] for parent, _ in self.places.values()}
        for parent, unit in self.units.values():
            wanted[parent].append(unit)
        for parent, units in wanted.items():
            if units and not all(runs_as_one(parent, unit, self.rule) for unit in units):
                others = [unit for unit in _units_of(parent) if not any({*unit} & {*mine} for mine in units)]
                adopt_units(parent, self.rule.kind, self.rule.layer, (*others, *units))

    def put_back(self, places: Collection[Place]) -> None:
        """Let units run as their modules again."""
        for parent, unit in places:
            assert isinstance(parent, FusedParent)
            others = tuple(other for other in _units_of(parent) if other != unit)
            kind, layer = parent.zoo_kind, parent.zoo_layer
            release(parent)
            if others:
                adopt_units(parent, kind, layer, others)


def plan_units(model: nn.Module, rule: Rule, *, strict: bool, but: Collection[nn.Module] = ()) -> UnitPlan:
    """Plan a rule of a kind of unit. It selects a unit by the unit's name, or else by those of both of its Linears.

    The parents in ``but`` are left as they are. Raises ValueError as :func:`zoo.selection.selected`.
    """
    places = places_of(model)
    asked = _selected(model, places, rule, strict=strict)
    uses = Counter(child for parent in model.modules() for child in parent._modules.values() if child is not None)
    made = UnitPlan(rule, places, dict(places), {})
    for name, (parent, unit) in places.items():
        if runs_as_one(parent, unit, rule):
            continue
        if name not in asked or parent in but:
            made.skip({name: NOT_SELECTED})
        elif reason := _reason(parent, unit, rule, uses):
            made.skip({name: reason})
    return made


def runs_as_one(parent: nn.Module, unit: Unit, rule: Rule) -> bool:
    """Whether a unit runs as the rule's layer already, in each call in which that is exact."""
    return (
        isinstance(parent, FusedParent)
        and (parent.zoo_kind, parent.zoo_layer) == (rule.kind, rule.layer)
        and parent.zoo_units.get(unit[0]) == unit
        and "forward" not in parent.__dict__
    )


def linears_of(place: Place) -> tuple[nn.Module, nn.Module]:
    """The first module of a unit, and the last."""
    parent, unit = place
    return parent.get_submodule(unit[0]), parent.get_submodule(unit[-1])


def _units_of(parent: nn.Module) -> tuple[Unit, ...]:
    return tuple(parent.zoo_units.values()) if isinstance(parent, FusedParent) else ()


def places_of(model: nn.Module, *, made: bool = False) -> dict[str, Place]:
    """All units of a model by name; with ``made`` also what was made one, but is none any more."""
    places: dict[str, Place] = {}
    for name, parent in model.named_modules():
        for unit in dict.fromkeys((*units_in(parent), *(_units_of(parent) if made else ()))):
            # a parent whose children are known is the unit; a sequence may hold several
            span = f"{unit[0]}-{unit[-1]}" if isinstance(parent, nn.Sequential) else ""
            places[".".join(part for part in (name, span) if part)] = parent, unit
    return places


def _selected(model: nn.Module, places: dict[str, Place], rule: Rule, *, strict: bool) -> set[str]:
    linears = {name: linears_of(place) for name, place in places.items()}
    names = Names()
    within = {linear for pair in linears.values() for linear in pair}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in within:
            names.setdefault(module, []).append(name)
    if not callable(rule.only):  # a predicate is for modules of a kind, which a unit is not
        for name, pair in linears.items():
            for linear in pair:
                names[linear].append(name)
    chosen = selected(model, names, rule, strict=strict)
    return {name for name, pair in linears.items() if chosen.issuperset(pair)}


def _reason(parent: nn.Module, unit: Unit, rule: Rule, uses: Counter[nn.Module]) -> str | None:
    """Why a unit cannot run as one, in plain words; or None."""
    if isinstance(parent, Patched) and not isinstance(parent, FusedParent):
        return f"its parent, a {type(parent).__name__}, is adapted to a {parent.zoo_kind} layer"
    for name in unit:
        if uses[parent._modules[name]] > 1:  # type: ignore[index]
            return f"{name} is used elsewhere, too"
    return unfusable(parent, unit, rule.layer)
