"""The log of a run: a JSON object a line, each with its step, appended as it happens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from zoo.tensor_files import replacing

__all__ = ["Log", "Silence", "read_log"]


class Log:
    """Appends to a file of JSON lines. ``keep``: former lines stay up to this step; later ones come again."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path = path
        self._file: TextIO | None = None
        kept = [line for line in read_log(path) if line["step"] <= keep] if path.exists() else []
        with replacing(path) as temporary:
            temporary.write_text("".join(_line(line) for line in kept), encoding="utf-8")

    def write(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        """Append a line. OSError, naming the file, where it cannot be written."""
        try:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(_line({"event": event, "step": step, **fields}))
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self.path}: a line could not be written: {error}") from error


class Silence:
    """The log of a rank that writes none."""

    def write(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        """Nothing."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a killed run left unfinished is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def _line(fields: Mapping[str, Any]) -> str:
    plain = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
