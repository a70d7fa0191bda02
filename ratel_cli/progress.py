"""How long work reports how far it is, without knowing who shows it. Invariant: reporting changes nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Advance(Protocol):
    """Called with the amount of work that was done since the last call, and with how many items that were."""

    def __call__(self, amount: float, items: int = 0) -> None: ...


class OpenBar(Protocol):
    """Opens a progress bar, by what is done and how much of it there is. `items`: what is counted besides: rows."""

    def __call__(self, what: str, total: float, *, items: str = "") -> AbstractContextManager[Advance]: ...


def no_progress(amount: float, items: int = 0) -> None:
    """Show nothing."""


def no_bar(what: str, total: float, *, items: str = "") -> AbstractContextManager[Advance]:  # noqa: ARG001 - as OpenBar
    """A progress bar that is not shown, and that never stops."""
    return nullcontext(no_progress)
