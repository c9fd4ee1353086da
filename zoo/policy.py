"""What a model was told about its layers, kept with the model.

A policy is a tuple of rules. It lies on the model as one attribute, so that it goes where the model goes: deepcopy,
pickle, EMA copies. Where the model has ``reset_classifier``, its class is extended so that the new head follows the
policy as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo.derived import Derived, derive, without
from zoo.state_dict import unwrap

__all__ = ["NOT_SELECTED", "Only", "Rule", "forget", "policy_of", "remember", "rules_from"]

_POLICY = "_zoo_policy"
NOT_SELECTED = "not selected by only"
"""Why a layer that a rule is not for was left alone."""

Predicate = Callable[[str, nn.Module], bool]
Only = str | tuple[str, ...] | Predicate | None
"""Which modules a rule is for: None (all), "head", globs over module names, or a predicate (name, module)."""


@dataclass(frozen=True)
class Rule:
    """Put ``layer`` in the place of every stock layer of ``kind`` that ``only`` selects."""

    kind: str
    layer: str
    only: Only = None

    def __post_init__(self) -> None:
        only = self.only
        if isinstance(only, list):
            object.__setattr__(self, "only", tuple(only))
        elif not (only is None or only == "head" or isinstance(only, tuple) or callable(only)):
            remedy = f"; a single glob goes into a list: [{only!r}]" if isinstance(only, str) else ""
            raise ValueError(
                f'only must be None (all), "head", a list of globs over module names, or a predicate (name, module) -> '
                f"bool; got {only!r}{remedy}"
            )
        if isinstance(self.only, tuple) and not all(isinstance(glob, str) for glob in self.only):
            raise ValueError(f"only: every glob must be a str, got {self.only!r}")

    def to_json(self) -> dict[str, Any]:
        """Plain data. ValueError where ``only`` is a predicate, which no file can hold."""
        if callable(self.only):
            raise ValueError(
                f"the policy selects layers by the function {self.only!r}, which cannot be stored; "
                "patch with a list of globs over module names instead"
            )
        only = list(self.only) if isinstance(self.only, tuple) else self.only
        return {"kind": self.kind, "layer": self.layer, "only": only}

    @classmethod
    def from_json(cls, data: Any) -> Rule:
        """The rule that :meth:`to_json` gave. ValueError for anything else."""
        if not isinstance(data, dict) or set(data) != {"kind", "layer", "only"}:
            raise ValueError(f"a layer rule must be an object with kind, layer and only; got {data!r}")
        if not isinstance(data["kind"], str) or not isinstance(data["layer"], str):
            raise ValueError(f"a layer rule's kind and layer must be strings; got {data!r}")
        return cls(data["kind"], data["layer"], data["only"])


def policy_of(model: nn.Module) -> tuple[Rule, ...]:
    """The rules that the model was patched by, oldest first; empty where it was not."""
    return unwrap(model).__dict__.get(_POLICY, ())


def remember(model: nn.Module, rule: Rule) -> None:
    """Add a rule to the model's policy; one that is there already is not added again."""
    model = unwrap(model)
    if hasattr(model, "reset_classifier") and not isinstance(model, _KeepsPolicy):
        model.__class__ = _keeping(type(model))  # type: ignore[arg-type]
    if rule not in policy_of(model):
        model.__dict__[_POLICY] = (*policy_of(model), rule)


def forget(model: nn.Module) -> None:
    """Remove the policies of the model and of all its modules."""
    for module in model.modules():
        module.__dict__.pop(_POLICY, None)
        if isinstance(module, _KeepsPolicy):
            module.__class__ = without(type(module), _KeepsPolicy)  # type: ignore[assignment]


class _KeepsPolicy(Derived):
    """Mixin: a head that is made anew follows the policy."""

    def reset_classifier(self, *args: Any, **kwargs: Any) -> Any:
        from zoo.swap import apply_rules

        assert isinstance(self, nn.Module)
        before = set(self.modules())
        result = super().reset_classifier(*args, **kwargs)  # type: ignore[misc]
        apply_rules(self, policy_of(self), but=before)
        return result


@functools.cache
def _keeping(base: type[nn.Module]) -> type[nn.Module]:
    return derive(base.__name__, (_KeepsPolicy, base), base, (_keeping,), __qualname__=base.__qualname__)


def rules_from(data: Iterable[Any]) -> tuple[Rule, ...]:
    """Rules from plain data, as a checkpoint's metadata holds them."""
    return tuple(Rule.from_json(item) for item in data)
