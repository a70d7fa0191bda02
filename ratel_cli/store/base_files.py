"""The base model's own files, where a store leaves frozen blocks: which bytes are a block's, and how they are read.

Of such a block the store has its checksums and a list of its pieces. A piece is a range of a file that is a range of
the block's array; what no piece has is zero. Files have their tensors anywhere, and direct I/O moves whole pages. So
pieces are read with the pages around them into buffers of this module, and copied from there, part by part, on the
threads for checksums. One that has copied a part begins the next one that waits: a reader takes a fixed amount of
memory (`staging_bytes`), however much it is asked for at once.

docs/store-format.md describes the list to the byte.

Invariants: the files are never written; a file that has become another one is noticed before its bytes are used, by its
size when it is opened, by the checksums of the region when it is read.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, Self

import numpy as np

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.checksum_workers import parts_of
from ratel_cli.io.files import use_direct_io
from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.tickets import Ticket, settle
from ratel_cli.json_fields import JsonFields, checked_integer, checked_list, checked_text
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import align_up

PART_BYTES: Final = 4 << 20
"""What is read and copied as one: as the queue's requests, so that every drive is at its full speed."""
_NUM_STAGED: Final = 8
"""Parts in flight: more than keep a drive busy while others are copied."""
_AROUND_BYTES: Final = 64 << 10
"""The pages around eight pieces: of what layers have, more are rarely in a part."""
_MAGIC: Final = b"RATELBAS"
_HEAD: Final = struct.Struct("<8sQ")
_CRC: Final = struct.Struct("<I")
_HINT: Final = "restore a snapshot with `ratel restore CONFIG`, or start over with --resume no"
_PUT_BACK: Final = "put the file back as it was, or start over with --resume no"


def staging_bytes(largest_bytes: int) -> int:
    """The memory that a reader takes, of whose blocks the largest one has `largest_bytes` in files."""
    return _NUM_STAGED * min(PART_BYTES + _AROUND_BYTES, largest_bytes)


class Piece(NamedTuple):
    """A range of a file that is a range of a block's array. In bytes."""

    start: int
    """In the block's array."""
    num_bytes: int
    file: int
    """Its number in the list."""
    offset: int
    """In the file."""


class BaseFile(NamedTuple):
    """A file, and the size that it must have."""

    path: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class BaseFiles:
    """The list: the files, and by block the pieces of its array, in their order."""

    files: tuple[BaseFile, ...]
    pieces: Mapping[int, tuple[Piece, ...]]

    def read_bytes(self, block: int, num_bytes: int) -> int:
        """What is read of the files for the whole array of a block, which has `num_bytes`."""
        found = 0
        for first, last in parts_of(num_bytes, most_bytes=PART_BYTES):
            for piece in _overlapping(self.pieces.get(block, ()), first, last):
                start, stop = _range_in_file(piece, first, last)
                whole_pages = self.files[piece.file].num_bytes // PAGE_BYTES * PAGE_BYTES
                found += max(0, align_up(min(stop, whole_pages), PAGE_BYTES) - start // PAGE_BYTES * PAGE_BYTES)
        return found

    @cached_property
    def content(self) -> bytes:
        """The list as a store has it, whole pages: magic 8 | length 8 | JSON | CRC-32 of all before it | zeros."""
        rows = [[block, *piece] for block, of_block in self.pieces.items() for piece in of_block]
        text = json.dumps({"files": self.files, "pieces": rows}, separators=(",", ":")).encode()
        body = _HEAD.pack(_MAGIC, len(text)) + text
        body += _CRC.pack(zlib.crc32(body))
        return body.ljust(align_up(len(body), PAGE_BYTES), b"\0")

    @classmethod
    def from_content(cls, content: bytes) -> Self:
        """The list that a store has. Raises IntegrityFailure if it is damaged."""
        try:
            magic, num_bytes = _HEAD.unpack_from(content)
            end = _HEAD.size + num_bytes
            if magic != _MAGIC or _CRC.unpack_from(content, end)[0] != zlib.crc32(content[:end]):
                raise ValueError("its own checksum differs")
            fields = JsonFields(json.loads(content[_HEAD.size : end]))
            files = [checked_list(row, "files") for row in fields.items("files")]
            pieces: dict[int, list[Piece]] = {}
            for row in fields.items("pieces"):
                block, *numbers = (checked_integer(each, "pieces") for each in checked_list(row, "pieces"))
                pieces.setdefault(block, []).append(Piece(*numbers))
            return cls(
                files=tuple(
                    BaseFile(checked_text(path, "path"), checked_integer(size, "size")) for path, size in files
                ),
                pieces={block: tuple(of_block) for block, of_block in pieces.items()},
            )
        except (ValueError, TypeError, struct.error) as error:
            raise IntegrityFailure(f"the store's list of the base model's files is damaged: {error}", _HINT) from error


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
                of_part = _overlapping(pieces, start + first, start + last)
                check_part = partial(check, first, last)
                self._waiting.append(_Part(ticket, of_part, start + first, memory[first:last], check_part))
            self._in_flight = [each for each in (*self._in_flight, ticket) if not each.done]
        self._begin_waiting()
        return ticket

    def changed(self, block: int, found: IntegrityFailure) -> IntegrityFailure:
        """The error for a block whose checksums the files do not give any more, which are what was `found`."""
        listed = self.files
        numbers = sorted({piece.file for piece in listed.pieces.get(block, ())})
        names = " or ".join(listed.files[number].path for number in numbers) or "a file"
        return IntegrityFailure(f"base_storage: {names} has changed since the run began: {found.message}", _PUT_BACK)

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
        opened = _OpenFiles(self._loaded.files, self._notice)
        largest_bytes = max(map(_staged_bytes, self._loaded.pieces.values()), default=0)
        self._free = [opened.lease(largest_bytes) for _ in range(_NUM_STAGED)]
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
            try:
                extents, copies = opened.placed(part, buffer)
                transfer = self._queue.read(extents)
                self._queue.checksums.start(partial(self._finish, part, buffer, transfer, copies))
            except Exception as error:  # noqa: BLE001 - every ticket must end
                self._end(part, buffer, error)

    def _finish(self, part: _Part, buffer: memoryview, transfer: Ticket, copies: Sequence[_Copy]) -> None:
        """What a thread for checksums does for a part."""
        failure: Exception | None = None
        try:
            transfer.wait()
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

    def __init__(self, files: Sequence[BaseFile], notice: Callable[[str], None]) -> None:
        """Raises BadInput if a file is missing or has another size."""
        self._resources = ExitStack()
        self._fds: list[int] = []
        self._ends: list[tuple[int, bytes]] = []
        """Of each file, where its whole pages end, and the bytes behind them, which direct I/O does not read."""
        with ExitStack() as opened:
            self._pool = opened.enter_context(BufferPool(None))
            for path, num_bytes in files:
                fd = _open_again(path, num_bytes)
                opened.callback(os.close, fd)
                self._fds.append(fd)
                end = num_bytes // PAGE_BYTES * PAGE_BYTES
                self._ends.append((end, os.pread(fd, num_bytes - end, end)))
            use_direct_io(self._fds, [Path(each.path) for each in files], notice)
            self._resources = opened.pop_all()

    def close(self) -> None:
        """Close the files, and give the memory back. Idempotent."""
        self._resources.close()

    def lease(self, num_bytes: int) -> memoryview:
        """Memory until `close`."""
        lease = self._pool.lease(num_bytes, "pages of the base model's files", crosses_link=False)
        self._resources.callback(lease.release)
        return lease.memory

    def placed(self, part: _Part, buffer: memoryview) -> tuple[list[Extent], list[_Copy]]:
        """What to read into the buffer for a part, and what to copy then."""
        extents, copies, position = [], [], 0
        for piece in part.pieces:
            start, stop = _range_in_file(piece, part.start, part.start + len(part.memory))
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


def _overlapping(pieces: Sequence[Piece], start: int, stop: int) -> Sequence[Piece]:
    """The pieces with bytes in [start, stop) of the array."""
    first = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    if first < len(pieces) and pieces[first].start + pieces[first].num_bytes <= start:
        first += 1
    return pieces[first : bisect_left(pieces, stop, lo=first, key=lambda piece: piece.start)]


def _range_in_file(piece: Piece, first: int, last: int) -> tuple[int, int]:
    """Where the bytes [first, last) of the array, as far as the piece has them, begin and end in its file."""
    before = piece.offset - piece.start
    return before + max(piece.start, first), before + min(piece.start + piece.num_bytes, last)


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
