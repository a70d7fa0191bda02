"""Gathers a block's compute weights from all ranks' slices.

    1. read    this rank's slice from its own drives, to its place in the memory of the whole block
    2. update  the slice, if its update was deferred until this use
    3. swap    slices with all ranks, on a thread of its own

Invariant: a slice is sent when it is the newest, and the block is complete when all slices have come.
"""

from __future__ import annotations

from collections.abc import Callable

from ratel_cli.closing import Closing
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.engine.reading.host_weights import HostWeights
from ratel_cli.engine.reading.turns import Turns
from ratel_cli.io.buffers import Lease
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.slices import ranges_in
from ratel_cli.schedule.uses import Stage


class WeightGathers(Closing):
    """The gathers of one rank. Use as a context manager."""

    def __init__(self, ranks: Ranks, timeline: Timeline) -> None:
        self._ranks = ranks
        self._timeline = timeline
        self._turns = Turns("gather")
        self.slice = ranks.slice
        """What this rank has of every block."""

    def gather(
        self, block: BlockSpec, lease: Lease, own: HostWeights, stage: Stage, wait_updated: Callable[[], None]
    ) -> HostWeights:
        """The weights of the whole block, in the memory of `lease`, in which `own` is this rank's slice.

        `wait_updated` returns when the slice is updated, if it has still to be. One rank alone has the whole block.
        """
        if self._ranks.size == 1:
            return own

        def swap() -> None:
            own.wait(self._timeline, stage)
            wait_updated()
            parts = [
                lease.memory[start * block.dtype_bytes : stop * block.dtype_bytes]
                for start, stop in ranges_in(block, self._ranks.size)
            ]
            self._ranks.weights.swap([parts[self._ranks.rank]] * self._ranks.size, parts)

        return HostWeights(block, lease, self._turns.submit(swap), own=own)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._turns.close()
