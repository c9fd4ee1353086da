"""The index of zoo's own trained checkpoints: ``weights/index.toml``, read once and checked.

Each table ``["model.dataset"]`` of the index says which model the file holds, how it was trained and what it reached.
The files lie beside the index: in the package when zoo is installed, in the project's ``weights`` when it is not.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

from zoo.naming import natural_key, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["WeightEntry", "find", "folder", "names"]


@dataclasses.dataclass(frozen=True)
class WeightEntry:
    """One trained checkpoint of the index.

    ``metrics`` are fractions (accuracy 0.97 is 97%) measured on the part of ``dataset`` that ``split`` names;
    ``recipe`` is the command that made the file, with what it fixes (seed, epochs, optimizer).
    """

    name: str
    model: str
    options: dict[str, Any]
    file: str
    sha256: str
    dataset: str
    split: str
    recipe: dict[str, Any]
    metrics: dict[str, float]
    license: str
    folder: Path = dataclasses.field(repr=False)

    @property
    def path(self) -> Path:
        """Where the file lies; nothing is checked."""
        return self.folder / self.file

    def verified_path(self) -> Path:
        """The file's path, after its SHA-256 was found to be the one of the index.

        Raises FileNotFoundError where it is absent and ValueError where its content is another.
        """
        try:
            with self.path.open("rb") as file:
                digest = _sha256(file)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.path}: the file of weights {self.name!r} is not there; reinstall zoo, "
                f"or make it anew with `{self.recipe.get('command', 'its recipe')}`"
            ) from None
        if digest != self.sha256:
            raise ValueError(
                f"{self.path}: the file of weights {self.name!r} is not the one that the index names: "
                f"got sha256 {digest}, expected {self.sha256}; reinstall zoo, or restore the file"
            )
        return self.path


def folder() -> Path:
    """The folder that holds ``index.toml``. Raises FileNotFoundError where there is none."""
    package = Path(__file__).resolve().parent
    places = (package / "_weights", package.parent / "weights")
    for place in places:
        if (place / "index.toml").is_file():
            return place
    raise FileNotFoundError(f"no index of weights: neither {places[0]} nor {places[1]} holds index.toml; reinstall zoo")


def names(model: str | None = None) -> list[str]:
    """The names of the index in natural order; with ``model``, those that hold that model's weights."""
    entries = _read(folder() / "index.toml")
    return sorted((name for name, entry in entries.items() if model in (None, entry.model)), key=natural_key)


def find(name: str) -> WeightEntry:
    """The entry called ``name``. Raises ValueError with the nearest names where there is none."""
    entries = _read(folder() / "index.toml")
    if name not in entries:
        raise unknown_name("weights", name, entries)
    return entries[name]


@functools.cache
def _read(path: Path) -> dict[str, WeightEntry]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from error
    return {name: _entry(path, name, table) for name, table in tables.items()}


_KINDS = {
    "model": str,
    "options": dict,
    "file": str,
    "sha256": str,
    "dataset": str,
    "split": str,
    "recipe": dict,
    "metrics": dict,
    "license": str,
}


def _entry(path: Path, name: str, table: Any) -> WeightEntry:
    where = f"{path}: [{name!r}]"
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {type(table).__name__}, expected a table; quote a name that has a dot in it")
    if table.keys() != _KINDS.keys():
        wrong = [f"lacks {key}" for key in _KINDS if key not in table]
        wrong += [f"has {key}, which no entry has" for key in table if key not in _KINDS]
        raise ValueError(f"{where} {', '.join(wrong)}; expected exactly {', '.join(_KINDS)}")
    for key, kind in _KINDS.items():
        if not isinstance(table[key], kind):
            raise ValueError(f"{where} {key} is {type(table[key]).__name__}, expected {kind.__name__}")
    if not re.fullmatch(r"[0-9a-f]{64}", table["sha256"]):
        raise ValueError(f"{where} sha256 is {table['sha256']!r}, expected 64 hexadecimal digits")
    if Path(table["file"]).name != table["file"]:
        raise ValueError(f"{where} file is {table['file']!r}, expected the name of a file beside the index")
    return WeightEntry(name=name, folder=path.parent, **table)


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
