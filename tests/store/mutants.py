"""Broken protocols: common mistakes of stores, each of which loses or mixes generations in a power cut.

`test_store_power` explores power cuts with each of them, and must find the mistake. Some protocols are wrong in what
they ask of the drive, some in where they write, and one in what it accepts when it recovers (`without_crc_check`).
"""

from __future__ import annotations

import zlib

from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.layout import NUM_MANIFESTS
from ratel_cli.store.manifest import EMPTY_PAGE
from ratel_cli.store.store import Store
from tests.store.power import DriveEvent, Files, RecordingDrive

_CRC_BYTES = 4


class NeverSyncs(RecordingDrive):
    """Treats a completed write as durable."""

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.events.pop()


class SyncsOnlyTheFirstFile(RecordingDrive):
    """Syncs only one of the drives that a store lies on."""

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if self.events[-1].path.parent.name != "a":
            self.events.pop()


class SyncsLate(RecordingDrive):
    """Writes the manifest before the data that it refers to is durable."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[DriveEvent] = []

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._late.append(self.events.pop())

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, offset, page)
        self.events += self._late
        self._late.clear()


class SyncsAgain(RecordingDrive):
    """Retries a failed fdatasync. The second call succeeds, because the dirty pages were dropped."""

    def sync(self, fd: int) -> None:
        self._record("failed_sync", fd)
        super().sync(fd)


class CommitsBeforeTheLastWrite(RecordingDrive):
    """Commits while the last write is in flight: it arrives after the syncs."""

    def __init__(self) -> None:
        super().__init__()
        self._in_flight: list[DriveEvent] = []

    def _record(self, kind: str, fd: int, offset: int = 0, content: bytes = b"") -> None:
        if kind != "sync":
            self.events += self._in_flight
            self._in_flight.clear()
        super()._record(kind, fd, offset, content)  # type: ignore[arg-type]
        if kind == "write":
            self._in_flight.append(self.events.pop())


class HasOneManifest(RecordingDrive):
    """Writes every manifest to the same page."""

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, max(PAGE_BYTES, offset), page)


class CachesTheManifest(RecordingDrive):
    """Does not write the manifest through the drive's cache."""

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, offset, page)
        written = self.events.pop()
        self.events.append(DriveEvent(kind="write", path=written.path, offset=written.offset, content=written.content))


class WritesOverTheCurrentSlot(Store):
    """Has no shadow: a step overwrites the current generation."""

    def _free_slots(self) -> set[int]:
        return {self.current().slot}


class ForgetsPins(Store):
    """Treats the slots of pinned generations as free."""

    def _free_slots(self) -> set[int]:
        return set(range(self.num_slots)) - {self.current().slot}


def without_crc_check(files: Files) -> Files:
    """The files as a recovery without a check of the CRC sees them: every manifest has the CRC of its bytes."""
    return {path: _with_right_crcs(content) for path, content in files.items()}


def _with_right_crcs(content: bytes) -> bytes:
    changed = bytearray(content)
    for start in range(0, NUM_MANIFESTS * PAGE_BYTES, PAGE_BYTES):
        body = content[start : start + PAGE_BYTES - _CRC_BYTES]
        if content[start : start + PAGE_BYTES] != EMPTY_PAGE:
            changed[start + len(body) : start + PAGE_BYTES] = zlib.crc32(body).to_bytes(_CRC_BYTES, "little")
    return bytes(changed)


DRIVES: tuple[type[RecordingDrive], ...] = (
    NeverSyncs,
    SyncsOnlyTheFirstFile,
    SyncsLate,
    SyncsAgain,
    CommitsBeforeTheLastWrite,
    HasOneManifest,
    CachesTheManifest,
)
STORES: tuple[type[Store], ...] = (WritesOverTheCurrentSlot, ForgetsPins)
