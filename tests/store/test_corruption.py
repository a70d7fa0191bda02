"""Much silent corruption: 190,000 flipped bits, 1,000 stale or misplaced chunks, all noticed before they are used.

Most flips are in memory, against the checksum table itself. The others go through real files and the real reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratel_cli.errors import IntegrityFailure, RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.schedule.rules import ADAMW
from ratel_cli.store.checksums import ChunkTable
from ratel_cli.store.layout import HEADER_BYTES, ChunkMap, Field, Geometry
from ratel_cli.store.lock import DATA_FILE_NAME
from tests.fakes import directory_in_memory
from tests.store.power import RecordingDrive
from tests.store.stores import (
    MIXED,
    SMALL_CHUNK,
    blocks_of,
    check_generation,
    create_store,
    import_all,
    open_store,
    run_step,
)
from tests.tiers import sample

RECORD = ADAMW.record("bfloat16")
STORE_ID = bytes(range(16))
NUM_STEPS = 3
NUM_FLIPS_IN_FILES = 400
NUM_WRONG_CHUNKS = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A store of three steps in one file, in which every logical address is an offset."""

    directory: Path
    content: bytes
    geometry: Geometry
    slot: int
    """The slot of step 3. The other slot has step 2."""

    @property
    def file(self) -> Path:
        return self.directory / DATA_FILE_NAME

    def chunk(self, slot: int, block: int, field: Field, start: int) -> slice:
        region = self.geometry.frozen if self.geometry.blocks[block].is_frozen else self.geometry.slot
        address = 0 if self.geometry.blocks[block].is_frozen else self.geometry.slot_address(slot)
        first = HEADER_BYTES + address + region.records.address(block, field.name, start)
        return slice(first, first + field.num_bytes(SMALL_CHUNK))

    def chunks(self, slot: int) -> list[slice]:
        return [
            self.chunk(slot, index, field, start)
            for index, block in enumerate(self.geometry.blocks)
            for field in block.record.fields
            for start in range(0, block.num_elements, SMALL_CHUNK)
        ]

    def is_in(self, slot: int, offset: int) -> bool:
        first = HEADER_BYTES + self.geometry.slot_address(slot)
        return first <= offset < first + self.geometry.slot.num_bytes


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    with directory_in_memory(tmp_path) as directory:
        drive = RecordingDrive()
        with import_all(create_store([directory], drive, barrier=drive, blocks=MIXED)) as store:
            for _ in range(NUM_STEPS):
                run_step(store)
            geometry = Geometry(blocks=MIXED, num_slots=2, shares=(1,), chunk_elements=SMALL_CHUNK)
            slot = store.current().slot
        content = (directory / DATA_FILE_NAME).read_bytes()
        yield Stored(directory=directory, content=content, geometry=geometry, slot=slot)


def reopened(stored: Stored, content: bytes) -> list[str]:
    """Open the store with this content as a run does, and check what is used. Returns the notices or the error."""
    stored.file.write_bytes(content)
    notices: list[str] = []
    try:
        with open_store([stored.directory], RecordingDrive(), notice=notices.append) as store, BufferPool(None) as pool:
            store.ensure_whole(pool, progress=lambda num_bytes: None, notice=notices.append)
            check_generation(store, store.progress.step)
    except RatelError as error:
        notices.append(error.message)
    return [text for text in notices if "direct I/O" not in text]


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    chunks = ChunkMap(blocks_of([SMALL_CHUNK]), SMALL_CHUNK, is_frozen=False)
    table = ChunkTable(chunks, STORE_ID, 5)
    num_flips = 0
    for field in RECORD.fields:
        memory = memoryview(bytearray(random.Random(field.name).randbytes(field.num_bytes(SMALL_CHUNK))))
        table.set_chunks(0, field.name, 0, SMALL_CHUNK, memory)
        for place in range(len(memory)):
            for bit in range(8):
                memory[place] ^= 1 << bit
                with pytest.raises(IntegrityFailure):
                    table.check_chunks(0, field.name, 0, SMALL_CHUNK, memory)
                memory[place] ^= 1 << bit
                num_flips += 1
        table.check_chunks(0, field.name, 0, SMALL_CHUNK, memory)
    assert num_flips > 190_000


@pytest.mark.full
def test_a_flipped_bit_anywhere_in_the_file_is_noticed(stored: Stored) -> None:
    """Unless it is in the slot that is not used."""
    assert reopened(stored, stored.content) == []
    chance = random.Random(0)
    num_noticed, end = 0, HEADER_BYTES + stored.geometry.slot_address(2)
    for number in range(NUM_FLIPS_IN_FILES):
        # Every tenth flip is in the header: manifests, identification.
        offset = chance.randrange(HEADER_BYTES if number % 10 == 0 else end)
        content = bytearray(stored.content)
        content[offset] ^= 1 << chance.randrange(8)
        notices = reopened(stored, bytes(content))
        assert bool(notices) != stored.is_in(1 - stored.slot, offset), (offset, notices)
        num_noticed += bool(notices)
    assert num_noticed > NUM_FLIPS_IN_FILES // 3


@pytest.mark.full
@pytest.mark.parametrize("seed", sample(range(4), every=4))
def test_a_stale_or_misplaced_chunk_is_noticed(stored: Stored, seed: int) -> None:
    """The chunk of the step before, of another place, or of the same field of another block."""
    chance = random.Random(seed)
    current, before = stored.chunks(stored.slot), stored.chunks(1 - stored.slot)
    for _ in range(NUM_WRONG_CHUNKS):
        index = chance.randrange(len(current))
        place = current[index]
        size = place.stop - place.start
        others = [other for other in current if other != place and other.stop - other.start == size]
        others = [chance.choice(others)] if others else []
        source = chance.choice([each for each in (before[index], *others) if each != place] or [current[0]])
        content = bytearray(stored.content)
        content[place] = stored.content[source]
        [notices, *_] = reopened(stored, bytes(content))
        is_frozen = place == before[index]  # nothing to fall back on
        assert ("not what the import wrote" if is_frozen else f"step {NUM_STEPS} is damaged (block ") in notices


def test_chunks_of_another_store_are_noticed(stored: Stored, tmp_path: Path) -> None:
    """A whole slot, with its table, of the same step of another store."""
    drive = RecordingDrive()
    with import_all(create_store([tmp_path / "other"], drive, barrier=drive, blocks=MIXED)) as store:
        for _ in range(NUM_STEPS):
            run_step(store)
        assert store.current().slot == stored.slot
    start = HEADER_BYTES + stored.geometry.slot_address(stored.slot)
    stop = start + stored.geometry.slot.num_bytes
    other = (tmp_path / "other" / DATA_FILE_NAME).read_bytes()
    content = stored.content[:start] + other[start:stop] + stored.content[stop:]
    [notices, *_] = reopened(stored, content)
    assert f"step {NUM_STEPS}" in notices
    assert "checksum table" in notices
