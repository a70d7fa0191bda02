"""Every error that Ratel raises on purpose, and the exit code each one ends the process with.

    RatelError                    1   a bug in Ratel (only this base class; never raised on its own)
      BadInput                    2   config, data, model files or arguments are wrong
      EnvironmentFailure          3   the machine cannot do it: space, permission, limits, lock
        NotEnoughSpace            3   a drive has too little free space for a file
        DoesNotFit                3   a memory tier is too small; reports by how many bytes and which key to change
        RankLost                 75   another rank of the run has ended, or does not answer
        RankKilled              137   a signal has ended a rank that `--ranks` has started: 128 + its number
      IntegrityFailure            4   an I/O error, a failed checksum, a torn manifest
      Diverged                    5   the loss or a gradient is NaN or infinite
      Interrupted           130/143   a signal asked to stop; every committed step is saved

`cli.app` has one more: 141, without an error, when nobody reads the output any more.

Raise an error where the fact is known. Translate a foreign error once, with `from exc`. Only `cli.app` prints errors:
one `error:` line each, then a `hint:` line if there is a hint. Interrupted is printed without a label.

Names and reasons that come from a user's files go into a message through `printable` or `excerpt`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final, TypeVar

SIGNALLED: Final = 128
"""Added to the number of the signal that has ended a process, as shells do."""
_Result = TypeVar("_Result")

ConfigKey = tuple[int | str, ...]
"""A key of the config with the sections and list positions around it; empty if none is meant."""


class RatelError(Exception):
    """Base of all expected failures: a message that says what happened where, and a hint that says what to do.

    `others` are further findings, so that all are reported at once.
    """

    exit_code: int = 1

    def __init__(self, message: str, hint: str | None = None, *, others: tuple[RatelError, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.others = others
        self.key: ConfigKey = ()
        """The key that the error is about, if that is known."""
        self.reported_by: int | None = None
        """The rank that reports it, where all ranks of a run, or all that are left, raise it. None: each one does."""


class BadInput(RatelError):
    """The user's input is wrong."""

    exit_code = 2


class EnvironmentFailure(RatelError):
    """The machine does not provide what the run needs."""

    exit_code = 3


class NotEnoughSpace(EnvironmentFailure):
    """A drive has too little free space for a file."""


class DoesNotFit(EnvironmentFailure):
    """A memory tier is too small for the run, by `shortfall_bytes`."""

    def __init__(
        self, message: str, hint: str | None = None, *, shortfall_bytes: int, is_gpu_memory: bool = False
    ) -> None:
        super().__init__(message, hint)
        self.shortfall_bytes = shortfall_bytes
        self.is_gpu_memory = is_gpu_memory


class RankLost(EnvironmentFailure):
    """Another rank of the run has ended, or does not answer."""

    exit_code = 75


class RankKilled(EnvironmentFailure):
    """A signal from outside has ended a rank. The exit code is 128 + the signal's number."""

    def __init__(self, rank: int, signal_number: int) -> None:
        is_kill, name = signal_number == signal.SIGKILL, signal.Signals(signal_number).name
        super().__init__(
            f"rank {rank} was killed by signal {signal_number} ({name})" + is_kill * ": out of memory?",
            "the same command resumes the run after its last saved step"
            + is_kill * "; `dmesg` shows what the kernel has killed for memory: lower limits.host_memory then",
        )
        self.exit_code = SIGNALLED + signal_number


class IntegrityFailure(RatelError):
    """Bytes could not be moved, or differ from the bytes that were written."""

    exit_code = 4


class Diverged(RatelError):
    """Training produced NaN or infinity. The last committed step is saved."""

    exit_code = 5


class Interrupted(RatelError):
    """A signal asked the command to stop. The exit code is 128 + the signal's number."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = SIGNALLED + signal_number


class ErrorList:
    """Keeps errors about the user's input and about the machine, so that the checks after them are made, too."""

    def __init__(self) -> None:
        self._errors: list[BadInput | EnvironmentFailure] = []

    def __bool__(self) -> bool:
        """Whether there is an error."""
        return bool(self._errors)

    def attempt(self, key: ConfigKey, work: Callable[[], _Result]) -> _Result | None:
        """The result of `work`; None if it raised an error, which is kept. `key`: the key that it is about."""
        try:
            return work()
        except (BadInput, EnvironmentFailure) as error:
            error.key = error.key or key
            self._errors.append(error)
            return None

    def raise_all(self) -> None:
        """Raise the first error, with the others. What is wrong about the input comes before the machine."""
        ordered = sorted(self._errors, key=lambda error: error.exit_code)
        found: dict[str, RatelError] = {}
        for error in ordered:
            for each in (error, *error.others):
                found.setdefault(each.message, each)
        if ordered:
            first, *others = found.values()
            first.others = tuple(others)
            raise first


def printable(text: str) -> str:
    """The text on one line, with an escape for every character that cannot be printed, such as a control character."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def excerpt(text: str, max_chars: int = 200) -> str:
    """The printable beginning of a text that may have any length."""
    return printable(text[:max_chars]) + ("..." if len(text) > max_chars else "")


def first_line(error: BaseException) -> str:
    """The first line of a foreign error's text, printable; the name of its type if it has no text."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])
