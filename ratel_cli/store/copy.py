"""Copies a generation from one store to another, and checks every byte on the way.

The stores may differ in directories, stripes and slots. They hold the same blocks in the same layout.

Invariant: only bytes that passed their checksums are written. The caller commits the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final, NamedTuple

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import in_flight
from ratel_cli.store.joined import Readable
from ratel_cli.store.shadow import Shadow

_PART_ELEMENTS: Final = 1 << 20
"""A multiple of every chunk size in use: 4 MiB of fp32, what the queues move in one request."""
_WIDEST_BYTES: Final = 4
COPY_BYTES: Final = 2 * _PART_ELEMENTS * _WIDEST_BYTES
"""Memory that a copy needs: one part is read while another is written."""


class _Part(NamedTuple):
    """Elements [start, stop) of a field of a block, and the memory that they pass through."""

    block: int
    field: str
    start: int
    stop: int
    memory: memoryview


def copy_generation(source: Readable, target: Shadow, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
    """Write all of `source` into `target`; frozen blocks only into a new store, since they never change.

    `progress` is called with the bytes of each part.
    Raises IntegrityFailure if bytes of the source are damaged. What `progress` raises ends the copy too.
    """
    assert source.blocks == target.generation.blocks
    fields = {field for block in source.blocks for field in block.record.fields}
    largest_bytes = max((field.num_bytes(_PART_ELEMENTS) for field in fields), default=0)  # of fixed values even more
    with pool.lease(max(COPY_BYTES, 2 * largest_bytes), "a copy of the state", crosses_link=False) as lease:
        parts = _parts(source, lease.memory, with_frozen=target.is_import)
        reads = ((part, source.read(*part)) for part in parts)
        with closing(in_flight(reads, at_most=2)) as finished:
            for part in finished:
                target.write(*part).wait()
                progress(len(part.memory))


def _parts(source: Readable, memory: memoryview, *, with_frozen: bool) -> Iterator[_Part]:
    """The parts in the order in which they lie in the store, alternating between the two halves of `memory`."""
    half_bytes = len(memory) // 2
    number = 0
    for index, block in enumerate(source.blocks):
        if block.is_frozen and not with_frozen:
            continue
        for field in block.record.fields:
            for start, stop in field.ranges(block.num_elements, _PART_ELEMENTS):
                first, num_bytes = number % 2 * half_bytes, field.num_bytes(stop - start)
                yield _Part(index, field.name, start, stop, memory[first : first + num_bytes])
                number += 1
