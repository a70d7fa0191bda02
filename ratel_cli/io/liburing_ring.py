"""The ring of the Python package `liburing`, with the methods of Ratel's own ring, for `storage.engine: liburing`.

The package (2026.3.30) calls the kernel with the GIL held, reads into memory that is no bytearray by vectors alone, and
gives completions one by one. Its timers are not tested, as it says, so the timer is the eventfd's timeout here.

Invariant: the package is opened in a process of its own first. Its wheel of 2026 is compiled for AVX-512, and an older
processor would end the run with SIGILL.
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
from errno import ETIME
from functools import cache
from importlib import import_module
from time import monotonic
from typing import Any

from ratel_cli.commands import pip_install
from ratel_cli.errors import EnvironmentFailure, printable

_PROBE = """
import liburing
ring = liburing.Ring()
liburing.io_uring_queue_init(2, ring)
liburing.io_uring_queue_exit(ring)
"""


class LiburingRing:
    """A ring of io_uring. One thread at a time may prepare, submit and reap."""

    def __init__(self, num_entries: int) -> None:
        """Raise EnvironmentFailure where the package cannot be used, OSError where the kernel does not allow it."""
        _check_package()
        self._package: Any = import_module("liburing")
        self._ring: Any = self._package.Ring()
        self._package.io_uring_queue_init(num_entries, self._ring)
        self._event = os.eventfd(0)
        self._is_open = True
        self._events = select.poll()
        self._events.register(self._event, select.POLLIN)
        self._package.io_uring_register_eventfd(self._ring, self._event)
        self._vectors: dict[tuple[int, int], object] = {}
        """By address and size of a buffer. The package never gives back what a vector was made of: made of an alias,
        and once for each of the pool's buffers, it holds no memory, and there are few."""
        self._timer: tuple[float, int] | None = None
        """When it completes, by `monotonic`, and its key."""

    def prepare(self, *, writes: bool, fd: int, memory: memoryview, offset: int, key: int) -> None:
        """Put a request on the ring: all of `memory`, to or from `offset` of the file.

        The memory must live until the completion with this `key`.
        """
        entry = self._package.io_uring_get_sqe(self._ring)
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        vector = self._vectors.get(place)
        if vector is None:
            alias = memoryview((ctypes.c_char * place[1]).from_address(place[0])).cast("B")
            vector = self._vectors[place] = self._package.Iovec([alias])
        (self._package.io_uring_prep_writev if writes else self._package.io_uring_prep_readv)(entry, fd, vector, offset)
        entry.user_data = key

    def prepare_timer(self, seconds: float, key: int) -> None:
        """Set the timer, which completes after `seconds`. One at a time."""
        self._timer = monotonic() + seconds, key

    def submit(self) -> None:
        """Hand everything prepared to the kernel. Raises OSError if it takes no more."""
        self._package.io_uring_submit(self._ring)

    def reap(self) -> list[tuple[int, int]]:
        """The completions that are there now, as (key, bytes moved or the negative number of an error)."""
        found, completion = [], self._package.Cqe()
        if self._timer is not None and self._timer[0] <= monotonic():
            found.append((self._timer[1], -ETIME))
            self._timer = None
        for _ in range(self._package.io_uring_cq_ready(self._ring)):
            self._package.io_uring_peek_cqe(self._ring, completion)
            entry = completion[0]
            try:
                result = entry.res
            except OSError as error:
                result = -(error.errno or 0)
            found.append((entry.user_data, result))
            self._package.io_uring_cqe_seen(self._ring, entry)
        return found

    def wait(self) -> None:
        """Block, without the GIL, until something has completed, or `wake` was called since the last wait."""
        milliseconds = None if self._timer is None else max(0.0, 1000 * (self._timer[0] - monotonic()))
        if self._events.poll(milliseconds):
            os.eventfd_read(self._event)

    def wake(self) -> None:
        """Let `wait` return. From any thread."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Close the ring. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._package.io_uring_queue_exit(self._ring)
            os.close(self._event)


@cache
def _check_package() -> None:
    """Raise EnvironmentFailure, with the reason, where the package is missing, or ends a process that opens it."""
    ended = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if ended.returncode < 0:
        reason = f"the package liburing ends its process with signal {-ended.returncode} on this processor"
        raise EnvironmentFailure(reason, "set storage.engine to io_uring, which needs no package")
    if "ModuleNotFoundError" in ended.stderr:
        raise EnvironmentFailure(
            "storage.engine: liburing needs a package that is not installed", pip_install("liburing")
        )
    if ended.returncode:
        reason = printable(ended.stderr.strip().splitlines()[-1])
        raise EnvironmentFailure(f"liburing is not available here: {reason}", "set storage.engine to threads")
