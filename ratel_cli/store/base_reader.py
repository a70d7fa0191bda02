"""Reads blocks that stay in the base model's files (base_files.py).

Files have their tensors anywhere, and direct I/O moves whole pages. So pieces are read with the pages around them into
buffers of this module, and copied from there, part by part, on the threads for checksums. One that has copied a part
begins the next one that waits: a reader takes a fixed amount of memory (`staging_bytes`), however much it is asked for
at once.

Invariants: the files are never written; a file that has become another one is noticed before its bytes are used, by its
size when it is opened, by the checksums of the region when it is read.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.checksum_workers import parts_of
from ratel_cli.io.files import use_direct_io
from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.tickets import Ticket, settle
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.base_files import (
    NUM_STAGED,
    PART_BYTES,
    BaseFile,
    BaseFiles,
    Piece,
    overlapping,
    range_in_file,
)
from ratel_cli.units import align_up

_PUT_BACK = "put the file back as it was, or start over with --resume no"


class _Part(NamedTuple):
    """What is read and copied as one."""

    ticket: Ticket
    pieces: Sequence[Piece]
    start: int
    """In the block's array."""
    memory: memoryview
    check: Callable[[], None]


class _Copy(NamedTuple):
    """Bytes of a part that have arrived in its buffer."""

    start: int
    """In the part."""
    source: memoryview


class BaseFilesReader(Closing):
    """Reads blocks from the files. From any thread. Opens the files when it first reads."""

    def __init__(self, load: Callable[[], BaseFiles], queue: IoQueue, notice: Callable[[str], None]) -> None:
        """`load`: gives the list, when it is first needed. It raises IntegrityFailure."""
        self._load = load
        self._queue = queue
        self._notice = notice
        self._lock = Lock()  # for all that follows
        self._loaded: BaseFiles | None = None
        self._opened: _OpenFiles | None = None
        self._waiting: deque[_Part] = deque()
        self._free: list[memoryview] = []
        self._in_flight: list[Ticket] = []

    @property
    def files(self) -> BaseFiles:
        """The list. Raises IntegrityFailure if it is damaged."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def read(
        self, block: int, start: int, memory: memoryview, *, unit_bytes: int, check: Callable[[int, int], None]
    ) -> Ticket:
        """Fill `memory` with the bytes of a block's array from `start` on.

        When the bytes [first, last) of `memory` are there, a multiple of `unit_bytes` or what is left, `check` is
        called with these on a thread for checksums. The ticket's `wait` raises what that raises. Raises BadInput if a
        file is missing or has another size.
        """
        assert unit_bytes <= PART_BYTES, unit_bytes
        pieces = self.files.pieces.get(block, ())
        parts = list(parts_of(len(memory), unit_bytes=unit_bytes, most_bytes=PART_BYTES))
        ticket = Ticket(num_parts=len(parts), buffers=(memory,))
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            for first, last in parts:
                of_part = overlapping(pieces, start + first, start + last)
                check_part = partial(check, first, last)
                self._waiting.append(_Part(ticket, of_part, start + first, memory[first:last], check_part))
            self._in_flight = [each for each in (*self._in_flight, ticket) if not each.done]
        self._begin_waiting()
        return ticket

    def changed(self, block: int, first: int, last: int) -> IntegrityFailure:
        """The error for bytes [first, last) of a block's array, which have another checksum."""
        listed = self.files
        numbers = sorted({piece.file for piece in overlapping(listed.pieces.get(block, ()), first, last)})
        names = " or ".join(listed.files[number].path for number in numbers) or "a file"
        return IntegrityFailure(
            f"base_storage: {names} has changed since the run began (block {block}, bytes {first} to {last})", _PUT_BACK
        )

    def settle(self) -> None:
        """Wait until nothing is being read."""
        with self._lock:
            in_flight, self._in_flight = self._in_flight, []
        settle(in_flight)

    def close(self) -> None:
        """Wait for what is being read, and close the files. Idempotent."""
        self.settle()
        with self._lock:
            opened, self._opened, self._free = self._opened, None, []
        if opened is not None:
            opened.close()

    def _open(self) -> _OpenFiles:
        """The open files, with a free buffer for each part in flight."""
        assert self._loaded is not None
        largest_bytes = max(map(_staged_bytes, self._loaded.pieces.values()), default=0)
        opened = _OpenFiles(self._loaded.files, self._notice, buffer_bytes=largest_bytes)
        self._free = list(opened.buffers)
        return opened

    def _begin_waiting(self) -> None:
        """Begin parts that wait, while there are buffers."""
        while True:
            with self._lock:
                if not self._waiting or not self._free:
                    return
                part, buffer, opened = self._waiting.popleft(), self._free.pop(), self._opened
            assert opened is not None
            part.ticket.begin_part()
            transfer: Ticket | None = None
            try:
                extents, copies = opened.placed(part, buffer)
                transfer = self._queue.read(extents)
                self._queue.checksums.start(partial(self._finish, part, buffer, transfer, copies))
            except Exception as error:  # noqa: BLE001 - every ticket must end
                settle([] if transfer is None else [transfer])  # nothing is read into the buffer any more
                self._end(part, buffer, error)

    def _finish(self, part: _Part, buffer: memoryview, transfer: Ticket, copies: Sequence[_Copy]) -> None:
        """What a thread for checksums does for a part."""
        failure: Exception | None = None
        try:
            _wait(transfer)
            _copy(copies, part.memory)
            part.check()
        except Exception as error:  # noqa: BLE001 - raised by the ticket's `wait`
            failure = error
        self._end(part, buffer, failure)
        self._begin_waiting()

    def _end(self, part: _Part, buffer: memoryview, error: Exception | None) -> None:
        with self._lock:
            self._free.append(buffer)
        part.ticket.finish_part(error)


class _OpenFiles(Closing):
    """The files, open for direct I/O, and memory for what is read of them."""

    def __init__(self, files: Sequence[BaseFile], notice: Callable[[str], None], *, buffer_bytes: int) -> None:
        """Raises BadInput if a file is missing or has another size, IntegrityFailure if it cannot be read."""
        self._resources = ExitStack()
        self._fds: list[int] = []
        self._ends: list[tuple[int, bytes]] = []
        """For each file: where its whole pages end, and the bytes behind them, which direct I/O does not read."""
        with ExitStack() as opened:
            for path, num_bytes in files:
                fd = _open_again(path, num_bytes)
                opened.callback(os.close, fd)
                self._fds.append(fd)
                end = num_bytes // PAGE_BYTES * PAGE_BYTES
                self._ends.append((end, _end_of(fd, path, num_bytes - end, end)))
            pool, purpose = opened.enter_context(BufferPool(None)), "pages of the base model's files"
            leases = [pool.lease(buffer_bytes, purpose, crosses_link=False) for _ in range(NUM_STAGED)]
            self.buffers = tuple(opened.enter_context(lease).memory for lease in leases)
            """One for each part in flight."""
            use_direct_io(self._fds, [Path(each.path) for each in files], notice)
            self._resources = opened.pop_all()

    def close(self) -> None:
        """Close the files, and give the memory back. Idempotent."""
        self._resources.close()

    def placed(self, part: _Part, buffer: memoryview) -> tuple[list[Extent], list[_Copy]]:
        """What to read into the buffer for a part, and what to copy then."""
        extents, copies, position = [], [], 0
        for piece in part.pieces:
            start, stop = range_in_file(piece, part.start, part.start + len(part.memory))
            in_part = piece.start - piece.offset - part.start
            end, rest = self._ends[piece.file]
            if start < end:
                page = start // PAGE_BYTES * PAGE_BYTES
                pages = buffer[position : position + align_up(min(stop, end), PAGE_BYTES) - page]
                position += len(pages)
                extents.append(Extent(self._fds[piece.file], page, pages))
                copies.append(_Copy(in_part + start, pages[start - page : min(stop, end) - page]))
            if stop > end:
                begin = max(start, end)
                copies.append(_Copy(in_part + begin, memoryview(rest)[begin - end : stop - end]))
        return extents, copies


def _open_again(path: str, num_bytes: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"base_storage: {path} cannot be read: {error.strerror}", _PUT_BACK) from error
    found = os.fstat(fd).st_size
    if found != num_bytes:
        os.close(fd)
        raise BadInput(f"base_storage: {path} has {found} bytes, and had {num_bytes} when the run began", _PUT_BACK)
    return fd


def _end_of(fd: int, path: str, num_bytes: int, offset: int) -> bytes:
    """The bytes of a file that are no whole page."""
    try:
        return os.pread(fd, num_bytes, offset)
    except OSError as error:
        raise IntegrityFailure(f"base_storage: {path} cannot be read: {error.strerror}", "check the drive") from error


def _wait(transfer: Ticket) -> None:
    """Raises IntegrityFailure, with what that means for the run."""
    try:
        transfer.wait()
    except IntegrityFailure as failure:
        raise IntegrityFailure(f"base_storage: {failure.message}", failure.hint or _PUT_BACK) from failure


def _staged_bytes(pieces: Sequence[Piece]) -> int:
    """The most that a part of a block takes of a buffer: its bytes, and of each piece the pages in which it begins and
    ends."""
    starts = [piece.start for piece in pieces]
    ends = [piece.start + piece.num_bytes for piece in pieces]
    most = max(bisect_left(starts, end + PART_BYTES) - index for index, end in enumerate(ends)) if pieces else 0
    return align_up(min(PART_BYTES, max(ends, default=0)), PAGE_BYTES) + 2 * PAGE_BYTES * most


def _copy(copies: Sequence[_Copy], memory: memoryview) -> None:
    """Put what has arrived in its places, and zeros between them. Without the GIL where it is much."""
    target, position = np.frombuffer(memory, np.uint8), 0
    for start, source in copies:
        target[position:start] = 0
        position = start + len(source)
        target[start:position] = np.frombuffer(source, np.uint8)
    target[position:] = 0
