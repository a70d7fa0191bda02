"""The base model's own files, where a store leaves frozen blocks: which bytes are a block's.

Of such a block the store has its checksums and a list of its pieces. A piece is a range of a file that is a range of
the block's array; what no piece has is zero. base_reader.py reads them. docs/store-format.md describes the list to the
byte.
"""

from __future__ import annotations

import json
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, Self

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.checksum_workers import parts_of
from ratel_cli.json_fields import JsonFields, checked_integer, checked_list, checked_text
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import align_up

PART_BYTES: Final = 3 << 20
"""What is read and copied as one: with the pages around it one request of the queue, and whole chunks in any dtype."""
NUM_STAGED: Final = 8
"""Parts in flight: more than keep a drive busy while others are copied."""
_AROUND_BYTES: Final = 64 << 10
"""The pages around eight pieces, which a part may have however large pieces are."""
_MAGIC: Final = b"RATELBAS"
_HEAD: Final = struct.Struct("<8sQ")
_CRC: Final = struct.Struct("<I")
_HINT: Final = "restore a snapshot with `ratel restore CONFIG`, or start over with --resume no"


def staging_bytes(file_bytes: int, block_bytes: int) -> int:
    """The memory that a reader takes for a block of this size, of which it reads `file_bytes`: a part of it with the
    pages around its pieces, of which small ones have many."""
    around_bytes = PART_BYTES * 2 * max(0, file_bytes - block_bytes) // max(1, block_bytes)
    return NUM_STAGED * min(PART_BYTES + _AROUND_BYTES + around_bytes, file_bytes)


def list_bytes_of(base_files: BaseFiles | None) -> int:
    """What the list takes in a store, in bytes: nothing where every block is in the store."""
    return 0 if base_files is None else len(base_files.content)


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
            for piece in overlapping(self.pieces.get(block, ()), first, last):
                start, stop = range_in_file(piece, first, last)
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


def overlapping(pieces: Sequence[Piece], start: int, stop: int) -> Sequence[Piece]:
    """The pieces with bytes in [start, stop) of the array."""
    first = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    if first < len(pieces) and pieces[first].start + pieces[first].num_bytes <= start:
        first += 1
    return pieces[first : bisect_left(pieces, stop, lo=first, key=lambda piece: piece.start)]


def range_in_file(piece: Piece, first: int, last: int) -> tuple[int, int]:
    """Where the bytes [first, last) of the array, as far as the piece has them, begin and end in its file."""
    before = piece.offset - piece.start
    return before + max(piece.start, first), before + min(piece.start + piece.num_bytes, last)
