"""Power cuts at every moment of several steps, and the proof that the exploration finds broken protocols.

Each mutant is a way in which stores are commonly wrong; if the exploration lets one pass, it is the
exploration that is broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import IntegrityFailure, RatelError
from ratel_cli.movement.lock import DATA_FILE_NAME
from ratel_cli.movement.queue import IoQueue, open_queue
from ratel_cli.movement.store import Store
from tests.movement.power import Event, Recorder, files_after_a_cut
from tests.movement.stores import (
    IDENTITY,
    check_generation,
    create_store,
    import_all,
    progress_of,
    run_step,
    write_generation,
)

BLOCK_ELEMENTS = (2048, 4096)
CUTS_PER_EVENT = 4
OTHER = replace(IDENTITY, seed=7)


class NeverSyncs(Recorder):
    """Takes the completion of a write for its durability."""

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.events.pop()


class AcknowledgesEarly(Recorder):
    """Writes the manifest before the data it speaks of is durable."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[Event] = []

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._late.append(self.events.pop())

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, offset, page)
        self.events += self._late
        self._late.clear()


class HasOneManifest(Recorder):
    """Writes every manifest to the same place."""

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, max(4096, offset), page)


class WritesThroughTheCache(Recorder):
    """Leaves the manifest to the drive's cache."""

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        super().write_through(fd, offset, page)
        written = self.events.pop()
        self.events.append(Event(kind="write", path=written.path, offset=written.offset, content=written.content))


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    with open_queue("threads", notice=pytest.fail, depth=2) as opened:
        yield opened


def explore(
    tmp_path: Path,
    queue: IoQueue,
    recorder: Recorder,
    work: Callable[[Store, Recorder], None],
    *,
    num_slots: int = 2,
    in_place: bool = False,
    cuts_per_event: int = CUTS_PER_EVENT,
) -> int:
    """Record the work on a new store, cut the power at every event of it, and recover. Returns the number of cuts."""
    paths = [tmp_path / "a", tmp_path / "b"]
    files = [path / DATA_FILE_NAME for path in paths]
    with create_store(
        paths, recorder, block_elements=BLOCK_ELEMENTS, num_slots=num_slots, in_place=in_place, barrier=recorder
    ) as store:
        import_all(store)
        before = {file: file.read_bytes() for file in files}
        recorder.events.clear()
        work(store, recorder)
    chance = random.Random(0)
    num_cuts = 0
    for cut in range(len(recorder.events) + 1):
        acknowledged = max((event.step for event in recorder.events[:cut]), default=0)
        for _ in range(cuts_per_event):
            num_cuts += 1
            for file, content in files_after_a_cut(before, recorder.events, cut, chance).items():
                file.write_bytes(content)
            check_recovery(paths, queue, acknowledged, in_place=in_place)
    return num_cuts


def check_recovery(paths: list[Path], queue: IoQueue, acknowledged: int, *, in_place: bool) -> None:
    with ExitStack() as stack:
        lost = ""
        try:
            store = stack.enter_context(Store.open(paths, queue=queue, identity=None))
        except IntegrityFailure as failure:
            lost = failure.message
        if lost:
            assert in_place
            assert f"step {acknowledged + 1} was being written in place" in lost
            return
        assert store.progress.step in (acknowledged, acknowledged + 1)
        check_generation(store, store.progress.step)
        for pinned in reversed(store.pinned_steps):
            store.rewind(pinned)
            check_generation(store, pinned)


def three_steps(store: Store, recorder: Recorder) -> None:
    for _ in range(3):
        run_step(store)
        recorder.acknowledge(store.progress.step)


def steps_with_everything(store: Store, recorder: Recorder) -> None:
    """Pins, a discarded step, a rewind's worth of manifests without data."""
    run_step(store)
    recorder.acknowledge(1)
    store.pin()
    store.begin_step()
    write_generation(store, 77)
    store.discard()
    run_step(store)
    recorder.acknowledge(2)
    store.pin()
    store.unpin(1)
    for _ in range(2):
        run_step(store)
        recorder.acknowledge(store.progress.step)
    store.commit_progress(progress_of(4))


def test_nothing_is_lost(tmp_path: Path, queue: IoQueue) -> None:
    assert explore(tmp_path, queue, Recorder(), three_steps) > 200


def test_nothing_is_lost_with_pins(tmp_path: Path, queue: IoQueue) -> None:
    assert explore(tmp_path, queue, Recorder(), steps_with_everything, num_slots=4, cuts_per_event=3) > 150


def test_in_place_is_whole_or_says_so(tmp_path: Path, queue: IoQueue) -> None:
    assert explore(tmp_path, queue, Recorder(), three_steps, in_place=True) > 200


def test_replacing_a_store_leaves_one_or_none(tmp_path: Path, queue: IoQueue) -> None:
    """Until the new import is committed the place holds the old store, whole, or counts as empty."""
    paths = [tmp_path / "a", tmp_path / "b"]
    files = [path / DATA_FILE_NAME for path in paths]
    with import_all(create_store(paths, queue, block_elements=BLOCK_ELEMENTS)) as store:
        run_step(store)
        run_step(store)
    before = {file: file.read_bytes() for file in files}
    recorder = Recorder()
    with create_store(
        paths, recorder, block_elements=BLOCK_ELEMENTS, barrier=recorder, overwrite=True, identity=OTHER
    ) as store:
        import_all(store)
        recorder.acknowledge(0)
    recorder.events = [event for event in recorder.events if event.path not in paths]  # syncs of directories
    chance = random.Random(0)
    found: set[str] = set()
    for cut in range(len(recorder.events) + 1):
        for _ in range(CUTS_PER_EVENT):
            for file, content in files_after_a_cut(before, recorder.events, cut, chance).items():
                file.write_bytes(content)
            if not Store.exists(paths):
                found.add("none")
                continue
            with Store.open(paths, queue=queue, identity=None) as store:
                is_old = store.identity == IDENTITY
                found.add("old" if is_old else "new")
                check_generation(store, store.progress.step)
                assert store.progress.step in ((1, 2) if is_old else (0,))
        assert cut < len(recorder.events) or "new" in found
    assert found == {"old", "none", "new"}


@pytest.mark.parametrize("mutant", [NeverSyncs, AcknowledgesEarly, HasOneManifest, WritesThroughTheCache])
def test_broken_protocols_are_found(tmp_path: Path, queue: IoQueue, mutant: type[Recorder]) -> None:
    with pytest.raises((AssertionError, RatelError)):
        explore(tmp_path, queue, mutant(), three_steps)
