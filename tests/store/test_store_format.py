"""The document of the store format is true: a reader that follows it alone finds every byte of real stores."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli import _native
from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.schedule.rules import rules_by_name
from ratel_cli.sizes import DtypeName
from ratel_cli.store.fill import Copied, fill
from ratel_cli.store.layout import Field, Geometry, Record, StoredBlock
from ratel_cli.store.lock import OWNER_FILE_NAME
from ratel_cli.store.store import Store
from tests.fakes import filled
from tests.store.format_reader import (
    DOCUMENT,
    FormatError,
    StoredGeneration,
    StoreReader,
    join_master,
    split_master,
)
from tests.store.stores import (
    BLOCK_ELEMENTS,
    IDENTITY,
    MIXED,
    SMALL_CHUNK,
    STRIPE_BYTES,
    blocks_of,
    contents,
    create_store,
    flip,
    import_all,
    open_store,
    progress_of,
    run_step,
)

SHAPES = ((1,), (3, 1, 2))
"""Shares of the stripes: one directory, and three."""
EVERY_SHAPE = pytest.mark.parametrize("weights", SHAPES, ids=["one directory", "three directories"])


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    with open_queue("threads", notice=pytest.fail, depth=4) as opened:
        yield opened


def directories(tmp_path: Path, weights: tuple[int, ...]) -> list[Path]:
    return [tmp_path / f"drive{index}" for index in range(len(weights))]


def make_store(
    paths: list[Path], queue: IoQueue, weights: tuple[int, ...], blocks: Sequence[StoredBlock] = MIXED
) -> None:
    """Steps 0 to 4, of which 1 and 2 are saved, and step 5, which was not applied."""
    with import_all(create_store(paths, queue, blocks=blocks, weights=weights, num_slots=4)) as store:
        for step in (1, 2, 3, 4):
            run_step(store)
            if step in (1, 2):
                store.pin()
        store.commit_progress(replace(progress_of(5), updates=4, loss_scale=0.1))


def check_contents(reader: StoreReader, generation: StoredGeneration, step: int) -> None:
    found = reader.read(generation)
    assert set(found) == {(index, name) for index, block in enumerate(reader.blocks) for name, *_ in block.fields}
    for (block, name), content in found.items():
        writer = 0 if reader.blocks[block].is_frozen else step
        assert content == contents(writer, block, name, len(content)), (step, block, name)


def check_made_store(reader: StoreReader) -> None:
    values = {"step": 5, "updates": 4, "loss_scale": 0.1, "good_steps": 2, "tokens": 500}
    assert reader.current.progress == values
    check_contents(reader, reader.current, 4)
    assert [entry.progress["step"] for entry in reader.pins] == [1, 2]
    check_contents(reader, reader.pins[0], 1)
    check_contents(reader, reader.pins[1], 2)
    assert reader.before is not None and reader.before.progress["step"] == 3
    check_contents(reader, reader.before, 3)


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_the_reader_finds_every_byte(
    tmp_path: Path, queue: IoQueue, dtype: DtypeName, weights: tuple[int, ...]
) -> None:
    paths = directories(tmp_path, weights)
    make_store(paths, queue, weights, blocks_of(BLOCK_ELEMENTS, dtype))
    reader = StoreReader(paths)
    assert [block.num_elements for block in reader.blocks] == list(BLOCK_ELEMENTS)
    assert reader.geometry["records"] == [reader.format.fields(dtype)] and reader.frozen_bytes == 0
    assert reader.manifest["generation"] == 8  # import, four steps, two pins, one step that was not applied
    assert (reader.is_damaged, reader.payload["step_in_place"]) == (False, None)
    assert reader.payload["identity"] == {
        "model_hash": IDENTITY.model_hash,
        "config_hash": IDENTITY.config_hash,
        "data_hash": IDENTITY.data_hash,
        "seed": IDENTITY.seed,
        "software": IDENTITY.software,
    }
    assert reader.table(reader.current)[0] == 4
    check_made_store(reader)


def test_the_document_has_the_fields_of_every_rule(tmp_path: Path, queue: IoQueue) -> None:
    make_store([tmp_path], queue, (1,))
    found = StoreReader([tmp_path]).format
    for rule in rules_by_name().values():
        for dtype, record in () if rule.is_frozen else rule.records:
            documented = rule.name if dtype == "bfloat16" else rule.name.removesuffix("_stochastic")
            assert found.fields(dtype, documented) == [[each.name, each.dtype, each.per] for each in record.fields]


@EVERY_SHAPE
def test_the_reader_and_the_program_read_the_same(tmp_path: Path, queue: IoQueue, weights: tuple[int, ...]) -> None:
    paths = directories(tmp_path, weights)
    make_store(paths, queue, weights)
    found = StoreReader(paths)
    with open_store(paths, queue) as store, BufferPool(None) as pool:
        assert (paths[0] / OWNER_FILE_NAME).name == found.format.table("Files")[1]["file"]
        assert set(json.loads((paths[0] / OWNER_FILE_NAME).read_text())) == {"pid", "started"}
        assert (store.slot_bytes, store.frozen_bytes) == (found.slot_bytes, found.frozen_bytes)
        for (block, name), content in found.read(found.current).items():
            with pool.lease(len(content), "test") as lease:
                store.current().read(block, name, 0, MIXED[block].num_elements, lease.memory).wait()
                assert bytes(lease.memory) == content


def test_fields_with_a_fixed_number_of_values(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    """They are one chunk, which may be larger than others; a block without elements has none."""
    fields = (Field("w32", "float32"), Field("rows", "float32", fixed=5000), Field("one", "float32", fixed=1))
    blocks = (*(StoredBlock(number, Record(fields)) for number in (6144, 0, 2048)), *MIXED)
    paths = directories(tmp_path, SHAPES[1])
    make_store(paths, queue, SHAPES[1], blocks)
    reader = StoreReader(paths)
    check_made_store(reader)
    assert [len(reader.read(reader.current)[block, "rows"]) for block in (0, 1, 2)] == [20480, 0, 20480]
    geometry = Geometry(blocks=blocks, num_slots=2, shares=(1,), stripe_bytes=STRIPE_BYTES, chunk_elements=SMALL_CHUNK)
    with open_store(paths, queue) as store:
        for (block, name), content in reader.read(reader.current).items():
            memory = filled(pool, bytes(len(content)))
            store.current().read(block, name, 0, blocks[block].num_elements, memory).wait()
            assert bytes(memory) == content
        store.current().check_all(pool, progress=lambda num_bytes: None)
        snapshot = Store.create([tmp_path / "snapshot"], geometry, identity=IDENTITY, queue=queue)
        with snapshot:
            fill(snapshot, Copied(store.current()), pool, progress=lambda num_bytes: None)
    found = StoreReader([tmp_path / "snapshot"])
    check_contents(found, found.current, 4)
    wanted = contents(4, 0, "rows", 20480)
    file = tmp_path / "snapshot" / "ratel.store"
    file.write_bytes(file.read_bytes().replace(wanted[100:200], bytes(100)))
    with (
        open_store([tmp_path / "snapshot"], queue) as store,
        pytest.raises(IntegrityFailure, match="block 0, rows: elements 0 to 6144"),
    ):
        store.current().check_all(pool, progress=lambda num_bytes: None)


def interesting_masters(number: int) -> list[int]:
    """Lower halves around the tie, below even and odd upper halves, infinities and NaN included; the rest by chance."""
    uppers = (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xFF7F, 0xFFFF)
    lowers = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    chance = random.Random(0)
    made = [upper << 16 | lower for upper in uppers for lower in lowers]
    made += [chance.getrandbits(16) << 16 | 0x8000 for _ in range(200)]
    return made + [chance.getrandbits(32) for _ in range(number - len(made))]


def test_masters_are_joined_as_the_document_says(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    """The kernel splits them, the store holds the halves, and the reader joins them."""
    masters = interesting_masters(2048)
    moments = [random.Random(1).getrandbits(31) for _ in masters]
    word = torch.tensor(masters, dtype=torch.int64).to(torch.int32)
    hi16, lo16 = torch.empty(2048, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.int16)
    v32 = torch.tensor(moments, dtype=torch.int32).view(torch.float32)
    _native.split_bfloat16(word.view(torch.float32), hi16, lo16, v32)
    stored = {"hi16": hi16.view(torch.int16), "lo16": lo16, "v32": v32.view(torch.int32)}
    with create_store([tmp_path], queue, block_elements=(2048,)) as store:
        for name, tensor in stored.items():
            store.shadow().write(0, name, 0, 2048, filled(pool, tensor.numpy().tobytes())).wait()
        store.commit_import(progress_of(0))
    reader = StoreReader([tmp_path])
    found = reader.read(reader.current)
    assert join_master(found[0, "hi16"], found[0, "lo16"], found[0, "v32"]) == (masters, moments)
    high, low, signs = split_master(masters)
    assert (found[0, "hi16"], found[0, "lo16"]) == (high, low)
    expected = [moment | sign for moment, sign in zip(moments, struct.unpack("<2048I", signs), strict=True)]
    assert list(struct.unpack("<2048I", found[0, "v32"])) == expected
    assert found[0, "m32"] == bytes(8192)


def test_each_commit_follows_the_one_before(tmp_path: Path, queue: IoQueue) -> None:
    """Generation 1 is the import, on page 1; slots, `before` and roots as the document has them."""
    with import_all(create_store([tmp_path], queue)) as store:
        first = StoreReader([tmp_path])
        assert (first.manifest["generation"], first.current.slot, first.before) == (1, 0, None)
        run_step(store)
        second = StoreReader([tmp_path])
        assert (second.manifest["generation"], second.current.slot, second.before) == (2, 1, first.current)
        run_step(store)
        third = StoreReader([tmp_path])
        assert (third.manifest["generation"], third.current.slot, third.before) == (3, 0, second.current)
        check_contents(third, third.current, 2)
        check_contents(third, second.current, 1)


def test_a_saved_step_is_resumed_as_the_document_says(tmp_path: Path, queue: IoQueue) -> None:
    paths = directories(tmp_path, SHAPES[1])
    make_store(paths, queue, SHAPES[1])
    with open_store(paths, queue) as store:
        entry = StoreReader(paths).pins[0]
        store.rewind(1)
        reader = StoreReader(paths)
        assert (reader.current, reader.pins, reader.before) == (entry, [entry], None)
        store.unpin(1)
        assert StoreReader(paths).pins == []


def test_in_place(tmp_path: Path, queue: IoQueue) -> None:
    with import_all(create_store([tmp_path], queue, in_place=True)) as store:
        run_step(store)
        reader = StoreReader([tmp_path])
        assert (reader.geometry["num_slots"], reader.geometry["in_place"], reader.before) == (1, True, None)
        check_contents(reader, reader.current, 1)
        store.begin_step()
        assert StoreReader([tmp_path]).payload["step_in_place"] == 2


def test_a_store_without_checksums(tmp_path: Path, queue: IoQueue) -> None:
    import_all(create_store([tmp_path], queue, chunk_elements=0)).close()
    reader = StoreReader([tmp_path])
    assert reader.current.root == ""
    check_contents(reader, reader.current, 0)


def test_the_last_chunk_of_a_field_is_shorter(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    with create_store([tmp_path], queue, chunk_elements=2 * SMALL_CHUNK) as store:
        for block, num_elements in enumerate(BLOCK_ELEMENTS):
            for field in store.blocks[block].record.fields:
                memory = filled(pool, contents(0, block, field.name, field.num_bytes(num_elements)))
                store.shadow().write(block, field.name, 0, num_elements, memory).wait()
        store.commit_import(progress_of(0))
    reader = StoreReader([tmp_path])
    check_contents(reader, reader.current, 0)
    assert len(reader.table(reader.current)) == 1 + 4 * (1 + 1 + 1 + 2)


def test_a_snapshot_has_its_own_numbers(tmp_path: Path, queue: IoQueue, pool: BufferPool) -> None:
    """Its table is seeded with its own store id and steps; its progress is that of the store."""

    def copy(source: Store, target: Store) -> StoreReader:
        fill(target, Copied(source.current()), pool, progress=lambda num_bytes: None)
        return StoreReader([tmp_path / "snapshot"])

    with (
        import_all(create_store([tmp_path / "a"], queue)) as source,
        create_store([tmp_path / "snapshot"], queue) as to,
    ):
        for _ in range(3):
            run_step(source)
        first = copy(source, to)
        check_contents(first, first.current, 3)
        assert (first.table(first.current)[0], first.current.progress["step"]) == (0, 3)
        run_step(source)
        run_step(source)
        second = copy(source, to)
        check_contents(second, second.current, 5)
        assert (second.table(second.current)[0], second.current.progress["step"]) == (4, 5)


@EVERY_SHAPE
def test_damage_is_found_where_the_document_says(tmp_path: Path, queue: IoQueue, weights: tuple[int, ...]) -> None:
    paths = directories(tmp_path, weights)
    make_store(paths, queue, weights, blocks_of(BLOCK_ELEMENTS))
    page = 8 % 2 * 4096
    flip(paths[0], page + 200)
    torn = StoreReader(paths)
    assert torn.is_damaged and torn.manifest["generation"] == 7
    check_contents(torn, torn.current, 4)
    flip(paths[0], page + 200)
    flip(paths[0], 12288)  # the first byte of slot 0
    reader = StoreReader(paths)
    damaged = [entry for entry in (reader.current, *reader.pins, reader.before) if entry and entry.slot == 0]
    with pytest.raises(FormatError, match="block 0, hi16, element 0"):
        reader.read(damaged[0])
    flip(paths[-1], 8192 + 30)
    with pytest.raises(FormatError, match="not identified"):
        StoreReader(paths)


def test_swapped_directories_are_noticed(tmp_path: Path, queue: IoQueue) -> None:
    paths = directories(tmp_path, SHAPES[1])
    make_store(paths, queue, SHAPES[1])
    with pytest.raises(FormatError, match="another order"):
        StoreReader([paths[0], paths[2], paths[1]])


WRONG = [
    ("A **page** is 4096 bytes", "A **page** is 8192 bytes"),
    ("| `ratel.store` | always |", "| `ratel.data` | always |"),
    ("| 12288 | the rest |", "| 16384 | the rest |"),
    ("| 8192 | 4096 | identification page |", "| 4096 | 4096 | identification page |"),
    ("| 28 | 4 | u32 | file_index |", "| 32 | 4 | u32 | file_index |"),
    ("| 12 | 16 | bytes | store_id |", "| 13 | 16 | bytes | store_id |"),
    ("`RATELDAT`", "`RATELDAX`"),
    ("`RATELMAN`", "`RATELMAX`"),
    ("| 8 | 4 | u32 | version | 5 |\n| 12 | 4 |", "| 8 | 4 | u32 | version | 6 |\n| 12 | 4 |"),
    ("| 32 | 8 | u64 | generation |", "| 32 | 4 | u32 | store_id |"),
    ("| 40 | 32 | bytes | previous_sha256 |", "| 41 | 31 | bytes | previous_sha256 |"),
    ("| 72 | payload_bytes | json |", "| 71 | payload_bytes | json |"),
    ("CRC-32 of bytes 0 to 4091", "CRC-32 of bytes 0 to 4090"),
    ("| `before` | null, or", "| `previous` | null, or"),
    ("`[step, updates, loss_scale, good_steps, tokens]`", "`[step, loss_scale, updates, good_steps, tokens]`"),
    ("`[slot, step, updates,", "`[step, slot, updates,"),
    ("| `num_slots` | number", "| `slots` | number"),
    ("| `seed` | integer", "| `random_seed` | integer"),
    ("| `int16` | 2 |", "| `int16` | 4 |"),
    ("| `float32` | 4 |", "| `float32` | 2 |"),
    ("| 16 | 8 | u64 | step |", "| 16 | 8 | u64 | block |"),
    ("| 28 | 4 | u32 | field |\n| 32 | 4 | u32 | chunk |", "| 32 | 4 | u32 | field |\n| 28 | 4 | u32 | chunk |"),
    ("of these 36 bytes", "of these 40 bytes"),
]
"""What the document says, and what it does not."""


def is_noticed(paths: list[Path], text: str) -> bool:
    try:
        check_made_store(StoreReader(paths, text))
    except (FormatError, OSError, ValueError, LookupError, AssertionError, struct.error):
        return True
    return False


def test_a_wrong_document_is_noticed(tmp_path: Path, queue: IoQueue) -> None:
    """Every number and name that the reader takes from the document matters."""
    text, paths = DOCUMENT.read_text(), directories(tmp_path, SHAPES[1])
    make_store(paths, queue, SHAPES[1])
    assert not is_noticed(paths, text)
    assert [said for said, _ in WRONG if said not in text] == []
    assert [said for said, instead in WRONG if not is_noticed(paths, text.replace(said, instead))] == []
