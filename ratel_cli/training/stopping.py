"""Ends a run in an orderly way when it receives SIGINT or SIGTERM.

The first signal is only recorded. Long work calls `check` wherever it is safe to end, for example between blocks, and
`check` raises. The committed state stays; the step that is being computed is dropped. A second signal ends the process
at once, which the store survives like any crash.

Invariant: a signal changes nothing except what `check` does. After `close`, the earlier handlers are installed again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

from ratel_cli.closing import Closing
from ratel_cli.errors import Interrupted

STDERR = 2
"""Its file descriptor. In a signal handler, `sys.stderr` may be in the middle of a line."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], object] | int | None


STOPPED = "Stopped. Run the same command again."
"""What a command prints when a signal stopped it and there is nothing that it could continue."""


class StopRequest(Closing):
    """Records signals while it is open. Only the main thread may open it."""

    def __init__(self) -> None:
        self.saved_step: int | None = None
        """The last committed step of a run that trains; the message names it."""
        self.must_resume = False
        """True if the same command would start over, because of its --resume option; the message says so."""
        self._received: int | None = None
        self._previous: dict[int, _Handler] = {}

    def check(self) -> None:
        """Raise Interrupted if a signal was received."""
        if self._received is not None:
            raise Interrupted(self._received, self._message())

    @property
    def received(self) -> int | None:
        """The signal that was received."""
        return self._received

    def note(self, number: int) -> None:
        """Another rank has received this signal."""
        self._received = self._received or number

    @property
    def is_requested(self) -> bool:
        """Whether a signal was received."""
        return self._received is not None

    def close(self) -> None:
        """Install the earlier handlers again. Idempotent."""
        for number, handler in self._previous.items():
            # None: it was not installed from Python, so Python cannot install it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._record)
        return self

    def _message(self) -> str:
        if self.saved_step is None:
            return STOPPED
        how = " with --resume auto" if self.must_resume else ""
        return f"Stopped at step {self.saved_step} (saved). Run the same command{how} to continue."

    def _record(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            with contextlib.suppress(OSError):
                os.write(STDERR, b"\rEnded at once. Every committed step is saved.\n")
            # Not the signal's default action: process 1 of a container would ignore it.
            os._exit(128 + number)
        self._received = number
