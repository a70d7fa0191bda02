"""Runs work on a recorded store, simulates a power cut at every event of it, and recovers what each cut leaves.

The work acknowledges what it has committed after each operation. After a cut the store must be whole, with its pins,
and either at the state that was acknowledged last or at the one that the operation in flight leads to.
"""

from __future__ import annotations

import mmap
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratel_cli.errors import IntegrityFailure, RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.schedule.rules import FROZEN
from ratel_cli.store.layout import StoredBlock
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Progress, Store
from tests.store.power import DriveEvent, Files, RecordingDrive, cuts
from tests.store.stores import SMALL_CHUNK, blocks_of, contents, create_store, import_all, progress_of, write_generation

BLOCKS = (*blocks_of((2048, 2048)), StoredBlock(2048, FROZEN.record("bfloat16"), is_frozen=True))
_MEMORY = memoryview(mmap.mmap(-1, 1 << 20))
_CONTINUES_EVERY = 41
"""One of this many recoveries is followed by a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a store holds: its current generation and the pinned ones. `good_steps` is the number of their contents."""

    progress: Progress
    pins: tuple[Progress, ...] = ()


class Driver:
    """Does to a store what a run does. Every step writes contents that were never there before."""

    def __init__(self, store: Store, drive: RecordingDrive) -> None:
        self.store = store
        self._drive = drive
        self._pins: dict[int, Progress] = {}
        self._serial = 0

    @property
    def pinned_steps(self) -> list[int]:
        return sorted(self._pins)

    def step(self) -> None:
        self._serial += 1
        self.store.begin_step()
        write_generation(self.store, self._serial)
        self.store.commit(self._following(contents_number=self._serial))
        self._acknowledge()

    def discard(self) -> None:
        self._serial += 1
        self.store.begin_step()
        if not self.store.overwrites:
            write_generation(self.store, self._serial)
        self.store.discard()

    def skip(self) -> None:
        """Commit a step that was not applied."""
        self._serial += 1
        self.store.commit_progress(self._following(contents_number=self.store.progress.good_steps))
        self._acknowledge()

    def pin(self) -> None:
        self.store.pin()
        self._pins[self.store.progress.step] = self.store.progress
        self._acknowledge()

    def unpin(self, step: int) -> None:
        self.store.unpin(step)
        del self._pins[step]
        self._acknowledge()

    def rewind(self, step: int) -> None:
        self.store.rewind(step)
        self._pins = {pinned: progress for pinned, progress in self._pins.items() if pinned <= step}
        self._acknowledge()

    def walk(self, num_operations: int, seed: int) -> None:
        """Random operations, most of them steps."""
        chance = random.Random(seed)
        for _ in range(num_operations):
            choices = [self.step] * 5 + [self.discard, self.skip]
            if not self.store.overwrites:
                choices += self._with_pins(chance)
            chance.choice(choices)()

    def _with_pins(self, chance: random.Random) -> list[Callable[[], None]]:
        choices: list[Callable[[], None]] = []
        if len(self._pins) + 2 < self.store.num_slots and self.store.progress.step not in self._pins:
            choices += [self.pin] * 3
        if self._pins:
            step = chance.choice(self.pinned_steps)
            choices += [lambda: self.unpin(step), lambda: self.rewind(step)]
        return choices

    def _following(self, *, contents_number: int) -> Progress:
        step = self.store.progress.step + 1
        return Progress(step=step, updates=step, loss_scale=1.0, good_steps=contents_number, tokens=self._serial)

    def _acknowledge(self) -> None:
        pins = tuple(self._pins[step] for step in self.pinned_steps)
        self._drive.acknowledge(Committed(progress=self.store.progress, pins=pins))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the work did to the files of a store."""

    paths: list[Path]
    before: Files
    events: list[DriveEvent]
    in_place: bool


def record(
    directory: Path,
    drive: RecordingDrive,
    work: Callable[[Driver], None],
    *,
    num_slots: int = 2,
    in_place: bool = False,
    store_class: type[Store] = Store,
    chunk_elements: int = SMALL_CHUNK,
) -> Recording:
    """Make a store at step 0, and record what the work does to its files."""
    paths = [directory / "a", directory / "b"]
    with create_store(
        paths,
        drive,
        blocks=BLOCKS,
        num_slots=num_slots,
        in_place=in_place,
        barrier=drive,
        store_class=store_class,
        chunk_elements=chunk_elements,
    ) as store:
        import_all(store)
        before = {path / DATA_FILE_NAME: (path / DATA_FILE_NAME).read_bytes() for path in paths}
        drive.events.clear()
        work(Driver(store, drive))
    return Recording(paths=paths, before=before, events=drive.events, in_place=in_place)


def recover(
    recording: Recording, *, per_event: int, seed: int = 0, seen_as: Callable[[Files], Files] = lambda files: files
) -> int:
    """Recover from every cut. Returns the number of states; the first wrong recovery is an AssertionError.

    `seen_as` changes the files before recovery sees them.
    """
    acknowledged = [Committed(progress=progress_of(0)), *_states(recording.events)]
    num_states = 0
    for cut, left in cuts(recording.before, recording.events, per_event=per_event, seed=seed):
        for file, content in seen_as(left).items():
            file.write_bytes(content)
        last = len(_states(recording.events[:cut]))
        num_states += 1
        check_recovery(
            recording.paths,
            acknowledged[last : last + 2],
            in_place=recording.in_place,
            continues=num_states % _CONTINUES_EVERY == 0,
        )
    return num_states


def check_recovery(paths: list[Path], allowed: Sequence[Committed], *, in_place: bool, continues: bool) -> None:
    """Check a recovery. `allowed`: the state acknowledged last, and that of the operation in flight if there is one."""
    drive = RecordingDrive()
    try:
        store = Store.open(paths, queue=drive, identity=None, barrier=drive)
    except IntegrityFailure as failure:
        assert in_place
        assert f"step {allowed[0].progress.step + 1} was being written in place" in failure.message
        return
    with store:
        candidates = [state for state in allowed if state.progress == store.progress]
        assert candidates, f"{store.progress} was never committed, or is not the newest"
        assert store.pinned_steps in [tuple(pin.step for pin in state.pins) for state in candidates]
        check_contents(store)
        if continues:
            _ensure_whole(store, notice=_reject)
            _do_a_step(store)
        for pinned in reversed(store.pinned_steps):
            store.rewind(pinned)
            assert store.progress in allowed[0].pins or store.progress in allowed[-1].pins
            check_contents(store)


def recover_from_a_lie(recording: Recording, *, per_event: int, verify: bool = True) -> Counter[str]:
    """Recover after a drive that lost confirmed writes. No wrong byte may be used. Returns how often what happened."""
    results: Counter[str] = Counter()
    for _, left in cuts(recording.before, recording.events, per_event=per_event, seed=0):
        for file, content in left.items():
            file.write_bytes(content)
        messages: list[str] = []
        try:
            with Store.open(recording.paths, queue=RecordingDrive(), identity=None) as store:
                if verify:
                    _ensure_whole(store, notice=messages.append)
                check_contents(store)
            results["fell back" if messages else "whole"] += 1
        except RatelError:
            results["rejected"] += 1
    return results


def check_contents(store: Store) -> None:
    """Check every byte of the current generation against the contents that its progress names."""
    for block, num_elements in enumerate(each.num_elements for each in store.blocks):
        for field in store.blocks[block].record.fields:
            memory = _MEMORY[: field.num_bytes(num_elements)]
            store.current().read(block, field.name, 0, num_elements, memory).wait()
            writer = 0 if store.blocks[block].is_frozen else store.progress.good_steps
            wanted = contents(writer, block, field.name, len(memory))
            assert bytes(memory) == wanted, (store.progress, block, field.name)


def _ensure_whole(store: Store, *, notice: Callable[[str], None]) -> None:
    with BufferPool(None) as pool:
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=notice)


def _reject(text: str) -> None:
    raise AssertionError(text)


def _do_a_step(store: Store) -> None:
    step = store.progress.step + 1
    store.begin_step()
    write_generation(store, -step)
    store.commit(replace(store.progress, step=step, good_steps=-step))
    check_contents(store)


def _states(events: Sequence[DriveEvent]) -> list[Committed]:
    return [event.state for event in events if isinstance(event.state, Committed)]
