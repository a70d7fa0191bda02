"""Broken protocols: ways in which stores are commonly wrong, each of which loses or mixes generations in a power cut.

`test_store_power` lets its exploration loose on them. If it lets one pass, it is the exploration that is broken.
Some are wrong in what they ask of the drive (recorders), some in where they write (stores), and one in what it
believes when it recovers (`trusting`).
"""

from __future__ import annotations

import zlib

from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.layout import NUM_MANIFESTS
from ratel_cli.store.manifest import EMPTY_PAGE
from ratel_cli.store.store import Store
from tests.store.power import Event, Files, Recorder

_CRC_BYTES = 4


class NeverSyncs(Recorder):
    """Takes the completion of a write for its durability."""

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.events.pop()


class SyncsTheFirstFileAlone(Recorder):
    """Forgets that a store may lie on several drives."""

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if self.events[-1].path.parent.name != "a":
            self.events.pop()


class SyncsLate(Recorder):
    """Writes the manifest before the data it speaks of is durable."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[Event] = []

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._late.append(self.events.pop())

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, offset, page)
        self.events += self._late
        self._late.clear()


class SyncsAgain(Recorder):
    """Calls fdatasync once more when it has failed. The second call succeeds, since the dirty pages were dropped."""

    def sync(self, fd: int) -> None:
        self._record("failed_sync", fd)
        super().sync(fd)


class CommitsBeforeTheLastWrite(Recorder):
    """Counts a write as done when it was submitted: the newest one arrives after the syncs."""

    def __init__(self) -> None:
        super().__init__()
        self._in_flight: list[Event] = []

    def _record(self, kind: str, fd: int, offset: int = 0, content: bytes = b"") -> None:
        if kind != "sync":
            self.events += self._in_flight
            self._in_flight.clear()
        super()._record(kind, fd, offset, content)  # type: ignore[arg-type]
        if kind == "write":
            self._in_flight.append(self.events.pop())


class HasOneManifest(Recorder):
    """Writes every manifest to the same place."""

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, max(PAGE_BYTES, offset), page)


class CachesTheManifest(Recorder):
    """Leaves the manifest to the drive's cache."""

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, offset, page)
        written = self.events.pop()
        self.events.append(Event(kind="write", path=written.path, offset=written.offset, content=written.content))


class WritesOverTheCurrentSlot(Store):
    """Has no shadow: the step is written over the generation that it came from."""

    def _free_slots(self) -> set[int]:
        return {self.current().slot}


class ForgetsPins(Store):
    """Takes the slot of a kept generation for a free one."""

    def _free_slots(self) -> set[int]:
        return set(range(self.num_slots)) - {self.current().slot}


def trusting(files: Files) -> Files:
    """The files as a recovery that does not check a manifest's CRC would see them: every manifest has a fitting one."""
    return {path: _sealed(content) for path, content in files.items()}


def _sealed(content: bytes) -> bytes:
    sealed = bytearray(content)
    for start in range(0, NUM_MANIFESTS * PAGE_BYTES, PAGE_BYTES):
        body = content[start : start + PAGE_BYTES - _CRC_BYTES]
        if content[start : start + PAGE_BYTES] != EMPTY_PAGE:
            sealed[start + len(body) : start + PAGE_BYTES] = zlib.crc32(body).to_bytes(_CRC_BYTES, "little")
    return bytes(sealed)


RECORDERS: tuple[type[Recorder], ...] = (
    NeverSyncs,
    SyncsTheFirstFileAlone,
    SyncsLate,
    SyncsAgain,
    CommitsBeforeTheLastWrite,
    HasOneManifest,
    CachesTheManifest,
)
STORES: tuple[type[Store], ...] = (WritesOverTheCurrentSlot, ForgetsPins)
