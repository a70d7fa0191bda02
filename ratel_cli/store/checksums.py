"""Checksums: of the store's chunks, with their places in a generation's table; and of what goes to scratch and returns.

A chunk is `chunk_elements` consecutive elements of one field of one block (1 MiB of fp32), the last one of
a field what is left. `generation` checks what is read against the table of the generation that it is read from;
`store` fills the table of the shadow as it is written, and writes it behind the slot's records. The manifest has the
table's own checksum, its root, so that a table counts only if a commit spoke of it.

A table is the step that wrote the slot, then one XXH3-64 a chunk, little-endian, zeros to the end of the page. Each
is seeded with store, step, block, field and chunk: bytes of another place, step or store do not pass for these, not
even if the table that vouches for them was moved along with them. The library hashes at 25 GB/s from main memory and
at 90 to 120 GB/s from the caches (2-core virtual machine, AVX-512, 2026-11), without the GIL; where AdamW has the
bytes in the caches, its kernel computes the same numbers (engine/optimizer/adamw.py).

Invariant: a chunk passes only if it has the bytes that were sealed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from struct import Struct
from typing import Final, Self

import xxhash

from ratel_cli.errors import IntegrityFailure
from ratel_cli.sizes import BLOCK_ALIGNMENT, CHECKSUM_BYTES, PAGE_BYTES
from ratel_cli.store.layout import RecordLayout
from ratel_cli.units import align_up

assert sys.byteorder == "little", "tables are stored as they lie in memory"
_SEED: Final = Struct("<16sQIII")
_HINT: Final = "go back to a kept generation with --resume STEP, or bring a snapshot back with `ratel restore`"


class ChunkMap:
    """Places in the table: blocks in order, fields in order, chunks in order. Place 0 has the step."""

    def __init__(self, layout: RecordLayout, block_elements: Sequence[int], chunk_elements: int) -> None:
        assert chunk_elements > 0 and chunk_elements % BLOCK_ALIGNMENT == 0, chunk_elements
        self.layout = layout
        self.block_elements = tuple(block_elements)
        self.chunk_elements = chunk_elements
        self._field_index = {field.name: index for index, field in enumerate(layout.fields)}
        self._chunks_of = tuple(-(-num_elements // chunk_elements) for num_elements in self.block_elements)
        self._firsts = tuple(accumulate((len(layout.fields) * number for number in self._chunks_of), initial=1))

    @property
    def num_places(self) -> int:
        return self._firsts[-1]

    @property
    def table_bytes(self) -> int:
        """What a table takes in its slot: whole pages."""
        return align_up(CHECKSUM_BYTES * self.num_places, PAGE_BYTES)

    def parts(self, block: int, field: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(place, first element, last) of the chunks that are [start, stop), which must be whole ones."""
        size, num_elements = self.chunk_elements, self.block_elements[block]
        assert start % size == 0 and (stop % size == 0 or stop == num_elements), (block, field, start, stop)
        first = self._firsts[block] + self._field_index[field] * self._chunks_of[block]
        for chunk in range(start // size, -(-stop // size)):
            yield first + chunk, chunk * size, min((chunk + 1) * size, stop)

    def columns(self, block: int, start: int, stop: int) -> Iterator[tuple[int, str, int, int]]:
        """(place, field, first element, last) of every field of every chunk in [start, stop), chunk by chunk."""
        fields = [list(self.parts(block, field.name, start, stop)) for field in self.layout.fields]
        for chunk in zip(*fields, strict=True):
            for field, (place, first, last) in zip(self.layout.fields, chunk, strict=True):
                yield place, field.name, first, last

    def seed(self, store_id: bytes, step: int, block: int, field: str, start: int) -> int:
        """What the checksum of the chunk that begins at `start` is seeded with."""
        chunk = start // self.chunk_elements
        return xxhash.xxh3_64_intdigest(_SEED.pack(store_id, step, block, self._field_index[field], chunk))

    def ranges(self) -> Iterator[tuple[int, str, int, int]]:
        """(block, field, start, stop) of every chunk there is."""
        for block, num_elements in enumerate(self.block_elements):
            for field in self.layout.fields:
                edges = [*range(0, num_elements, self.chunk_elements), num_elements]
                for start, stop in pairwise(edges):
                    yield block, field.name, start, stop


class ChunkTable:
    """The checksums of one generation. Different chunks may be sealed and checked from different threads."""

    def __init__(self, chunks: ChunkMap, store_id: bytes, step: int) -> None:
        """Of a generation that is being written by `step`: nothing is sealed yet."""
        self._chunks = chunks
        self._store_id = store_id
        self._step = step
        self._digests = array("Q", [step]) + array("Q", [0]) * (chunks.num_places - 1)
        self._is_sealed = bytearray([1]) + bytearray(chunks.num_places - 1)

    @classmethod
    def from_bytes(cls, chunks: ChunkMap, store_id: bytes, content: memoryview, root: str) -> Self:
        """The table as it was stored. Raises IntegrityFailure if it is not the one of that root."""
        found = _root(content)
        if found != root:
            raise IntegrityFailure(f"the table of checksums is damaged: its checksum is {found}, not {root}", _HINT)
        digests = array("Q", bytes(content[: CHECKSUM_BYTES * chunks.num_places]))
        table = cls(chunks, store_id, digests[0])
        table._digests = digests
        table._is_sealed = bytearray([1]) * chunks.num_places
        return table

    @property
    def is_complete(self) -> bool:
        """Whether every chunk of the generation is sealed."""
        return all(self._is_sealed)

    def seal(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
        """These are the bytes of elements [start, stop)."""
        for place, first, _, part in self._parts(block, field, start, stop, memory):
            self._digests[place] = self._digest(block, field, first, part)
            self._is_sealed[place] = 1

    def seal_zeros(self) -> None:
        """What was not sealed is zero: a store is made so."""
        zeros = memoryview(bytes(4 * self._chunks.chunk_elements))
        for block, field, start, stop in self._chunks.ranges():
            [(place, _, _)] = self._chunks.parts(block, field, start, stop)
            if not self._is_sealed[place]:
                num_bytes = (stop - start) * self._chunks.layout.field(field).bytes_per_element
                self.seal(block, field, start, stop, zeros[:num_bytes])

    def check(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> None:
        """Raise IntegrityFailure unless these are the bytes that were sealed."""
        for place, first, last, part in self._parts(block, field, start, stop, memory):
            self._compare(place, self._digest(block, field, first, part), f"block {block}, {field}", first, last)

    def seeds(self, block: int, start: int, stop: int, fields: Collection[str]) -> list[int | None]:
        """For whoever takes checksums itself, as `columns` has the chunks; `take` and `compare` want the digests so.

        None for other fields than these.
        """
        return [
            self._chunks.seed(self._store_id, self._step, block, field, first) if field in fields else None
            for _, field, first, _ in self._chunks.columns(block, start, stop)
        ]

    def take(self, block: int, start: int, stop: int, digests: Sequence[int | None]) -> None:
        """Like `seal`, of all fields."""
        columns = self._chunks.columns(block, start, stop)
        for (place, _, _, _), digest in zip(columns, digests, strict=True):
            assert digest is not None
            self._digests[place] = digest
            self._is_sealed[place] = 1

    def compare(self, block: int, start: int, stop: int, digests: Sequence[int | None]) -> None:
        """Like `check`, of those that were taken."""
        columns = self._chunks.columns(block, start, stop)
        for (place, field, first, last), digest in zip(columns, digests, strict=True):
            if digest is not None:
                self._compare(place, digest, f"block {block}, {field}", first, last)

    def store_into(self, memory: memoryview) -> str:
        """Fill `memory` (`table_bytes`) with the table as it is stored. Returns its root."""
        memory[:] = self._digests.tobytes().ljust(len(memory), b"\0")
        return _root(memory)

    def _parts(
        self, block: int, field: str, start: int, stop: int, memory: memoryview
    ) -> Iterator[tuple[int, int, int, memoryview]]:
        size = self._chunks.layout.field(field).bytes_per_element
        for place, first, last in self._chunks.parts(block, field, start, stop):
            yield place, first, last, memory[(first - start) * size : (last - start) * size]

    def _compare(self, place: int, digest: int, what: str, first: int, last: int) -> None:
        assert self._is_sealed[place], "a chunk is read before it was written"
        if digest != self._digests[place]:
            raise IntegrityFailure(
                f"{what}: elements {first} to {last} are not what step {self._step} wrote "
                "(a flipped bit, or a chunk of another place or time)",
                _HINT,
            )

    def _digest(self, block: int, field: str, first: int, part: memoryview) -> int:
        return xxhash.xxh3_64_intdigest(part, seed=self._chunks.seed(self._store_id, self._step, block, field, first))


class Seal:
    """The checksum of bytes that go to a drive and come back in the same run."""

    def __init__(self, memory: memoryview) -> None:
        self._digest = xxhash.xxh3_64_intdigest(memory)

    def check(self, memory: memoryview, what: str) -> None:
        """Raise IntegrityFailure unless the bytes are the same; `what` they are is for the message."""
        if xxhash.xxh3_64_intdigest(memory) != self._digest:
            raise IntegrityFailure(f"{what}: what was read is not what was written", "check the drive, then resume")


def _root(content: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)
