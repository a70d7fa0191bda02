"""Power cuts, explored: records what a store does to its files, and makes the files as a cut may leave them.

The model of a drive is the one that promises least. A write that completed is anywhere between not
there and there, in sectors of 512 bytes; a sync makes what completed before it on that file durable;
a page written through is durable when the call returns, and torn when the cut comes during it. A sync
that fails drops what it was to make durable, as the page cache does: it never arrives.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.tickets import Ticket

SECTOR_BYTES = 512
Files = dict[Path, bytes]
_SHARES = (0.0, 0.0, 0.1, 0.5, 0.9, 1.0, 1.0)
"""Of a write's sectors, so many have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a file, or the acknowledgement of what the store has committed."""

    kind: Literal["write", "sync", "failed_sync", "write_through", "acknowledge"]
    path: Path = Path()
    offset: int = 0
    content: bytes = b""
    state: object = None
    """What is acknowledged."""


class Recorder(IoQueue):
    """An IoQueue and a Barrier over real files that writes everything down."""

    engine = "recorder"
    read_bytes = 0
    written_bytes = 0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, extents: Sequence[Extent]) -> Ticket:
        for extent in extents:
            assert os.preadv(extent.fd, [extent.memory], extent.offset) == len(extent.memory)
        return Ticket(num_parts=0)

    def write(self, extents: Sequence[Extent]) -> Ticket:
        for extent in extents:
            assert os.pwritev(extent.fd, [extent.memory], extent.offset) == len(extent.memory)
            self._record("write", extent.fd, extent.offset, bytes(extent.memory))
        return Ticket(num_parts=0)

    def sync(self, fd: int) -> None:
        self._record("sync", fd)

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        assert os.pwritev(fd, [page], offset) == len(page)
        self._record("write_through", fd, offset, bytes(page))

    def acknowledge(self, state: object) -> None:
        self.events.append(Event(kind="acknowledge", state=state))

    def close(self) -> None:
        return

    def _record(
        self,
        kind: Literal["write", "sync", "failed_sync", "write_through"],
        fd: int,
        offset: int = 0,
        content: bytes = b"",
    ) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.events.append(Event(kind=kind, path=path, offset=offset, content=content))


class FailsToSync(Recorder):
    """From its n-th sync on, counted from 1, the drive makes nothing durable, and says so."""

    def __init__(self, *, first_failing: int) -> None:
        super().__init__()
        self._left = first_failing

    def sync(self, fd: int) -> None:
        self._left -= 1
        if self._left > 0:
            super().sync(fd)
            return
        self._record("failed_sync", fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def cuts(
    before: Mapping[Path, bytes], events: Sequence[Event], *, per_event: int, seed: int
) -> Iterator[tuple[int, Files]]:
    """The files if the power goes during event number `cut`, or after the last: `per_event` of the many ways, all
    different, by chance."""
    chance = random.Random(seed)
    durable = {path: bytearray(content) for path, content in before.items()}
    pending: list[Event] = []
    for cut in range(len(events) + 1):
        event = events[cut] if cut < len(events) else None
        uncertain = [*pending, *([event] if event is not None and event.content else [])]
        seen: set[tuple[bytes, ...]] = set()
        for _ in range(per_event if uncertain else 1):
            files = _torn(durable, uncertain, chance)
            found = tuple(files.values())
            if found not in seen:
                seen.add(found)
                yield cut, files
        if event is not None:
            pending = _happen(durable, pending, event)


def _happen(durable: dict[Path, bytearray], pending: list[Event], event: Event) -> list[Event]:
    """Let an event take place in full; returns the writes that are not durable after it."""
    match event.kind:
        case "write":
            return [*pending, event]
        case "write_through":
            _put(durable, event)
        case "sync":
            for write in pending:
                if write.path == event.path:
                    _put(durable, write)
    if event.kind in ("sync", "failed_sync"):
        return [write for write in pending if write.path != event.path]
    return pending


def _torn(durable: Mapping[Path, bytearray], uncertain: Sequence[Event], chance: random.Random) -> Files:
    files = {path: bytearray(content) for path, content in durable.items()}
    for write in uncertain:
        share = chance.choice(_SHARES)
        for start in range(0, len(write.content), SECTOR_BYTES):
            if chance.random() < share:
                sector = write.content[start : start + SECTOR_BYTES]
                files[write.path][write.offset + start : write.offset + start + len(sector)] = sector
    return {path: bytes(content) for path, content in files.items()}


def _put(files: dict[Path, bytearray], event: Event) -> None:
    files[event.path][event.offset : event.offset + len(event.content)] = event.content
