"""Copies a generation from one store to another, every byte of it checked on the way.

Used by `training.snapshots`, beneath training, and by `ratel restore`. The stores may differ in directories, stripes
and slots; they hold the same blocks in the same layout.

Invariant: what is written was read whole and passed its checksums; only the caller commits it.
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
from ratel_cli.store.store import Store

_PART_ELEMENTS: Final = 1 << 20
"""Whole chunks: 4 MiB of fp32, what the queues move in one request."""
_WIDEST_BYTES: Final = 4
COPY_BYTES: Final = 2 * _PART_ELEMENTS * _WIDEST_BYTES
"""Memory that a copy takes: one part is read while another is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    block: int
    field: str
    start: int
    stop: int
    memory: memoryview


def copy_generation(source: Generation, target: Store, pool: BufferPool, *, progress: Callable[[int], None]) -> None:
    """Write all of `source` into the generation that `target` has begun. `progress` is told the bytes of each part.

    What `progress` raises ends the copy, like IntegrityFailure for bytes that are damaged.
    """
    assert (source.layout, source.block_elements) == (target.layout, target.block_elements)
    reads: deque[tuple[_Part, Ticket]] = deque()

    def hand_on() -> None:
        part, ticket = reads.popleft()
        ticket.wait()
        target.write(part.block, part.field, part.start, part.stop, part.memory).wait()
        progress(len(part.memory))

    with pool.lease(COPY_BYTES, "a copy of the state") as lease:
        try:
            for part in _parts(source, lease.memory):
                reads.append((part, source.read(part.block, part.field, part.start, part.stop, part.memory)))
                if len(reads) == 2:
                    hand_on()
            while reads:
                hand_on()
        finally:
            for _, ticket in reads:
                with suppress(RatelError):  # the copy failed for a reason that is told; the memory must be at rest
                    ticket.wait()


def _parts(source: Generation, memory: memoryview) -> Iterator[_Part]:
    """In the order in which they lie in the store, in the two halves of the memory by turns."""
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
