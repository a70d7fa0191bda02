"""What a run tells the person who watches it: one way to write to stderr, for every command.

Commands open one RunLog and hand its methods down as plain callables (`notice`), so that nothing
below knows about terminals. Data goes to stdout and is not printed here.

Invariant: no text reaches the terminal with control characters in it (names come from files that
others wrote), nothing is read as markup, and without a terminal there is no bar and no colour.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_DANGEROUS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: controls, invisible formatting (text that runs backwards), half characters, line ends."""


def escape_control(text: str) -> str:
    """The text on one line, with everything that a terminal would act upon spelled out."""
    if text.isprintable():
        return text
    return "".join(_escape(each) if unicodedata.category(each) in _DANGEROUS else each for each in text)


def _escape(character: str) -> str:
    code = ord(character)
    return _SHORT_ESCAPES.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}")


class Bar:
    """A progress bar that may not be there."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: float = 1) -> None:
        """Move on by so much."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, amount)


class RunLog:
    """Narration on stderr. Lines stay above the bar while there is one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._told: set[str] = set()

    @property
    def is_terminal(self) -> bool:
        """Whether a person watches."""
        return self._console.is_terminal

    def say(self, text: str) -> None:
        """One line; a text of several lines becomes as many."""
        for line in text.split("\n"):
            self._print("", line)

    def notice(self, text: str) -> None:
        """Something worth knowing. The same notice is told once."""
        if text not in self._told:
            self._told.add(text)
            self._print("note: ", text, "dim")

    def warn(self, text: str) -> None:
        """Something that is probably not wanted. Told once, like a notice."""
        if text not in self._told:
            self._told.add(text)
            self._print("warning: ", text, "yellow")

    def error(self, message: str, hint: str | None = None) -> None:
        """Why the run ends, and what to do."""
        self._print("error: ", message, "bold red")
        if hint:
            self._print("hint: ", hint, "cyan")

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Two columns: what, and how it is."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, fact in rows:
            self._print("", f"{name:<{width}}  {fact}".rstrip())

    @contextmanager
    def bar(self, what: str, total: float) -> Iterator[Bar]:
        """A progress bar while a person watches, nothing otherwise."""
        if not self.is_terminal:
            yield Bar(None, None)
            return
        what_column = TextColumn("{task.description}", markup=False)
        columns = (what_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield Bar(progress, progress.add_task(escape_control(what), total=total))

    def _print(self, label: str, text: str, style: str = "") -> None:
        self._console.print(Text.assemble((label, style), escape_control(text)))
