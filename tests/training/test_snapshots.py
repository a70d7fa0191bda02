"""Snapshots of a store during training: what is copied, what is skipped, and what a failing device costs."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from ratel_cli.errors import Interrupted
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Store
from ratel_cli.training.snapshots import AllRanks, Snapshots
from tests.fakes import Fault, FaultyQueue
from tests.store.stores import check_generation, create_store, import_all, open_store, run_step

SLOW = 1_000.0
"""Bytes per second: a copy takes 17 seconds."""


class Machine:
    """A store with a slot for the generation that is being copied, and a second store for the snapshots."""

    def __init__(self, directory: Path, queue: IoQueue, resources: ExitStack, *, num_slots: int = 3) -> None:
        self.messages: list[str] = []
        self.target_path = directory / "target"
        self._resources = resources
        self.source = resources.enter_context(import_all(create_store([directory / "a"], queue, num_slots=num_slots)))

    def begin(
        self,
        target: Store,
        *,
        every: int = 2,
        bytes_per_second: float = 1e12,
        patience_seconds: float = 10.0,
        of_all: Callable[[bool, bool], tuple[bool, bool]] = lambda is_busy, is_over: (is_busy, is_over),
    ) -> Snapshots:
        return self._resources.enter_context(
            Snapshots(
                self.source,
                target,
                patience_seconds=patience_seconds,
                ranks=AllRanks(of_all=of_all),
                every=every,
                bytes_per_second=bytes_per_second,
                notice=lambda text: self.messages.append(f"note: {text}"),
                warn=lambda text: self.messages.append(f"warning: {text}"),
            )
        )

    def run(self, snapshots: Snapshots, num_steps: int, *, finishes: bool = False) -> None:
        for _ in range(num_steps):
            run_step(self.source)
            snapshots.after_commit()
        if finishes:
            snapshots.finish(lambda: None)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def queue(resources: ExitStack) -> IoQueue:
    return resources.enter_context(open_queue("threads", notice=pytest.fail))


@pytest.fixture
def machine(tmp_path: Path, queue: IoQueue, resources: ExitStack) -> Machine:
    return Machine(tmp_path, queue, resources)


@pytest.fixture
def target(machine: Machine, queue: IoQueue, resources: ExitStack) -> Store:
    return resources.enter_context(create_store([machine.target_path], queue))


def wait_for(target: Store, step: int) -> None:
    deadline = time.monotonic() + 300
    while target.progress.step != step:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_every_second_step_is_copied(machine: Machine, target: Store) -> None:
    snapshots = machine.begin(target)
    for step in (2, 4, 6):
        machine.run(snapshots, 2)
        wait_for(target, step)
        snapshots.finish(lambda: None)
        check_generation(target, step)
    machine.run(snapshots, 1, finishes=True)
    check_generation(target, 6)
    assert machine.messages == []


@pytest.mark.full
def test_steps_that_are_due_during_a_copy_are_skipped_except_the_last(machine: Machine, target: Store) -> None:
    snapshots = machine.begin(target, bytes_per_second=5 * SLOW)
    machine.run(snapshots, 8)
    assert len({text for text in machine.messages if text.startswith("note: copying a snapshot takes longer")}) == 1
    assert target.progress.step == 0
    snapshots.finish(lambda: None)
    check_generation(target, 8)
    machine.source.begin_step()  # no generation is held now
    machine.source.discard()
    assert machine.source.hold().progress.step == 8


def test_a_snapshot_that_was_due_when_the_run_was_killed_is_made_at_the_start(
    machine: Machine, target: Store, queue: IoQueue
) -> None:
    run_step(machine.source)
    run_step(machine.source)
    snapshots = machine.begin(target)
    snapshots.after_commit()
    snapshots.finish(lambda: None)
    check_generation(target, 2)
    target.close()
    with open_store([machine.target_path], queue) as reopened:
        again = machine.begin(reopened)
        again.after_commit()
        again.finish(lambda: None)
        check_generation(reopened, 2)
        machine.run(again, 2, finishes=True)
        check_generation(reopened, 4)
        again.close()


def test_a_copy_begins_when_no_rank_copies(machine: Machine, target: Store) -> None:
    """Each is asked at each step that is due. When those of one are over, all are."""
    asked: list[tuple[bool, bool]] = []
    answers = iter([(True, False), (False, False), (False, True), (False, False)])

    def of_all(is_busy: bool, is_over: bool) -> tuple[bool, bool]:
        asked.append((is_busy, is_over))
        return next(answers)

    snapshots = machine.begin(target, of_all=of_all)
    machine.run(snapshots, 2)
    assert target.progress.step == 0
    machine.run(snapshots, 2)
    wait_for(target, 4)
    machine.run(snapshots, 4)
    assert asked[0] == (False, False) and asked[3] == (False, True) and len(asked) == 4
    assert target.progress.step == 4
    warnings = [text for text in machine.messages if text.startswith("warning")]
    assert warnings == ["warning: another rank cannot copy to its snapshot; training continues without snapshots"]


def test_what_is_overwritten_is_no_snapshot(machine: Machine, target: Store) -> None:
    snapshots = machine.begin(target)
    machine.run(snapshots, 2, finishes=True)
    machine.run(snapshots, 2, finishes=True)
    assert (target.progress.step, target.step_before) == (4, 2)
    target.forget_before()
    target.begin_step()
    assert (target.progress.step, target.step_before) == (4, None)
    target.discard()


def test_the_import_is_not_copied(machine: Machine, target: Store) -> None:
    snapshots = machine.begin(target, every=1)
    snapshots.after_commit()
    snapshots.finish(lambda: None)
    assert not Store.exists([machine.target_path])


def test_a_run_that_ends_abandons_its_copy_and_keeps_the_snapshot_before(
    machine: Machine, target: Store, queue: IoQueue
) -> None:
    snapshots = machine.begin(target)
    machine.run(snapshots, 2, finishes=True)
    slow = machine.begin(target, bytes_per_second=SLOW)
    machine.run(slow, 2)
    began = time.monotonic()
    slow.close()
    slow.close()
    assert time.monotonic() - began < 60
    target.close()
    with open_store([machine.target_path], queue) as reopened:
        check_generation(reopened, 2)
    assert machine.messages == []


def test_a_signal_during_the_last_copy_ends_the_waiting(machine: Machine, target: Store) -> None:
    snapshots = machine.begin(target, every=1)

    def stop() -> None:
        raise Interrupted(2, "Stopped.")

    machine.run(snapshots, 1)
    with pytest.raises(Interrupted):
        snapshots.finish(stop)
    snapshots.close()


@pytest.mark.parametrize("call", [0, 5])
def test_a_device_that_fails_costs_one_warning(
    machine: Machine, target: Store, resources: ExitStack, queue: IoQueue, call: int
) -> None:
    snapshots = machine.begin(target)
    machine.run(snapshots, 2, finishes=True)
    target.close()
    faulty = resources.enter_context(FaultyQueue(from_call=call, lasting=Fault(error_number=errno.EIO)))
    with open_store([machine.target_path], faulty) as failing:
        snapshots = machine.begin(failing)
        machine.run(snapshots, 2, finishes=True)
        machine.run(snapshots, 4, finishes=True)
        snapshots.close()
    [warning] = machine.messages
    assert warning.startswith("warning: step 4 could not be copied to the snapshot: ")
    assert warning.endswith("; training continues without snapshots")
    check_generation(machine.source, 8)
    with open_store([machine.target_path], queue) as reopened:
        check_generation(reopened, 2)


def test_damage_in_the_store_does_not_reach_the_snapshot(machine: Machine, target: Store, tmp_path: Path) -> None:
    snapshots = machine.begin(target, every=1)
    machine.run(snapshots, 1, finishes=True)
    run_step(machine.source)
    size = (tmp_path / "a" / DATA_FILE_NAME).stat().st_size
    with (tmp_path / "a" / DATA_FILE_NAME).open("r+b") as file:
        file.seek(3 * 4096)
        file.write(bytes(size - 3 * 4096))
    snapshots.after_commit()
    snapshots.finish(lambda: None)
    [warning] = machine.messages
    assert warning.startswith("warning: step 2 could not be copied to the snapshot: block 0, hi16")
    check_generation(target, 1)


def test_without_a_free_slot_only_that_snapshot_is_missing(machine: Machine, target: Store) -> None:
    snapshots = machine.begin(target, every=1)
    run_step(machine.source)
    machine.source.pin()
    run_step(machine.source)
    snapshots.after_commit()
    [warning] = machine.messages
    assert warning.startswith("warning: no snapshot of step 2: step 2 cannot be saved: the store has 3 slots")
    machine.source.unpin(1)
    machine.run(snapshots, 1, finishes=True)
    check_generation(target, 3)


def test_a_bug_in_the_thread_surfaces_in_the_loop(machine: Machine, target: Store) -> None:
    snapshots = machine.begin(target, every=1)
    target.commit_import(machine.source.progress)
    target.begin_step()  # as nobody else may
    run_step(machine.source)
    snapshots.after_commit()
    with pytest.raises(AssertionError):
        snapshots.finish(lambda: None)


def test_a_copy_is_not_faster_than_its_limit(machine: Machine, target: Store) -> None:
    num_bytes = sum(block.num_bytes for block in machine.source.blocks)
    snapshots = machine.begin(target, every=1, bytes_per_second=num_bytes / 0.5)
    began = time.monotonic()
    machine.run(snapshots, 1)
    wait_for(target, 1)
    assert time.monotonic() - began >= 0.5


class HangingBarrier(Barrier):
    """A device that hangs when it makes bytes durable, until `responds` is set. Creation does not hang."""

    def __init__(self) -> None:
        self.hangs = False
        self.responds = Event()
        self.has_begun = Event()

    def sync(self, fd: int) -> None:
        if self.hangs:
            self.has_begun.set()
            self.responds.wait()
        super().sync(fd)


def test_a_device_that_hangs_costs_one_warning(machine: Machine, queue: IoQueue) -> None:
    barrier = HangingBarrier()
    with create_store([machine.target_path], queue, barrier=barrier) as target:
        barrier.hangs = True
        snapshots = machine.begin(target, patience_seconds=0.05)
        machine.run(snapshots, 2)
        assert barrier.has_begun.wait(300)
        started = time.monotonic()
        snapshots.close()
        assert time.monotonic() - started < 60
        assert machine.messages == [
            "warning: the device of the snapshot does not respond; the last complete snapshot remains valid"
        ]
        [thread] = [thread for thread in threading.enumerate() if thread.name == "ratel-snapshot"]
        barrier.responds.set()
        thread.join(300)
        assert target.progress.step == 0  # too late: the store takes no more commits
    run_step(machine.source)
