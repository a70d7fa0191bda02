"""Power cuts, explored: records what a store does to its files, and makes the files as a cut may leave them.

The model of a drive is the one that promises least. A write that completed is anywhere between not
there and there, in sectors of 512 bytes; a sync makes what completed before it on that file durable;
a page written through is durable when the call returns, and torn when the cut comes during it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from ratel_cli.movement.queue import Piece
from ratel_cli.movement.tickets import Ticket

SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a file, or the acknowledgement of a step."""

    kind: Literal["write", "sync", "write_through", "acknowledge"]
    path: Path = Path()
    offset: int = 0
    content: bytes = b""
    step: int = 0


class Recorder:
    """An IoQueue and a Barrier over real files that writes everything down."""

    engine = "recorder"
    read_bytes = 0
    written_bytes = 0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, pieces: Sequence[Piece]) -> Ticket:
        for piece in pieces:
            assert os.preadv(piece.fd, [piece.memory], piece.offset) == len(piece.memory)
        return Ticket(num_parts=0)

    def write(self, pieces: Sequence[Piece]) -> Ticket:
        for piece in pieces:
            assert os.pwritev(piece.fd, [piece.memory], piece.offset) == len(piece.memory)
            self._record("write", piece.fd, piece.offset, bytes(piece.memory))
        return Ticket(num_parts=0)

    def sync(self, fd: int) -> None:
        self._record("sync", fd)

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        assert os.pwritev(fd, [page], offset) == len(page)
        self._record("write_through", fd, offset, bytes(page))

    def acknowledge(self, step: int) -> None:
        self.events.append(Event(kind="acknowledge", step=step))

    def close(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(
        self, kind: Literal["write", "sync", "write_through"], fd: int, offset: int = 0, content: bytes = b""
    ) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.events.append(Event(kind=kind, path=path, offset=offset, content=content))


def files_after_a_cut(
    before: Mapping[Path, bytes], events: Sequence[Event], cut: int, chance: random.Random
) -> dict[Path, bytes]:
    """The files if the power goes during event number `cut`: one of the many ways, by chance."""
    files = {path: bytearray(content) for path, content in before.items()}
    pending: list[Event] = []
    for event in events[:cut]:
        if event.kind == "write":
            pending.append(event)
        elif event.kind == "write_through":
            _put(files, event)
        elif event.kind == "sync":
            for write in [write for write in pending if write.path == event.path]:
                _put(files, write)
            pending = [write for write in pending if write.path != event.path]
    pending += [event for event in events[cut : cut + 1] if event.content]
    share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    for write in pending:
        for start in range(0, len(write.content), SECTOR_BYTES):
            if chance.random() < share:
                sector = write.content[start : start + SECTOR_BYTES]
                files[write.path][write.offset + start : write.offset + start + len(sector)] = sector
    return {path: bytes(content) for path, content in files.items()}


def _put(files: dict[Path, bytearray], event: Event) -> None:
    files[event.path][event.offset : event.offset + len(event.content)] = event.content
