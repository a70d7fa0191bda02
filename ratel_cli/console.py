"""What a command prints: notices, errors, tables and progress bars, all in one way.

A command opens a RunLog and passes its methods on as plain callables, so that the layers below know nothing about
terminals. Messages go to stderr. A result goes to stdout, through a RunLog of its own or as JSON.

Invariant: no control character reaches the terminal, because names come from files that others wrote. Nothing is read
as markup. Without a terminal there are no bars and no colours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ratel_cli.errors import printable


class Bar:
    """A progress bar; without a terminal, nothing."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: float = 1) -> None:
        """Advance the bar by an amount of work."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, amount)


class RunLog:
    """Prints to one stream, by default stderr. While there is a progress bar, lines appear above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._printed: set[str] = set()

    @property
    def is_terminal(self) -> bool:
        """Whether the stream is a terminal, so that a person watches it."""
        return self._console.is_terminal

    def say(self, text: str) -> None:
        """Print a text, which may have several lines."""
        for line in text.split("\n"):
            self._print("", line)

    def notice(self, text: str) -> None:
        """Print something worth knowing. The same notice is printed once."""
        if text not in self._printed:
            self._printed.add(text)
            self._print("note: ", text, "dim")

    def warn(self, text: str) -> None:
        """Print something that the user probably does not want. The same warning is printed once."""
        if text not in self._printed:
            self._printed.add(text)
            self._print("warning: ", text, "yellow")

    def error(self, message: str, hint: str | None = None) -> None:
        """Print why the command ends, and what the user can do."""
        self._print("error: ", message, "bold red")
        if hint:
            self._print("hint: ", hint, "cyan")

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print rows of a name and a fact, in two columns."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, fact in rows:
            self._print("", f"{name:<{width}}  {fact}".rstrip())

    @contextmanager
    def bar(self, what: str, total: float) -> Iterator[Bar]:
        """Show a progress bar on a terminal. `total` is the whole amount of work."""
        if not self.is_terminal:
            yield Bar(None, None)
            return
        what_column = TextColumn("{task.description}", markup=False)
        columns = (what_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield Bar(progress, progress.add_task(printable(what), total=total))

    def _print(self, label: str, text: str, style: str = "") -> None:
        self._console.print(Text.assemble((label, style), printable(text)))
