"""One home for the rule that a `with` statement closes what it opened.

Owners of files, threads, rings and pinned memory derive from `Closing`. Invariant: leaving the `with` statement calls
`close` exactly once, whatever ended it, and never hides an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager that gives back itself on entry and calls its own `close` on exit."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back everything that the object owns. Must be idempotent: a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
