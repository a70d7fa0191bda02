"""The optimizer thread: AdamW out of core, beneath whatever the compute thread does.

`engine.optimizer.update` says which blocks' updates are to come, hands over their gradients, and waits for what it
needs. The thread walks through the blocks in groups of parameters, so that its buffers are as large as
three groups, whatever the size of a block. For group i, the one after it being i-1 (Ratel Fig. 3b):

    1. read ahead   R(i-1): master, m, v of the current generation, even before the gradient is there
    2. compute      C(i), when R(i) is done and the block's gradient has been handed over
    3. write back   W(i): behind R(i-1), which C(i-1) will wait for, and beside C(i-1)
    4. settle       wait for W(i+1), the group before: its buffers are those of R(i-2)

So the drive always has a read or a write to do while the processor computes.
`naive` does R(i), C(i), W(i) strictly one after another (Fig. 3a). All orders give the same bits.

Invariants: at most three groups have buffers; a block counts as written when every write of it was waited
for; a failure ends the thread and is raised by every later call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from types import TracebackType
from typing import Literal, Self

from ratel_cli.engine.optimizer.groups import BlockUpdate, Group, GroupWork
from ratel_cli.engine.telemetry import Resource
from ratel_cli.model.spec import BlockSpec
from ratel_cli.sizes import BLOCK_ALIGNMENT, GROUP_ELEMENTS

GroupOrder = Literal["optimized", "naive"]


class UpdatePipeline:
    """Owns the optimizer thread. All methods are for the compute thread."""

    def __init__(
        self, work: GroupWork, *, order: GroupOrder = "optimized", group_elements: int = GROUP_ELEMENTS
    ) -> None:
        assert group_elements > 0 and group_elements % BLOCK_ALIGNMENT == 0
        self._work = work
        self._walk = self._walk_optimized if order == "optimized" else self._walk_naive
        self._group_elements = group_elements
        self._changed = Condition()  # for all that follows
        self._order: deque[BlockSpec] = deque()
        """Blocks whose groups have not all begun; where the first one stands is in the next two."""
        self._next_start = self._next_part = 0
        self._expected: set[int] = set()
        self._updates: dict[int, BlockUpdate] = {}
        """Submitted and not written, by block."""
        self._works = False
        self._cancelled = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="ratel-optimizer", daemon=True)
        self._thread.start()

    def expect(self, blocks: Sequence[BlockSpec]) -> None:
        """Announce updates in the order in which they will be submitted, with weights: their states are read ahead."""
        with self._changed:
            self._check()
            self._order.extend(block for block in blocks if block.num_elements)
            self._expected.update(block.index for block in blocks if block.num_elements)
            self._changed.notify_all()

    def submit(self, update: BlockUpdate) -> None:
        """Take over the update of a block that is expected, or of one that nobody has announced."""
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
        """Return when no more than so many submitted updates are not written yet."""
        self._wait(lambda: len(self._updates) <= at_most)

    @property
    def waits_for(self) -> Resource:
        """What whoever waits for the optimizer waits for in truth, at this moment."""
        return self._work.waits_for

    def cancel(self) -> None:
        """Drop what was expected and submitted. What the shadow holds afterwards is of no use."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._works)
            self._drop()
            self._cancelled = False
        self._work.forget_states()

    def close(self) -> None:
        """End the thread and give all memory back. Idempotent."""
        with self._changed:
            self._cancelled = self._closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._drop()
        self._work.forget_states()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure is not None)
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _drop(self) -> None:
        self._order.clear()
        self._expected.clear()
        self._next_start = self._next_part = 0
        updates, self._updates = self._updates, {}
        for update in updates.values():
            update.release()

    # From here on, what the thread does.

    def _run(self) -> None:
        while self._begin():
            alive: list[Group] = []
            try:
                self._walk(alive)
            except BaseException as failure:  # noqa: BLE001 - it is raised where the results are wanted
                with self._changed:
                    self._failure = failure
            for group in alive:
                self._work.abandon(group)
            with self._changed:
                self._works = False
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait for something to do. False ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._can_begin())
            self._works = not self._closed
            return self._works

    def _can_begin(self) -> bool:
        return bool(self._order) and self._failure is None and not self._cancelled

    def _walk_optimized(self, alive: list[Group]) -> None:
        """Until no further group is known, or all is cancelled. `alive` holds the groups that have buffers."""
        previous: Group | None = None
        current = self._read_next(alive)
        while current is not None:
            following = self._read_next(alive)
            if previous is not None and not self._is_handed_over(current):
                self._finish(previous, alive)  # there is time, and someone may wait for that block
                previous = None
            if not self._compute(current):
                return
            self._work.write(current)
            if previous is not None:
                self._finish(previous, alive)
            previous, current = current, following or self._read_next(alive)
        if previous is not None:
            self._finish(previous, alive)

    def _walk_naive(self, alive: list[Group]) -> None:
        while (group := self._read_next(alive)) is not None and self._compute(group):
            self._work.write(group)
            self._finish(group, alive)

    def _read_next(self, alive: list[Group]) -> Group | None:
        """Begin the next group in the order of blocks, if there is one."""
        with self._changed:
            if not self._can_begin():
                return None
            block, start, part = self._order[0], self._next_start, self._next_part
            stop = min(start + self._group_elements, block.num_elements)
            update = self._updates.get(block.index)
            if stop < block.num_elements:
                self._next_start, self._next_part = stop, part + 1
            else:
                self._order.popleft()
                self._next_start = self._next_part = 0
        with_weights = update is not None and update.weights is None
        group = Group(block=block, part=part, start=start, stop=stop, with_weights=with_weights)
        alive.append(group)
        self._work.read(group)
        return group

    def _is_handed_over(self, group: Group) -> bool:
        with self._changed:
            return group.block.index in self._updates

    def _compute(self, group: Group) -> bool:
        """Update the group as soon as its gradient is there. False when everything was cancelled."""
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
        if not update.keeps_gradient:
            update.gradient.release()
        self._changed.notify_all()

    def _note_written(self, update: BlockUpdate) -> None:
        update.is_written = True
        del self._updates[update.gradient.block.index]
        update.release()
        self._changed.notify_all()
