"""The optimizer thread: the papers' order of reads, updates and writes, its bounds, and what failures do."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.optimizer.group_update import GroupUpdater
from ratel_cli.engine.optimizer.groups import BlockUpdate, Group, GroupWork
from ratel_cli.engine.optimizer.pipeline import GroupOrder, UpdatePipeline
from ratel_cli.engine.optimizer.settings import UpdateNumbers, adamw_settings
from ratel_cli.errors import RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.planning.profile.placement import GroupShape
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from ratel_cli.sizes import BLOCK_ALIGNMENT
from ratel_cli.store.store import Store
from tests.fakes import Fault, FaultyQueue
from tests.store.stores import create_store, progress_of

SMALL = GroupShape(elements=BLOCK_ALIGNMENT)
TWO_EACH_WAY = GroupShape(elements=BLOCK_ALIGNMENT, in_flight=2)
HOST = HostDevice(Timeline())
ADAMW = UpdateNumbers(number=1, learning_rate=1e-3, gradient_scale=1.0)


def blocks_of(*num_groups: int) -> list[BlockSpec]:
    return [
        lay_out_block(
            dtype="bfloat16",
            index=index,
            name=f"layer {index}",
            parameters=[("w", (count * BLOCK_ALIGNMENT,), True)],
        )
        for index, count in enumerate(num_groups)
    ]


def update_of(block: BlockSpec, pool: BufferPool) -> BlockUpdate:
    total = gradient_sum(block, pool, HOST, single=True)
    total.add([torch.ones(parameter.shape, dtype=torch.bfloat16) for parameter in block.parameters])
    return BlockUpdate(gradient=total.finish(), weights=None, numbers=ADAMW)


@dataclass
class FakeWork:
    """Notes the calls, and how many groups have buffers."""

    events: list[str] = field(default_factory=list)
    alive: int = 0
    most_alive: int = 0
    compute_seconds: float = 0.0
    waits_for: str = "optimizer"

    def _note(self, what: str, group: Group) -> None:
        self.events.append(f"{what} {group.block.index}.{group.number}")

    def read(self, group: Group) -> None:
        self._note("R", group)
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)

    def compute(self, group: Group, update: BlockUpdate) -> None:
        assert update.gradient.block is group.block
        time.sleep(self.compute_seconds)
        self._note("C", group)

    def write(self, group: Group) -> None:
        self._note("W", group)

    def finish(self, group: Group) -> None:
        self._note("F", group)
        self.alive -= 1

    def abandon(self, group: Group) -> None:
        self._note("A", group)
        self.alive -= 1

    def forget_states(self, blocks: frozenset[int] | None = None) -> None:
        self.events.append("forget")


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(None) as pool:
        yield pool
        assert pool.leased_bytes == 0


def walk(
    work: FakeWork, pool: BufferPool, order: GroupOrder, *num_groups: int, groups: GroupShape = SMALL
) -> list[str]:
    blocks = blocks_of(*num_groups)
    with UpdatePipeline(work, order=order, groups=groups) as pipeline:  # type: ignore[arg-type]
        updates = [update_of(block, pool) for block in blocks]
        for update in updates:
            pipeline.submit(update)
        pipeline.wait_unfinished(at_most=0)
        assert all(update.is_updated and update.is_written for update in updates)
    return work.events[:-1]


def test_a_write_is_queued_after_the_next_read_and_overlapped_with_the_next_update(pool: BufferPool) -> None:
    """R(i) R(i-1) W(i) R(i-2) W(i-1) and so on (Ratel Fig. 3b)."""
    work = FakeWork()
    assert walk(work, pool, "optimized", 5) == [
        *("R 0.0", "R 0.1", "C 0.0", "W 0.0"),
        *("R 0.2", "C 0.1", "W 0.1", "F 0.0"),
        *("R 0.3", "C 0.2", "W 0.2", "F 0.1"),
        *("R 0.4", "C 0.3", "W 0.3", "F 0.2"),
        *("C 0.4", "W 0.4", "F 0.3", "F 0.4"),
    ]
    assert work.most_alive == 3


def test_with_two_groups_in_flight_two_are_read_ahead_and_two_are_written(pool: BufferPool) -> None:
    """While a group is updated, the next two are read and the two before are written."""
    work = FakeWork()
    assert walk(work, pool, "optimized", 6, groups=TWO_EACH_WAY) == [
        *("R 0.0", "R 0.1", "R 0.2", "C 0.0", "W 0.0"),
        *("R 0.3", "C 0.1", "W 0.1"),
        *("R 0.4", "C 0.2", "W 0.2", "F 0.0"),
        *("R 0.5", "C 0.3", "W 0.3", "F 0.1"),
        *("C 0.4", "W 0.4", "F 0.2"),
        *("C 0.5", "W 0.5", "F 0.3", "F 0.4", "F 0.5"),
    ]
    assert work.most_alive == TWO_EACH_WAY.num_buffers == 5


def test_naive_does_one_thing_after_another(pool: BufferPool) -> None:
    work = FakeWork()
    assert walk(work, pool, "naive", 2, 1) == [
        f"{what} {group}" for group in ("0.0", "0.1", "1.0") for what in ("R", "C", "W", "F")
    ]
    assert work.most_alive == 1


@pytest.mark.parametrize("num_groups", [(), (0,), (1,), (0, 1, 0), (2, 3, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("order", ["optimized", "naive"])
@pytest.mark.parametrize("groups", [SMALL, TWO_EACH_WAY], ids=["one", "two"])
def test_every_group_is_read_updated_written_once(
    pool: BufferPool, order: GroupOrder, num_groups: tuple[int, ...], groups: GroupShape
) -> None:
    work = FakeWork()
    events = walk(work, pool, order, *num_groups, groups=groups)
    wanted = [f"{index}.{part}" for index, count in enumerate(num_groups) for part in range(count)]
    for what in "RCWF":
        assert [event[2:] for event in events if event[0] == what] == wanted
    assert work.most_alive <= groups.num_buffers
    assert work.alive == 0


def test_announced_states_are_read_before_the_gradient_comes(pool: BufferPool) -> None:
    work = FakeWork()
    blocks = blocks_of(1, 2)
    with UpdatePipeline(work, groups=SMALL) as pipeline:  # type: ignore[arg-type]
        pipeline.expect(blocks)
        while len(work.events) < 2:
            time.sleep(0.001)
        assert work.events == ["R 0.0", "R 1.0"]
        pipeline.cancel(frozenset(range(9)))
        assert work.events[2:] == ["A 0.0", "A 1.0", "forget"]
        pipeline.submit(update := update_of(blocks[1], pool))
        pipeline.wait_written(update)


def test_cancel_drops_what_was_submitted(pool: BufferPool) -> None:
    work = FakeWork(compute_seconds=0.02)
    with UpdatePipeline(work, groups=SMALL) as pipeline:  # type: ignore[arg-type]
        for block in blocks_of(20, 20):
            pipeline.submit(update_of(block, pool))
        while "C 0.0" not in work.events:
            time.sleep(0.001)
        pipeline.cancel(frozenset(range(9)))
        assert work.alive == 0
        assert pool.leased_bytes == 0
        pipeline.wait_unfinished(at_most=0)
    assert len([event for event in work.events if event[0] == "C"]) < 40


def test_a_failure_of_the_thread_is_raised_by_every_later_call(pool: BufferPool) -> None:
    class Broken(FakeWork):
        def compute(self, group: Group, update: BlockUpdate) -> None:
            raise ZeroDivisionError(f"a bug in {group.number} of {update.gradient.block.name}")

    work, (block,) = Broken(), blocks_of(2)
    with UpdatePipeline(work, groups=SMALL) as pipeline:  # type: ignore[arg-type]
        update = update_of(block, pool)
        pipeline.submit(update)
        for call in (
            lambda: pipeline.wait_updated(update),
            lambda: pipeline.wait_written(update),
            lambda: pipeline.wait_unfinished(at_most=0),
            lambda: pipeline.expect([block]),
        ):
            with pytest.raises(ZeroDivisionError, match="a bug in 0"):
                call()
        assert work.alive == 0


def stored(tmp_path: Path, queue: FaultyQueue) -> Store:
    store = create_store([tmp_path], queue, block_elements=[3 * BLOCK_ALIGNMENT, BLOCK_ALIGNMENT])
    store.commit_import(progress_of(0))
    store.begin_step()
    return store


def work_on(store: Store, pool: BufferPool, resident: frozenset[int] = frozenset()) -> GroupWork:
    settings = adamw_settings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    work = GroupWork(GroupUpdater(settings, seed=0), store, pool, timeline=Timeline())
    work.follow(resident)
    return work


@pytest.mark.parametrize(("order", "groups"), [("optimized", SMALL), ("optimized", TWO_EACH_WAY), ("naive", SMALL)])
def test_every_failing_transfer_raises_and_gives_all_buffers_back(
    tmp_path: Path, pool: BufferPool, order: GroupOrder, groups: GroupShape
) -> None:
    """Each system call of the update fails in turn."""
    blocks = blocks_of(3, 1)
    failed, call = 0, 0
    while True:
        with FaultyQueue() as queue, stored(tmp_path / str(call), queue) as store:
            queue._faults[len(queue.calls) + call] = Fault(error_number=errno.EIO)
            with UpdatePipeline(work_on(store, pool), order=order, groups=groups) as pipeline:
                try:
                    for block in blocks:
                        pipeline.submit(update_of(block, pool))
                    pipeline.wait_unfinished(at_most=0)
                except RatelError as error:
                    assert "Input/output error" in str(error)
                    failed += 1
                else:
                    break
            assert pool.leased_bytes == 0
        call += 1
    # Four groups, each with four fields read and four written.
    assert failed == call == 32


def test_resident_states_are_read_once_until_they_are_forgotten(tmp_path: Path, pool: BufferPool) -> None:
    blocks = blocks_of(3, 1)
    gradients: list[BlockGradient] = []
    with FaultyQueue() as queue, stored(tmp_path, queue) as store:
        work = work_on(store, pool, frozenset((0,)))
        with UpdatePipeline(work, groups=SMALL) as pipeline:
            read = []
            for _ in range(4):
                before = queue.read_bytes
                for block in blocks:
                    pipeline.submit(update := update_of(block, pool))
                    gradients.append(update.gradient)
                pipeline.wait_unfinished(at_most=0)
                read.append((queue.read_bytes - before) // BLOCK_ALIGNMENT)
                store.discard()
                store.begin_step()
                if len(read) == 2:
                    pipeline.cancel(frozenset(range(9)))
        assert read == [12 * 4, 12 + 2 * 3, 12 * 4, 12 + 2 * 3]


def test_waits_for_names_the_resource_that_the_thread_waits_for(tmp_path: Path, pool: BufferPool) -> None:
    (block,) = blocks_of(3)
    with FaultyQueue() as queue, stored(tmp_path, queue) as store:
        queue._faults[len(queue.calls)] = Fault(hangs=True)
        with UpdatePipeline(work_on(store, pool), groups=SMALL) as pipeline:
            assert pipeline.waits_for == "optimizer"
            pipeline.submit(update_of(block, pool))
            while pipeline.waits_for != "nvme read":
                time.sleep(0.001)
            queue.release()
            pipeline.wait_unfinished(at_most=0)
            assert pipeline.waits_for == "optimizer"
