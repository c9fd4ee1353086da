"""The command line as a user meets it: what it prints, where, and how it ends. What the commands compute is tested in
tests/commands, test_demo.py and test_doctor.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.models import OptionInfo
from typer.testing import CliRunner, Result

import zoo
from zoo.cli import app
from zoo.report import Report

ROOT = Path(zoo.__file__).parent.parent


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@dataclass(frozen=True)
class Finding(Report):
    """A report that says what it is told to."""

    found: str
    good: bool = True

    @property
    def ok(self) -> bool:
        return self.good

    def __str__(self) -> str:
        return f"found {self.found}"


def doctor_that(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Report]) -> None:
    monkeypatch.setattr("zoo.doctor.examine", work)


# help, version and usage errors


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("list", "info", "check", "parity", "train", "publish", "sweep", "demo", "doctor"):
        assert f" {command} " in result.stdout
        assert run(command, "--help").exit_code == 0


def test_each_command_has_json() -> None:
    for command in ("list", "info", "check", "parity", "train", "publish", "sweep", "demo", "doctor"):
        assert "--json" in run(command, "--help").stdout


def test_version() -> None:
    assert run("--version").stdout == f"zoo {zoo.__version__}\n"


def test_help_does_not_import_torch() -> None:
    """The package's own imports aside: the command line must not add torch to them."""
    code = f"""
import sys, types
package = types.ModuleType("zoo"); package.__path__ = [{str(ROOT / "zoo")!r}]
sys.modules["zoo"] = package
import zoo.cli
assert not {{"torch", "timm", "torchvision"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["info"],
        ["list", "--source", "keras"],
        ["check", "resnet18", "--against", "keras"],
        ["check", "resnet18", "--no-such-option"],
        ["parity", "resnet18"],
        ["parity", "resnet18", "--data", "digits", "--limit", "0"],
        ["parity", "resnet18", "--data", "digits", "--batch-size", "many"],
    ],
)
def test_usage_errors_are_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage" in result.stderr


# reports, their output and exit codes


def test_a_good_report_is_0_and_a_bad_one_1(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor_that(monkeypatch, lambda: Finding("all well"))
    result = run("doctor")
    assert (result.exit_code, result.stdout) == (0, "found all well\n")
    doctor_that(monkeypatch, lambda: Finding("something", good=False))
    result = run("doctor")
    assert (result.exit_code, result.stdout) == (1, "found something\n")
    result = run("doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"ok": False, "found": "something", "good": False})


def test_stdout_holds_the_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy() -> Report:
        print("a library chats")
        return Finding("it")

    doctor_that(monkeypatch, noisy)
    result = run("doctor", "--json")
    assert json.loads(result.stdout) == {"ok": True, "found": "it", "good": True}
    assert result.stderr == "a library chats\n"


@pytest.mark.parametrize("error", [ValueError("name [bold]x[/bold]: got 1, expected 2"), FileNotFoundError("f: none")])
def test_explained_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> Report:
        raise error

    doctor_that(monkeypatch, fail)
    result = run("doctor")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"zoo: {error}\n")
    result = run("doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"ok": False, "error": str(error)})
    assert result.stderr == f"zoo: {error}\n"


def test_long_errors_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Report:
        raise ValueError("word " * 100)

    doctor_that(monkeypatch, fail)
    assert len(run("doctor").stderr.splitlines()) == 1


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Report:
        raise KeyError("a bug")

    doctor_that(monkeypatch, fail)
    assert isinstance(run("doctor").exception, KeyError)


# in a process of its own


def python(code: str, **options: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=pipe, stderr=pipe, cwd=ROOT, **options)  # type: ignore[call-overload, no-any-return]


def test_interrupt_is_130_without_a_traceback() -> None:
    process = python("""
import sys, time
import zoo.doctor
from zoo.cli import main
from zoo.commands.output import progress
def examine():
    with progress() as bar:
        for _ in bar.track(range(1000)):
            print("at work", flush=True)
            time.sleep(0.1)
zoo.doctor.examine = examine
sys.argv = ["zoo", "doctor"]
main()
""")
    assert process.stderr is not None
    while "at work" not in (line := process.stderr.readline()):
        assert line, "it ended before it began"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"]])
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zoo", *arguments, "--source", "zoo"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_module_and_entry_point() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "zoo", "list", "resnet1?"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "resnet18\n", "")
    declared = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert 'zoo = "zoo.cli:main"' in declared


# list


def test_list_is_one_name_a_line_in_natural_order() -> None:
    assert run("list", "resnet*").stdout.split() == ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    everything = run("list").stdout.split()
    assert {name.partition("/")[0] for name in everything if "/" in name} == {"torchvision", "timm"}
    assert len(everything) == len(zoo.list_models()) > 1400


def test_list_of_one_source() -> None:
    assert "mlp" in run("list", "--source", "zoo").stdout.split()
    names = run("list", "--source", "torchvision").stdout.split()
    assert len(names) == 80
    assert all(name.startswith("torchvision/") for name in names)
    assert json.loads(run("list", "*resnet18", "--source", "torchvision", "--json").stdout) == {
        "ok": True,
        "models": ["torchvision/resnet18"],
    }


def test_list_of_layers() -> None:
    assert {"linear zoo", "mlp zoo"} <= set(run("list", "--layers").stdout.splitlines())
    found = json.loads(run("list", "z?o", "--layers", "--json").stdout)
    layers = {kind: names for kind, names in found["layers"].items() if names}
    assert (found["ok"], layers) == (True, {"linear": ["zoo"], "mlp": ["zoo"]})


def test_list_of_nothing_is_1() -> None:
    assert "no model matches 'resnet1'" in run("list", "resnet1").stderr
    assert "no model of timm matches" in run("list", "resnet18", "--source", "timm").stderr
    result = run("list", "cudnn", "--layers")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no layer matches" in result.stderr


# arguments reach the commands


def test_unknown_names_list_the_nearest() -> None:
    for command in (["info"], ["check"], ["parity", "--data", "digits"]):
        result = run(*command, "resnet19")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("zoo: unknown model 'resnet19'")
        assert "resnet18" in result.stderr


def test_options_reach_the_model() -> None:
    data = json.loads(run("info", "mlp", "-o", "in_features=64", "--option", "hidden=[32]", "--json").stdout)
    assert data["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    result = run("info", "mlp", "-o", "depth=3")
    assert result.exit_code == 1
    assert "does not take the option 'depth'" in result.stderr


def test_check_takes_its_arguments() -> None:
    data = json.loads(run("check", "mlp", "--weights", "mlp.digits", "--gradients", "--device", "cpu", "--json").stdout)
    assert data["ok"] is True
    assert data["weights"] == "mlp.digits"
    assert {entry["kind"] for entry in data["parity"]["entries"]} == {"output", "gradient"}
    assert "mlp to compare with" in run("check", "mlp", "--against", "timm").stderr
    assert json.loads(run("check", "mlp", "--weights", "none", "--json").stdout)["weights"] is None


def test_parity_takes_its_arguments() -> None:
    arguments = "mlp --data digits --weights mlp.digits --limit 90 --batch-size 40 --size 8 --device cpu --json"
    result = run("parity", *arguments.split())
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert (data["ok"], data["images"], data["weights"]) == (True, 90, "mlp.digits")
    assert data["stock_top1"] == data["custom_top1"] > 0.9


def test_demo_passes_its_device_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*, device: str, say: Callable[[str], None]) -> Report:
        say(f"looking at {device}")
        return Finding(device)

    monkeypatch.setattr("zoo.demo.demo", fake)
    result = run("demo", "--device", "cuda:3")
    assert (result.stdout, result.stderr) == ("found cuda:3\n", "... looking at cuda:3\n")


def test_no_option_is_named_by_its_metavar():
    """typer 0.27.0 takes a metavar that reads like the parameter for the option's name: --DEVICE for --device."""
    commands = [
        command.callback
        for group in (app, *(g.typer_instance for g in app.registered_groups))
        for command in group.registered_commands
    ]
    assert len(commands) > 10
    seen = 0
    for callback in commands:
        for name, hint in typing.get_type_hints(callback, include_extras=True).items():
            for option in getattr(hint, "__metadata__", ()):
                if isinstance(option, OptionInfo) and option.metavar:
                    seen += 1
                    named = option.param_decls or str(option.default).startswith(
                        "--"
                    )  # Annotated puts the first one there
                    assert named or option.metavar.lower() != name.lower(), f"{callback.__name__}: {name}"
    assert seen > 10
