"""What every report has in common: frozen data, ``ok``, a readable ``str``, JSON, and an error on demand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

__all__ = ["CheckFailed", "Report"]


class CheckFailed(RuntimeError):
    """Raised by :meth:`Report.raise_for_failure`; its text is the report's."""


class Report:
    """Base of the frozen dataclasses that zoo's checks return.

    A subclass adds its fields (data only), the property ``ok`` and ``__str__``.
    """

    @property
    def ok(self) -> bool:
        """Whether everything that the report speaks of is as it should be."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain containers, with ``ok`` first."""
        fields = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"ok": self.ok, **fields}

    def to_json(self, *, indent: int | None = 2) -> str:
        """The fields as JSON text. Numbers that JSON cannot hold (nan, inf) become strings."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def raise_for_failure(self) -> None:
        """Raise :class:`CheckFailed` with the report's text unless ``ok``."""
        if not self.ok:
            raise CheckFailed(str(self))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
