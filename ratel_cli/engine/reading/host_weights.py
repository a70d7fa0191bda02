"""Compute weights (P16) in host memory, shared by the block that computes with them and by its update.

Invariants: (1) a buffer goes back to the pool when its last user has released it and nothing is being read into it;
(2) nobody uses the bytes of a read that failed: every user that waits is raised its error, whoever waited first.
"""

from __future__ import annotations

from threading import Lock
from typing import Self

from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.io.buffers import Lease
from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.uses import Stage


class HostWeights:
    """The compute field of one block in host memory, for several users, and the read that fills it."""

    def __init__(
        self, block: BlockSpec, lease: Lease, read: Ticket, *, own: HostWeights | None = None, start_bytes: int = 0
    ) -> None:
        """`own`: this rank's slice, in the memory of `lease` as well; None: the block is this rank's. `start_bytes`:
        where the block begins in `lease`."""
        self.block = block
        self._own = own
        self._lease = lease
        self._start_bytes = start_bytes
        self._lock = Lock()
        self._read: Ticket | None = read
        """None when it has ended and somebody has waited for it."""
        self._error: Exception | None = None
        """Why it failed."""

    @property
    def memory(self) -> memoryview:
        """The block's elements; complete after `wait`."""
        return self._lease.memory[self._start_bytes :][: self.block.compute_bytes]

    @property
    def own(self) -> HostWeights:
        """What this rank updates of them: its slice, or all."""
        return self if self._own is None else self._own

    @property
    def is_read(self) -> bool:
        """True if `wait` would return, or raise, at once."""
        read = self._read
        return read is None or read.done

    def wait(self, timeline: Timeline, stage: Stage) -> None:
        """Block until the read has ended. For any user, from any thread, more than once.

        Raises RatelError if the read failed.
        """
        with self._lock:
            read = self._end_read()
        if self._error is not None:
            raise self._error
        if read is not None:
            resource: Resource = "nvme read" if self._own is None else "network"
            timeline.transfer(resource, SpanLabel.of("weights", self.block, stage), read)

    def _end_read(self) -> Ticket | None:
        """Wait for the read, and return it; None if somebody has. Its error is kept for every user."""
        read = self._read
        if read is not None:
            try:
                read.wait()
            except Exception as error:  # noqa: BLE001  whoever waits is raised it
                self._error = error
            self._read = None
        return read

    def share(self) -> Self:
        """Add a user."""
        self._lease.share()
        return self

    def release(self) -> None:
        """Remove a user. The last one gives the memory back, after the read has ended."""
        self._settle()
        if self._own is not None:
            self._own._settle()  # where nothing was gathered
        self._lease.release()

    def _settle(self) -> None:
        with self._lock:
            self._end_read()  # another user may still wait, and learns whether it failed


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

    def __contains__(self, block: BlockSpec) -> bool:
        """Whether the block's weights are in memory."""
        return block.index in self._weights

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
