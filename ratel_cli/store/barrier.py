"""The two system calls that make bytes durable, and the named moments at which tests kill the process.

Used by `commits`, `creation` and `headers`. Completion of an O_DIRECT write says that the drive has the bytes, not
that they survive a power cut: only what passed through a `Barrier` does. Tests pass barriers of their
own, to record the order of writes and syncs or to let them fail.

Invariant: nothing here retries. After a failed sync the kernel has dropped the dirty state, and a
second call would lie.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Protocol

from ratel_cli.errors import BadInput

KILL_VARIABLE = "RATEL_KILL_AT"
KILL_POINTS = (
    "create.reserved",
    "create.erased",
    "create.identified",
    "create.filled",
    "commit.written",
    "commit.synced",
    "commit.published",
    "manifest.ready",
    "manifest.published",
)
"""Arguments of `failpoint`; the manifest points are passed by every change of state, commits included."""


def failpoint(point: str) -> None:
    """Name this moment of the protocol. ``RATEL_KILL_AT=point:n`` kills the process (SIGKILL) the n-th time.

    For tests of recovery only. The count that is left is kept in the variable itself.
    """
    wanted = os.environ.get(KILL_VARIABLE)
    if wanted is None:
        return
    name, _, count = wanted.rpartition(":")
    if not name or not count.isdecimal():
        raise BadInput(f"{KILL_VARIABLE}={wanted}: expected point:n")
    if name != point:
        return
    if int(count) <= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[KILL_VARIABLE] = f"{name}:{int(count) - 1}"


class Barrier(Protocol):
    """Makes bytes durable; raises OSError."""

    def sync(self, fd: int) -> None:
        """Everything that was written to the file and has completed is durable on return."""
        ...

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        """Write one page; it is durable on return. Says nothing of other writes."""
        ...


class KernelBarrier:
    """fdatasync, and pwritev with RWF_DSYNC (which the drive can serve without a full flush)."""

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        if os.pwritev(fd, [page], offset, os.RWF_DSYNC) != len(page):
            raise OSError(errno.EIO, "a page was written in part")
