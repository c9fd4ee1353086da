"""What a claim is, how its check ends, and the verdict that comes of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.verify.subject import Subject

__all__ = ["FAIL", "PASS", "REFUSED", "UNTESTED", "Broken", "Claim", "Refused", "Untested", "Verdict", "outcome_of"]

PASS, FAIL, REFUSED, UNTESTED = "pass", "fail", "refused", "untested"


class Broken(Exception):
    """The claim does not hold; the text says how."""


class Refused(Exception):
    """The layer said clearly that it does not do this; the text is what it said."""


class Untested(Exception):
    """The claim cannot be judged here; the text says why."""


@dataclass(frozen=True)
class Claim:
    """One thing that a layer is expected to do."""

    name: str
    says: str
    """What is claimed, in plain words."""
    check: Callable[[Subject], None]
    """Returns if the claim holds; raises :class:`Broken`, :class:`Untested`, or what the layer raised."""
    kinds: tuple[str, ...] = ("linear",)
    """Of which layers it is claimed."""


@dataclass(frozen=True)
class TensorError:
    """How far one tensor is from float64, relatively."""

    name: str
    error: float
    stock_error: float
    limit: float


@dataclass(frozen=True)
class Verdict:
    """What became of one claim."""

    claim: str
    says: str
    status: str
    """"pass", "fail", "refused" (a clear error), or "untested"."""
    reason: str = ""
    """Why it did not pass."""
    seconds: float = 0.0
    error: float | None = None
    """Relative, against float64, of the tensor that is nearest to its limit or farthest over it; None where the claim
    compares no values."""
    stock_error: float | None = None
    error_limit: float | None = None
    error_at: str = ""
    """Which tensor that is."""
    tensors: tuple[TensorError, ...] = ()
    """Of a claim about a model, in the order of its modules: the tensors nearest to their limits, or over them."""

    @property
    def ok(self) -> bool:
        """Whether nothing is known to be wrong."""
        return self.status != FAIL


_CLEAR = re.compile(
    r"not (yet |currently )?(implemented|support)|unsupported|once_differentiable|expected .*\bgot\b|got .*\bexpected\b"
    r"|requires create_graph=False|setup_context|generate_vmap_rule|override the (jvp|vmap)",
    re.I | re.S,
)
_PYTHONS = re.compile(
    r"values to unpack|positional argument|unsupported operand|object (is not|has no|does not)|indices must be", re.I
)
"""What the interpreter says of a mistake in the layer's own code, be it by a ValueError or a TypeError."""
_INTERNAL = ("torch._dynamo", "torch._inductor", "torch.fx", "torch._export", "torch.export")


def outcome_of(error: Exception) -> tuple[str, str]:
    """The status and reason of an exception that a check ended with.

    A refusal is an error that a reader understands without the source: NotImplementedError, ValueError or TypeError
    with a text, or a RuntimeError that says what is not supported, or what was expected and got. All else, such as an
    IndexError, an unpacking of too many values, a failed assertion or an error of torch.compile's own, is a failure.
    """
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    if isinstance(error, Broken):
        return FAIL, text
    if isinstance(error, Refused):
        return REFUSED, text
    if isinstance(error, Untested):
        return UNTESTED, text
    kind = type(error)
    clear = bool(text) and not kind.__module__.startswith(_INTERNAL) and not _PYTHONS.search(text)
    if clear and (
        isinstance(error, (NotImplementedError, ValueError, TypeError))
        or (isinstance(error, RuntimeError) and _CLEAR.search(text))
    ):
        return REFUSED, f"{kind.__name__}: {text}"
    return FAIL, f"{kind.__name__}: {text}" if text else f"{kind.__name__} without a text"
