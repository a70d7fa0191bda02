"""What the two I/O engines share: one request to the kernel, and what its result means.

A queue (queue.py) cuts pieces into requests and hands them to a lane, one lane a direction; the
lanes (uring.py, threaded.py) differ only in how they hand a request to the kernel. Everything that
decides about bytes -- short transfers, retries, errors -- is here, so that both decide alike.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Literal, Protocol

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure, RatelError
from ratel_cli.io.tickets import Ticket
from ratel_cli.sizes import PAGE_BYTES

Direction = Literal["read", "write"]

# The kernel may refuse a request for the moment (EAGAIN) or be interrupted (EINTR); more often than
# this in a row, without a byte moved, is a fault.
MAX_ATTEMPTS = 64
_TRANSIENT = frozenset({errno.EAGAIN, errno.EINTR})
_NO_MEMORY = memoryview(b"")
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class Lane(Protocol):
    """One direction of an engine: a named thread that keeps up to ``depth`` requests in flight.

    Once its thread has failed, or a request has not completed in time, a lane is broken: what is
    unfinished fails with that cause, and so does every later ``submit``.
    """

    @property
    def moved_bytes(self) -> int:
        """Bytes moved by completed transfers; a ticket's bytes are in it before the ticket is done."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take over requests; never blocks on the device."""
        ...

    def close(self) -> None:
        """Fail what was not handed to the kernel, wait for what was, join the thread. Idempotent."""
        ...


class Request:
    """A transfer small enough for one call to the kernel; shrinks as parts of it complete."""

    __slots__ = ("_attempts", "direction", "fd", "memory", "offset", "ticket")

    def __init__(self, *, ticket: Ticket, direction: Direction, fd: int, offset: int, memory: memoryview) -> None:
        self.ticket = ticket
        self.direction = direction
        self.fd = fd
        self.offset = offset
        self.memory = memory
        self._attempts = 0

    def advance(self, result: int | OSError) -> int:
        """Take in one result of the kernel and return the bytes gained; the request is finished when
        ``memory`` is empty, and must be handed in again otherwise. Raises when it cannot go on."""
        if isinstance(result, OSError):
            if result.errno not in _TRANSIENT or self._attempts >= MAX_ATTEMPTS:
                raise self.failure(result) from result
            self._attempts += 1
            return 0
        # A torn page is moved again: the next request must start on a page for O_DIRECT.
        gained_bytes = result - result % PAGE_BYTES
        if gained_bytes == 0:
            end = "the file ends there" if self.direction == "read" else "nothing was written"
            raise IntegrityFailure(f"{self} moved {result} bytes: {end}")
        self.memory = self.memory[gained_bytes:]
        self.offset += gained_bytes
        self._attempts = 0
        return gained_bytes

    def finish(self, error: RatelError | None = None) -> None:
        """Tell the ticket, and let go of the memory."""
        self.memory = _NO_MEMORY
        self.ticket.finish_part(error)

    def failure(self, cause: OSError) -> RatelError:
        """What an error number means for the run."""
        message = f"{self} failed: {cause.strerror or cause}"
        if cause.errno in _NO_SPACE:
            return EnvironmentFailure(message, "free space there, or name another directory in storage.paths")
        return IntegrityFailure(message, "look for device errors (dmesg, smartctl); the last committed step stands")

    def __str__(self) -> str:
        return f"{self.direction} of {len(self.memory)} bytes at {self.offset} of {_name_of(self.fd)}"


def timeout_error(request: Request, timeout_seconds: float) -> RatelError:
    """For a request that the kernel did not complete; it breaks its lane."""
    return IntegrityFailure(
        f"{request} did not complete within {timeout_seconds:g} seconds",
        "the device hangs (see dmesg); the last committed step stands",
    )


def lane_error(cause: BaseException) -> RatelError:
    """For everything unfinished in a lane that broke. A new one each time: each is raised elsewhere."""
    hint = cause.hint if isinstance(cause, RatelError) else None
    error = IntegrityFailure(f"transfers have stopped: {cause}", hint)
    error.__cause__ = cause
    return error


def closed_error() -> RatelError:
    """For a request that was still waiting when its queue was closed."""
    return IntegrityFailure("the I/O queue was closed before this transfer began")


def _name_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"
