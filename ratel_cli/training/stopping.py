"""Stops a run in an orderly way when SIGINT or SIGTERM asks for it.

Opened by the commands that take long. The first signal is noted, and whoever drives long work calls `check` at
its next safe place: between blocks, between import groups. The committed state stands; the step in
flight is dropped. A second signal ends the process, which the store survives like any crash.

Invariant: a signal changes nothing but what `check` says; afterwards the handlers are those of before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from ratel_cli.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """Listens for signals while it is open. Only the main thread may open it."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, _Handler] = {}

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._received is not None:
            name = signal.Signals(self._received).name
            raise Interrupted(self._received, f"stopped by {name}; what was committed stands")

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for number, handler in self._previous.items():
            # None: it was not set from Python, and cannot be set back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            # Not by the signal's default action: process 1 of a container would ignore it.
            os._exit(128 + number)
        self._received = number
