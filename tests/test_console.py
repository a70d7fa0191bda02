"""What reaches the terminal, and what never does."""

from __future__ import annotations

import io
import logging
import signal
import sys
import threading
import time
import warnings
from threading import Event

import pytest
from rich.text import Text

from ratel_cli import console
from ratel_cli.console import RunLog
from tests.real_time import in_real_time
from tests.terminal import Screen


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch, *, columns: int = 60, rows: int = 24) -> None:
    """Have an environment in which a `Terminal` is one, of this size."""
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(rows)}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 60 columns and 24 rows."""
    as_terminal(monkeypatch)
    return Terminal()


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


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_long_work_prints_a_line_now_and_then_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(console, "perf_counter", clock)
    with RunLog(stream).bar("reading the data", total=1000, items="rows") as bar:
        for clock.now, amount in ((1, 10), (29, 40), (30, 50), (59, 100), (61, 50), (400, 250), (401, 500)):
            bar.advance(amount, 2 * amount)
    with RunLog(stream).bar("importing weights", total=4e9) as bar:
        clock.now = 3000
        bar.advance(1.5e9)
    assert stream.getvalue().splitlines() == [
        "reading the data: 200 rows, 6.667 rows/s, 4 min 30 s left",
        "reading the data: 500 rows, 8.197 rows/s, 3 min 03 s left",
        "reading the data: 1000 rows, 2.5 rows/s, 6 min 40 s left",
        "importing weights: 1.50B/4.00B, 1 h 12 min left",
    ]


def test_a_bar_counts_items_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(console, "perf_counter", clock)
    bar = console.Bar("reading", 100, items="rows")
    clock.now = 10
    bar.advance(50, 12345)
    assert [line.plain for line in bar.lines(60)] == [
        "reading " + "\u2501" * 8 + "\u2500" * 9 + " 12345 rows, 1234 rows/s, 10 s left"
    ]


def test_a_bar_on_a_terminal(stream: Terminal) -> None:
    run_log = RunLog(stream)
    assert run_log.is_terminal
    with run_log.bar("steps [x]\x1b[2J", total=2) as bar:
        bar.advance()
        run_log.say("step 1")
        bar.advance()
        deadline = time.monotonic() + 60
        while "2/2" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert shown(stream).lines == ["step 1", "steps [x]\\x1b[2J " + "\u2501" * 38 + " 2/2"]
    assert shown(stream).lines == ["step 1"]


def test_facts_are_folded_in_their_column_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    as_terminal(monkeypatch, columns=30)
    stream = Terminal()
    RunLog(stream).facts(
        [("model", "one two three four five six seven"), ("at", "/a/path/that/is/longer/than/the/line")]
    )
    assert stream.getvalue().splitlines() == [
        "model  one two three four five",
        "       six seven",
        "at     /a/path/that/is/longer/than/the/line",
    ]


class Numbered:
    """Lines that count how often they were drawn."""

    def __init__(self, height: int = 2) -> None:
        self.height = height
        self.num_drawn = 0
        self.drawn = Event()

    def __call__(self, width: int) -> list[Text]:
        self.num_drawn += 1
        self.drawn.set()
        return [Text(f"line {number}, drawn".ljust(width, ".")) for number in range(self.height)]

    def wait(self) -> None:
        """Return when they are drawn again."""
        self.drawn.clear()
        assert self.drawn.wait(60)


def shown(stream: Terminal, *, columns: int = 60, rows: int = 24) -> Screen:
    screen = Screen(columns, rows)
    screen.write(stream.getvalue())
    return screen


def test_lines_stay_below_what_is_printed_and_go_without_a_trace(stream: Terminal) -> None:
    run_log = RunLog(stream)
    lines = Numbered()
    run_log.say("before")
    with run_log.live(lines):
        run_log.say("one")
        lines.wait()
        run_log.warn("two")
        assert shown(stream).lines == ["before", "one", "warning: two", *[line.plain for line in lines(59)]]
        assert shown(stream).cursor == (5, 0)
        run_log.say("x" * 150)
    run_log.say("after")
    assert shown(stream).lines == ["before", "one", "warning: two", "x" * 60, "x" * 60, "x" * 30, "after"]


def test_what_libraries_print_does_not_tear_the_lines(stream: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    run_log = RunLog()
    with run_log.live(Numbered()):
        sys.stderr.write("a part, ")
        sys.stderr.write("and its end\n")
        logging.StreamHandler(sys.stderr).handle(logging.makeLogRecord({"msg": "logged"}))
        sys.stderr.write(warnings.formatwarning("careful", UserWarning, "file.py", 3))
        assert shown(stream).lines[:2] == ["a part, and its end", "logged"]
        assert shown(stream).lines[-2:] == [f"line {number}, drawn".ljust(59, ".") for number in (0, 1)]
        assert any("UserWarning: careful" in line for line in shown(stream).lines)
    assert sys.stderr is stream
    assert "drawn" not in "".join(shown(stream).lines)


def test_a_file_on_stdout_gets_its_text(stream: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only stderr is a terminal: what goes to stdout stays out of it."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    with RunLog(stream).live(Numbered()):
        print("a result")
    assert output.getvalue() == "a result\n"
    assert "a result" not in stream.getvalue()


@pytest.mark.parametrize(
    ("environment", "is_terminal", "is_live"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, False, False),
    ],
)
def test_where_lines_change(
    monkeypatch: pytest.MonkeyPatch, stream: Terminal, environment: dict[str, str], is_terminal: bool, is_live: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    output = stream if is_terminal else io.StringIO()
    run_log = RunLog(output)
    lines = Numbered()
    assert run_log.is_live == is_live
    with run_log.live(lines):
        run_log.say("said")
    assert (lines.num_drawn > 0) == is_live
    if not is_live:
        assert output.getvalue() == "said\n"


def test_no_color_has_no_colours(stream: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with RunLog(stream).live(lambda width: [Text("red", "bold red")]):
        pass
    assert "\x1b[1mred\x1b[0m" in stream.getvalue()


@in_real_time
def test_lines_are_drawn_at_most_four_times_a_second(stream: Terminal) -> None:
    """However much is printed: what is printed shows the lines as they were drawn last."""
    run_log = RunLog(stream)
    lines = Numbered()
    start = time.monotonic()
    with run_log.live(lines):
        while time.monotonic() < start + 0.6:
            run_log.say("busy")
        assert 2 <= lines.num_drawn <= 1 + 4 * (time.monotonic() - start)


def test_one_set_of_lines_at_a_time(stream: Terminal) -> None:
    run_log = RunLog(stream)
    inner = Numbered()
    with run_log.live(Numbered()), run_log.live(inner):
        pass
    assert inner.num_drawn == 0


def test_a_terminal_with_few_rows_shows_the_first_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    as_terminal(monkeypatch, rows=4)
    stream = Terminal()
    lines = Numbered(height=9)
    with (run_log := RunLog(stream)).live(lines):
        run_log.say("said")
        lines.wait()
        screen = shown(stream, rows=4)
        assert [line.rstrip(".") for line in screen.lines] == ["said", *(f"line {n}, drawn" for n in range(3))]
    assert shown(stream, rows=4).lines == ["said"]


def test_a_failure_to_draw_ends_the_lines_and_not_the_work(stream: Terminal) -> None:
    def broken(width: int) -> list[Text]:
        raise ValueError("no such number")

    run_log = RunLog(stream)
    with run_log.live(broken):
        run_log.say("work")
    assert shown(stream).lines == [
        "work",
        "warning: progress can no longer be shown on the terminal (no",
        "  such number)",
    ]


def test_the_thread_ends_with_the_lines(stream: Terminal) -> None:
    with pytest.raises(KeyError), RunLog(stream).live(Numbered()):
        raise KeyError
    assert [thread.name for thread in threading.enumerate() if thread.name == "ratel-screen"] == []


def test_a_size_that_was_undone_at_once(stream: Terminal) -> None:
    """Its signal is all that can be seen of it. Nothing is written until the terminal has settled."""
    lines = Numbered()
    run_log = RunLog(stream)
    handler = signal.getsignal(signal.SIGWINCH)
    with run_log.live(lines):
        raised_at = time.monotonic()
        signal.raise_signal(signal.SIGWINCH)
        before = stream.getvalue()
        run_log.say("said")
        assert stream.getvalue() == before
        lines.wait()
        assert time.monotonic() >= raised_at + 0.5
    assert signal.getsignal(signal.SIGWINCH) is handler
    assert shown(stream).lines == ["said"]


def test_a_size_that_changes_while_lines_are_made(stream: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were made for another width, so they are not written."""
    sizes = [(60, 24)]
    monkeypatch.setattr(console, "_size", lambda *_: sizes[-1])
    widths: list[int] = []
    has_changed = Event()

    def lines(width: int) -> list[Text]:
        widths.append(width)
        if len(widths) == 2:
            sizes.append((40, 24))
        elif len(widths) > 2:
            has_changed.set()
        return [Text(f"drawing {len(widths)}")]

    with RunLog(stream).live(lines):
        assert has_changed.wait(60)
    assert widths[:3] == [59, 59, 39]
    assert [f"drawing {number}" in stream.getvalue() for number in (1, 2, 3)] == [True, False, True]
