"""The drive's ceiling for an optimizer step: as much read as written, both at once. Asked by the benchmarks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.units import MIB

_GROUP_BYTES = 24 * MIB
_NUM_IN_FLIGHT = 3


def mixed_rate(paths: Sequence[Path], queue: IoQueue, pool: BufferPool, *, num_bytes: int = 1 << 30) -> float:
    """Bytes per second of both directions together, as much read as written, in pieces as large as the optimizer's."""
    num_bytes = max(1, num_bytes // _GROUP_BYTES) * _GROUP_BYTES
    with ExitStack() as resources:
        scratch = resources.enter_context(Scratch(paths, 2 * num_bytes, queue))
        leases = [resources.enter_context(pool.lease(_GROUP_BYTES, "measuring")) for _ in range(2 * _NUM_IN_FLIGHT)]
        for offset in range(0, 2 * num_bytes, _GROUP_BYTES):
            scratch.write(offset, leases[0].memory).wait()
        start = time.perf_counter()
        tickets: deque[Ticket] = deque()
        for number, offset in enumerate(range(0, num_bytes, _GROUP_BYTES)):
            if len(tickets) == 2 * _NUM_IN_FLIGHT:
                tickets.popleft().wait()
                tickets.popleft().wait()
            read, write = leases[2 * (number % _NUM_IN_FLIGHT)], leases[2 * (number % _NUM_IN_FLIGHT) + 1]
            tickets += [scratch.read(offset, read.memory), scratch.write(num_bytes + offset, write.memory)]
        join(tickets).wait()
        return 2 * num_bytes / (time.perf_counter() - start)
