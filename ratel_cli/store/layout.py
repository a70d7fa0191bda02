"""What a block's record holds: its fields and where each one begins.

Used by `store` to place bytes, by `model.import_weights` and `model.export_weights` to encode and decode weights, and
by `engine` to know what to read for compute and what for the update.

The master weight, m and v are fp32 in every layout. For bfloat16 compute the master is split into
its upper and lower half: the upper is the weight that the device computes with, so no separate copy
of it exists. The one bit which rounding loses is carried by the sign of v (architecture.md, 4).

Invariant: fields lie one after another without gaps, and a block has a multiple of
`BLOCK_ALIGNMENT` elements, so that every field of every record begins on a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ratel_cli.sizes import BLOCK_ALIGNMENT, DtypeName


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
        """Everything else that the update reads and writes."""
        return self.fields[1:]

    @property
    def bytes_per_parameter(self) -> int:
        return sum(field.bytes_per_element for field in self.fields)

    def field(self, name: str) -> Field:
        """The field called `name`; an unknown name is a bug."""
        return self.fields[self._index(name)]

    def record_bytes(self, num_elements: int) -> int:
        """Size of the record of a block with `num_elements` elements."""
        assert num_elements % BLOCK_ALIGNMENT == 0, num_elements
        return num_elements * self.bytes_per_parameter

    def field_offset(self, name: str, num_elements: int) -> int:
        """Where the field begins, in bytes from the start of the record."""
        assert num_elements % BLOCK_ALIGNMENT == 0, num_elements
        return num_elements * sum(field.bytes_per_element for field in self.fields[: self._index(name)])

    def _index(self, name: str) -> int:
        return [field.name for field in self.fields].index(name)


class RecordMap:
    """Where each element of each block lies in the store's logical addresses: slot after slot, block after block."""

    def __init__(self, layout: RecordLayout, block_elements: Sequence[int], *, table_bytes: int = 0) -> None:
        """Behind a slot's records come the `table_bytes` of their checksums (checksums.py)."""
        self.layout = layout
        self.block_elements = tuple(block_elements)
        self._table_bytes = table_bytes
        self._block_offsets = tuple(accumulate((layout.record_bytes(n) for n in self.block_elements), initial=0))

    @property
    def records_bytes(self) -> int:
        """Size of all records."""
        return self._block_offsets[-1]

    @property
    def slot_bytes(self) -> int:
        """Size of one generation: every record once, and the table."""
        return self.records_bytes + self._table_bytes

    def table_address(self, slot: int) -> int:
        """Logical address of the table of checksums."""
        return slot * self.slot_bytes + self.records_bytes

    def address(self, slot: int, block: int, field: str, start: int) -> int:
        """Logical address of element `start` of a field."""
        num_elements = self.block_elements[block]
        assert 0 <= start <= num_elements and start % BLOCK_ALIGNMENT == 0, start
        inside = self.layout.field_offset(field, num_elements) + start * self.layout.field(field).bytes_per_element
        return slot * self.slot_bytes + self._block_offsets[block] + inside


def record_layout(dtype: DtypeName) -> RecordLayout:
    """The layout for a compute dtype: 12, 12 and 14 bytes per parameter."""
    match dtype:
        case "bfloat16":
            weights: tuple[Field, ...] = (Field("hi16", 2), Field("lo16", 2))
        case "float32":
            weights = (Field("w32", 4),)
        case "float16":
            weights = (Field("w16", 2), Field("w32", 4))
    return RecordLayout(dtype=dtype, fields=(*weights, Field("m32", 4), Field("v32", 4)))
