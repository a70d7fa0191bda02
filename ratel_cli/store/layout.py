"""Where every byte of a store lies: file headers, the frozen region, slots, records, fields, and checksum tables.

All of it is arithmetic on the `Geometry`, which is fixed when the store is made and written in every manifest.
docs/store-format.md describes the same to the byte.

The store knows nothing of update rules: a block comes with its record, a list of fields, and the manifest repeats it.
`ratel_cli/schedule/rules.py` says what a rule keeps for a parameter.

Two kinds of regions have the same shape, records and then their checksum table: a slot holds one generation of the
blocks that are trained, and the frozen region, which lies before all slots, holds the blocks that never change. It is
written once, and shared by all generations. Of a block that stays in the base model's files (base_files.py) it has the
checksums alone; a list of these files is its end.

Invariants: fields lie one after another and begin on a page; a chunk of any field is whole pages, except at the end of
a block. A field with a fixed number of values is one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

from ratel_cli.io.striping import StripeMap
from ratel_cli.sizes import (
    BLOCK_ALIGNMENT,
    CHECKSUM_BYTES,
    CHUNK_ELEMENTS,
    PAGE_BYTES,
    STRIPE_BYTES,
    VALUE_BYTES,
    ValueType,
)
from ratel_cli.units import align_up

NUM_MANIFESTS: Final = 2
IDENTIFICATION_OFFSET: Final = NUM_MANIFESTS * PAGE_BYTES
HEADER_BYTES: Final = IDENTIFICATION_OFFSET + PAGE_BYTES
"""Size of each data file's header: two pages for manifests, one that identifies the file (headers.py)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a record: a value for each element of the block, or for each `per` consecutive elements.

    A value for several elements belongs to those that follow one another from a multiple of `per` on. Or the block has
    a fixed number of values, such as one for each column of a matrix: these are read and written with its first
    element, all at once.
    """

    name: str
    dtype: ValueType
    per: int = 1
    fixed: int | None = None
    """Values of a block, however many elements it has; None: they follow from the elements."""

    @property
    def page_elements(self) -> int:
        """Elements whose values are a page; 1 where values do not follow from elements."""
        return self.per * PAGE_BYTES // VALUE_BYTES[self.dtype] if self.fixed is None else 1

    def num_values(self, num_elements: int, start: int = 0) -> int:
        """Values of `num_elements` elements from `start` on, which matters where their number is fixed."""
        if self.fixed is not None:
            return self.fixed if num_elements > 0 and start == 0 else 0
        return -(-num_elements // self.per)

    def num_bytes(self, num_elements: int, start: int = 0) -> int:
        """Size of the values of `num_elements` elements from `start` on, up to the end of a page."""
        return align_up(self.num_values(num_elements, start) * VALUE_BYTES[self.dtype], PAGE_BYTES)

    def offset(self, start: int) -> int:
        """Bytes before the value of element `start`, the first of a page."""
        assert start % self.page_elements == 0, start
        return self.num_bytes(start) if self.fixed is not None else start // self.per * VALUE_BYTES[self.dtype]

    def part(self, memory: memoryview, start: int, stop: int) -> memoryview:
        """Return the part of the field's memory for elements [start, stop), with the rest of the last page. `start` is
        the first element of a page."""
        return memory[self.offset(start) :][: self.num_bytes(stop - start, start)]

    def ranges(self, num_elements: int, size: int) -> Iterator[tuple[int, int]]:
        """Elements [0, num_elements) in ranges of `size`, the last of which may be shorter; in one where the number of
        values is fixed."""
        return pairwise([*range(0, num_elements, size if self.fixed is None else max(1, num_elements)), num_elements])


@dataclass(frozen=True, slots=True)
class Record:
    """The fields that a block has in the store, in their order. The first one has the compute weights (P16)."""

    fields: tuple[Field, ...]

    @property
    def compute_field(self) -> Field:
        """The weights in the precision that the device computes with."""
        return self.fields[0]

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """All fields but the compute weights: what only the update reads."""
        return self.fields[1:]

    def field(self, name: str) -> Field:
        """The field of this name. An unknown name is a bug (ValueError)."""
        return self.fields[self.index(name)]

    def index(self, name: str) -> int:
        """The position of the field of this name in the record, from 0. An unknown name is a bug (ValueError)."""
        return [field.name for field in self.fields].index(name)

    @property
    def page_elements(self) -> int:
        """The fewest elements that are whole pages in every field."""
        return math.lcm(*(field.page_elements for field in self.fields))

    def num_bytes(self, num_elements: int) -> int:
        """Size of the record of a block with `num_elements` elements."""
        return sum(field.num_bytes(num_elements) for field in self.fields)

    def state_bytes(self, num_elements: int) -> int:
        """Size of the state fields of `num_elements` elements."""
        return sum(field.num_bytes(num_elements) for field in self.state_fields)

    def addresses(self, num_elements: int) -> Iterator[tuple[Field, int]]:
        """Each field, and where it begins in the record of a block with `num_elements` elements."""
        sizes = (field.num_bytes(num_elements) for field in self.fields)
        return zip(self.fields, accumulate(sizes, initial=0), strict=False)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block as the store sees it."""

    num_elements: int
    """Length of its flat array, gaps between parameters included."""
    record: Record
    is_frozen: bool = False
    """True if the block never changes: it lies in the frozen region, not in the slots."""
    is_in_files: bool = False
    """True if its record lies in the base model's files instead. Only of frozen blocks."""

    @property
    def num_bytes(self) -> int:
        """Size of the block's record."""
        return self.record.num_bytes(self.num_elements)


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Which part of every block lies in one rank's store. One rank alone has all of it."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    def range_of(self, num_elements: int, *, unit: int = BLOCK_ALIGNMENT) -> tuple[int, int]:
        """The elements [start, stop) of a block that are this rank's.

        The ranks' ranges follow each other and make up the block. They are cut at multiples of `unit` elements, the
        least that the block's rule updates as one, and differ by one unit at most.
        """
        assert unit > 0 and unit % BLOCK_ALIGNMENT == 0, unit
        num_units = -(-num_elements // unit)
        start, stop = (num_units * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return min(start, num_elements), min(stop, num_elements)


WHOLE = RankSlice()
"""What one rank alone has."""


class RecordMap:
    """Addresses in a region: block after block, field after field. A block that lies elsewhere takes no space."""

    def __init__(self, blocks: Sequence[StoredBlock], *, is_frozen: bool) -> None:
        lie_here = (block.is_frozen is is_frozen and not block.is_in_files for block in blocks)
        sizes = [block.num_bytes if lies_here else 0 for block, lies_here in zip(blocks, lie_here, strict=True)]
        offsets = accumulate(sizes, initial=0)
        self._fields = [
            {field.name: (field, offset + inside) for field, inside in block.record.addresses(block.num_elements)}
            for block, offset in zip(blocks, offsets, strict=False)
        ]
        """By block and name: the field, and where it begins."""
        self.num_elements = [block.num_elements for block in blocks]
        """By block: the elements that it has."""
        self.in_files = frozenset(index for index, block in enumerate(blocks) if block.is_in_files)
        """The blocks whose records lie in the base model's files."""
        self.num_bytes = sum(sizes)
        """Size of all records of the region."""

    def address(self, block: int, field: str, start: int) -> int:
        """Where element `start` of a field lies in the region."""
        found, offset = self._fields[block][field]
        assert block not in self.in_files, block
        assert 0 <= start <= self.num_elements[block], start
        return offset + (found.offset(start) if start < self.num_elements[block] else found.num_bytes(start))

    def field_bytes(self, block: int, field: str, num_elements: int, start: int = 0) -> int:
        """Size of `num_elements` elements of a field from `start` on."""
        return self._fields[block][field][0].num_bytes(num_elements, start)


class ChunkMap:
    """Entries of a region's checksum table: the step, then one entry per chunk, ordered by block, field and chunk.

    A chunk is `chunk_elements` consecutive elements of one field of one block. The last chunk of a field is shorter if
    the field does not divide evenly. A field with a fixed number of values is one chunk. Entry 0 has the step that
    wrote the region. Blocks that lie elsewhere have no entries.
    """

    def __init__(self, blocks: Sequence[StoredBlock], chunk_elements: int, *, is_frozen: bool) -> None:
        self.blocks = tuple(blocks)
        self.chunk_elements = chunk_elements
        self._num_elements = [block.num_elements if block.is_frozen is is_frozen else 0 for block in blocks]
        self.first_entries: list[dict[str, int]] = []
        """By block and name of the field: the entry of its first chunk. Those of the next chunks follow."""
        self.num_entries = 1
        """Entries of the table, the step's included."""
        for block, number in zip(blocks, self._num_elements, strict=True):
            self.first_entries.append({})
            for field in block.record.fields:
                self.first_entries[-1][field.name] = self.num_entries
                self.num_entries += -(-number // chunk_elements) if field.fixed is None else number > 0

    @property
    def table_bytes(self) -> int:
        """Space of the table in its region: whole pages."""
        return align_up(CHECKSUM_BYTES * self.num_entries, PAGE_BYTES)

    def parts(self, block: int, field: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Each chunk in elements [start, stop) of a field as (entry, first element, end). Only whole chunks."""
        size, num_elements = self.chunk_elements, self._num_elements[block]
        assert start % size == 0 and (stop % size == 0 or stop == num_elements), (block, field, start, stop)
        first = self.first_entries[block][field]
        if self.blocks[block].record.field(field).fixed is not None:
            yield from [(first, 0, num_elements)] if start == 0 < stop else []
            return
        for chunk in range(start // size, -(-stop // size)):
            yield first + chunk, chunk * size, min((chunk + 1) * size, stop)

    def ranges(self) -> Iterator[tuple[int, Field, int, int]]:
        """Every chunk of the region as (block, field, first element, end), in the order of the table."""
        for block, num_elements in enumerate(self._num_elements):
            for field in self.blocks[block].record.fields:
                for start, stop in field.ranges(num_elements, self.chunk_elements):
                    yield block, field, start, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The shape of the frozen region, or of a slot."""

    records: RecordMap
    chunks: ChunkMap | None
    """Which values share a checksum. None if the store has no checksums, or no frozen blocks."""
    list_bytes: int = 0
    """Size of the list of the base model's files, which follows the checksum table."""

    @property
    def list_address(self) -> int:
        """Where this list begins in the region."""
        return self.records.num_bytes + (0 if self.chunks is None else self.chunks.table_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the records, their checksum table, and the list."""
        return self.list_address + self.list_bytes


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of a store."""

    blocks: tuple[StoredBlock, ...]
    """What the store has of each block: this rank's slice of it."""
    num_slots: int
    shares: tuple[int, ...]
    """Each data file's share of the stripes (io/striping.py)."""
    stripe_bytes: int = STRIPE_BYTES
    chunk_elements: int = CHUNK_ELEMENTS
    """Elements of a field that share a checksum. 0: the store has no checksums."""
    rank_slice: RankSlice = RankSlice()
    list_bytes: int = 0
    """Size of the list of the base model's files (base_files.py), whole pages; 0: all blocks lie in the store."""

    def __post_init__(self) -> None:
        assert self.num_slots > 0 and self.list_bytes % PAGE_BYTES == 0
        assert all(block.is_frozen for block in self.blocks if block.is_in_files)
        assert self.stripe_bytes > 0
        assert self.stripe_bytes % PAGE_BYTES == 0
        assert all(
            field.num_bytes(self.chunk_elements) == self.chunk_elements // field.per * VALUE_BYTES[field.dtype]
            for block in self.blocks
            for field in block.record.fields
            if field.fixed is None
        ), "a chunk is whole pages in every field"

    @property
    def overwrites(self) -> bool:
        """True if the store has one slot, which steps overwrite."""
        return self.num_slots == 1

    @cached_property
    def frozen(self) -> Region:
        """The frozen region. It begins at logical address 0."""
        return self._region(is_frozen=True)

    @cached_property
    def slot(self) -> Region:
        """One slot. They follow the frozen region."""
        return self._region(is_frozen=False)

    def slot_address(self, number: int) -> int:
        """The logical address of a slot."""
        return self.frozen.num_bytes + number * self.slot.num_bytes

    def stripes(self) -> StripeMap:
        """From logical addresses to bytes of the data files."""
        return StripeMap(shares=self.shares, stripe_bytes=self.stripe_bytes, header_bytes=HEADER_BYTES)

    def file_bytes(self) -> tuple[int, ...]:
        """Size of each data file."""
        return self.stripes().file_bytes(self.slot_address(self.num_slots))

    @property
    def in_files_bytes(self) -> int:
        """What a generation has in the base model's files."""
        return sum(block.num_bytes for block in self.blocks if block.is_in_files)

    @property
    def made_bytes(self) -> int:
        """What making a store writes before its first generation: all files, and then what is frozen."""
        return sum(self.file_bytes()) + self.frozen.num_bytes

    def _region(self, *, is_frozen: bool) -> Region:
        records, chunks = RecordMap(self.blocks, is_frozen=is_frozen), None
        has_blocks = any(block.is_frozen and block.num_elements for block in self.blocks)
        if self.chunk_elements and (has_blocks or not is_frozen):
            chunks = ChunkMap(self.blocks, self.chunk_elements, is_frozen=is_frozen)
        return Region(records=records, chunks=chunks, list_bytes=self.list_bytes if is_frozen else 0)
