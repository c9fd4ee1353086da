from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType

from zoo.tables import TableReport, columns, console, plain, rows, verdict


@dataclass(frozen=True)
class Found(TableReport):
    names: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.names

    def __rich__(self) -> RenderableType:
        table = columns("name", "length", right=("length",), title="names")
        for name in self.names:
            table.add_row(name, str(len(name)))
        labelled = rows()
        labelled.add_row("first", self.names[0])
        return Group(table, labelled, verdict(self.ok, "done"))


def test_text_is_plain_and_complete() -> None:
    names = ("[bold]x[/bold]", ":smile:", "[0, 3]", "a" * 150)
    text = str(Found(names))
    for name in names[:3]:
        assert name in text
    folded = [line.split()[0] for line in text.splitlines() if line.strip().startswith("aaa")]
    assert "".join(folded) == "a" * 150  # not cut
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "\x1b" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert text.splitlines()[-1] == "done"


def test_numbers_stand_to_the_right() -> None:
    lines = str(Found(("a", "b" * 12))).splitlines()
    ends = [len(line) for line in lines if line.endswith((" 1", "12"))]
    assert len(set(ends)) == 1


def test_a_terminal_gets_colour() -> None:
    terminal = console(force_terminal=True, width=80, color_system="standard")
    with terminal.capture() as captured:
        terminal.print(Found(("[bold]x",)))
    assert "\x1b[1;31mdone" in captured.get()  # not ok: red
    assert "[bold]x" in captured.get()


def test_width() -> None:
    assert max(len(line) for line in plain(Found(("word " * 30,)), width=40).splitlines()) <= 40
