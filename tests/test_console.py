"""Narration: what reaches the terminal, and what never does."""

from __future__ import annotations

import io

import pytest

from ratel_cli.console import RunLog, escape_control


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain, with accents: éß漢", "plain, with accents: éß漢"),
        ("two\nlines\r\tand", "two\\nlines\\r\\tand"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("right\u202eleft", "right\\u{202e}left"),
        ("half \udc80", "half \\u{dc80}"),
        ("\u2028", "\\u{2028}"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert escape_control(text) == shown


def test_lines_without_a_terminal_are_plain() -> None:
    stream = io.StringIO()
    narration = RunLog(stream)
    narration.say("[bold]not markup[/bold] :smile: " + "x" * 200)
    narration.say("one\ntwo")
    narration.notice("once")
    narration.notice("once")
    narration.warn("careful\x1b[2J")
    narration.error("bad", "do better")
    narration.facts([("model", "tiny"), ("store", "")])
    assert stream.getvalue().split("\n") == [
        "[bold]not markup[/bold] :smile: " + "x" * 200,
        "one",
        "two",
        "note: once",
        "warning: careful\\x1b[2J",
        "error: bad",
        "hint: do better",
        "model  tiny",
        "store",
        "",
    ]


def test_no_bar_without_a_terminal() -> None:
    stream = io.StringIO()
    narration = RunLog(stream)
    with narration.bar("steps", total=3) as bar:
        bar.advance()
        narration.say("step 1")
    assert stream.getvalue() == "step 1\n"
    assert not narration.is_terminal


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    narration = RunLog(stream)
    assert narration.is_terminal
    with narration.bar("steps [x]\x1b[2J", total=2) as bar:
        bar.advance()
        narration.say("step 1")
        bar.advance()
    shown = stream.getvalue()
    assert "steps [x]\\x1b[2J" in shown
    assert "2/2" in shown
    assert "step 1" in shown
