"""Scratch space on the drives: for held gradients and offloaded activations.

One unlinked file in each directory, reserved when it is opened and never synced. The space is free again as soon as the
run ends, however it ends.

The checksums of sealed bytes are taken and compared next to the transfers (io/checksum_workers.py).

Invariant: while the object is open, bytes read are the bytes written last; if they were sealed, anything else raises
IntegrityFailure. Nothing survives the object.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ratel_cli.closing import Closing
from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.checksum_workers import parts_of
from ratel_cli.io.files import (
    SpaceNeed,
    check_directories,
    check_space,
    make_directory,
    open_unlinked,
    reserve,
    use_direct_io,
)
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.striped_files import StripedFiles
from ratel_cli.io.striping import StripeMap
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.sizes import PAGE_BYTES, STRIPE_BYTES
from ratel_cli.units import align_up


class Scratch(Closing):
    """`num_bytes` of space, addressed from 0. Bytes that were never written are undefined. Use as a context manager."""

    def __init__(
        self,
        paths: Sequence[Path],
        num_bytes: int,
        queue: IoQueue,
        *,
        shares: Sequence[int] | None = None,
        stripe_bytes: int = STRIPE_BYTES,
    ) -> None:
        """`shares` are those of the directories in the stripes; None: equal shares.

        Raises BadInput for an empty or doubled path, and EnvironmentFailure if space or permission is missing.
        """
        assert num_bytes >= 0 and num_bytes % PAGE_BYTES == 0
        directories = check_directories(paths)
        stripes = StripeMap(shares=tuple(shares or [1] * len(directories)), stripe_bytes=stripe_bytes, header_bytes=0)
        file_bytes = stripes.file_bytes(num_bytes)
        check_space(
            [
                SpaceNeed(directory=directory, num_bytes=size)
                for directory, size in zip(directories, file_bytes, strict=True)
            ]
        )
        self.num_bytes = num_bytes
        self._fds: list[int] = []
        self._digests: dict[int, int] = {}
        """XXH3-64 of what was sealed last, by the offset of each part."""
        try:
            for directory, size in zip(directories, file_bytes, strict=True):
                make_directory(directory)
                self._fds.append(open_unlinked(directory))
                reserve(self._fds[-1], directory / "scratch", size)
            # No notice: the store in the same directories has one where direct I/O is not available.
            use_direct_io(self._fds, [directory / "scratch" for directory in directories], lambda _: None)
            self._files = StripedFiles(self._fds, stripes, queue)
        except BaseException:
            self._close_files()
            raise

    def write(self, offset: int, memory: memoryview) -> Ticket:
        """Write `memory` to `offset`. Both are whole pages. Nobody notices if other bytes are read later."""
        assert self._fds and offset + len(memory) <= self.num_bytes
        return self._files.write(offset, memory)

    def read(self, offset: int, memory: memoryview) -> Ticket:
        """Fill `memory` from `offset`. Both are whole pages."""
        assert self._fds and offset + len(memory) <= self.num_bytes
        return self._files.read(offset, memory)

    def write_sealed(self, offset: int, memory: memoryview) -> Ticket:
        """`write` for bytes that `read_sealed` will read. They must not change until the ticket is done."""
        assert self._fds and offset + len(memory) <= self.num_bytes
        return join([self._write_part(offset + start, memory[start:stop]) for start, stop in parts_of(len(memory))])

    def read_sealed(self, offset: int, memory: memoryview, what: str) -> Ticket:
        """Fill `memory` from `offset`, where `write_sealed` has written as much at once.

        The ticket's `wait` raises IntegrityFailure if these are not the bytes that were written; `what` names them.
        """
        assert self._fds and offset + len(memory) <= self.num_bytes
        parts = parts_of(len(memory))
        return join([self._read_part(offset + start, memory[start:stop], what) for start, stop in parts])

    def close(self) -> None:
        """Wait for transfers in flight, and give the space back. Idempotent."""
        if self._fds:
            self._files.settle()
        self._close_files()

    def _write_part(self, offset: int, memory: memoryview) -> Ticket:
        def take() -> None:
            self._digests[offset] = xxhash.xxh3_64_intdigest(memory)

        return self._files.write(offset, memory, take=take)

    def _read_part(self, offset: int, memory: memoryview, what: str) -> Ticket:
        def check() -> None:
            if xxhash.xxh3_64_intdigest(memory) != self._digests[offset]:
                raise IntegrityFailure(
                    f"{what}: the bytes read are not the bytes written", "check the drive, then resume"
                )

        return self._files.read(offset, memory, check=check)

    def _close_files(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class ScratchPlace:
    """A part of scratch space."""

    scratch: Scratch
    offset: int
    num_bytes: int
    """Whole pages."""


class GrowingScratch(Closing):
    """Scratch space that grows as parts of it are taken. Parts that are given back serve others of the same size."""

    def __init__(self, paths: Sequence[Path], queue: IoQueue, *, step_bytes: int) -> None:
        """`step_bytes`: what it grows by at once; more for a larger part. The rest is as of `Scratch`."""
        self._paths, self._queue, self._step_bytes = paths, queue, step_bytes
        self._parts: list[Scratch] = []
        self._end = 0
        """Bytes of the last one that are taken."""
        self._free = defaultdict[int, list[ScratchPlace]](list)
        """By size."""

    def take(self, num_bytes: int) -> ScratchPlace:
        """A part of at least `num_bytes`, in whole pages. Raises EnvironmentFailure if there is no space."""
        size = align_up(num_bytes, PAGE_BYTES)
        if self._free[size]:
            return self._free[size].pop()
        if not self._parts or self._end + size > self._parts[-1].num_bytes:
            self._parts.append(Scratch(self._paths, max(size, self._step_bytes), self._queue))
            self._end = 0
        self._end += size
        return ScratchPlace(self._parts[-1], self._end - size, size)

    def give_back(self, place: ScratchPlace) -> None:
        """Nothing of the part is in flight, and its bytes are not needed any more."""
        self._free[place.num_bytes].append(place)

    def close(self) -> None:
        """Close all parts; see `Scratch`. Idempotent."""
        while self._parts:
            self._parts.pop().close()
