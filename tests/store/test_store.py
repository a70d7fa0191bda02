"""The store in ordinary use: generations, slots, pins, progress, and calls that it rejects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.io.striped_files import native_stripes
from ratel_cli.io.striping import StripeMap
from ratel_cli.schedule.rules import ADAMW
from ratel_cli.sizes import PAGE_BYTES, DtypeName
from ratel_cli.store.layout import HEADER_BYTES, StoredBlock
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Store
from tests.fakes import filled
from tests.store.stores import (
    BLOCK_ELEMENTS,
    IDENTITY,
    STRIPE_BYTES,
    check_generation,
    contents,
    create_store,
    import_all,
    open_store,
    progress_of,
    run_step,
    write_generation,
)


def drives(tmp_path: Path, num_directories: int) -> list[Path]:
    return [tmp_path / f"drive{index}" / "store" for index in range(num_directories)]


def logical_bytes(paths: list[Path], num_bytes: int, weights: tuple[int, ...] | None = None) -> bytes:
    """The logical bytes, put together from the files."""
    stripes = StripeMap(shares=weights or (1,) * len(paths), stripe_bytes=STRIPE_BYTES, header_bytes=HEADER_BYTES)
    files = [(path / DATA_FILE_NAME).read_bytes() for path in paths]
    assert tuple(map(len, files)) == stripes.file_bytes(num_bytes)
    ranges = native_stripes(stripes).ranges(0, num_bytes)
    return b"".join(files[file_index][offset : offset + length] for file_index, offset, length in ranges)


def check_pinned(store: Store, *steps: int) -> None:
    assert store.pinned_steps == steps


@pytest.mark.parametrize("weights", [(3,), (2, 1), (1, 3), (3, 1, 2)])
def test_files_get_their_shares_of_the_stripes(tmp_path: Path, queue: IoQueue, weights: tuple[int, ...]) -> None:
    paths = drives(tmp_path, len(weights))
    with import_all(create_store(paths, queue, weights=weights)) as store:
        run_step(store)
        check_generation(store, 1)
        slot_bytes = store.slot_bytes
    with open_store(paths, queue) as store:
        check_generation(store, 1)
        run_step(store)
        check_generation(store, 2)
    first_field = contents(2, 0, "hi16", BLOCK_ELEMENTS[0] * 2)
    assert logical_bytes(paths, 2 * slot_bytes, weights).startswith(first_field)


@pytest.mark.parametrize("num_directories", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_generations_are_read_as_written(
    tmp_path: Path, queue: IoQueue, dtype: DtypeName, num_directories: int
) -> None:
    paths = drives(tmp_path, num_directories)
    with import_all(create_store(paths, queue, dtype=dtype)) as store:
        check_generation(store, 0)
        for step in (1, 2, 3):
            run_step(store)
            check_generation(store, step)
        slot_bytes = store.slot_bytes
        assert store.nvme_bytes == sum((path / DATA_FILE_NAME).stat().st_size for path in paths)
    with open_store(paths, queue) as store:
        assert store.identity == IDENTITY
        assert store.blocks == tuple(StoredBlock(number, ADAMW.record(dtype)) for number in BLOCK_ELEMENTS)
        check_generation(store, 3)
        run_step(store)
    whole = logical_bytes(paths, 2 * slot_bytes)
    for slot, step in ((0, 4), (1, 3)):
        position = slot * slot_bytes
        for block, num_elements in enumerate(BLOCK_ELEMENTS):
            for field in store.blocks[block].record.fields:
                expected = contents(step, block, field.name, field.num_bytes(num_elements))
                assert whole[position : position + len(expected)] == expected
                position += len(expected)


def test_any_range_of_chunks_is_read(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with import_all(create_store(drives(tmp_path, 2), queue)) as store:
        whole = contents(0, 3, "m32", 6144 * 4)
        for start, stop in [(0, 0), (0, 2048), (2048, 6144), (6144, 6144)]:
            memory = pool.lease((stop - start) * 4, "test").memory
            store.current().read(3, "m32", start, stop, memory).wait()
            assert memory == whole[start * 4 : stop * 4]


def test_what_was_not_imported_is_zero(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with create_store([tmp_path], queue) as store:
        store.shadow().write(0, "hi16", 2048, 4096, filled(pool, b"\1" * 4096)).wait()
        store.commit_import(progress_of(0))
        memory = pool.lease(8192, "test").memory
        store.current().read(0, "hi16", 0, 4096, memory).wait()
        assert memory == bytes(4096) + b"\1" * 4096
        store.current().read(3, "hi16", 0, 4096, memory).wait()
        assert memory == bytes(8192)


def test_both_engines_write_the_same_files(tmp_path: Path) -> None:
    contents_of: list[list[bytes]] = []
    for engine in ("auto", "threads"):
        paths = [tmp_path / engine / "a", tmp_path / engine / "b"]
        with open_queue("threads" if engine == "threads" else "auto", notice=lambda _: None) as queue:
            # Without checksums, whose seeds depend on the random store id.
            with import_all(create_store(paths, queue, chunk_elements=0)) as store:
                run_step(store)
            contents_of.append([(path / DATA_FILE_NAME).read_bytes()[HEADER_BYTES:] for path in paths])
    assert contents_of[0] == contents_of[1]


@pytest.mark.parametrize("block_elements", [(), (0,), (2048,), (0, 2048, 0)])
def test_blocks_of_any_size(tmp_path: Path, queue: IoQueue, block_elements: tuple[int, ...]) -> None:
    with import_all(create_store([tmp_path], queue, block_elements=block_elements)) as store:
        run_step(store)
    with open_store([tmp_path], queue) as store:
        check_generation(store, 1)


def test_every_byte_is_written_when_the_store_is_made(tmp_path: Path, queue: IoQueue) -> None:
    paths = drives(tmp_path, 3)
    written: list[int] = []
    with create_store(paths, queue, num_slots=3, stripe_bytes=4 << 20, progress=written.append) as store:
        assert store.nvme_bytes == 3 * store.slot_bytes + 3 * HEADER_BYTES
        assert sum(written) == 3 * store.slot_bytes
        assert sum((path / DATA_FILE_NAME).stat().st_blocks * 512 for path in paths) >= store.nvme_bytes


def test_a_discarded_step_leaves_no_trace(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue)) as store:
        store.begin_step()
        write_generation(store, 99)
        store.discard()
        check_generation(store, 0)
        run_step(store)
        check_generation(store, 1)
        store.begin_step()
        store.discard()
    with open_store([tmp_path], queue) as store:
        check_generation(store, 1)


def test_reads_during_a_step_see_the_step_before(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue)) as store:
        store.begin_step()
        write_generation(store, 1)
        check_generation(store, 0)
        store.commit(progress_of(1))
        check_generation(store, 1)


def test_a_step_that_is_not_applied_changes_only_the_progress(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    skipped = replace(progress_of(1), updates=0, loss_scale=0.5)
    with import_all(create_store([tmp_path], queue)) as store:
        written_bytes = queue.written_bytes
        store.commit_progress(skipped)
        assert queue.written_bytes == written_bytes
    with open_store([tmp_path], queue) as store:
        assert store.progress == skipped
        memory = pool.lease(8192, "test").memory
        store.current().read(0, "hi16", 0, 4096, memory).wait()
        assert memory == contents(0, 0, "hi16", 8192)


def test_a_step_writes_each_byte_once(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store(drives(tmp_path, 2), queue)) as store:
        before = queue.written_bytes
        run_step(store)
        assert queue.written_bytes - before == store.slot_bytes == 12 * sum(BLOCK_ELEMENTS) + PAGE_BYTES


def test_pinned_generations_are_not_overwritten(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=4)) as store:
        run_step(store)
        store.pin()
        store.pin()  # a second time changes nothing
        for _ in range(3):
            run_step(store)
        store.pin()
        check_pinned(store, 1, 4)
        for _ in range(4):
            run_step(store)
    with open_store([tmp_path], queue) as store:
        check_pinned(store, 1, 4)
        check_generation(store, 8)
        run_step(store)
        store.rewind(4)
        check_generation(store, 4)
        check_pinned(store, 1, 4)
        run_step(store)
        check_generation(store, 5)
        store.rewind(1)
        check_pinned(store, 1)
    with open_store([tmp_path], queue) as store:
        check_generation(store, 1)
        store.unpin(1)
        check_pinned(store)
        run_step(store)
        check_generation(store, 2)


def test_a_pin_in_the_middle_of_a_step(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=3)) as store:
        store.begin_step()
        store.pin()
        write_generation(store, 1)
        store.commit(progress_of(1))
        run_step(store)
        check_generation(store, 2)
        store.rewind(0)
        check_generation(store, 0)


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_pins_leave_two_slots_for_steps(tmp_path: Path, queue: IoQueue, num_slots: int) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=num_slots)) as store:
        for step in range(num_slots - 2):
            store.pin()
            run_step(store)
            check_generation(store, step + 1)
        with pytest.raises(EnvironmentFailure, match=f"the store has {num_slots} slots") as raised:
            store.pin()
        assert raised.value.hint is not None
        for _ in range(3):
            run_step(store)
        if num_slots > 2:
            store.unpin(0)
            store.pin()
            assert store.progress.step in store.pinned_steps


def test_rewinding_to_a_step_that_is_not_pinned(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=3)) as store:
        with pytest.raises(BadInput, match="step 7 is not saved in the store; saved steps: none"):
            store.rewind(7)
        store.pin()
        with pytest.raises(BadInput, match="step 7 is not saved in the store; saved steps: 0"):
            store.rewind(7)


def test_a_store_in_place_has_one_slot(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, in_place=True)) as store:
        assert store.nvme_bytes == HEADER_BYTES + store.slot_bytes
        run_step(store)
        store.begin_step()
        store.discard()  # nothing was written yet
        with pytest.raises(EnvironmentFailure, match="cannot be saved"):
            store.pin()
    with open_store([tmp_path], queue) as store:
        check_generation(store, 1)
        run_step(store)
        check_generation(store, 2)


def test_committing_an_incomplete_step_is_a_bug(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with import_all(create_store([tmp_path], queue)) as store:
        store.begin_step()
        with pytest.raises(AssertionError, match="every byte of every record"):
            store.commit(progress_of(1))
        write_generation(store, 1)
        ticket = store.shadow().write(0, "hi16", 0, 2048, filled(pool, contents(1, 0, "hi16", 4096)))
        with pytest.raises(AssertionError, match="was not waited for"):
            store.commit(progress_of(1))
        ticket.wait()


def test_calls_out_of_order_are_a_bug(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    page = filled(pool, bytes(4096))
    with create_store([tmp_path], queue) as store:
        with pytest.raises(AssertionError):
            store.begin_step()
        import_all(store)
        for call in (
            lambda: store.shadow().write(0, "hi16", 0, 2048, page),
            lambda: store.commit(progress_of(1)),
            lambda: store.commit_import(progress_of(0)),
            store.discard,
            lambda: store.unpin(3),
            lambda: store.current().read(0, "hi16", 0, 4096, page),
            lambda: store.current().read(0, "hi16", 1, 2049, page),
            lambda: store.current().read(0, "hi16", 4096, 6144, page),
        ):
            with pytest.raises(AssertionError):
                call()
        store.begin_step()
        with pytest.raises(AssertionError):
            store.begin_step()
    with pytest.raises(AssertionError):
        store.current().read(0, "hi16", 0, 2048, page)
    store.close()


def test_a_store_exists_once_its_import_is_committed(tmp_path: Path, queue: IoQueue) -> None:
    paths = drives(tmp_path, 2)
    assert not Store.exists(paths)
    with create_store(paths, queue) as store:
        assert not Store.exists(paths)
        import_all(store)
        assert Store.exists(paths)
        assert Store.exists(paths[:1])
        assert Store.exists(paths[1:])


def test_it_belongs_to_another_identity_from_a_commit_on(queue: IoQueue, tmp_path: Path) -> None:
    """Its generations stay, and a step that comes then does not change that."""
    other = replace(IDENTITY, data_hash="e" * 64)
    with import_all(create_store([tmp_path], queue)) as store:
        run_step(store)
        before = store.store_id
        store.belong_to(other)
        assert store.identity == other
        check_generation(store, 1)
    with pytest.raises(BadInput, match="the training data changed"):
        open_store([tmp_path], queue)
    with Store.open([tmp_path], queue=queue, identity=other) as store:
        check_generation(store, 1)
        run_step(store)
        assert (store.store_id, store.identity) == (before, other)
    with Store.open([tmp_path], queue=queue, identity=other) as store:
        check_generation(store, 2)
