"""A group of parameters on its way through host memory: it is read, updated and written.

The pipeline decides when; `GroupWork` does it, on the optimizer thread. A `Group` carries all that belongs to its
parameters: their fields in memory, their transfers, and the seeds of their checksums. The states of a resident block
have buffers of their own, as large as the block, which stay: they are read once, then updated and written there.

Invariants: reads are from the current generation and writes go to the shadow, so that an update can be repeated until
it is committed (resident states must be forgotten for that); no buffer is given back while a transfer uses it; the
update's pass over the bytes takes the checksums of what was read and of what will be written, and nothing is written
or handed on that was made of bytes other than those that were sealed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter

from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.engine.optimizer.group_update import GroupChecksums, GroupUpdater
from ratel_cli.engine.optimizer.settings import UpdateNumbers
from ratel_cli.engine.reading.host_weights import HostWeights
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.tickets import Ticket, join, settle
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.updates import InTorch
from ratel_cli.store.generation import Generation
from ratel_cli.store.layout import Field
from ratel_cli.store.store import Store


@dataclass(slots=True, kw_only=True, eq=False)
class BlockUpdate:
    """One block's update, until its last byte is written. The pipeline is a user of gradient and weights meanwhile."""

    gradient: BlockGradient
    weights: HostWeights | None
    """Compute weights in memory, updated in place and written from there; None: read and written with the states."""
    numbers: UpdateNumbers
    is_updated: bool = field(default=False, init=False)
    """True when `weights`, if there are any, are the new ones."""
    is_written: bool = field(default=False, init=False)
    """True when the block is in the shadow."""

    def release(self) -> None:
        """Release gradient and weights: the update has been written, or never will be."""
        if not self.is_updated:
            self.gradient.release()
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.release()


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Elements `[start, stop)` of a block. `number` counts the block's groups from 0."""

    block: BlockSpec
    number: int
    start: int
    stop: int
    with_weights: bool
    """True if the compute field is read and written with the states."""
    memories: dict[str, memoryview] = field(default_factory=dict)
    """By name: the fields' elements in host memory."""
    checksums: GroupChecksums | None = None
    """Checksums of what is read and written; None if the store has none."""
    lease: Lease | None = None
    """The memory of the fields that pass through; None if all of them stay in host memory."""
    read: Ticket | None = None
    write: Ticket | None = None

    @property
    def is_last(self) -> bool:
        """True if the block has no further group."""
        return self.stop == self.block.num_elements


class GroupWork:
    """Reads, updates and writes groups, on the optimizer thread."""

    def __init__(self, updater: GroupUpdater, store: Store, pool: BufferPool, *, timeline: Timeline) -> None:
        self._updater = updater
        self._store = store
        self._pool = pool
        self._timeline = timeline
        self._resident: frozenset[int] = frozenset()
        """Blocks whose states stay in memory."""
        self.waits_for: Resource = "optimizer"
        """The resource that the thread waits for or works on. Other threads may read it."""
        self._states: dict[int, dict[str, Lease]] = {}
        self._valid: set[int] = set()
        """Resident blocks whose states in memory are those of the newest generation."""

    def read(self, group: Group) -> None:
        """Find memory for the group's fields, and start reading those that are not in memory."""
        block, record = group.block, group.block.record
        fields = record.state_fields
        if block.index in self._resident:
            group.memories |= self._resident_memories(group)
            if block.index in self._valid:
                fields = ()
        if group.with_weights:
            fields = (record.compute_field, *fields)
        self._lease_for(group, fields)
        read = {each.name: group.memories[each.name] for each in fields}
        current = self._store.current()
        if isinstance(block.rule.update, InTorch):  # no kernel takes checksums
            group.read = _read_checked(current, group, read)
        elif self._store.chunk_elements:
            group.checksums = GroupChecksums(
                block.index,
                current,
                self._store.shadow(),
                read=frozenset(read),
                chunk_elements=self._store.chunk_elements,
            )
        if read and group.read is None:
            group.read = current.read_unchecked(block.index, group.start, group.stop, read)

    def compute(self, group: Group, update: BlockUpdate) -> None:
        """Wait for what is being read, and update it in place.

        Raises IntegrityFailure if the bytes that were read are not those that were written.
        """
        block = group.block
        self._wait_read(group)
        update.gradient.fetch(self._pool)
        if update.weights is not None:
            update.weights.wait(self._timeline, "forward")
            compute = block.record.compute_field
            group.memories[compute.name] = compute.part(update.weights.memory, group.start, group.stop)
        began, buffer_bytes = perf_counter(), block.update_buffer_bytes(group.stop - group.start)
        with (
            update.gradient.elements(group.start, group.stop, self._pool) as values,
            self._lease(buffer_bytes, f"update of {block.name}") if buffer_bytes else nullcontext() as lease,
        ):
            self._updater.update(
                group.memories,
                update.gradient,
                update.numbers,
                values=values,
                start=group.start,
                stop=group.stop,
                checksums=group.checksums,
                buffer=None if lease is None else lease.memory[:buffer_bytes],
            )
        label = SpanLabel.of(block.rule.title, block, "update", group.number)
        self._timeline.record("optimizer", label, began, perf_counter())
        if group.is_last and block.index in self._resident:
            self._valid.add(block.index)

    def write(self, group: Group) -> None:
        """Start writing every field to the shadow."""
        shadow, where = self._store.shadow(), (group.block.index, group.start, group.stop)
        if isinstance(group.block.rule.update, InTorch):
            writes = (shadow.write(where[0], name, *where[1:], each) for name, each in group.memories.items())
            group.write = join([*writes])
        else:
            group.write = shadow.write_hashed(*where, group.memories)

    def finish(self, group: Group) -> None:
        """Wait for the write, and give the group's buffers back."""
        write, group.write = group.write, None
        assert write is not None
        try:
            self._wait(group, write, "nvme write", "update")
        finally:
            self.release(group)

    def abandon(self, group: Group) -> None:
        """Drop a group that is not needed any more: wait for its transfers, failed or not, and release its buffers."""
        settle([ticket for ticket in (group.read, group.write) if ticket is not None])
        group.read = group.write = None
        self.release(group)

    def release(self, group: Group) -> None:
        """Give the group's buffers back."""
        group.memories.clear()
        lease, group.lease = group.lease, None
        if lease is not None:
            lease.release()

    def can_fill(self, block: BlockSpec) -> bool:
        """True if the block's states belong in memory, and are not there."""
        return block.num_elements > 0 and block.index in self._resident and block.index not in self._valid

    def fill(self, block: BlockSpec) -> None:
        """Read the block's states of the current generation into memory, if they belong there.

        Raises IntegrityFailure if the bytes are not those that were written.
        """
        if not self.can_fill(block):
            return
        group = Group(block=block, number=0, start=0, stop=block.num_elements, with_weights=False)
        memories, current = self._resident_memories(group), self._store.current()
        group.read = _read_checked(current, group, memories)
        self._wait_read(group)
        self._valid.add(block.index)

    def follow(self, resident_states: frozenset[int]) -> None:
        """Let the states of these blocks stay in memory from now on, and release those of others.

        The optimizer thread must not be walking.
        """
        self.forget_states(frozenset(self._states) - resident_states)
        self._resident = resident_states

    def forget_states(self, blocks: frozenset[int] | None = None) -> None:
        """Release the resident states of these blocks, or of all: they are not those of the current generation. They
        will be read again.

        The optimizer thread must not be walking.
        """
        forgotten = frozenset(self._states) if blocks is None else blocks & self._states.keys()
        self._valid -= forgotten
        for block in forgotten:
            for lease in self._states.pop(block).values():
                lease.release()

    def _wait_read(self, group: Group) -> None:
        read, group.read = group.read, None
        if read is not None:
            self._wait(group, read, "nvme read", "states")

    def _wait(self, group: Group, ticket: Ticket, resource: Resource, what: str) -> None:
        self.waits_for = resource
        try:
            ticket.wait()
        finally:
            self.waits_for = "optimizer"
        self._timeline.transfer(resource, SpanLabel.of(what, group.block, "update", group.number), ticket)

    def _lease(self, num_bytes: int, purpose: str) -> Lease:
        return self._pool.lease(num_bytes, purpose, crosses_link=False)

    def _lease_for(self, group: Group, fields: Sequence[Field]) -> None:
        """Find memory for those of the fields that have none: one buffer, in which they lie one after another."""
        number = group.stop - group.start
        missing = {each.name: each.num_bytes(number) for each in fields if each.name not in group.memories}
        if not missing:
            return
        group.lease = self._lease(sum(missing.values()), f"optimizer states of {group.block.name}")
        memory, start = group.lease.memory, 0
        for name, size in missing.items():
            group.memories[name] = memory[start : start + size]
            start += size

    def _resident_memories(self, group: Group) -> dict[str, memoryview]:
        block = group.block
        leases = self._states.get(block.index)
        if leases is None:
            leases = self._states[block.index] = {
                each.name: self._lease(each.num_bytes(block.num_elements), f"{each.name} of {block.name}")
                for each in block.record.state_fields
            }
        return {
            each.name: each.part(leases[each.name].memory, group.start, group.stop)
            for each in block.record.state_fields
        }


def _read_checked(current: Generation, group: Group, memories: Mapping[str, memoryview]) -> Ticket:
    """Read the group's elements of these fields. The ticket raises IntegrityFailure if they are damaged."""
    block, start, stop = group.block.index, group.start, group.stop
    return join([current.read(block, name, start, stop, memory) for name, memory in memories.items()])
