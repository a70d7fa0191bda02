"""Checksums: every changed, stale or misplaced chunk is noticed before its bytes are used, and the error names it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli import _native
from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.schedule.rules import ADAMW
from ratel_cli.sizes import CHUNK_ELEMENTS, PAGE_BYTES
from ratel_cli.store.checksums import ChunkTable
from ratel_cli.store.layout import HEADER_BYTES, ChunkMap, Geometry
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Store
from tests.fakes import values_of
from tests.kernels.oracle import scalars
from tests.store.stores import (
    BLOCK_ELEMENTS,
    SMALL_CHUNK,
    blocks_of,
    check_generation,
    create_store,
    edit,
    flip,
    import_all,
    open_store,
    run_step,
    write_generation,
)
from tests.tiers import thinned

RECORD = ADAMW.record("bfloat16")
STORE_ID = bytes(range(16))


@pytest.fixture
def paths(tmp_path: Path, queue: IoQueue) -> list[Path]:
    """A store of two steps in one file. Step 2 is in slot 0, step 1 in slot 1."""
    with import_all(create_store([tmp_path / "store"], queue)) as store:
        run_step(store)
        run_step(store)
    return [tmp_path / "store"]


def geometry_of(store: Store) -> Geometry:
    return Geometry(blocks=store.blocks, num_slots=store.num_slots, shares=(1,), chunk_elements=store.chunk_elements)


def chunks_of(elements: Sequence[int], chunk_elements: int = 2048) -> ChunkMap:
    return ChunkMap(blocks_of(elements), chunk_elements, is_frozen=False)


def check_all(store: Store) -> None:
    with BufferPool(None) as pool:
        store.current().check_all(pool, progress=lambda num_bytes: None)


@pytest.mark.parametrize("elements", [(), (0,), (2048,), (2048, 0, 6144), (CHUNK_ELEMENTS + 2048, CHUNK_ELEMENTS)])
@pytest.mark.parametrize("chunk_elements", [2048, CHUNK_ELEMENTS])
def test_every_chunk_has_its_own_entry(elements: tuple[int, ...], chunk_elements: int) -> None:
    chunks = chunks_of(elements, chunk_elements)
    entries = []
    for block, field, start, stop in chunks.ranges():
        [(entry, first, end)] = chunks.parts(block, field.name, start, stop)
        assert (first, end) == (start, stop)
        assert 0 < stop - start <= chunk_elements
        entries.append(entry)
    assert entries == list(range(1, chunks.num_entries))
    assert chunks.table_bytes % PAGE_BYTES == 0
    assert 8 * chunks.num_entries <= chunks.table_bytes < 8 * chunks.num_entries + PAGE_BYTES


@pytest.mark.parametrize(("start", "stop"), [(1, 2048), (2048, 4095), (0, 6000)])
def test_parts_of_chunks_are_a_bug(start: int, stop: int) -> None:
    with pytest.raises(AssertionError):
        list(chunks_of((6144,), 2048).parts(0, "hi16", start, stop))


def test_a_table_accepts_only_the_bytes_it_was_made_from() -> None:
    """Not those of another value, block, field, chunk, step or store."""
    chunks = chunks_of((4096, 4096), 2048)
    table = ChunkTable(chunks, STORE_ID, 7)
    data = memoryview(bytearray(random.Random(0).randbytes(4096)))
    for block in (0, 1):
        for field in ("hi16", "lo16"):
            for start in (0, 2048):
                table.set_chunks(block, field, start, start + 2048, data)
                table.check_chunks(block, field, start, start + 2048, data)
    fields = [field.name for field in RECORD.fields]
    tables = (table, ChunkTable(chunks, STORE_ID, 8), ChunkTable(chunks, bytes(16), 7))
    seeds = [
        each._seed(block, field, start)
        for each in tables
        for block in (0, 1)
        for field in fields
        for start in (0, 2048)
    ]
    assert len(set(seeds)) == len(seeds) == 3 * (chunks.num_entries - 1)
    data[100] ^= 1
    with pytest.raises(IntegrityFailure, match="block 1, lo16: elements 2048 to 4096 are not what step 7 wrote"):
        table.check_chunks(1, "lo16", 2048, 4096, data)
    assert not table.is_complete
    table.set_zeros()
    assert table.is_complete
    table.check_chunks(1, "v32", 2048, 4096, memoryview(bytes(8192)))


@pytest.mark.parametrize(("start", "stop"), [(0, 2048), (0, 6144), (2048, 6144), (4096, 6144)])
def test_a_kernel_compares_and_enters_the_checksums_of_the_bytes(start: int, stop: int) -> None:
    """The kernel for all fields at once, without an update, against checksums field by field."""
    chunks, choice = chunks_of((2048, 6144), 2048), random.Random(start + stop)
    data = {
        field.name: memoryview(bytearray(choice.randbytes(field.num_bytes(stop - start)))) for field in RECORD.fields
    }
    taken, computed = (ChunkTable(chunks, STORE_ID, 5) for _ in range(2))
    for name, memory in data.items():
        computed.set_chunks(1, name, start, stop, memory)

    def pass_over(fields: Collection[str], before: ChunkTable) -> list[tuple[int, int]]:
        return _native.update_adamw_bfloat16(
            *(values_of(data[field.name], field) for field in RECORD.fields),
            torch.zeros(stop - start),
            scalars=_native.AdamWScalars(**scalars(1)),
            segments=[],
            chunk_elements=2048,
            first_chunk=start // 2048,
            before=before.of_block(1, frozenset(fields)),
            after=taken.of_block(1, frozenset(data)),
        )

    with pytest.raises(ValueError, match="before: a chunk has no checksum yet"):
        pass_over(["hi16"], taken)
    assert pass_over(data.keys(), computed) == []
    for name, memory in data.items():
        taken.check_chunks(1, name, start, stop, memory)
    for number, field in enumerate(RECORD.fields):
        for chunk in range((stop - start) // 2048):
            place = choice.randrange(field.offset(chunk * 2048), field.num_bytes((chunk + 1) * 2048))
            data[field.name][place] ^= 1
            assert pass_over(data.keys(), computed) == [(number, chunk)]
            assert pass_over(data.keys() - {field.name}, computed) == []
            data[field.name][place] ^= 1
            first = start + 2048 * chunk
            error = computed.mismatch(1, start, stop, field_index=number, chunk=chunk)
            assert f"block 1, {field.name}: elements {first} to {first + 2048} are not" in str(error)


def test_a_stored_table_is_accepted_only_with_its_root() -> None:
    chunks = chunks_of((4096,), 2048)
    table = ChunkTable(chunks, STORE_ID, 3)
    table.set_zeros()
    stored = memoryview(bytearray(chunks.table_bytes))
    root = table.write_into(stored)
    again = ChunkTable.from_bytes(chunks, STORE_ID, stored, root)
    again.check_chunks(0, "m32", 0, 4096, memoryview(bytes(16384)))
    for place in (0, 8, chunks.table_bytes - 1):
        stored[place] ^= 1
        with pytest.raises(IntegrityFailure, match="checksum table is damaged"):
            ChunkTable.from_bytes(chunks, STORE_ID, stored, root)
        stored[place] ^= 1


@pytest.mark.parametrize("seed", thinned(range(40), every=4))
def test_a_changed_byte_is_found_on_reading(paths: list[Path], queue: IoQueue, seed: int) -> None:
    chance = random.Random(seed)
    with open_store(paths, queue) as store:
        geometry = geometry_of(store)
    block = chance.randrange(len(BLOCK_ELEMENTS))
    field = chance.choice(RECORD.fields)
    start = chance.randrange(0, BLOCK_ELEMENTS[block], SMALL_CHUNK)
    inside = chance.randrange(field.num_bytes(SMALL_CHUNK))
    flip(
        paths[0],
        HEADER_BYTES + geometry.slot.records.address(block, field.name, start) + inside,
        1 << chance.randrange(8),
    )
    with open_store(paths, queue) as store, BufferPool(None) as pool:
        memory = pool.lease(field.num_bytes(BLOCK_ELEMENTS[block]), "test").memory
        ticket = store.current().read(block, field.name, 0, BLOCK_ELEMENTS[block], memory)
        with pytest.raises(IntegrityFailure, match=f"block {block}, {field.name}: elements {start} to"):
            ticket.wait()
        with pytest.raises(IntegrityFailure, match=f"block {block}, {field.name}"):
            store.current().check_all(pool, progress=lambda num_bytes: None)


def test_a_damaged_table_is_found(paths: list[Path], queue: IoQueue) -> None:
    with open_store(paths, queue) as store:
        table = geometry_of(store).slot.records.num_bytes
    flip(paths[0], HEADER_BYTES + table + 20)
    with open_store(paths, queue) as store, pytest.raises(IntegrityFailure, match="step 2: the checksum table"):
        check_all(store)


def test_a_stale_slot_is_found(paths: list[Path], queue: IoQueue, tmp_path: Path) -> None:
    """The drive lost every write of a step, the table's included, but not the manifest."""
    shutil.copytree(paths[0], tmp_path / "before")
    with open_store(paths, queue) as store:
        run_step(store)
        size, slot = store.slot_bytes, store.current().slot
    old = (tmp_path / "before" / DATA_FILE_NAME).read_bytes()
    first = HEADER_BYTES + slot * size
    edit(paths[0], first, old[first : first + size])
    with open_store(paths, queue) as store, pytest.raises(IntegrityFailure, match="step 3: the checksum table"):
        check_all(store)


def test_swapped_chunks_are_found(paths: list[Path], queue: IoQueue) -> None:
    """Two chunks of one field change places."""
    with open_store(paths, queue) as store:
        geometry = geometry_of(store)
    first, second = (HEADER_BYTES + geometry.slot.records.address(0, "m32", start) for start in (0, SMALL_CHUNK))
    content = bytearray((paths[0] / DATA_FILE_NAME).read_bytes())
    size = 4 * SMALL_CHUNK
    content[first : first + size], content[second : second + size] = (
        content[second : second + size],
        content[first : first + size],
    )
    (paths[0] / DATA_FILE_NAME).write_bytes(content)
    with open_store(paths, queue) as store, pytest.raises(IntegrityFailure, match="block 0, m32: elements 0 to 2048"):
        check_all(store)


def test_after_damage_it_falls_back_on_the_step_before(paths: list[Path], queue: IoQueue, pool: BufferPool) -> None:
    flip(paths[0], HEADER_BYTES + 5000)
    notices: list[str] = []
    checked: list[int] = []
    with open_store(paths, queue) as store:
        store.ensure_whole(pool, progress=checked.append, notice=notices.append)
        check_generation(store, 1)
        run_step(store)
        check_generation(store, 2)
    assert len(notices) == 1
    assert "step 2 is damaged (block 0" in notices[0]
    assert "resuming from step 1" in notices[0]
    assert sum(checked) > 12 * sum(BLOCK_ELEMENTS)
    notices.clear()
    with open_store(paths, queue) as store:
        store.ensure_whole(pool, progress=checked.append, notice=notices.append)
        check_generation(store, 2)
    assert notices == []


def test_falling_back_unpins_what_came_later(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=4)) as store:
        run_step(store)
        store.pin()
        run_step(store)
        store.pin()
        slot_bytes, slot = store.slot_bytes, store.current().slot
    flip(tmp_path, HEADER_BYTES + slot * slot_bytes)
    with open_store([tmp_path], queue) as store:
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=lambda text: None)
        assert store.progress.step == 1
        assert store.pinned_steps == (1,)


def test_two_damaged_generations_are_an_error(paths: list[Path], queue: IoQueue, pool: BufferPool) -> None:
    with open_store(paths, queue) as store:
        slot_bytes = store.slot_bytes
    flip(paths[0], HEADER_BYTES + 5000)
    flip(paths[0], HEADER_BYTES + slot_bytes + 5000)
    with open_store(paths, queue) as store, pytest.raises(IntegrityFailure, match=r"block 0, hi16.*step 2 wrote"):
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


def test_a_damaged_import_is_an_error(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    import_all(create_store([tmp_path], queue)).close()
    flip(tmp_path, HEADER_BYTES + 0)
    with open_store([tmp_path], queue) as store, pytest.raises(IntegrityFailure, match="step 0 wrote"):
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


@pytest.mark.parametrize("num_drives", [1, 3])
def test_all_drives_are_kept_busy(tmp_path: Path, queue: IoQueue, pool: BufferPool, num_drives: int) -> None:
    """Eight chunks for each are in flight."""
    paths = [tmp_path / str(number) for number in range(num_drives)]
    with import_all(create_store(paths, queue)) as store:
        before = pool.peak_bytes
        store.current().check_all(pool, progress=lambda num_bytes: None)
    assert before == 0
    assert pool.peak_bytes == num_drives * 8 * 4 * SMALL_CHUNK


def test_pinned_generations_are_checked_too(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=3)) as store:
        run_step(store)
        store.pin()
        slot = store.current().slot
        run_step(store)
        run_step(store)
        slot_bytes = store.slot_bytes
        pinned = store.pinned(1)
        assert pinned.progress.step == 1
        pinned.check_all(pool, progress=lambda num_bytes: None)
    flip(tmp_path, HEADER_BYTES + slot * slot_bytes + 9000)
    with open_store([tmp_path], queue) as store:
        check_all(store)
        with pytest.raises(IntegrityFailure, match="step 1 wrote"):
            store.pinned(1).check_all(pool, progress=lambda num_bytes: None)


def test_what_was_not_imported_is_zero(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with create_store([tmp_path], queue) as store:
        store.commit_import(store.progress)
        check_all(store)
        memory = pool.lease(8192, "test").memory
        store.current().read(0, "hi16", 0, 4096, memory).wait()
        assert bytes(memory) == bytes(8192)


def test_a_discarded_step_leaves_no_checksums(paths: list[Path], queue: IoQueue) -> None:
    with open_store(paths, queue) as store:
        store.begin_step()
        write_generation(store, 99)
        store.discard()
        check_generation(store, 2)
        run_step(store)
        check_generation(store, 3)
    with open_store(paths, queue) as store:
        check_generation(store, 3)


def test_a_chunk_without_a_checksum_stops_the_commit(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with import_all(create_store([tmp_path], queue, block_elements=(2048,))) as store:
        store.begin_step()
        shadow = store.shadow()
        for field in RECORD.fields:
            memory = pool.lease(field.num_bytes(2048), "test").memory
            if field.name == "m32":
                shadow.write_hashed(0, 0, 2048, {field.name: memory}).wait()
            else:
                shadow.write(0, field.name, 0, 2048, memory).wait()
        with pytest.raises(AssertionError, match="without a checksum"):
            store.commit(replace(store.progress, step=1))


def test_a_store_may_have_no_checksums(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    """For benchmarks of what checksums cost. Such a store cannot be verified."""
    with import_all(create_store([tmp_path], queue, chunk_elements=0)) as store:
        run_step(store)
        assert store.slot_bytes == 12 * sum(BLOCK_ELEMENTS)
        check_generation(store, 1)
        with pytest.raises(BadInput, match="made without checksums"):
            store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)
