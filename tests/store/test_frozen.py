"""Blocks that never change: written once, checked like all others, shared by every generation and by snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.schedule.rules import FROZEN
from ratel_cli.store.fill import Copied, fill
from ratel_cli.store.layout import HEADER_BYTES, Field, Record, StoredBlock
from ratel_cli.store.lock import DATA_FILE_NAME
from tests.fakes import filled
from tests.store.stores import (
    MIXED,
    blocks_of,
    check_generation,
    contents,
    create_store,
    flip,
    import_all,
    open_store,
    progress_of,
    run_step,
    write_generation,
)

FROZEN_BYTES = 4096 * 2 + 2048 * 4
"""Of the records of the frozen blocks in `MIXED`."""


def test_steps_leave_them_as_they_were_imported(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, blocks=MIXED, num_slots=3)) as store:
        assert (
            store.frozen_bytes == FROZEN_BYTES + 4096
            and store.generation_bytes == store.frozen_bytes + store.slot_bytes
        )
        assert store.nvme_bytes == HEADER_BYTES + store.frozen_bytes + 3 * store.slot_bytes
        file = tmp_path / DATA_FILE_NAME
        region = slice(HEADER_BYTES, HEADER_BYTES + store.frozen_bytes)
        before = file.read_bytes()[region]
        assert before.startswith(contents(0, 2, "frozen", 8192))
        for step in (1, 2, 3):
            run_step(store)
            check_generation(store, step)
        assert file.read_bytes()[region] == before
    with open_store([tmp_path], queue) as store:
        assert store.blocks == MIXED
        check_generation(store, 3)


def test_a_step_that_writes_one_is_a_bug(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with import_all(create_store([tmp_path], queue, blocks=MIXED)) as store:
        store.begin_step()
        with pytest.raises(AssertionError, match="does not write frozen blocks"):
            store.shadow().write(2, "frozen", 0, 4096, filled(pool, bytes(8192)))


def test_what_was_not_imported_is_zero(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with create_store([tmp_path], queue, blocks=MIXED) as store:
        store.commit_import(progress_of(0))
    with open_store([tmp_path], queue) as store:
        memory = pool.lease(8192, "test").memory
        store.current().read(2, "frozen", 0, 4096, memory).wait()
        assert memory == bytes(8192)
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (5000, "block 2, frozen: elements 2048 to 4096 are not what the import wrote"),
        (FROZEN_BYTES + 9, "frozen blocks: the checksum table is damaged"),
    ],
)
def test_damage_leaves_no_generation_to_fall_back_on(
    tmp_path: Path, queue: IoQueue, pool: BufferPool, offset: int, message: str
) -> None:
    with import_all(create_store([tmp_path], queue, blocks=MIXED)) as store:
        run_step(store)
    flip(tmp_path, HEADER_BYTES + offset)
    with open_store([tmp_path], queue) as store, pytest.raises(IntegrityFailure, match=message):
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


def test_those_of_another_store_do_not_pass(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    for name in ("a", "b"):
        import_all(create_store([tmp_path / name], queue, blocks=MIXED)).close()
    ours, theirs = (bytearray((tmp_path / name / DATA_FILE_NAME).read_bytes()) for name in ("a", "b"))
    region = slice(HEADER_BYTES, HEADER_BYTES + FROZEN_BYTES + 4096)
    assert ours[region] != theirs[region]  # the tables differ, the records do not
    ours[region] = theirs[region]
    (tmp_path / "a" / DATA_FILE_NAME).write_bytes(ours)
    with open_store([tmp_path / "a"], queue) as store, pytest.raises(IntegrityFailure, match="frozen blocks"):
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


def test_a_copy_has_them_once(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    """The first copy into a new store brings them; later ones move what is trained alone."""
    copied: list[int] = []
    with (
        import_all(create_store([tmp_path / "a"], queue, blocks=MIXED)) as source,
        create_store([tmp_path / "b"], queue, blocks=MIXED) as target,
    ):
        fill(target, Copied(source.current()), pool, progress=copied.append)
        trained_bytes = sum(block.num_bytes for block in MIXED if not block.is_frozen)
        assert sum(copied) == trained_bytes + FROZEN_BYTES
        run_step(source)
        copied.clear()
        fill(target, Copied(source.current()), pool, progress=copied.append)
        assert sum(copied) == trained_bytes
    with open_store([tmp_path / "b"], queue) as target:
        check_generation(target, 1)
        target.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


def test_a_store_of_frozen_blocks_alone(tmp_path: Path, queue: IoQueue) -> None:
    blocks = (StoredBlock(2048, FROZEN.record("float16"), is_frozen=True),)
    with import_all(create_store([tmp_path], queue, blocks=blocks)) as store:
        run_step(store)
        check_generation(store, 1)


def test_fields_with_one_value_for_many_elements(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    """As rules with moments of 8 bits have: what does not fill a page takes one."""
    record = Record((Field("w", "bfloat16"), Field("m", "uint8"), Field("scales", "float32", 256)))
    chunk = 1 << 18
    blocks = (StoredBlock(2048, record), *blocks_of((2048,)), StoredBlock(2 * chunk + 2048, record))
    with create_store([tmp_path], queue, blocks=blocks, chunk_elements=chunk) as store:
        for index, block in enumerate(blocks):
            for field in block.record.fields:
                whole = filled(pool, contents(0, index, field.name, field.num_bytes(block.num_elements)))
                for start in range(0, block.num_elements, chunk):
                    stop = min(start + chunk, block.num_elements)
                    part = whole[field.offset(start) :][: field.num_bytes(stop - start)]
                    store.shadow().write(index, field.name, start, stop, part).wait()
        store.commit_import(progress_of(0))
    with open_store([tmp_path], queue) as store:
        check_generation(store, 0)
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


def test_what_is_staged_counts_once_it_is_published(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, blocks=MIXED)) as store:
        store.begin_step()
        write_generation(store, store.progress.step + 1)
        staged = store.stage(progress_of(1))
        check_generation(store, 0)
        with pytest.raises(AssertionError):
            store.pin()
        with pytest.raises(AssertionError):
            store.begin_step()
        store.publish(staged)
        check_generation(store, 1)
        with pytest.raises(AssertionError):
            store.publish(staged)
    with open_store([tmp_path], queue) as store:
        check_generation(store, 1)


def test_what_is_staged_may_be_dropped(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, blocks=MIXED)) as store:
        store.begin_step()
        write_generation(store, store.progress.step + 1)
        store.stage(progress_of(1))
        store.discard()
        run_step(store)
        check_generation(store, 1)
        store.begin_step()
        write_generation(store, store.progress.step + 1)
        store.stage(progress_of(2))
    with open_store([tmp_path], queue) as store:  # the process ended between `stage` and `publish`
        check_generation(store, 1)
