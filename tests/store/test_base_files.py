"""Blocks that stay in the base model's files: read where they lie, with the store's checksums, and never written."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from ratel_cli.errors import BadInput, IntegrityFailure, RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import Extent, IoQueue
from ratel_cli.io.tickets import Ticket
from ratel_cli.schedule.rules import ADAMW, FROZEN
from ratel_cli.store import base_reader
from ratel_cli.store.base_files import NUM_STAGED, BaseFile, BaseFiles, Piece, staging_bytes
from ratel_cli.store.base_reader import BaseFilesReader
from ratel_cli.store.fill import Copied, fill
from ratel_cli.store.layout import HEADER_BYTES, Geometry, StoredBlock
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Store
from tests.fakes import filled
from tests.store.format_reader import StoreReader
from tests.store.stores import IDENTITY, SMALL_CHUNK, contents, open_store, progress_of

SIZES = (6144, 2048, 4096)
"""Elements of the blocks that lie in files."""
BLOCKS = (
    StoredBlock(4096, ADAMW.record("bfloat16")),
    StoredBlock(SIZES[0], FROZEN.record("bfloat16"), is_frozen=True, is_in_files=True),
    StoredBlock(2048, FROZEN.record("bfloat16"), is_frozen=True),
    StoredBlock(SIZES[1], FROZEN.record("bfloat16"), is_frozen=True, is_in_files=True),
    StoredBlock(SIZES[2], FROZEN.record("float32"), is_frozen=True, is_in_files=True),
)


def files_in(directory: Path, *, gap: int = 0, seed: int = 0) -> tuple[BaseFiles, dict[int, bytes]]:
    """Two files in which the blocks lie in pieces, and the bytes of each block. `gap`: bytes between pieces that no
    file has."""
    choice = random.Random(seed)
    written = [bytearray(choice.randbytes(choice.choice((0, 1, 8, 4095, 4096, 4097)))) for _ in range(2)]
    pieces: dict[int, tuple[Piece, ...]] = {}
    arrays: dict[int, bytes] = {}
    for index in choice.sample([1, 3, 4], 3):
        num_bytes = BLOCKS[index].num_bytes
        array, of_block, position = bytearray(num_bytes), [], 0
        while position < num_bytes:
            length = min(choice.choice((1, 2, 510, 4096, 4097, 5000, 9000)), num_bytes - position)
            file = choice.randrange(2)
            of_block.append(Piece(position, length, file, len(written[file])))
            array[position : position + length] = piece = choice.randbytes(length)
            written[file] += piece + choice.randbytes(choice.choice((0, 0, 3, 4096)))
            position += length + gap
        pieces[index], arrays[index] = tuple(of_block), bytes(array)
    directory.mkdir(exist_ok=True)
    paths = [directory / f"{number}.safetensors" for number in range(2)]
    for path, content in zip(paths, written, strict=True):
        path.write_bytes(content)
    files = tuple(BaseFile(str(path), len(content)) for path, content in zip(paths, written, strict=True))
    return BaseFiles(files=files, pieces=dict(sorted(pieces.items()))), arrays


def make(
    directory: Path, queue: IoQueue, files: BaseFiles, *, chunk_elements: int = SMALL_CHUNK, num_slots: int = 2
) -> Store:
    geometry = Geometry(
        blocks=BLOCKS,
        num_slots=num_slots,
        shares=(1,),
        chunk_elements=chunk_elements,
        list_bytes=len(files.content),
    )
    return Store.create([directory], geometry, identity=IDENTITY, queue=queue, base_files=files)


def wanted(index: int, arrays: dict[int, bytes], step: int) -> bytes:
    if index in arrays:
        return arrays[index]
    block = BLOCKS[index]
    return contents(0 if block.is_frozen else step, index, block.record.fields[0].name, block.num_elements * 2)


def write(store: Store, arrays: dict[int, bytes], step: int) -> None:
    with BufferPool(None) as pool:
        for index, block in enumerate(BLOCKS):
            if block.is_frozen and step:
                continue
            for number, field in enumerate(block.record.fields):
                num_bytes = field.num_bytes(block.num_elements)
                content = contents(step, index, field.name, num_bytes) if number else wanted(index, arrays, step)
                store.shadow().write(index, field.name, 0, block.num_elements, filled(pool, content)).wait()


def imported(directory: Path, queue: IoQueue, files: BaseFiles, arrays: dict[int, bytes], **settings: int) -> Store:
    store = make(directory, queue, files, **settings)
    write(store, arrays, 0)
    store.commit_import(progress_of(0))
    return store


def read(store: Store, index: int, start: int = 0, stop: int | None = None) -> bytes:
    block = BLOCKS[index]
    field, stop = block.record.compute_field, block.num_elements if stop is None else stop
    with BufferPool(None) as pool:
        memory = filled(pool, b"\xff" * field.num_bytes(stop - start))
        store.current().read(index, field.name, start, stop, memory).wait()
        return bytes(memory)


def check(store: Store, arrays: dict[int, bytes], step: int) -> None:
    for index in range(len(BLOCKS)):
        assert read(store, index) == wanted(index, arrays, step), index


@contextmanager
def small_parts(patch: pytest.MonkeyPatch, num_bytes: int, number: int = 2) -> Iterator[None]:
    with patch.context() as patched:
        patched.setattr(base_reader, "PART_BYTES", num_bytes)
        patched.setattr(base_reader, "NUM_STAGED", number)
        yield


@pytest.mark.parametrize("gap", [0, 2, 5000])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_read_where_they_lie(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch, seed: int, gap: int
) -> None:
    files, arrays = files_in(tmp_path / "base", gap=gap, seed=seed)
    before = [Path(path).read_bytes() for path, _ in files.files]
    with small_parts(monkeypatch, 8192):
        with imported(tmp_path / "store", queue, files, arrays) as store:
            check(store, arrays, 0)
            store.begin_step()
            write(store, arrays, 1)
            store.commit(progress_of(1))
        with open_store([tmp_path / "store"], queue) as store, BufferPool(None) as pool:
            assert store.base_files == files
            check(store, arrays, 1)
            progress: list[int] = []
            store.current().check_all(pool, progress=progress.append)
            assert sum(progress) == sum(block.num_bytes for block in BLOCKS)
            for start, stop in ((0, 2048), (2048, 4096), (2048, 6144), (4096, 6144)):
                assert read(store, 1, start, stop) == arrays[1][2 * start : 2 * stop]
    assert [Path(path).read_bytes() for path, _ in files.files] == before
    reader = StoreReader([tmp_path / "store"])
    content = reader.read(reader.current)
    assert {index: content[index, "frozen"] for index in arrays} == arrays


def test_what_the_store_has_of_them(tmp_path: Path, queue: IoQueue) -> None:
    """A list and checksums; the data file and what is written are that much smaller."""
    files, arrays = files_in(tmp_path / "base")
    written = queue.written_bytes
    with imported(tmp_path / "store", queue, files, arrays) as store:
        in_files = sum(block.num_bytes for block in BLOCKS if block.is_in_files)
        assert store.frozen_bytes == BLOCKS[2].num_bytes + 4096 + len(files.content)
        assert store.generation_bytes == store.frozen_bytes + in_files + store.slot_bytes
        assert store.nvme_bytes == HEADER_BYTES + store.frozen_bytes + 2 * store.slot_bytes
        assert (tmp_path / "store" / DATA_FILE_NAME).stat().st_size == store.nvme_bytes
        assert queue.written_bytes - written == store.made_bytes - HEADER_BYTES + store.slot_bytes


def test_a_store_without_checksums_reads_them_too(tmp_path: Path, queue: IoQueue) -> None:
    files, arrays = files_in(tmp_path / "base", gap=100)
    with imported(tmp_path / "store", queue, files, arrays, chunk_elements=0) as store:
        check(store, arrays, 0)


def test_many_reads_at_once(tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are buffers: each waits for its turn."""
    files, arrays = files_in(tmp_path / "base")
    with (
        small_parts(monkeypatch, 4096, 1),
        imported(tmp_path / "store", queue, files, arrays) as store,
        BufferPool(None) as pool,
    ):
        field = BLOCKS[1].record.compute_field
        memories = [filled(pool, bytes(field.num_bytes(SIZES[0]))) for _ in range(5)]
        tickets = [store.current().read(1, field.name, 0, SIZES[0], memory) for memory in memories]
        for ticket, memory in zip(tickets, memories, strict=True):
            ticket.wait()
            began, ended = ticket.span
            assert began <= ended and memory == arrays[1]


def test_a_changed_byte_is_noticed(tmp_path: Path, queue: IoQueue) -> None:
    files, arrays = files_in(tmp_path / "base")
    imported(tmp_path / "store", queue, files, arrays).close()
    piece = files.pieces[1][1]
    path = Path(files.files[piece.file].path)
    content = bytearray(path.read_bytes())
    content[piece.offset] ^= 1
    path.write_bytes(content)
    with open_store([tmp_path / "store"], queue) as store, BufferPool(None) as pool:
        for _ in range(2):  # a reader goes on after a failure
            with pytest.raises(IntegrityFailure, match=r"has changed since .* \(block 1, bytes \d+ to \d+\)") as raised:
                read(store, 1)
            assert str(path) in raised.value.message and "put the file back" in str(raised.value.hint)
        assert read(store, 3) == arrays[3]
        with pytest.raises(IntegrityFailure, match="block 1, bytes"):
            store.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "has [0-9]+ bytes, and had [0-9]+ when the run"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has [0-9]+ bytes, and had [0-9]+ when the run"),
    ],
)
def test_a_file_that_is_another_one_is_refused(
    tmp_path: Path, queue: IoQueue, change: Callable[[Path], None], message: str
) -> None:
    files, arrays = files_in(tmp_path / "base")
    imported(tmp_path / "store", queue, files, arrays).close()
    change(Path(files.files[1].path))
    with open_store([tmp_path / "store"], queue) as store:  # such as to be deleted
        assert read(store, 0) == wanted(0, arrays, 0)
        with pytest.raises(BadInput, match=message) as raised:
            read(store, 1)
        assert "start over with --resume no" in str(raised.value.hint)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, queue: IoQueue) -> None:
    files, arrays = files_in(tmp_path / "base")
    with imported(tmp_path / "store", queue, files, arrays) as store:
        assert read(store, 1) == arrays[1]
        for path, _ in files.files:
            os.truncate(path, 0)
        with pytest.raises(IntegrityFailure, match=r"base_storage: .*the file ends there") as raised:
            read(store, 1)
        assert "put the file back" in str(raised.value.hint)


def test_the_error_names_the_file_of_the_chunk_that_differs(tmp_path: Path, queue: IoQueue) -> None:
    """Not all files of a block, which may be dozens."""
    path, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    array = contents(0, 1, "frozen", 2 * SIZES[0])
    path.write_bytes(array[:4096])
    other.write_bytes(array[4096:])
    pieces = {1: (Piece(0, 4096, 0, 0), Piece(4096, 8192, 1, 0)), 3: (), 4: ()}
    files = BaseFiles(files=(BaseFile(str(path), 4096), BaseFile(str(other), 8192)), pieces=pieces)
    arrays = {1: array, 3: bytes(2 * SIZES[1]), 4: bytes(4 * SIZES[2])}
    with imported(tmp_path / "store", queue, files, arrays) as store:
        check(store, arrays, 0)
        other.write_bytes(bytes(8192))
        with pytest.raises(IntegrityFailure, match="bytes 4096 to 8192") as raised:
            read(store, 1)
        assert str(other) in raised.value.message and str(path) not in raised.value.message


def test_a_tail_that_cannot_be_read(tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    files, arrays = files_in(tmp_path / "base")
    with imported(tmp_path / "store", queue, files, arrays) as store:
        monkeypatch.setattr(os, "pread", _fails)
        with pytest.raises(IntegrityFailure, match=r"base_storage: .* cannot be read: Input/output error"):
            read(store, 1)
        monkeypatch.undo()
        assert read(store, 1) == arrays[1]


def _fails(*_: object) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_without_threads_the_read_ends_when_the_transfer_has(tmp_path: Path, queue: IoQueue) -> None:
    class Busy:
        def start(self, work: object) -> None:
            raise RuntimeError("cannot schedule new futures after shutdown")

    class Closing:
        checksums = Busy()
        tickets: ClassVar[list[Ticket]] = []

        def read(self, extents: Sequence[Extent]) -> Ticket:
            self.tickets.append(queue.read(extents))
            return self.tickets[-1]

    files, _ = files_in(tmp_path / "base")
    with BaseFilesReader(lambda: files, Closing(), pytest.fail) as reader, BufferPool(None) as pool:  # type: ignore[arg-type]
        ticket = reader.read(1, 0, filled(pool, bytes(12288)), unit_bytes=4096, check=lambda first, last: None)
        assert all(each.done for each in Closing.tickets)
        with pytest.raises(RuntimeError, match="after shutdown"):
            ticket.wait()


def test_what_a_reader_takes_is_what_a_plan_counts() -> None:
    """Also of many small pieces, as of a stack of experts: each has pages around it."""
    for sizes in ([3 << 20] * 9, [20_000] * 900, [3_000_001], [7]):
        pieces, position, offset = [], 0, 2088
        for size in sizes:
            pieces.append(Piece(position, size, 0, offset))
            position, offset = position + size, offset + size + 64
        listed = BaseFiles(files=(BaseFile("a", offset),), pieces={0: tuple(pieces)})
        leased = NUM_STAGED * base_reader._staged_bytes(pieces)
        planned = staging_bytes(listed.read_bytes(0, position), position)
        assert 0 < leased <= planned + NUM_STAGED * 3 * 4096, sizes[:1]


def test_a_queue_that_takes_nothing_ends_the_read(tmp_path: Path, queue: IoQueue) -> None:
    class Broken:
        checksums = queue.checksums

        def read(self, extents: Sequence[Extent]) -> Ticket:
            raise IntegrityFailure("transfers have stopped")

    files, _ = files_in(tmp_path / "base")
    with BaseFilesReader(lambda: files, Broken(), pytest.fail) as reader, BufferPool(None) as pool:  # type: ignore[arg-type]
        ticket = reader.read(1, 0, filled(pool, bytes(12288)), unit_bytes=4096, check=lambda first, last: None)
        with pytest.raises(RatelError, match="transfers have stopped"):
            ticket.wait()


@pytest.mark.parametrize("offset", [0, 9, 17, -1])
def test_a_damaged_list_is_noticed(tmp_path: Path, queue: IoQueue, offset: int) -> None:
    files, arrays = files_in(tmp_path / "base")
    with imported(tmp_path / "store", queue, files, arrays) as store:
        start = HEADER_BYTES + store.frozen_bytes - len(files.content)
    path = tmp_path / "store" / DATA_FILE_NAME
    content = bytearray(path.read_bytes())
    content[start + (len(files.content.rstrip(b"\0")) - 1 if offset < 0 else offset)] ^= 64
    path.write_bytes(content)
    with open_store([tmp_path / "store"], queue) as store, pytest.raises(IntegrityFailure, match="list of the base"):
        read(store, 1)


def test_a_list_of_something_else(tmp_path: Path) -> None:
    files, _ = files_in(tmp_path / "base")
    assert BaseFiles.from_content(files.content) == files
    empty = replace(files, files=(), pieces={})
    assert BaseFiles.from_content(empty.content) == empty and len(empty.content) == 4096
    for content in (b"", bytes(4096), files.content[:30]):
        with pytest.raises(IntegrityFailure, match="list of the base model's files is damaged"):
            BaseFiles.from_content(content)


def test_a_copy_leaves_them_where_they_are(tmp_path: Path, queue: IoQueue) -> None:
    files, arrays = files_in(tmp_path / "base")
    with (
        imported(tmp_path / "store", queue, files, arrays) as source,
        make(tmp_path / "copy", queue, files) as target,
        BufferPool(None) as pool,
    ):
        fill(target, Copied(source.current()), pool, progress=lambda num_bytes: None)
        check(target, arrays, 0)
    with open_store([tmp_path / "copy"], queue) as target, BufferPool(None) as pool:
        target.ensure_whole(pool, progress=lambda num_bytes: None, notice=pytest.fail)


def test_no_file_has_what_the_list_does_not_name(tmp_path: Path, queue: IoQueue) -> None:
    """A block without pieces is zero."""
    files, arrays = files_in(tmp_path / "base")
    files = replace(files, pieces={index: of for index, of in files.pieces.items() if index != 3})
    with imported(tmp_path / "store", queue, files, {**arrays, 3: bytes(4096)}) as store:
        assert read(store, 3) == bytes(4096)
