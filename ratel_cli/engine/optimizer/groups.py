"""A group of parameters on its way through host memory: read, updated, written.

`engine.optimizer.pipeline` decides when each of these happens, on its thread; this is what happens. The states of
a resident block have buffers of their own, as large as the block, which stay: they are read once, and
then updated and written where they lie.

Invariants: what is read is the current generation and what is written goes to the shadow, so that an
update can be repeated until it is committed (resident states must be forgotten for that); no buffer is
given back while a transfer uses it; the checksums of what was read and of what is written are taken in the pass of the
update, and nothing is written or handed on that was made of bytes which are not those that were sealed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ratel_cli.engine.optimizer.adamw import AdamWUpdate, GroupAdamW
from ratel_cli.engine.optimizer.gradients import BlockGradient
from ratel_cli.engine.telemetry import Resource, Timeline
from ratel_cli.engine.weights import HostWeights
from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.model.spec import BlockSpec
from ratel_cli.store.store import Store


@dataclass(slots=True, kw_only=True, eq=False)
class BlockUpdate:
    """One block's update, from hand-over to the last byte written. Whoever carries it out owns what is in it."""

    gradient: BlockGradient
    weights: HostWeights | None
    """Compute weights, updated in place and written from there; None: they come and go by group, like states."""
    adamw: AdamWUpdate
    keeps_gradient: bool = False
    """The gradient is not released, since it may be needed once more."""
    is_updated: bool = field(default=False, init=False)
    is_written: bool = field(default=False, init=False)

    def release(self) -> None:
        """Give everything back: the update has been written, or never will be."""
        if not (self.keeps_gradient or self.is_updated):
            self.gradient.release()
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.release()


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Elements [start, stop) of a block; `part` counts the block's groups from 0."""

    block: BlockSpec
    part: int
    start: int
    stop: int
    with_weights: bool
    """The compute field is among the group's own buffers."""
    memories: dict[str, memoryview] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    """Fields that come from the drive."""
    leases: list[Lease] = field(default_factory=list)
    read: Ticket | None = None
    write: Ticket | None = None

    @property
    def is_last(self) -> bool:
        return self.stop == self.block.num_elements


class GroupWork:
    """Carries groups out. All methods are for the optimizer thread."""

    def __init__(
        self,
        adamw: GroupAdamW,
        store: Store,
        pool: BufferPool,
        *,
        timeline: Timeline,
        resident_states: frozenset[int],
    ) -> None:
        self._adamw = adamw
        self._store = store
        self._pool = pool
        self._timeline = timeline
        self._resident = resident_states
        self.waits_for: Resource = "optimizer"
        """The drive while the thread stands still for it; read by other threads."""
        self._states: dict[int, dict[str, Lease]] = {}
        self._valid: set[int] = set()
        """Resident blocks whose states in memory are those of the newest generation."""

    def read(self, group: Group) -> None:
        """Find memory for the group, and start reading what is not there."""
        block, fields = group.block, list(self._store.layout.state_fields)
        if block.index in self._resident:
            group.memories |= self._resident_memories(group)
            if block.index in self._valid:
                fields = []
        if group.with_weights:
            fields.insert(0, self._store.layout.compute_field)
        for each in fields:
            if each.name not in group.memories:
                num_bytes = (group.stop - group.start) * each.bytes_per_element
                group.leases.append(self._pool.lease(num_bytes, f"optimizer state {each.name}"))
                group.memories[each.name] = group.leases[-1].memory
        if fields:
            group.unchecked = tuple(each.name for each in fields)
            read = self._store.current().read_unchecked
            group.read = join(
                [read(block.index, name, group.start, group.stop, group.memories[name]) for name in group.unchecked]
            )

    def compute(self, group: Group, update: BlockUpdate) -> None:
        """Wait for what is being read, and update it in place."""
        block, place = group.block, {"block": group.block.index, "part": group.part}
        self._wait_read(group)
        update.gradient.fetch(self._pool)
        if update.weights is not None:
            update.weights.wait(self._timeline, "forward")
            compute = self._store.layout.compute_field
            size = compute.bytes_per_element
            group.memories[compute.name] = update.weights.memory[group.start * size : group.stop * size]
        with self._timeline.during("optimizer", f"AdamW of {block.name}", stage="update", **place):
            self._adamw.update(
                group.memories,
                update.gradient,
                update.adamw,
                start=group.start,
                stop=group.stop,
                chunks=_GroupChunks(self._store, group) if self._store.chunk_elements else None,
            )
        if group.is_last and block.index in self._resident:
            self._valid.add(block.index)

    def write(self, group: Group) -> None:
        """Start writing every field to the shadow."""
        write = self._store.shadow().write_hashed
        group.write = join(
            [
                write(group.block.index, each.name, group.start, group.stop, group.memories[each.name])
                for each in self._store.layout.fields
            ]
        )

    def finish(self, group: Group) -> None:
        """Wait for the write, and give the group's buffers back."""
        write, group.write = group.write, None
        assert write is not None
        try:
            self._wait(group, write, "nvme write", f"update of {group.block.name}")
        finally:
            self.release(group)

    def abandon(self, group: Group) -> None:
        """The group is not needed any more: wait until its buffers are free, whatever became of its transfers."""
        for ticket in (group.read, group.write):
            if ticket is not None:
                try:
                    ticket.wait()
                except RatelError:
                    continue  # nobody needs these bytes
        group.read = group.write = None
        self.release(group)

    def release(self, group: Group) -> None:
        """Give the group's buffers back."""
        group.memories.clear()
        for lease in group.leases:
            lease.release()
        group.leases.clear()

    def forget_states(self) -> None:
        """Resident states are not those of the current generation: give their memory back, and read them again."""
        states, self._states = self._states, {}
        self._valid.clear()
        for leases in states.values():
            for lease in leases.values():
                lease.release()

    def _wait_read(self, group: Group) -> None:
        read, group.read = group.read, None
        if read is not None:
            self._wait(group, read, "nvme read", f"states of {group.block.name}")

    def _wait(self, group: Group, ticket: Ticket, resource: Resource, label: str) -> None:
        self.waits_for = resource
        try:
            ticket.wait()
        finally:
            self.waits_for = "optimizer"
        self._timeline.transfer(resource, label, ticket, block=group.block.index, stage="update", part=group.part)

    def _resident_memories(self, group: Group) -> dict[str, memoryview]:
        block = group.block
        leases = self._states.get(block.index)
        if leases is None:
            leases = self._states[block.index] = {
                each.name: self._pool.lease(block.num_elements * each.bytes_per_element, f"{each.name} of {block.name}")
                for each in self._store.layout.state_fields
            }
        return {
            each.name: leases[each.name].memory[
                group.start * each.bytes_per_element : group.stop * each.bytes_per_element
            ]
            for each in self._store.layout.state_fields
        }


class _GroupChunks:
    """The checksums of one group's chunks: of what was read as the current generation has it, and for the shadow."""

    def __init__(self, store: Store, group: Group) -> None:
        self._group = group
        self._current = store.current()
        self._shadow = store.shadow()
        self.num_elements = store.chunk_elements

    def seeds(self, start: int, stop: int) -> tuple[list[int | None], list[int | None]]:
        block, unchecked = self._group.block.index, self._group.unchecked
        before = self._current.seeds(block, start, stop, unchecked) if unchecked else []
        return before, self._shadow.seeds(block, start, stop)

    def take(self, start: int, stop: int, before: list[int | None], after: list[int | None]) -> None:
        block = self._group.block.index
        if self._group.unchecked:
            self._current.check_digests(block, start, stop, before)
        self._shadow.set_digests(block, start, stop, after)
