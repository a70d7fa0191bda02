"""What a command prints: notices, errors, tables and what changes while it works, all in one way.

A command opens a RunLog and passes its methods on as plain callables, so that the layers below know nothing about
terminals. Messages go to stderr. A result goes to stdout, through a RunLog of its own or as JSON.

Invariants: no control character reaches the terminal, because names come from files that others wrote. Nothing is read
as markup. Without a terminal there are no bars and no colours. Lines that change are drawn by a thread of their own, at
most `DRAWS_PER_SECOND` times a second, however often the work behind them goes on.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Event, RLock, Thread, current_thread, main_thread
from time import perf_counter, sleep
from types import FrameType
from typing import Self, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable, RenderHook
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment, Segments
from rich.text import Text

from ratel_cli.closing import Closing
from ratel_cli.commands import with_run_named
from ratel_cli.errors import printable
from ratel_cli.units import format_count, format_rate_number, format_wait, meter

DRAWS_PER_SECOND = 4
_BAR_CELLS = 40
_INDENT = "  "
_LEAST_COLUMNS = 20
"""Text is not folded into less."""
_MOST_COUNTED = 100_000
"""The largest total that a bar counts in plain numbers."""
_LINE_SECONDS = 30.0
"""How often long work prints a line where no bar can be shown."""
_SETTLED_SECONDS = 0.75
"""After this time a terminal has reported its new size: tmux keeps one back for 0.25 s, on a busy machine longer."""
_SIZE_SECONDS = 0.02
"""How often the size is read."""
_MOST_UNSETTLED_SECONDS = 3.0
"""A command does not wait longer at its end for a terminal whose size changes all the time."""

Lines = Callable[[int], Sequence[Text]]
"""The lines to show, each at most as wide as the number of columns that it is called with."""


class Bar:
    """A line that shows how far a piece of work is.

    `items`: what is counted, such as rows, where the amount of work is something else, such as bytes. `say`: prints a
    line now and then, where no bar can be shown.
    """

    def __init__(
        self,
        what: str,
        total: float,
        *,
        items: str = "",
        ascii_only: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._what = what
        self._total = total
        self._items = items
        self._done = 0.0
        self._num_items = 0
        self._start = self._said_at = perf_counter()
        self._ascii_only = ascii_only
        self._say = say

    def advance(self, amount: float = 1, items: int = 0) -> None:
        """Advance the bar by an amount of work."""
        self._done += amount
        self._num_items += items
        if self._say is not None and perf_counter() >= self._said_at + _LINE_SECONDS:
            self._said_at = perf_counter()
            self._say(f"{self._what}: {self._numbers()}")

    def _share(self) -> float:
        return min(1.0, self._done / self._total) if self._total else 1.0

    def _numbers(self) -> str:
        """How much is done, and the time that is left."""
        seconds, share = max(perf_counter() - self._start, 1e-9), self._share()
        if self._items:
            numbers = (
                f"{self._num_items} {self._items}, {format_rate_number(self._num_items / seconds)} {self._items}/s"
            )
        else:
            each = "{:.0f}".format if self._total <= _MOST_COUNTED else format_count
            numbers = f"{each(self._done)}/{each(self._total)}"
        left = seconds * (1 - share) / share if 0 < share < 1 else 0.0
        return numbers + (f", {format_wait(left)} left" if left >= 1 else "")

    def lines(self, width: int) -> list[Text]:
        """The bar, its numbers, and the time that is left."""
        numbers, share = f" {self._numbers()}", self._share()
        cells = max(0, min(_BAR_CELLS, width - cell_len(self._what) - len(numbers) - 1))
        done, rest = meter(share, cells, ascii_only=self._ascii_only)
        line = Text.assemble(f"{self._what} ", (done, "cyan"), (rest, "dim"), numbers)
        line.truncate(width)
        return [line]


class RunLog:
    """Prints to one stream, by default stderr. Lines that change stay at the bottom of a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._console = _Console(file=self._stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._printed: set[str] = set()
        self._live: _LiveLines | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the stream is a terminal, so that a person watches it."""
        return self._console.is_terminal

    @property
    def is_live(self) -> bool:
        """Whether lines on the terminal can change. FORCE_COLOR colours a file, but does not make it a terminal."""
        console = self._console
        return console.is_terminal and console.is_interactive and self._stream.isatty() and not console.is_dumb_terminal

    @property
    def columns(self) -> int:
        """The width of the terminal; 80 without one."""
        return _size(self._console, self._stream)[0]

    @property
    def ascii_only(self) -> bool:
        """Whether the stream can show nothing but ASCII."""
        return self._console.options.ascii_only

    def say(self, text: str) -> None:
        """Print a text, which may have several lines, as it is."""
        for line in with_run_named(text).split("\n"):
            self._print("", line)

    def remark(self, text: str, *, indent: int = len(_INDENT)) -> None:
        """Print a sentence; on a terminal it is folded between words, and continues behind an indent."""
        self._print_folded("", text, indent=indent)

    def notice(self, text: str) -> None:
        """Print something worth knowing. The same notice is printed once."""
        if text not in self._printed:
            self._printed.add(text)
            self._print_folded("note: ", text, "dim")

    def warn(self, text: str) -> None:
        """Print something that the user probably does not want. The same warning is printed once."""
        if text not in self._printed:
            self._printed.add(text)
            self._print_folded("warning: ", text, "yellow")

    def error(self, message: str, hint: str | None = None) -> None:
        """Print why the command ends, and what the user can do."""
        self._print("error: ", with_run_named(message), "bold red")
        if hint:
            self._print("hint: ", with_run_named(hint), "cyan")

    def marked(self, parts: Sequence[tuple[str, bool]]) -> None:
        """Print a text of several parts. The marked ones are coloured on a terminal, and in brackets elsewhere."""
        text = Text()
        for part, is_marked in parts:
            lines = "\n".join(map(printable, part.split("\n")))
            opened, closed = ("", "") if self.is_terminal or not is_marked else ("\u27e6", "\u27e7")
            text.append(f"{opened}{lines}{closed}", "green" if is_marked else "dim")
        self._print_text(text)

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print rows of a name and a fact, in two columns. On a terminal a long fact continues in its column."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, fact in ((name, with_run_named(fact)) for name, fact in rows):
            for part_name, part in zip((name, *[""] * len(fact)), self._folded(fact, width + 2), strict=False):
                self._print("", f"{part_name:<{width}}  {part}".rstrip())

    @contextmanager
    def bar(self, what: str, total: float, *, items: str = "") -> Iterator[Bar]:
        """Show a progress bar on a terminal; elsewhere print a line now and then, if the work takes long.

        `total` is the whole amount of work, `items` what is counted besides it.
        """
        say = None if self.is_live else self.say
        bar = Bar(printable(what), total, items=items, ascii_only=self.ascii_only, say=say)
        with self.live(bar.lines):
            yield bar

    @contextmanager
    def live(self, lines: Lines) -> Iterator[None]:
        """Show lines at the bottom of a terminal until the `with` statement ends; then they are gone.

        Another thread calls `lines`. Elsewhere, and where other lines are shown already, nothing is shown.
        """
        if not self.is_live or self._live is not None:
            yield
            return
        shown = _LiveLines(self._console, self._stream, lines)
        try:
            with shown as self._live:
                yield
        finally:
            self._live = None
            if shown.failure is not None:
                self.warn(f"progress can no longer be shown on the terminal ({printable(shown.failure)})")

    def _folded(self, text: str, indent: int, *, then: str = "") -> list[str]:
        """The text as one line; on a terminal as lines that fit behind an indent, folded between words.

        All but the first begin with `then`. Errors and hints are not folded: people copy commands out of them.
        """
        width = self.columns - indent
        if not self.is_live or width < _LEAST_COLUMNS:
            return [text]
        lines = textwrap.wrap(text, width, subsequent_indent=then, break_long_words=False, break_on_hyphens=False)
        return lines or [""]

    def _print_folded(self, label: str, text: str, style: str = "", *, indent: int = len(_INDENT)) -> None:
        first, *others = self._folded(label + with_run_named(text), 0, then=" " * indent)
        self._print(label, first.removeprefix(label), style)
        for line in others:
            self._print("", line)

    def _print(self, label: str, text: str, style: str = "") -> None:
        self._print_text(Text.assemble((label, style), printable(text)))

    def _print_text(self, text: Text) -> None:
        with self._live.lock if self._live is not None else nullcontext():
            try:
                self._console.print(text)
            except OSError as error:
                if self._stream is not sys.stderr or isinstance(error, BrokenPipeError):
                    raise
                sys.stderr = self._stream = self._console.file = cast("TextIO", _Nowhere())  # a full drive, say


class _Nowhere(io.TextIOBase):
    """A stream of which nothing is left."""

    def write(self, text: str) -> int:
        """See TextIOBase."""
        return len(text)


class RankLog(RunLog):
    """The log of a rank that is not the first: warnings and errors, with its number; the rest says what the first
    one does."""

    def __init__(self, rank: int) -> None:
        super().__init__(cast("TextIO", _Nowhere()))
        self._rank = rank
        self._shown = RunLog()

    def warn(self, text: str) -> None:
        """See RunLog."""
        self._shown.warn(f"rank {self._rank}: {text}")

    def error(self, message: str, hint: str | None = None) -> None:
        """See RunLog."""
        self._shown.error(f"rank {self._rank}: {message}", hint)


class _Console(Console):
    """A console that ends the command, and nothing else, when nobody reads the stream any more."""

    def on_broken_pipe(self) -> None:
        """Raise SystemExit, which no `except Exception` on the way takes for a failure of its own."""
        raise SystemExit


class _LiveLines(Closing, RenderHook):
    """Lines at the bottom of a terminal that a thread draws again and again. What is printed appears above them.

    Each drawing is one write, and covers the one before without erasing it first, so that nothing flickers. The cursor
    stays visible, below the lines: a process that is killed leaves a terminal that works.

    Rows are erased one by one: a terminal such as tmux keeps what "erase to the end of the screen" removes, if the
    cursor is at the top, and a panel that fills the screen would pile up in its history.

    A terminal that becomes narrower wraps what it shows, and may do so before it reports its new size. So nothing is
    written while the size changes; what is printed then appears `_SETTLED_SECONDS` after the last change. To read the
    size is not enough: tmux reports one that was undone at once for 0.01 s only, but each with a signal. The size is
    read again when all is ready to be written, as lines may take longer to make than a terminal to change.

    Invariant: between two writes the cursor is at the beginning of the line below the lines.
    """

    def __init__(self, console: Console, stream: TextIO, lines: Lines) -> None:
        self.failure: str | None = None
        """Why drawing ended early; None if it did not."""
        self._console = console
        self._stream = stream
        self._lines = lines
        self._shown: list[Text] = []
        self._printed: list[ConsoleRenderable] = []
        """What is to appear above the lines when the size has settled."""
        self._size = _size(console, stream)
        """Columns and rows of the terminal when they were read last."""
        self._changed_at = -_SETTLED_SECONDS
        """When they changed last, as far as is known."""
        self._drawn_at = self._size
        """Columns and rows when the lines were drawn last."""
        self.lock = RLock()
        """Held while something is printed, so that two threads do not draw at once."""
        self._handler: Callable[[int, FrameType | None], object] | int | None = None
        """What handled the signal of a new size before; None if it was not ours to change."""
        self._ends = Event()
        self._thread = Thread(target=self._run, name="ratel-screen", daemon=True)

    def __enter__(self) -> Self:
        if current_thread() is main_thread():  # Python lets no other install a handler
            self._handler = signal.signal(signal.SIGWINCH, self._note_change)
        self._console.push_render_hook(self)
        # A warning that a library prints while the lines are shown appears above them, as our own do.
        self._stdout, self._stderr = sys.stdout, sys.stderr
        if self._stderr is self._stream:
            sys.stderr = FileProxy(self._console, self._stderr)
        if self._stdout is not None and self._stdout.isatty():
            sys.stdout = FileProxy(self._console, self._stdout)
        self._draw()
        self._thread.start()
        return self

    def close(self) -> None:
        """Remove the lines. Idempotent."""
        if self._ends.is_set():
            return
        self._ends.set()
        self._thread.join()
        sys.stdout, sys.stderr = self._stdout, self._stderr
        last_wait_at = perf_counter() + _MOST_UNSETTLED_SECONDS
        while not self._is_settled() and perf_counter() < last_wait_at:
            sleep(_SIZE_SECONDS)
        self._lines, self._drawn_at = lambda _width: [], (0, 0)
        try:
            self._console.print(_NOTHING)
        finally:
            self._console.pop_render_hook()
            if self._handler is not None:
                signal.signal(signal.SIGWINCH, self._handler)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """What rich prints instead of `renderables`: they take the place of the lines, which follow below them."""
        self._printed += [] if renderables == [_NOTHING] else renderables
        if not self._may_write():
            return []
        size, lines = self._size, self._shown
        has_new_size = self._drawn_at != size
        if not self._printed or has_new_size:
            lines = list(self._lines(size[0] - 1))[: size[1] - 1]
        drawn = list(self._drawn(lines))
        if not self._may_write():
            return []
        covers = not self._printed and not has_new_size and len(lines) >= len(self._shown)
        height = self._height()
        to_start = f"\r\x1b[{height}A" if height else "\r"
        before = _control(to_start if covers else "\r\x1b[K" + "\x1b[A\x1b[2K" * height)  # the latter erases all lines
        printed, self._printed = self._printed, []
        self._shown, self._drawn_at = lines, size
        return [before, *printed, *drawn]

    def _run(self) -> None:
        drawn_at = perf_counter()
        while self.failure is None and not self._ends.wait(_SIZE_SECONDS):
            with self.lock:
                self._is_settled()  # notes a change, even one that is undone before the next drawing
            if perf_counter() >= drawn_at + 1 / DRAWS_PER_SECOND:
                self._draw()
                drawn_at = perf_counter()

    def _draw(self) -> None:
        try:
            with self.lock:
                self._console.print(_NOTHING)
        except Exception as error:  # noqa: BLE001 - the work goes on without its display
            self.failure = str(error) or type(error).__name__

    def _note_change(self, _number: int, _frame: FrameType | None) -> None:
        self._changed_at = perf_counter()

    def _may_write(self) -> bool:
        """Whether what is on the screen is where it is believed to be. At the end nobody can wait any more."""
        return self._is_settled() or self._ends.is_set()

    def _is_settled(self) -> bool:
        """Whether the terminal has had the size that it has now for a while."""
        size, now = _size(self._console, self._stream), perf_counter()
        if size != self._size:
            self._size, self._changed_at = size, now
        return now - self._changed_at >= _SETTLED_SECONDS

    def _height(self) -> int:
        """The rows that the lines take. A terminal that has become narrower has wrapped what was drawn."""
        width, _ = self._size
        return sum(max(1, -(-line.cell_len // width)) for line in self._shown)

    def _drawn(self, lines: Sequence[Text]) -> Iterator[Segments]:
        for line in lines:
            style = self._console.get_style(line.style)
            yield Segments(Segment.apply_style(line.render(self._console), style))
            yield _control("\x1b[K\n")
        yield _control("\x1b[K")  # the terminal shows Ctrl-C, and what else is typed, where the cursor is


def _control(text: str) -> Segments:
    """Text that only a terminal gets, as it is."""
    return Segments([Segment(text, None, [(ControlType.CLEAR,)])])


_NOTHING = _control("")
"""Printed to draw the lines again."""


def _size(console: Console, stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the stream's own terminal, as it is now. Rich asks those of stdin first."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return (columns, rows) if columns and rows else (max(1, console.width), max(2, console.height))
