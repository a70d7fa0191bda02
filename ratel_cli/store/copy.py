"""Copies a generation from one store to another, and checks every byte on the way.

The stores may differ in directories, stripes and slots. They hold the same blocks in the same layout.

Invariant: only bytes that passed their checksums are written. The caller commits the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket
from ratel_cli.store.generation import Generation
from ratel_cli.store.shadow import Shadow

_PART_ELEMENTS: Final = 1 << 20
"""A multiple of every chunk size in use: 4 MiB of fp32, what the queues move in one request."""
_WIDEST_BYTES: Final = 4
COPY_BYTES: Final = 2 * _PART_ELEMENTS * _WIDEST_BYTES
"""Memory that a copy needs: one part is read while another is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Elements [start, stop) of a field of a block, and the memory that they pass through."""

    block: int
    field: str
    start: int
    stop: int
    memory: memoryview


def copy_generation(source: Generation, target: Shadow, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
    """Write all of `source` into `target`. `progress` is called with the bytes of each part.

    Raises IntegrityFailure if bytes of the source are damaged. What `progress` raises ends the copy too.
    """
    assert (source.layout, source.block_elements) == (target.generation.layout, target.generation.block_elements)
    reads: deque[tuple[_Part, Ticket]] = deque()

    def write_first() -> None:
        part, ticket = reads.popleft()
        ticket.wait()
        target.write(part.block, part.field, part.start, part.stop, part.memory).wait()
        progress(len(part.memory))

    with pool.lease(COPY_BYTES, "a copy of the state") as lease:
        try:
            for part in _parts(source, lease.memory):
                reads.append((part, source.read(part.block, part.field, part.start, part.stop, part.memory)))
                if len(reads) == 2:
                    write_first()
            while reads:
                write_first()
        finally:
            for _, ticket in reads:
                with suppress(RatelError):  # another error is on its way; the memory must be free of transfers
                    ticket.wait()


def _parts(source: Generation, memory: memoryview) -> Iterator[_Part]:
    """The parts in the order in which they lie in the store, alternating between the two halves of `memory`."""
    half_bytes = len(memory) // 2
    number = 0
    for block, num_elements in enumerate(source.block_elements):
        for field in source.layout.fields:
            for start in range(0, num_elements, _PART_ELEMENTS):
                stop = min(start + _PART_ELEMENTS, num_elements)
                first, num_bytes = number % 2 * half_bytes, (stop - start) * field.bytes_per_element
                yield _Part(
                    block=block, field=field.name, start=start, stop=stop, memory=memory[first : first + num_bytes]
                )
                number += 1
