"""What the I/O engines share: a request to the kernel, what its result means, and a lane of requests.

A queue cuts transfers into requests and hands them to a lane, one lane per direction. The lanes of the engines
(uring.py, threads.py) differ only in how they hand a request to the kernel. Everything that decides about bytes (short
transfers, retries, errors, what a broken lane does) is here, so that all engines decide alike.
"""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from threading import RLock
from typing import Literal

from ratel_cli.closing import Closing
from ratel_cli.errors import EnvironmentFailure, IntegrityFailure, RatelError
from ratel_cli.io.tickets import Ticket
from ratel_cli.sizes import PAGE_BYTES

Direction = Literal["read", "write"]

MAX_ATTEMPTS = 64
"""The kernel may reject a request for the moment (EAGAIN) or be interrupted (EINTR). More often than this in a row,
without a byte moved, is a fault."""
_TRANSIENT = frozenset({errno.EAGAIN, errno.EINTR})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_MEMORY = memoryview(b"")


class Request:
    """A transfer small enough for one call to the kernel. It shrinks as parts of it complete."""

    __slots__ = ("_attempts", "direction", "fd", "memory", "offset", "ticket")

    def __init__(self, ticket: Ticket, direction: Direction, fd: int, offset: int, memory: memoryview) -> None:
        self.ticket = ticket
        self.direction = direction
        self.fd = fd
        self.offset = offset
        self.memory = memory
        self._attempts = 0

    def advance(self, result: int | OSError) -> int:
        """Apply one result of the kernel, and return the bytes that it moved.

        The request is finished when `memory` is empty. Otherwise it must be handed to the kernel again. Raises
        RatelError if it cannot continue.
        """
        if isinstance(result, OSError):
            if result.errno not in _TRANSIENT or self._attempts >= MAX_ATTEMPTS:
                raise self._failure(result) from result
            self._attempts += 1
            return 0
        # A torn page is moved again: for O_DIRECT, the next request must start on a page.
        gained_bytes = result - result % PAGE_BYTES
        if gained_bytes == 0:
            end = "the file ends there" if self.direction == "read" else "nothing was written"
            raise IntegrityFailure(f"{self} moved {result} bytes: {end}")
        self.memory = self.memory[gained_bytes:]
        self.offset += gained_bytes
        self._attempts = 0
        return gained_bytes

    def finish(self, error: RatelError | None = None) -> None:
        """Drop the memory, and end this request's part of the ticket."""
        self.memory = _NO_MEMORY
        self.ticket.finish_part(error)

    def _failure(self, cause: OSError) -> RatelError:
        """What an error number means for the run."""
        message = f"{self} failed: {cause.strerror or cause}"
        if cause.errno in _NO_SPACE:
            return EnvironmentFailure(message, "free space there, or name another directory in storage.paths")
        return IntegrityFailure(message, "look for device errors (dmesg, smartctl); the last committed step is safe")

    def __str__(self) -> str:
        return f"{self.direction} of {len(self.memory)} bytes at {self.offset} of {_name_of(self.fd)}"


class Lane(Closing):
    """One direction of an engine, which keeps up to `depth` requests in the kernel's hands.

    Once a thread of the lane has failed, or a request has not completed within the timeout, the lane is broken: what
    waits fails with that cause, and so does every later `submit`.
    """

    def __init__(self, *, depth: int, timeout_seconds: float) -> None:
        assert depth > 0 and timeout_seconds > 0
        self._depth = depth
        self._timeout_seconds = timeout_seconds
        self._lock = RLock()  # for the next three
        self._waiting: deque[Request] = deque()
        self._broken: BaseException | None = None
        self._is_closed = False
        self.moved_bytes = 0
        """Bytes moved so far. A ticket's bytes are counted before the ticket is done."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take over requests. Never blocks on the device. Raises IntegrityFailure if the lane is broken."""
        with self._lock:
            if self._broken is not None:
                raise lane_error(self._broken)
            assert not self._is_closed, "a transfer was submitted to a closed queue"
            self._waiting.extend(requests)
            self._wake(len(requests))

    @abstractmethod
    def close(self) -> None:
        """Fail the requests that wait, let those in the kernel's hands end, and join the threads. Idempotent."""

    @abstractmethod
    def _wake(self, num_requests: int) -> None:
        """Make the lane's threads look at `num_requests` new requests. The caller holds the lock."""

    def _take_waiting(self) -> Request | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _fail_waiting(self, error: RatelError) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.popleft().finish(error)

    def _break(self, cause: BaseException) -> None:
        with self._lock:
            self._broken = self._broken or cause
            self._fail_waiting(lane_error(cause))


def timeout_error(request: Request, timeout_seconds: float) -> RatelError:
    """The error of a request that the kernel did not complete. It breaks its lane."""
    return IntegrityFailure(
        f"{request} did not complete within {timeout_seconds:g} seconds",
        "the device does not respond: look for device errors (dmesg, smartctl); the last committed step is safe",
    )


def lane_error(cause: BaseException) -> RatelError:
    """The error of what is unfinished in a broken lane. A new one each time, because each is raised elsewhere."""
    hint = cause.hint if isinstance(cause, RatelError) else None
    error = IntegrityFailure(f"transfers have stopped: {cause}", hint)
    error.__cause__ = cause
    return error


def closed_error() -> RatelError:
    """The error of a request that still waited when its queue was closed."""
    return IntegrityFailure("the I/O queue was closed before this transfer began")


def _name_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"
