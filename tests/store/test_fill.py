"""Stores filled from others: the same bytes whatever the shapes of the stores, and no damaged byte is copied."""

from __future__ import annotations

import errno
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.sizes import DtypeName
from ratel_cli.store.fill import COPY_BYTES, Copied, StatePart, fill
from ratel_cli.store.layout import StoredBlock
from ratel_cli.store.store import Store
from tests.fakes import Fault, FaultyQueue, filled
from tests.store.stores import (
    BLOCK_ELEMENTS,
    check_generation,
    contents,
    create_store,
    flip_in,
    import_all,
    open_store,
    progress_of,
    run_step,
)

LARGE_BLOCKS = (2048, (1 << 20) + 2048, 2048)
"""Each field of the second block needs two parts."""


def copy(source: Store, target: Store, pool: BufferPool) -> list[int]:
    """Copy the current generation, and commit it. Returns the bytes of each part."""
    parts: list[int] = []
    fill(target, Copied(source.current()), pool, progress=parts.append)
    return parts


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_every_byte_is_copied(queue: IoQueue, pool: BufferPool, tmp_path: Path, dtype: DtypeName) -> None:
    """From two files to one, with stripes of another size and another number of slots; as an import and as a step."""
    with (
        import_all(create_store([tmp_path / "a", tmp_path / "b"], queue, dtype=dtype, num_slots=3)) as source,
        create_store([tmp_path / "c"], queue, dtype=dtype, stripe_bytes=1 << 20) as target,
    ):
        run_step(source)
        parts = copy(source, target, pool)
        check_generation(target, 1)
        assert sum(parts) == sum(block.num_bytes for block in source.blocks)
        run_step(source)
        copy(source, target, pool)
        check_generation(target, 2)
        check_generation(source, 2)
    with open_store([tmp_path / "c"], queue) as reopened:
        check_generation(reopened, 2)


def test_large_fields_are_copied_in_parts_with_constant_memory(queue: IoQueue, tmp_path: Path) -> None:
    with (
        import_all(create_store([tmp_path / "a"], queue, block_elements=LARGE_BLOCKS)) as source,
        create_store([tmp_path / "b"], queue, block_elements=LARGE_BLOCKS) as target,
        BufferPool(COPY_BYTES) as pool,
    ):
        parts = copy(source, target, pool)
        assert len(parts) == 4 * 4
        assert max(parts) == COPY_BYTES // 2
        check_generation(target, 0)
        assert pool.leased_bytes == 0


def test_damaged_bytes_are_not_copied(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    import_all(create_store([tmp_path / "a"], queue)).close()
    flip_in(tmp_path / "a", contents(0, 3, "m32", 4 * BLOCK_ELEMENTS[3])[:4096])
    with (
        open_store([tmp_path / "a"], queue) as source,
        create_store([tmp_path / "b"], queue) as target,
        pytest.raises(IntegrityFailure, match=r"block 3, m32"),
    ):
        copy(source, target, pool)
    assert not Store.exists([tmp_path / "b"])
    assert pool.leased_bytes == 0


@pytest.mark.parametrize("call", [0, 3, 7])
def test_a_target_that_cannot_be_written(queue: IoQueue, pool: BufferPool, tmp_path: Path, call: int) -> None:
    with (
        import_all(create_store([tmp_path / "a"], queue)) as source,
        import_all(create_store([tmp_path / "b"], queue)) as target,
    ):
        run_step(source)
        target.close()
        with (
            FaultyQueue(from_call=call, lasting=Fault(error_number=errno.EIO)) as faulty,
            open_store([tmp_path / "b"], faulty) as failing,
            pytest.raises(IntegrityFailure),
        ):
            copy(source, failing, pool)
        assert pool.leased_bytes == 0
        check_generation(source, 1)
    with open_store([tmp_path / "b"], queue) as reopened:
        check_generation(reopened, 0)


def test_an_exception_from_progress_ends_the_copy(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    def stop(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with (
        import_all(create_store([tmp_path / "a"], queue)) as source,
        create_store([tmp_path / "b"], queue) as target,
    ):
        with pytest.raises(KeyboardInterrupt):
            fill(target, Copied(source.current()), pool, progress=stop)
        assert pool.leased_bytes == 0


class WholeBlocks:
    """A source of a kind of its own: it has all fields of a block at once. Remembers whether it was ended."""

    def __init__(self, step: int) -> None:
        self.progress = progress_of(step)
        self.has_ended = False

    def parts(self, blocks: Sequence[tuple[int, StoredBlock]], pool: BufferPool) -> Generator[StatePart, None, None]:
        try:
            for index, block in blocks:
                sizes = {field.name: field.num_bytes(block.num_elements) for field in block.record.fields}
                made = {name: contents(self.progress.step, index, name, size) for name, size in sizes.items()}
                memories = {name: filled(pool, content) for name, content in made.items()}
                yield StatePart(index, 0, block.num_elements, memories)
        finally:
            self.has_ended = True


def test_a_source_of_another_kind(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    """The first filling is the store's import, others are steps; one that is ended early is none."""

    def stop(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with create_store([tmp_path], queue) as store:
        for step in (0, 1):
            parts: list[int] = []
            assert store.is_new == (step == 0)
            fill(store, WholeBlocks(step), pool, progress=parts.append)
            check_generation(store, step)
            assert parts == [block.num_bytes for block in store.blocks]
        ended = WholeBlocks(2)
        with pytest.raises(KeyboardInterrupt):
            fill(store, ended, pool, progress=stop)
        assert ended.has_ended
    with open_store([tmp_path], queue) as store:
        check_generation(store, 1)
