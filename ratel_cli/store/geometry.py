"""Where everything in a store lies: fixed when the store is made, and written in every manifest.

Used by `store` and by what makes and opens one. `planning.traffic` says what a store will take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ratel_cli.io.striping import StripeMap
from ratel_cli.sizes import PAGE_BYTES, DtypeName
from ratel_cli.store.checksums import ChunkMap
from ratel_cli.store.layout import RecordMap, record_layout

NUM_MANIFESTS: Final = 2
IDENTIFICATION_OFFSET: Final = NUM_MANIFESTS * PAGE_BYTES
HEADER_BYTES: Final = IDENTIFICATION_OFFSET + PAGE_BYTES
"""Of every data file: two places for manifests, and the file's identification (headers.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of a store."""

    dtype: DtypeName
    block_elements: tuple[int, ...]
    num_slots: int
    weights: tuple[int, ...]
    """One for each file; see extents.py."""
    stripe_bytes: int
    in_place: bool
    chunk_elements: int
    """Of a field; each chunk has a checksum. 0: there are none."""

    def __post_init__(self) -> None:
        assert self.num_slots == 1 if self.in_place else self.num_slots >= 2, "a step needs a slot besides the current"
        assert self.stripe_bytes > 0
        assert self.stripe_bytes % PAGE_BYTES == 0

    def records(self) -> RecordMap:
        """Logical addresses of all elements."""
        chunks = self.chunks()
        return RecordMap(
            record_layout(self.dtype), self.block_elements, table_bytes=chunks.table_bytes if chunks is not None else 0
        )

    def chunks(self) -> ChunkMap | None:
        """What has a checksum each; None: nothing has."""
        if not self.chunk_elements:
            return None
        return ChunkMap(record_layout(self.dtype), self.block_elements, self.chunk_elements)

    def stripes(self) -> StripeMap:
        """From logical addresses to the files."""
        return StripeMap(weights=self.weights, stripe_bytes=self.stripe_bytes, header_bytes=HEADER_BYTES)

    def file_bytes(self) -> tuple[int, ...]:
        """Size of each data file."""
        return self.stripes().file_bytes(self.num_slots * self.records().slot_bytes)
