"""Wrong stores, damaged stores and failing drives: each ends in the documented error and loses no step."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.tickets import Ticket
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.manifest import FORMAT_VERSION
from ratel_cli.store.open import StoreMismatch
from ratel_cli.store.store import Store
from tests.fakes import Fault, FaultyBarrier, FaultyQueue, filled
from tests.store.stores import (
    IDENTITY,
    check_generation,
    create_store,
    edit,
    flip,
    import_all,
    open_store,
    progress_of,
    run_step,
    write_generation,
)


@pytest.fixture
def paths(tmp_path: Path, plain_queue: IoQueue) -> list[Path]:
    """A store of three steps in two directories. Its manifest has generation 4 and is on page 0."""
    made = [tmp_path / "a", tmp_path / "b"]
    with import_all(create_store(made, plain_queue)) as store:
        for _ in range(3):
            run_step(store)
    return made


def are_done(*tickets: Ticket) -> tuple[bool, ...]:
    return tuple(ticket.done for ticket in tickets)


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("model_hash", replace(IDENTITY, model_hash="other")),
        ("config_hash", replace(IDENTITY, config_hash="other")),
        ("data_hash", replace(IDENTITY, data_hash="other")),
        ("seed", replace(IDENTITY, seed=43)),
    ],
)
def test_another_runs_store_is_an_error_by_field(
    paths: list[Path], plain_queue: IoQueue, field: str, wanted: object
) -> None:
    assert isinstance(wanted, type(IDENTITY))
    with pytest.raises(StoreMismatch) as raised:
        open_store(paths, plain_queue, identity=wanted)
    assert raised.value.fields == (field,)
    assert f"changed since the store in {paths[0]} was made: {field} was " in raised.value.message
    assert "\n" not in raised.value.message
    assert "--resume no" in (raised.value.hint or "")


def test_all_fields_that_differ_are_named(paths: list[Path], plain_queue: IoQueue) -> None:
    with pytest.raises(BadInput, match="model_hash") as raised:
        open_store(paths, plain_queue, identity=replace(IDENTITY, model_hash="x", seed=1))
    assert [other.message.split(":")[1] for other in raised.value.others] == [" seed was 42, is now 1"]


def test_other_software_is_a_notice(paths: list[Path], plain_queue: IoQueue) -> None:
    notices: list[str] = []
    with open_store(paths, plain_queue, identity=replace(IDENTITY, software="ratel 2"), notice=notices.append) as store:
        check_generation(store, 3)
    assert notices == ["the software was ratel 1, is now ratel 2: resuming is valid, but not bit-exact"]


def test_without_an_identity_any_store_opens(paths: list[Path], plain_queue: IoQueue) -> None:
    with open_store(paths, plain_queue, identity=None) as store:
        assert store.identity == IDENTITY


def test_a_missing_store_is_an_error(tmp_path: Path, plain_queue: IoQueue) -> None:
    with pytest.raises(BadInput, match="there is no store in"):
        open_store([tmp_path], plain_queue)


def test_swapped_missing_and_mixed_directories(paths: list[Path], tmp_path: Path, plain_queue: IoQueue) -> None:
    for wrong, reason in (
        (paths[::-1], "is file 2 of its store, but is named as file 1"),
        (paths[:1], "names 1 directory, but the store has 2"),
        (paths[1:], "is file 2 of its store, but is named as file 1"),
        ([paths[0], tmp_path / "c"], "there is no store in"),
    ):
        with pytest.raises(BadInput, match=reason):
            open_store(wrong, plain_queue)
    others = [tmp_path / "c", tmp_path / "d"]
    import_all(create_store(others, plain_queue)).close()
    with pytest.raises(BadInput, match="belong to different stores"):
        open_store([paths[0], others[1]], plain_queue)
    three = [tmp_path / "e", tmp_path / "f", tmp_path / "g"]
    import_all(create_store(three, plain_queue)).close()
    with pytest.raises(BadInput, match="is file 3 of its store, but is named as file 2"):
        open_store([three[0], three[2], three[1]], plain_queue)


def test_a_damaged_identification_is_an_error(paths: list[Path], plain_queue: IoQueue) -> None:
    flip(paths[1], 2 * PAGE_BYTES + 20)
    with pytest.raises(BadInput, match="is not a data file of Ratel, or is damaged"):
        open_store(paths, plain_queue)


def test_a_truncated_file_is_an_error(paths: list[Path], plain_queue: IoQueue) -> None:
    size_bytes = (paths[1] / DATA_FILE_NAME).stat().st_size
    os.truncate(paths[1] / DATA_FILE_NAME, size_bytes - 1)
    with pytest.raises(IntegrityFailure, match=f"is truncated: it has {size_bytes - 1} of {size_bytes} bytes"):
        open_store(paths, plain_queue)


def test_an_empty_file_is_an_incomplete_store(paths: list[Path], plain_queue: IoQueue) -> None:
    for path in paths:
        os.truncate(path / DATA_FILE_NAME, 0)
    with pytest.raises(BadInput, match="incomplete"):
        open_store(paths, plain_queue)


def test_another_format_is_an_error(paths: list[Path], plain_queue: IoQueue) -> None:
    page = bytearray((paths[0] / DATA_FILE_NAME).read_bytes()[: PAGE_BYTES - 4])
    page[8:12] = struct.pack("<I", FORMAT_VERSION + 1)
    edit(paths[0], 0, bytes(page) + struct.pack("<I", zlib.crc32(page)))
    with pytest.raises(BadInput, match="format_version: the store has format 6"):
        open_store(paths, plain_queue)
    assert Store.exists(paths)


@pytest.mark.parametrize("offset", [0, 8, 100, 2000, PAGE_BYTES - 1])
def test_a_torn_manifest_falls_back_to_the_one_before(paths: list[Path], plain_queue: IoQueue, offset: int) -> None:
    flip(paths[0], offset)  # generation 4, of step 3
    assert Store.exists(paths)
    notices: list[str] = []
    with open_store(paths, plain_queue, notice=notices.append) as store:
        check_generation(store, 2)
        run_step(store)
        check_generation(store, 3)
    assert [text for text in notices if "resuming from step 2" in text] == notices
    assert len(notices) == 1
    notices.clear()
    with open_store(paths, plain_queue, notice=notices.append) as store:
        check_generation(store, 3)
    assert notices == []


def test_two_torn_manifests_are_an_error(paths: list[Path], plain_queue: IoQueue) -> None:
    flip(paths[0], 100)
    flip(paths[0], PAGE_BYTES + 100)
    with pytest.raises(IntegrityFailure, match="both manifests"):
        open_store(paths, plain_queue)
    with pytest.raises(BadInput, match="there is a store"):
        create_store(paths, plain_queue)
    import_all(create_store(paths, plain_queue, overwrite=True)).close()


def test_a_manifest_that_a_drive_lost_is_noticed(paths: list[Path], plain_queue: IoQueue) -> None:
    first_file = (paths[0] / DATA_FILE_NAME).read_bytes()
    with open_store(paths, plain_queue) as store:
        run_step(store)
        run_step(store)
    edit(paths[0], PAGE_BYTES, first_file[PAGE_BYTES : 2 * PAGE_BYTES])  # generation 5 never arrived, 6 did
    with pytest.raises(IntegrityFailure, match="generations 3 and 6 do not follow each other"):
        open_store(paths, plain_queue)


@pytest.mark.parametrize("fails", ["sync", "write_through"])
@pytest.mark.parametrize("action", ["import", "step"])
def test_a_failed_commit_is_final(tmp_path: Path, plain_queue: IoQueue, fails: str, action: str) -> None:
    barrier = FaultyBarrier()
    with create_store([tmp_path], plain_queue, barrier=barrier, num_slots=3) as store:
        if action == "step":
            import_all(store)
            run_step(store)
            store.begin_step()
            write_generation(store, 2)
        barrier.fails = fails
        before = len(barrier.calls)
        with pytest.raises(IntegrityFailure, match="nothing more is committed") as failure:
            store.commit(progress_of(2)) if action == "step" else store.commit_import(progress_of(0))
        assert isinstance(failure.value.__cause__, OSError)
        assert barrier.calls[before:].count(fails) == 1
        made = len(barrier.calls)
        for call in (store.begin_step, store.pin, store.discard, lambda: store.commit_progress(progress_of(9))):
            with pytest.raises(IntegrityFailure, match="accepts no more commits"):
                call()
        assert len(barrier.calls) == made
    if action == "import":
        assert not Store.exists([tmp_path])
    else:
        with open_store([tmp_path], plain_queue) as store:
            check_generation(store, 1)


def test_a_failed_sync_writes_no_manifest(tmp_path: Path, plain_queue: IoQueue) -> None:
    barrier = FaultyBarrier()
    with import_all(create_store([tmp_path], plain_queue, barrier=barrier)) as store:
        store.begin_step()
        write_generation(store, 1)
        barrier.fails = "sync"
        barrier.calls.clear()
        with pytest.raises(IntegrityFailure):
            store.commit(progress_of(1))
        assert barrier.calls == ["sync"]


def test_a_failed_write_of_a_header_is_an_error(tmp_path: Path, plain_queue: IoQueue) -> None:
    barrier = FaultyBarrier()
    barrier.fails = "write_through"
    with pytest.raises(IntegrityFailure, match="could not be written: Input/output error"):
        create_store([tmp_path], plain_queue, barrier=barrier)
    assert not Store.exists([tmp_path])
    create_store([tmp_path], plain_queue).close()


@pytest.mark.full
def test_every_failing_transfer_leaves_the_last_step(tmp_path: Path) -> None:
    """Each transfer of a step fails in turn. The step is discarded and done again."""
    with FaultyQueue() as sound:
        import_all(create_store([tmp_path], sound)).close()
        before = len(sound.calls)
        with open_store([tmp_path], sound) as store:
            run_step(store)
        calls_of_a_step = len(sound.calls) - before
    assert calls_of_a_step > 10
    for call in range(calls_of_a_step):
        with FaultyQueue({call: Fault(error_number=errno.EIO)}) as faulty, open_store([tmp_path], faulty) as store:
            step = store.progress.step
            with pytest.raises(IntegrityFailure):
                run_step(store)
            store.discard()
            check_generation(store, step)
            run_step(store)
            check_generation(store, step + 1)


@pytest.mark.parametrize("shuffle_seed", [1, 2])
def test_completions_in_any_order(tmp_path: Path, shuffle_seed: int) -> None:
    faults = {
        call: Fault(short_bytes=4096) if call % 2 else Fault(error_number=errno.EAGAIN) for call in range(0, 200, 7)
    }
    with (
        FaultyQueue(faults, shuffle_seed=shuffle_seed, depth=8, request_bytes=8192) as queue,
        import_all(create_store([tmp_path / "a", tmp_path / "b"], queue)) as store,
    ):
        run_step(store)
        check_generation(store, 1)


def test_closing_waits_for_transfers_in_flight(tmp_path: Path, pool: BufferPool) -> None:
    with FaultyQueue() as sound:
        import_all(create_store([tmp_path], sound)).close()
    with FaultyQueue(lasting=Fault(delay_seconds=0.05)) as slow:
        store = open_store([tmp_path], slow)
        store.begin_step()
        written = store.shadow().write(0, "hi16", 0, 2048, filled(pool, bytes(4096)))
        read = store.current().read(0, "hi16", 0, 2048, pool.lease(4096, "test").memory)
        assert are_done(written, read) == (False, False)
        store.close()
        assert are_done(written, read) == (True, True)
        store.close()


def test_a_store_in_place_reports_what_was_lost(tmp_path: Path, plain_queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], plain_queue, in_place=True)) as store:
        run_step(store)
        store.begin_step()
        write_generation(store, 2)
        with pytest.raises(IntegrityFailure, match="step 2 cannot be discarded"):
            store.discard()
    assert Store.exists([tmp_path])
    with pytest.raises(
        IntegrityFailure, match=r"step 2 was being written .* the state after step 1 is lost"
    ) as failure:
        open_store([tmp_path], plain_queue)
    assert "--resume no" in (failure.value.hint or "")
