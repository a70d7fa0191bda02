"""Power cuts at every moment of a store's life, and the proof that they find broken protocols.

The walks alone meet 20,000 different states of the files, those of the short tier 1,000 of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import IntegrityFailure, RatelError
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Store
from tests.fakes import directory_in_memory
from tests.store.exploration import (
    BLOCKS,
    Driver,
    check_contents,
    record,
    recover,
    recover_from_a_lie,
)
from tests.store.mutants import DRIVES, STORES, NeverSyncs, SyncsAgain, SyncsOnlyTheFirstFile, without_crc_check
from tests.store.power import FailsToSync, RecordingDrive, cuts
from tests.store.stores import IDENTITY, create_store, import_all
from tests.tiers import thinned

NUM_WALKS = 8
STATES_PER_WALK = 20_000 // NUM_WALKS
NUM_SHORT_WALKS = 4
STATES_PER_SHORT_WALK = 1_000 // NUM_SHORT_WALKS
WALKS = [
    *thinned((pytest.param(seed, 2, STATES_PER_SHORT_WALK) for seed in range(NUM_SHORT_WALKS)), every=2),
    *(pytest.param(seed, 16, STATES_PER_WALK, marks=pytest.mark.nightly) for seed in range(NUM_WALKS)),
]
OTHER = replace(IDENTITY, seed=7)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with directory_in_memory(tmp_path) as found:
        yield found


def three_steps(driver: Driver) -> None:
    for _ in range(3):
        driver.step()


def steps_with_pins(driver: Driver) -> None:
    """Reuses each slot while another one is pinned."""
    driver.step()
    driver.pin()
    three_steps(driver)
    driver.rewind(1)
    driver.step()
    driver.unpin(1)
    driver.step()


@pytest.mark.parametrize(("seed", "per_event", "num_states"), WALKS)
def test_nothing_is_lost(directory: Path, seed: int, per_event: int, num_states: int) -> None:
    recording = record(directory, RecordingDrive(), lambda driver: driver.walk(32, seed), num_slots=2 + seed % 4)
    assert recover(recording, per_event=per_event, seed=seed) >= num_states


def test_a_store_in_place_is_whole_or_reports_its_loss(directory: Path) -> None:
    recording = record(directory, RecordingDrive(), lambda driver: driver.walk(12, 0), in_place=True)
    assert recover(recording, per_event=8) > 500


@pytest.mark.parametrize("first_failing", range(1, 8))
def test_a_failed_sync_loses_no_step(directory: Path, first_failing: int) -> None:
    """Two files and three steps make six syncs. A failed one ends the run, and its step never counts."""

    def until_it_fails(driver: Driver) -> None:
        with suppress(IntegrityFailure):
            three_steps(driver)
            assert first_failing == 7
            return
        assert driver.store.progress.step == (first_failing - 1) // 2
        with pytest.raises(IntegrityFailure, match="accepts no more commits"):
            driver.step()

    drive = FailsToSync(first_failing=first_failing + 4)  # two are for directories, two for the import
    assert recover(record(directory, drive, until_it_fails), per_event=4) > 30


def cut_creations(directory: Path, *, over_another: bool) -> Iterator[list[Path]]:
    """Make and fill a store, over nothing or over an older store. Yields the directories after each cut."""
    paths = [directory / "a", directory / "b"]
    files = [path / DATA_FILE_NAME for path in paths]
    if over_another:
        old = RecordingDrive()
        with import_all(create_store(paths, old, blocks=BLOCKS, barrier=old)) as store:
            driver = Driver(store, old)
            driver.step()
            driver.step()
        before = {file: file.read_bytes() for file in files}
    drive = RecordingDrive()
    with create_store(paths, drive, blocks=BLOCKS, barrier=drive, overwrite=over_another, identity=OTHER) as store:
        import_all(store)
    if not over_another:
        before = {file: bytes(file.stat().st_size) for file in files}
    for _, left in cuts(before, drive.events, per_event=24, seed=0):
        for file, content in left.items():
            file.write_bytes(content)
        yield paths


@pytest.mark.parametrize("over_another", [False, True])
def test_a_new_store_is_whole_or_not_there(directory: Path, over_another: bool) -> None:
    """Until the import is committed, the directories hold the whole old store or count as empty."""
    found: list[str] = []
    for paths in cut_creations(directory, over_another=over_another):
        if not Store.exists(paths):
            found.append("none")
            continue
        drive = RecordingDrive()
        with Store.open(paths, queue=drive, identity=None, barrier=drive) as store:
            is_old = store.identity == IDENTITY
            found.append("old" if is_old else "new")
            assert store.progress.step in ((1, 2) if is_old else (0,))
            check_contents(store)
    assert set(found) == ({"old", "none", "new"} if over_another else {"none", "new"})
    assert found[-1] == "new"
    assert len(found) > 250


@pytest.mark.parametrize("mutant", DRIVES)
def test_broken_protocols_are_found(directory: Path, mutant: type[RecordingDrive]) -> None:
    recording = record(directory, mutant(), three_steps)
    with pytest.raises((AssertionError, RatelError)):
        recover(recording, per_event=16)


@pytest.mark.full
@pytest.mark.parametrize("mutant", STORES)
def test_stores_that_write_to_the_wrong_slot_are_found(directory: Path, mutant: type[Store]) -> None:
    recording = record(directory, RecordingDrive(), steps_with_pins, num_slots=4, store_class=mutant)
    with pytest.raises((AssertionError, RatelError)):
        recover(recording, per_event=16)


def test_a_recovery_that_accepts_torn_manifests_is_found(directory: Path) -> None:
    recording = record(directory, RecordingDrive(), three_steps)
    with pytest.raises((AssertionError, RatelError)):
        recover(recording, per_event=16, seen_as=without_crc_check)


@pytest.mark.full
def test_the_real_protocol_passes_where_mutants_fail(directory: Path) -> None:
    """The same work and the same cuts: what the tests find is the mutation."""
    assert recover(record(directory, RecordingDrive(), three_steps), per_event=16) > 300
    assert recover(record(directory / "pins", RecordingDrive(), steps_with_pins, num_slots=4), per_event=16) > 600


@pytest.mark.full
@pytest.mark.parametrize("lie", [NeverSyncs, SyncsOnlyTheFirstFile, SyncsAgain])
def test_a_drive_that_loses_confirmed_writes_is_noticed(directory: Path, lie: type[RecordingDrive]) -> None:
    """A manifest may refer to bytes that never arrived. They are not used; the step before is, if it is whole."""
    results = recover_from_a_lie(record(directory, lie(), three_steps), per_event=16)
    assert results["whole"] > 10
    assert results["fell back"] > 5


def test_without_checksums_wrong_bytes_would_be_used(directory: Path) -> None:
    recording = record(directory, NeverSyncs(), three_steps, chunk_elements=0)
    with pytest.raises(AssertionError):
        recover_from_a_lie(recording, per_event=16, verify=False)
