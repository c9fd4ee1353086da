"""``zoo train``: a training run with progress on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from zoo.commands.output import progress, tell
from zoo.launch import rank
from zoo.report import Report
from zoo.train import TrainConfig, read_config, train
from zoo.train import compare as train_both

__all__ = ["run"]


def run(told: Mapping[str, Any], *, config: str | None, out: str | None, resume: bool, compare: bool) -> Report:
    """Train. Args: as the command's, see ``zoo train --help``; ``told`` has fields of TrainConfig, None if not given.

    Raises:
        ValueError: no model or no data is named, or as zoo.train.train.
        OSError: as zoo.train.train.
    """
    fields = read_config(config) if config is not None else {}
    given = {name: value for name, value in told.items() if value is not None}
    if "options" in given:
        given["options"] = {**fields.get("options", {}), **given["options"]}
    fields |= given
    for name, example in (("model", "zoo train mlp --data digits"), ("data", "--data digits")):
        if name not in fields:
            raise ValueError(f"{name}: got none; name it, as {example}, or in the file of --config")
    whole = TrainConfig(**fields)
    if compare and whole.custom_linear:
        raise ValueError(
            "custom_linear: --compare torch trains both, with torch's Linears and with zoo's; leave it out"
        )
    folder = Path(out) if out is not None else Path("runs", whole.model.replace("/", "-"))
    work = train_both if compare else train
    if rank():
        return work(whole, folder, resume=resume)
    with progress() as bar:
        return work(whole, folder, resume=resume, watch=_Shown(bar), say=tell)


class _Shown:
    """A bar for the steps of a run; it appears with the first of them, and keeps the last text."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task: TaskID | None = None

    def __call__(self, step: int, steps: int, text: str) -> None:
        if self.task is None:
            self.task = self.bar.add_task("", total=steps)
        self.bar.update(self.task, completed=step)
        if text:
            self.bar.update(self.task, description=text)
