"""One home for the rule that a `with` statement closes what it opened.

Owners of files, threads, rings and pinned memory derive from `Closing`. Invariants: leaving the `with` statement calls
`close` exactly once, whatever ended it, and never hides an exception; a forked child closes nothing of its parent's,
whose files and rings it shares, and whose threads it does not have.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager that gives back itself on entry and calls its own `close` on exit."""

    _pid: int
    """Id of the process that made the object."""

    def __new__(cls, *_: object, **__: object) -> Self:
        made = super().__new__(cls)
        made._pid = os.getpid()
        return made

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "close" in vars(cls):
            cls.close = _unless_forked(cls.close)  # type: ignore[assignment, method-assign]

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return self._pid != os.getpid()

    @abstractmethod
    def close(self) -> None:
        """Give back everything that the object owns. Must be idempotent: a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unless_forked(close: Callable[[Closing], None]) -> Callable[[Closing], None]:
    """A `close` that does nothing in a forked child, where it would wait for threads that do not exist."""

    def closing(owner: Closing) -> None:
        if not owner.is_of_parent:
            close(owner)

    return closing
