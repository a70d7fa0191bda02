"""Every error that Ratel raises on purpose, and the exit code each one ends the process with.

    RatelError                    1   a bug in Ratel (only this base class; never raised on its own)
      BadInput                    2   config, data, model files or arguments are wrong
      EnvironmentFailure          3   space, permission, limits, lock: the machine cannot do it
        DoesNotFit                3   a tier is too small; says by how many bytes and which key to change
      IntegrityFailure            4   an I/O error, a failed checksum, a torn manifest
      Diverged                    5   the loss or a gradient is NaN or infinite
      Interrupted           130/143   a signal asked us to stop; the committed state stands

Raise where the fact is known; translate a foreign error once, with ``from exc``. `cli.app` is the
only place that prints them: one ``error:`` line each, then ``hint:`` where there is one.
"""

from __future__ import annotations

from typing import ClassVar


class RatelError(Exception):
    """Base of all expected failures: what happened, and what to do about it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInput(RatelError):
    """The user's input is wrong. Carries every finding, so that all are told at once."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None, *, others: tuple[BadInput, ...] = ()) -> None:
        super().__init__(message, hint)
        self.others = others


class EnvironmentFailure(RatelError):
    """The machine does not provide what the run needs."""

    exit_code = 3


class DoesNotFit(EnvironmentFailure):
    """A memory tier is too small for the run."""

    def __init__(
        self, message: str, hint: str | None = None, *, shortfall_bytes: int, is_gpu_memory: bool = False
    ) -> None:
        super().__init__(message, hint)
        self.shortfall_bytes = shortfall_bytes
        self.is_gpu_memory = is_gpu_memory


class IntegrityFailure(RatelError):
    """Bytes could not be moved, or are not the bytes that were written."""

    exit_code = 4


class Diverged(RatelError):
    """Training produced NaN or infinity; the last committed step stands."""

    exit_code = 5


class Interrupted(RatelError):
    """A signal asked us to stop. Exit code 128 + signal number."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number

    @property
    def signal_exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal_number
