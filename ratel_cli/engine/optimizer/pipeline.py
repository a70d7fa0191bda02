"""The optimizer thread: updates out of core, overlapped with the compute thread.

The compute thread announces which updates will come, submits them, and waits for what it needs. The optimizer thread
walks through the blocks in groups of parameters, so that its buffers hold a few groups, whatever the size of a block.
With one group in flight each way, for group i, where i-1 is the next group (Ratel Fig. 3b):

    1. read ahead   R(i-1): master, m, v of the current generation, even before the gradient has arrived
    2. compute      C(i), when R(i) has ended and the block's update was submitted
    3. write back   W(i): queued behind R(i-1), for which C(i-1) will wait, and overlapped with C(i-1)
    4. finish       wait for W(i+1), the group before: its buffers will be those of R(i-2)

So the drive always has a read or a write to do while the processor computes. With more groups in flight, as many are
read ahead, and as many writes are waited for later: a group's transfer ends with the slowest of its drives, and the
others have the next group to do meanwhile. The order `naive` does R(i), C(i), W(i) strictly one after another (Fig.
3a). All orders give the same bits.

While there is nothing to update, the thread reads states that will stay in memory (`fill`), one block after another.

Invariants: no more groups have buffers than `GroupShape.num_buffers`; a block counts as written when all its writes
have been waited for; a failure ends the walk and is raised by every later call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Literal

from ratel_cli.closing import Closing
from ratel_cli.engine.optimizer.groups import BlockUpdate, Group, GroupWork
from ratel_cli.planning.profile.placement import GroupShape
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.sizes import BLOCK_ALIGNMENT

GroupOrder = Literal["optimized", "naive"]
_GROUPS = GroupShape()


class UpdatePipeline(Closing):
    """Owns the optimizer thread. All methods are for the compute thread."""

    def __init__(self, work: GroupWork, *, order: GroupOrder = "optimized", groups: GroupShape = _GROUPS) -> None:
        self._work = work
        self._walk = self._walk_optimized if order == "optimized" else self._walk_naive
        self._set_groups(groups)
        self._changed = Condition()  # guards everything below
        self._order: deque[BlockSpec] = deque()
        """Blocks with groups that have not begun. The next group of the first block is given by the next two."""
        self._next_start = self._next_number = 0
        self._expected: set[int] = set()
        self._updates: dict[int, BlockUpdate] = {}
        """By block: updates that were submitted and are not written yet."""
        self._to_fill: deque[BlockSpec] = deque()
        """Blocks whose states may be read while there is nothing to update."""
        self._is_walking = False
        self._cancelled = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="ratel-optimizer", daemon=True)
        self._thread.start()

    def expect(self, blocks: Sequence[BlockSpec]) -> None:
        """Announce updates in the order in which they will be submitted: their states are read ahead.

        An announced update must come with its weights.
        """
        with self._changed:
            self._check()
            self._order.extend(block for block in blocks if block.num_elements)
            self._expected.update(block.index for block in blocks if block.num_elements)
            self._changed.notify_all()

    def fill(self, blocks: Sequence[BlockSpec]) -> None:
        """Read the resident states of these blocks that are not in memory, in this order, until updates come.

        All blocks must be those of the current generation until they are updated.
        """
        with self._changed:
            self._to_fill = deque(block for block in blocks if self._work.can_fill(block))
            self._changed.notify_all()

    def submit(self, update: BlockUpdate) -> None:
        """Take over the update of a block, whether it was announced or not."""
        block = update.gradient.block
        with self._changed:
            assert block.index not in self._updates, "a block is updated once at a time"
            self._updates[block.index] = update
            self._check()
            if block.num_elements == 0:
                self._note_updated(update)
                self._note_written(update)
            elif block.index in self._expected:
                assert update.weights is not None, "an expected update brings its weights"
                self._expected.remove(block.index)
            else:
                self._order.append(block)
            self._changed.notify_all()

    def wait_updated(self, update: BlockUpdate) -> None:
        """Return when the weights that the update came with are the new ones."""
        self._wait(lambda: update.is_updated)

    def wait_written(self, update: BlockUpdate) -> None:
        """Return when the block is in the store's shadow."""
        self._wait(lambda: update.is_written)

    def wait_unfinished(self, *, at_most: int) -> None:
        """Return when updates that were submitted and are not written yet are of at most `at_most` segments."""
        self._wait(lambda: len({each.gradient.block.segment for each in self._updates.values()}) <= at_most)

    @property
    def waits_for(self) -> Resource:
        """The resource that the optimizer thread is waiting for or working on at this moment."""
        return self._work.waits_for

    def follow(self, groups: GroupShape, *, resident_states: frozenset[int]) -> None:
        """Update in other groups from now on, with the states of other blocks in memory.

        Every submitted update must be written.
        """
        with self._changed:
            self._to_fill.clear()
            self._changed.wait_for(lambda: not self._is_walking)
            assert not self._updates
            self._set_groups(groups)
        self._work.follow(resident_states)

    def cancel(self, updated: frozenset[int]) -> None:
        """Drop all announced and submitted updates. The shadow must be discarded afterwards.

        `updated`: the blocks that have been submitted since the last generation; their resident states are forgotten.
        """
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_walking)
            self._drop()
            self._cancelled = False
        self._work.forget_states(updated)

    def close(self) -> None:
        """End the thread and give all memory back. Idempotent."""
        with self._changed:
            self._cancelled = self._closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._drop()
        self._work.forget_states()

    def _set_groups(self, groups: GroupShape) -> None:
        assert groups.elements > 0 and groups.elements % BLOCK_ALIGNMENT == 0 and groups.in_flight > 0
        self._group_elements = groups.elements
        self._in_flight = groups.in_flight

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure is not None)
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _drop(self) -> None:
        self._order.clear()
        self._to_fill.clear()
        self._expected.clear()
        self._next_start = self._next_number = 0
        updates, self._updates = self._updates, {}
        for update in updates.values():
            update.release()

    # The optimizer thread.

    def _run(self) -> None:
        while self._begin():
            alive: list[Group] = []
            try:
                self._fill()
                self._walk(alive)
            except BaseException as failure:  # noqa: BLE001 - raised by the next call of the compute thread
                with self._changed:
                    self._failure = failure
            for group in alive:
                self._work.abandon(group)
            with self._changed:
                self._is_walking = False
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait until there is a group to read. False: the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._can_begin() or self._can_fill())
            self._is_walking = not self._closed
            return self._is_walking

    def _can_fill(self) -> bool:
        return bool(self._to_fill) and not self._order and self._failure is None and not self._cancelled

    def _fill(self) -> None:
        while True:
            with self._changed:
                if not self._can_fill():
                    return
                block = self._to_fill.popleft()
            self._work.fill(block)

    def _can_begin(self) -> bool:
        return bool(self._order) and self._failure is None and not self._cancelled

    def _walk_optimized(self, alive: list[Group]) -> None:
        """Walk until no further group is known or all is cancelled. `alive` collects the groups that have buffers."""
        reading: deque[Group] = deque()
        writing: deque[Group] = deque()
        while True:
            while len(reading) <= self._in_flight and (group := self._read_next(alive)) is not None:
                reading.append(group)
            if not reading:
                break
            current = reading[0]
            if not self._is_submitted(current):  # there is time, and the compute thread may wait for these blocks
                while writing:
                    self._finish(writing.popleft(), alive)
            if not self._compute(current):
                return
            self._work.write(reading.popleft())
            writing.append(current)
            if len(writing) > self._in_flight:
                self._finish(writing.popleft(), alive)
        for group in writing:
            self._finish(group, alive)

    def _walk_naive(self, alive: list[Group]) -> None:
        while (group := self._read_next(alive)) is not None and self._compute(group):
            self._work.write(group)
            self._finish(group, alive)

    def _read_next(self, alive: list[Group]) -> Group | None:
        """Begin the next group in the order of blocks, if there is one."""
        with self._changed:
            if not self._can_begin():
                return None
            block, start, number = self._order[0], self._next_start, self._next_number
            stop = min(start + block.group_elements(self._group_elements), block.num_elements)
            update = self._updates.get(block.index)
            if stop < block.num_elements:
                self._next_start, self._next_number = stop, number + 1
            else:
                self._order.popleft()
                self._next_start = self._next_number = 0
        with_weights = update is not None and update.weights is None
        group = Group(block=block, number=number, start=start, stop=stop, with_weights=with_weights)
        alive.append(group)
        self._work.read(group)
        return group

    def _is_submitted(self, group: Group) -> bool:
        with self._changed:
            return group.block.index in self._updates

    def _compute(self, group: Group) -> bool:
        """Update the group as soon as its gradient has been submitted. False if all was cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or group.block.index in self._updates)
            if self._cancelled:
                return False
            update = self._updates[group.block.index]
        self._work.compute(group, update)
        if group.is_last:
            with self._changed:
                self._note_updated(update)
        return True

    def _finish(self, group: Group, alive: list[Group]) -> None:
        alive.remove(group)
        self._work.finish(group)
        if group.is_last:
            with self._changed:
                self._note_written(self._updates[group.block.index])

    def _note_updated(self, update: BlockUpdate) -> None:
        update.is_updated = True
        update.gradient.release()
        self._changed.notify_all()

    def _note_written(self, update: BlockUpdate) -> None:
        del self._updates[update.gradient.block.index]
        update.release()
        update.is_written = True  # last: the reader, which does not ask for the lock, leases memory then
        self._changed.notify_all()
