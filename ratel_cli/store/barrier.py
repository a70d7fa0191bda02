"""The two system calls that make bytes durable, and the failpoints at which tests kill the process.

When an O_DIRECT write completes, the drive has the bytes, but they need not survive a power cut. Only bytes that passed
through a `Barrier` do. Tests use barriers of their own, to record the order of writes and syncs or to let them fail.

Invariant: nothing here retries. After a failed sync the kernel has dropped the dirty state, and a second call would
report a false success.
"""

from __future__ import annotations

import errno
import os
import signal

from ratel_cli.errors import BadInput

FAILPOINT_VARIABLE = "RATEL_KILL_AT"
FAILPOINTS = (
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
"""Arguments of `failpoint`. Every change of a store's state passes the manifest failpoints, commits included."""


def failpoint(point: str) -> None:
    """Mark this moment of the protocol. ``RATEL_KILL_AT=point:n`` kills the process (SIGKILL) the n-th time.

    For tests of recovery only. The variable itself counts down. Raises BadInput if its value cannot be read.
    """
    wanted = os.environ.get(FAILPOINT_VARIABLE)
    if wanted is None:
        return
    name, _, count = wanted.rpartition(":")
    if not name or not count.isdecimal():
        raise BadInput(f"{FAILPOINT_VARIABLE}={wanted}: expected point:n")
    if name != point:
        return
    if int(count) <= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[FAILPOINT_VARIABLE] = f"{name}:{int(count) - 1}"


class Barrier:
    """Makes bytes durable. Both methods raise OSError if they cannot."""

    def sync(self, fd: int) -> None:
        """Make durable everything that was written to the file and has completed."""
        os.fdatasync(fd)

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        """Write one page and make it durable (RWF_DSYNC). Other writes to the file may still not be.

        The drive can serve this without a full flush.
        """
        if os.pwritev(fd, [page], offset, os.RWF_DSYNC) != len(page):
            raise OSError(errno.EIO, "only a part of a page was written")
