"""Power cuts at every moment of steps that several ranks commit together: of all machines at once, or of one of them.

Ranks are threads with a store each, and all that they do to their files is recorded in one order. After a cut every
store is opened, and all go on from one step, whose contents are right: the newest one whose commit any rank had seen
the end of, or the one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ratel_cli.engine.ranks.commits import commit_progress_together, commit_together, resume_together
from ratel_cli.engine.ranks.ranks import Channel, Ranks
from ratel_cli.io.buffers import BufferPool
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Progress, Store
from tests.fakes import directory_in_memory
from tests.ranks.threads import together
from tests.store.power import DriveEvent, Files, RecordingDrive, cuts
from tests.store.stores import contents, create_store, import_all, progress_of, write_generation
from tests.tiers import rotating

NUM_STEPS, SKIPPED = 4, 3
"""Steps, and the one that is not applied."""
STATES = [(2, 1), pytest.param(2, 4, marks=pytest.mark.nightly), pytest.param(3, 4, marks=pytest.mark.full)]
"""The number of ranks, and after how many states of the files for each event they go on."""
Commit = Callable[[Store, Ranks, Progress], None]


class Committed(NamedTuple):
    """A rank has seen the end of a commit."""

    step: int


class Entered(NamedTuple):
    """A rank has come to a meeting."""

    rank: int


class SharedDrive(RecordingDrive):
    """Records into a list that several have."""

    def __init__(self, events: list[DriveEvent]) -> None:
        super().__init__()
        self.events = events


@dataclass(frozen=True, slots=True)
class NotingChannel:
    """Notes when its rank comes to a swap."""

    channel: Channel
    drive: RecordingDrive
    rank: int

    def swap(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        """See Channel."""
        self.drive.acknowledge(Entered(self.rank))
        self.channel.swap(send, receive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the ranks did to their files."""

    size: int
    directory: Path
    before: Files
    events: list[DriveEvent]

    def path(self, rank: int) -> Path:
        return self.directory / str(rank)


def record(directory: Path, size: int, *, commit: Commit = commit_together) -> Recording:
    """Some steps of so many ranks, one of which is not applied."""
    events: list[DriveEvent] = []
    before: Files = {}
    drives = [SharedDrive(events) for _ in range(size)]
    stores = []
    for rank, drive in enumerate(drives):
        path = directory / str(rank)
        path.mkdir()
        stores.append(import_all(create_store([path], drive, barrier=drive)))
        before[path / DATA_FILE_NAME] = (path / DATA_FILE_NAME).read_bytes()
    events.clear()

    def train(ranks: Ranks) -> None:
        store, drive = stores[ranks.rank], drives[ranks.rank]
        noting = replace(ranks, control=NotingChannel(ranks.control, drive, ranks.rank))
        for step in range(1, NUM_STEPS + 1):
            if step == SKIPPED:
                commit_progress_together(store, noting, progress_of(step))
            else:
                store.begin_step()
                write_generation(store, step)
                commit(store, noting, progress_of(step))
            drive.acknowledge(Committed(step))

    assert together(size, train) == [None] * size
    for store in stores:
        store.close()
    return Recording(size=size, directory=directory, before=before, events=events)


def of_all_machines(recording: Recording, *, per_event: int) -> Iterator[tuple[int, Files]]:
    """The number of events before the cut, and the files after it."""
    yield from cuts(recording.before, recording.events, per_event=per_event, seed=0)


def of_one_machine(recording: Recording, rank: int, *, per_event: int) -> Iterator[tuple[int, Files]]:
    """The others go on until they come to a meeting that this one has not come to."""
    own = [event for event in recording.events if rank_of(event, recording) == rank]
    places = [number for number, event in enumerate(recording.events) if rank_of(event, recording) == rank]
    path = recording.path(rank) / DATA_FILE_NAME
    for cut, files in cuts({path: recording.before[path]}, own, per_event=per_event, seed=rank):
        met = sum(event.state == Entered(rank) for event in own[:cut])
        left = list(others_go_on(recording, rank, met))
        until = max([0, *(number + 1 for number, _ in left)])
        after = dict(recording.before)
        for _, event in left:
            apply(after, event)
        seen = [*places[:cut], *(number for number, _ in left)]
        yield max([until, *(number + 1 for number in seen)]), {**after, **files}


def others_go_on(recording: Recording, rank: int, met: int) -> Iterator[tuple[int, DriveEvent]]:
    """Events of the other ranks before they wait for `rank`, which has come to `met` meetings."""
    entered = dict.fromkeys(range(recording.size), 0)
    for number, event in enumerate(recording.events):
        of = rank_of(event, recording)
        if of is None or of == rank or entered[of] > met:
            continue
        if event.state == Entered(of):
            entered[of] += 1
        yield number, event


def rank_of(event: DriveEvent, recording: Recording) -> int | None:
    if isinstance(event.state, Entered):
        return event.state.rank
    return None if event.state is not None else int(event.path.parent.name)


def apply(files: Files, event: DriveEvent) -> None:
    if event.content:
        content = bytearray(files[event.path])
        content[event.offset : event.offset + len(event.content)] = event.content
        files[event.path] = bytes(content)


def check_contents(store: Store, step: int) -> None:
    """Check every byte of the current generation against those of `step`."""
    for block, stored in enumerate(store.blocks):
        for field in stored.record.fields:
            memory = memoryview(bytearray(field.num_bytes(stored.num_elements)))
            store.current().read(block, field.name, 0, stored.num_elements, memory).wait()
            assert bytes(memory) == contents(step, block, field.name, len(memory)), (step, block, field.name)


def recover(recording: Recording, found: Iterator[tuple[int, Files]]) -> int:
    """Go on after each cut. Returns how many there were; the first that is wrong is an AssertionError."""
    num_states = 0
    for cut, files in found:
        num_states += 1
        for path, content in files.items():
            path.write_bytes(content)
        states = [event.state for event in recording.events[:cut]]
        newest = max([0, *(state.step for state in states if isinstance(state, Committed))])

        def resume(ranks: Ranks) -> int:
            with (
                closing(RecordingDrive()) as drive,
                BufferPool(None) as pool,
                Store.open([recording.path(ranks.rank)], queue=drive, identity=None, barrier=drive) as store,
            ):
                store.ensure_whole(pool, progress=lambda num_bytes: None, notice=lambda text: None)
                resume_together(store, ranks, pool)
                step = store.progress.step
                check_contents(store, step - 1 if step == SKIPPED else step)
                return step

        steps: list[Any] = together(recording.size, resume)
        assert steps in ([newest] * recording.size, [newest + 1] * recording.size), (cut, newest, steps)
    return num_states


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with directory_in_memory(tmp_path) as found:
        yield found


@pytest.mark.parametrize(("size", "per_event"), STATES)
def test_a_power_cut_of_all_machines(directory: Path, size: int, per_event: int) -> None:
    recording = record(directory, size)
    assert recover(recording, of_all_machines(recording, per_event=per_event)) > 25 * per_event


@pytest.mark.parametrize(("rank", "per_event"), rotating([0, 1], [2, 6], every=2, full_rotation=True))
def test_a_power_cut_of_one_machine(directory: Path, rank: int, per_event: int) -> None:
    recording = record(directory, 2)
    assert recover(recording, of_one_machine(recording, rank, per_event=per_event)) > 10 * per_event


def test_an_overwrite_before_all_have_committed_is_found(directory: Path) -> None:
    """Without a meeting one machine may be two steps ahead of another."""

    def hasty(store: Store, ranks: Ranks, progress: Progress) -> None:
        store.commit(progress)

    recording = record(directory, 2, commit=hasty)
    found = chain.from_iterable(of_one_machine(recording, rank, per_event=6) for rank in range(2))
    with pytest.raises(AssertionError):
        recover(recording, found)
