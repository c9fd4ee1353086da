"""Reads a verdict's JSON back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED
from zoo.verify.schema import FIELDS, SCHEMA

__all__ = ["read"]


def read(file: str | Path) -> dict[str, Any]:
    """A verdict as :meth:`VerifyReport.to_dict` gives it.

    Raises:
        ValueError: for a file that is no verdict, or of another schema; it names the file.
        OSError: for one that cannot be read.
    """
    try:
        data = json.loads(Path(file).read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(data, dict) or "schema" not in data or "verdicts" not in data:
        raise ValueError(f"{file}: not a verdict; expected what zoo verify --json writes")
    if data["schema"] != SCHEMA:
        again = f"; make it again: {data['command']}" if isinstance(data.get("command"), str) else ""
        raise ValueError(f"{file}: schema {data['schema']!r}, expected {SCHEMA}{again}")
    _complete(data, str(file))
    return data


def _complete(data: dict[str, Any], file: str) -> None:
    """ValueError for the first field that is not there or has another type."""
    _object(data, "", file)
    for verdict in _array(data, "verdicts", file):
        _object(verdict, "verdicts[]", file)
        if verdict["status"] not in (PASS, FAIL, REFUSED, UNTESTED):
            raise ValueError(
                f"{file}: verdicts[].status {verdict['status']!r}, expected pass, fail, refused or untested"
            )
        for key in ("seconds", "error", "stock_error", "error_limit"):
            _number(verdict[key], f"verdicts[].{key}", file)
        for tensor in _array(verdict, "tensors", file):
            _object(tensor, "verdicts[].tensors[]", file)
            for key in ("error", "stock_error", "limit"):
                _number(tensor[key], f"verdicts[].tensors[].{key}", file)
    if data["timing"] is not None:
        _object(data["timing"], "timing", file)
        for row in _array(data["timing"], "rows", file):
            _object(row, "timing.rows[]", file)
            for key in ("layer_us", "peer_us", "speedup", "speedup_low", "speedup_high", "floor"):
                _number(row[key], f"timing.rows[].{key}", file)
                if row["speedup"] is not None and not (isinstance(row[key], (int, float)) and 0 <= row[key] < math.inf):
                    raise ValueError(f"{file}: timing.rows[].{key}: got {row[key]!r}, expected a number of 0 or more")
            if row["speedup"] is not None and not min(row["speedup"], row["speedup_low"], row["speedup_high"]) > 0:
                raise ValueError(f"{file}: timing.rows[].speedup: got 0, expected more")


def _object(data: Any, at: str, file: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{file}: {at}: got {type(data).__name__}, expected an object")
    start = f"{at}." if at else ""
    for path in FIELDS:
        key = path.removeprefix(start)
        if path.startswith(start) and key and not set(key) & set(".[*") and key not in data:
            raise ValueError(f"{file}: {path} is missing")


def _array(data: dict[str, Any], key: str, file: str) -> list[Any]:
    value = data[key]
    if not isinstance(value, list):
        raise ValueError(f"{file}: {key}: got {type(value).__name__}, expected an array")
    return value


def _number(value: Any, path: str, file: str) -> None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return
    if value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{file}: {path}: got {value!r}, expected a number")
