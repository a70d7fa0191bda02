"""Compute weights (P16) in host memory, shared by the block that computes with them and by its update.

Invariant: a buffer goes back to the pool when its last user has released it and nothing is being read into it.
"""

from __future__ import annotations

import contextlib
from typing import Self

from ratel_cli.engine.telemetry import SpanLabel, Timeline
from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import Lease
from ratel_cli.io.tickets import Ticket
from ratel_cli.model.spec import BlockSpec
from ratel_cli.planning.placement import Stage


class HostWeights:
    """The compute field of one block in host memory, for several users, and the read that fills it."""

    def __init__(self, block: BlockSpec, lease: Lease, read: Ticket) -> None:
        self.block = block
        self.num_uses = 0
        """Uses announced to the weight reader that share this buffer; the update may be a further user."""
        self._lease = lease
        self._reads = [read]  # whoever waits for the read pops it; a list, since its pop is atomic

    @property
    def memory(self) -> memoryview:
        """The block's elements; complete after `wait`."""
        return self._lease.memory

    @property
    def is_read(self) -> bool:
        """True if `wait` would return, or raise, at once."""
        return all(read.done for read in self._reads)

    def wait(self, timeline: Timeline, stage: Stage) -> None:
        """Block until the read has ended. Later calls return at once. Two threads must not call it at once.

        Raises RatelError if the read failed.
        """
        if self._reads:
            read = self._reads.pop()
            read.wait()
            timeline.transfer("nvme read", SpanLabel.of("weights", self.block, stage), read)

    def share(self) -> Self:
        """Add a user."""
        self._lease.share()
        return self

    def release(self) -> None:
        """Remove a user. The last one gives the memory back, after the read has ended."""
        with contextlib.suppress(RatelError, IndexError):  # if nobody has waited, nobody needs these bytes
            self._reads.pop().wait()
        self._lease.release()


class ResidentWeights:
    """Compute weights that stay in host memory from step to step."""

    def __init__(self, blocks: frozenset[int]) -> None:
        """`blocks`: the indices of the blocks whose weights stay."""
        self._blocks = blocks
        self._weights: dict[int, HostWeights] = {}

    def get(self, block: BlockSpec) -> HostWeights | None:
        """The block's weights with one more user, or None if they are not in memory."""
        weights = self._weights.get(block.index)
        return None if weights is None else weights.share()

    def add(self, weights: HostWeights) -> None:
        """Let the weights stay, if their block is one of those that do."""
        if weights.block.index in self._blocks:
            self._weights[weights.block.index] = weights.share()

    def follow(self, blocks: frozenset[int]) -> None:
        """Let the weights of these blocks stay from now on, and release those of others."""
        self.forget(frozenset(self._weights) - blocks)
        self._blocks = blocks

    def forget(self, blocks: frozenset[int] | None = None) -> None:
        """Release the weights of these blocks, or of all: they are not those of the current generation, or nobody needs
        them any more."""
        forgotten = frozenset(self._weights) if blocks is None else blocks & self._weights.keys()
        for block in forgotten:
            self._weights.pop(block).release()
