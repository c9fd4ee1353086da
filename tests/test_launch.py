"""How a process that torchrun started ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from zoo.launch import run_and_leave


class Left(BaseException):
    """In the place of the process's end."""


@pytest.mark.parametrize(
    ("work", "code", "error"),
    [
        (lambda: print("done"), 0, ""),
        (sys.exit, 0, ""),
        (lambda: sys.exit(3), 3, ""),
        (lambda: sys.exit("what is wrong"), 1, "what is wrong\n"),
        (lambda: 1 / 0, 1, "ZeroDivisionError: division by zero\n"),
        (lambda: int("not a number"), 1, "ValueError: invalid literal for int() with base 10: 'not a number'\n"),
    ],
)
def test_it_says_all_and_leaves_with_pythons_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], work: Callable[[], Any], code: int, error: str
) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(Left) as left:
        run_and_leave(work)
    assert left.value.args == (code,)
    said = capsys.readouterr().err
    assert said.endswith(error) and bool(said) == bool(error)


@pytest.mark.parametrize("launched", [True, False])
def test_a_launched_process_is_not_shut_down(launched: bool) -> None:
    """And another one is; what was printed is there in any case."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    script = f"""
import atexit, os, sys
os.environ.update(dict.fromkeys({names if launched else ()!r}, "0"))
sys.argv = ["zoo", "--help"]
atexit.register(print, "Python was shut down")
from zoo.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Usage: " in done.stdout, done.stderr
    assert ("Python was shut down" in done.stdout) is not launched
