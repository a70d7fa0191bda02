"""Simulated power cuts: records what a store does to its files, and makes the files as a cut may leave them.

The model is the drive that promises least. Of a write that completed, any sectors of 512 bytes may be there after a
cut. A sync makes durable what completed before it on that file. A page that is written through is durable when the call
returns, and may be torn if the cut comes during it. A sync that fails drops what it should have made durable, as the
page cache does.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratel_cli.io.checksum_workers import ChecksumWorkers
from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.tickets import Ticket
from ratel_cli.store.barrier import Barrier

SECTOR_BYTES = 512
Files = dict[Path, bytes]
_SHARES = (0.0, 0.0, 0.1, 0.5, 0.9, 1.0, 1.0)
"""Shares of a write's sectors that have arrived, to choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveEvent:
    """Something that happened to a file, or the acknowledgement of what the store has committed."""

    kind: Literal["write", "sync", "failed_sync", "write_through", "acknowledge"]
    path: Path = Path()
    offset: int = 0
    content: bytes = b""
    state: object = None
    """What is acknowledged; None for other kinds."""


class RecordingDrive(IoQueue, Barrier):
    """An IoQueue and a Barrier over real files, which records every event."""

    engine = "recording"
    read_bytes = 0
    written_bytes = 0

    def __init__(self) -> None:
        self.checksums = ChecksumWorkers()
        self.events: list[DriveEvent] = []

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
        self.events.append(DriveEvent(kind="acknowledge", state=state))

    def close(self) -> None:
        self.checksums.close()

    def _record(
        self,
        kind: Literal["write", "sync", "failed_sync", "write_through"],
        fd: int,
        offset: int = 0,
        content: bytes = b"",
    ) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.events.append(DriveEvent(kind=kind, path=path, offset=offset, content=content))


class FailsToSync(RecordingDrive):
    """A drive whose syncs fail from a given one on, counted from 1, and make nothing durable."""

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
    before: Mapping[Path, bytes], events: Sequence[DriveEvent], *, per_event: int, seed: int
) -> Iterator[tuple[int, Files]]:
    """(cut, the files after a power cut during event number `cut`), for every event and once after the last.

    There are many ways in which a cut may leave the files: for each cut, up to `per_event` different ones, by chance.
    """
    chance = random.Random(seed)
    durable = {path: bytearray(content) for path, content in before.items()}
    pending: list[DriveEvent] = []
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


def _happen(durable: dict[Path, bytearray], pending: list[DriveEvent], event: DriveEvent) -> list[DriveEvent]:
    """Apply an event in full. Returns the writes that are not durable after it."""
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


def _torn(durable: Mapping[Path, bytearray], uncertain: Sequence[DriveEvent], chance: random.Random) -> Files:
    files = {path: bytearray(content) for path, content in durable.items()}
    for write in uncertain:
        share = chance.choice(_SHARES)
        for start in range(0, len(write.content), SECTOR_BYTES):
            if chance.random() < share:
                sector = write.content[start : start + SECTOR_BYTES]
                files[write.path][write.offset + start : write.offset + start + len(sector)] = sector
    return {path: bytes(content) for path, content in files.items()}


def _put(files: dict[Path, bytearray], event: DriveEvent) -> None:
    files[event.path][event.offset : event.offset + len(event.content)] = event.content
