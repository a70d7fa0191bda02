"""Where every byte of a store lies: file headers, slots, records, fields, and the entries of the checksum table.

All of it is arithmetic on the `Geometry`, which is fixed when the store is made and written in every manifest.
docs/store-format.md describes the same to the byte.

The master weight (P32), m and v (OS32) are fp32 in every layout. For bfloat16 compute the master is split into its
upper and lower half: the upper half is the weight that the device computes with (P16), so no separate copy of it
exists. Rounding loses one bit, which the sign of v carries.

Invariants: fields lie one after another without gaps, and a block has a multiple of `BLOCK_ALIGNMENT` elements, so that
every field of every record begins on a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from ratel_cli.io.striping import StripeMap
from ratel_cli.sizes import BLOCK_ALIGNMENT, CHECKSUM_BYTES, CHUNK_ELEMENTS, PAGE_BYTES, STRIPE_BYTES, DtypeName
from ratel_cli.units import align_up

NUM_MANIFESTS: Final = 2
IDENTIFICATION_OFFSET: Final = NUM_MANIFESTS * PAGE_BYTES
HEADER_BYTES: Final = IDENTIFICATION_OFFSET + PAGE_BYTES
"""Size of each data file's header: two pages for manifests, one that identifies the file (headers.py)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a record, with one value for each parameter of the block."""

    name: str
    bytes_per_element: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """The fields of a record for one compute dtype, in the order in which they are stored."""

    dtype: DtypeName
    fields: tuple[Field, ...]

    @property
    def compute_field(self) -> Field:
        """The weights in the precision that the device computes with."""
        return self.fields[0]

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """All fields but the compute weights: what only the update reads."""
        return self.fields[1:]

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of all fields together, for one parameter."""
        return sum(field.bytes_per_element for field in self.fields)

    def field(self, name: str) -> Field:
        """The field of this name. An unknown name is a bug (ValueError)."""
        return self.fields[self.index(name)]

    def index(self, name: str) -> int:
        """The position of the field of this name in the record, from 0. An unknown name is a bug (ValueError)."""
        return [field.name for field in self.fields].index(name)

    def record_bytes(self, num_elements: int) -> int:
        """Size of the record of a block with `num_elements` elements."""
        assert num_elements % BLOCK_ALIGNMENT == 0, num_elements
        return num_elements * self.bytes_per_parameter


def record_layout(dtype: DtypeName) -> RecordLayout:
    """The record of a compute dtype: 12 bytes per parameter for bfloat16 and float32, 14 for float16."""
    match dtype:
        case "bfloat16":
            weights: tuple[Field, ...] = (Field("hi16", 2), Field("lo16", 2))
        case "float32":
            weights = (Field("w32", 4),)
        case "float16":
            weights = (Field("w16", 2), Field("w32", 4))
    return RecordLayout(dtype=dtype, fields=(*weights, Field("m32", 4), Field("v32", 4)))


class RecordMap:
    """Logical addresses of all elements: slot after slot, block after block, field after field."""

    def __init__(self, layout: RecordLayout, block_elements: Sequence[int], *, table_bytes: int = 0) -> None:
        """`table_bytes` follow the records of each slot, for their checksums."""
        self.layout = layout
        self.block_elements = tuple(block_elements)
        self._table_bytes = table_bytes
        self._block_offsets = tuple(accumulate((layout.record_bytes(n) for n in self.block_elements), initial=0))
        sizes = [field.bytes_per_element for field in layout.fields]
        before = accumulate(sizes[:-1], initial=0)
        self._fields = {
            field.name: (each, field.bytes_per_element) for field, each in zip(layout.fields, before, strict=True)
        }
        """By field: bytes per element of the fields before it in a record, and its own."""

    @property
    def records_bytes(self) -> int:
        """Size of all records of one generation."""
        return self._block_offsets[-1]

    @property
    def slot_bytes(self) -> int:
        """Size of one slot: every record once, and the checksum table."""
        return self.records_bytes + self._table_bytes

    def table_address(self, slot: int) -> int:
        """Logical address of the slot's checksum table."""
        return slot * self.slot_bytes + self.records_bytes

    def address(self, slot: int, block: int, field: str, start: int) -> int:
        """Logical address of element `start` of a field."""
        num_elements = self.block_elements[block]
        assert 0 <= start <= num_elements and start % BLOCK_ALIGNMENT == 0, start
        bytes_before, size = self._fields[field]
        return slot * self.slot_bytes + self._block_offsets[block] + num_elements * bytes_before + start * size

    def field_bytes(self, field: str, num_elements: int) -> int:
        """Size of `num_elements` elements of a field."""
        return num_elements * self._fields[field][1]


class ChunkMap:
    """Entries of the checksum table: the step, then one entry per chunk, ordered by block, field and chunk.

    A chunk is `chunk_elements` consecutive elements of one field of one block. The last chunk of a field is shorter if
    the field does not divide evenly. Entry 0 has the step that wrote the slot.
    """

    def __init__(self, layout: RecordLayout, block_elements: Sequence[int], chunk_elements: int) -> None:
        assert chunk_elements > 0 and chunk_elements % BLOCK_ALIGNMENT == 0, chunk_elements
        self.layout = layout
        self.block_elements = tuple(block_elements)
        self.chunk_elements = chunk_elements
        self._chunks_per_field = tuple(-(-num_elements // chunk_elements) for num_elements in self.block_elements)
        self._first_entries = tuple(
            accumulate((len(layout.fields) * number for number in self._chunks_per_field), initial=1)
        )

    @property
    def num_entries(self) -> int:
        """Entries of the table, the step's included."""
        return self._first_entries[-1]

    @property
    def table_bytes(self) -> int:
        """Space of the table in its slot: whole pages."""
        return align_up(CHECKSUM_BYTES * self.num_entries, PAGE_BYTES)

    def parts(self, block: int, field: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Each chunk in elements [start, stop) of a field as (entry, first element, end). Only whole chunks."""
        size, num_elements = self.chunk_elements, self.block_elements[block]
        assert start % size == 0 and (stop % size == 0 or stop == num_elements), (block, field, start, stop)
        first = self._first_entries[block] + self.layout.index(field) * self._chunks_per_field[block]
        for chunk in range(start // size, -(-stop // size)):
            yield first + chunk, chunk * size, min((chunk + 1) * size, stop)

    def first_entries(self, block: int) -> Iterator[tuple[str, int]]:
        """For each field of a block: its name, and the entry of its first chunk. Those of the next chunks follow."""
        for index, field in enumerate(self.layout.fields):
            yield field.name, self._first_entries[block] + index * self._chunks_per_field[block]

    def ranges(self) -> Iterator[tuple[int, str, int, int]]:
        """Every chunk of a generation as (block, field, first element, end), in the order of the table."""
        for block, num_elements in enumerate(self.block_elements):
            for field in self.layout.fields:
                edges = [*range(0, num_elements, self.chunk_elements), num_elements]
                for start, stop in pairwise(edges):
                    yield block, field.name, start, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of a store."""

    dtype: DtypeName
    block_elements: tuple[int, ...]
    num_slots: int
    weights: tuple[int, ...]
    """Each data file's share of the stripes (io/striping.py)."""
    stripe_bytes: int = STRIPE_BYTES
    chunk_elements: int = CHUNK_ELEMENTS
    """Elements of a field that share a checksum. 0: the store has no checksums."""

    def __post_init__(self) -> None:
        assert self.num_slots > 0
        assert self.stripe_bytes > 0
        assert self.stripe_bytes % PAGE_BYTES == 0

    @property
    def in_place(self) -> bool:
        """True if the store has one slot, which steps overwrite."""
        return self.num_slots == 1

    def records(self) -> RecordMap:
        """Logical addresses of all elements."""
        chunks = self.chunks()
        return RecordMap(
            record_layout(self.dtype), self.block_elements, table_bytes=chunks.table_bytes if chunks is not None else 0
        )

    def chunks(self) -> ChunkMap | None:
        """Entries of the checksum table. None: the store has no checksums."""
        if not self.chunk_elements:
            return None
        return ChunkMap(record_layout(self.dtype), self.block_elements, self.chunk_elements)

    def stripes(self) -> StripeMap:
        """From logical addresses to bytes of the data files."""
        return StripeMap(weights=self.weights, stripe_bytes=self.stripe_bytes, header_bytes=HEADER_BYTES)

    def file_bytes(self) -> tuple[int, ...]:
        """Size of each data file."""
        return self.stripes().file_bytes(self.num_slots * self.records().slot_bytes)
