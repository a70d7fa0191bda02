"""What reaches the terminal, and what never does."""

from __future__ import annotations

import io

import pytest

from ratel_cli.console import RunLog


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_without_a_terminal_are_plain() -> None:
    stream = io.StringIO()
    run_log = RunLog(stream)
    run_log.say("[bold]not markup[/bold] :smile: " + "x" * 200)
    run_log.say("one\ntwo")
    run_log.notice("once")
    run_log.notice("once")
    run_log.warn("careful\x1b[2J")
    run_log.error("bad", "do better")
    run_log.facts([("model", "tiny"), ("store", "")])
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
    run_log = RunLog(stream)
    with run_log.bar("steps", total=3) as bar:
        bar.advance()
        run_log.say("step 1")
    assert stream.getvalue() == "step 1\n"
    assert not run_log.is_terminal


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    run_log = RunLog(stream)
    assert run_log.is_terminal
    with run_log.bar("steps [x]\x1b[2J", total=2) as bar:
        bar.advance()
        run_log.say("step 1")
        bar.advance()
    shown = stream.getvalue()
    assert "steps [x]\\x1b[2J" in shown
    assert "2/2" in shown
    assert "step 1" in shown
