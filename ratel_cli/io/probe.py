"""Tries the store's kind of I/O in a directory: a page written and read back, past the page cache if that is possible.

Invariant: nothing remains. The file has no name from the moment it is made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import open_unlinked, reserve, use_direct_io
from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.sizes import PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What happened."""

    failure: str | None
    """Why a file could not be written and read; None if it could."""
    is_direct: bool
    """Whether transfers bypass the page cache."""


def probe_directory(directory: Path, queue: IoQueue) -> Probe:
    """Write a page in a new file of the directory, and read it back."""
    buffered: list[str] = []
    try:
        fd = open_unlinked(directory)
        try:
            reserve(fd, directory / "probe", PAGE_BYTES)
            use_direct_io([fd], [directory / "probe"], buffered.append)
            return Probe(failure=_wrong_bytes(fd, queue), is_direct=not buffered)
        finally:
            os.close(fd)
    except RatelError as error:
        return Probe(failure=error.message, is_direct=False)


def _wrong_bytes(fd: int, queue: IoQueue) -> str | None:
    """Why the bytes read are not those written; None if they are. Raises RatelError if they cannot be moved."""
    written = os.urandom(PAGE_BYTES)
    with BufferPool(None) as pool, pool.lease(PAGE_BYTES, "a probe") as lease:
        lease.memory[:] = written
        queue.write([Extent(fd, 0, lease.memory)]).wait()
        lease.memory[:] = bytes(PAGE_BYTES)
        queue.read([Extent(fd, 0, lease.memory)]).wait()
        return None if lease.memory == written else "the bytes read are not the bytes written"
