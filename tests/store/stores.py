"""A small store whose contents are a pure function of the step, so that every byte can be checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.schedule.rules import ADAMW, FROZEN
from ratel_cli.sizes import DtypeName
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.layout import Geometry, StoredBlock
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Progress, Store, StoreIdentity
from tests.fakes import filled

BLOCK_ELEMENTS = (4096, 2048, 2048, 6144)
SMALL_CHUNK = 2048
STRIPE_BYTES = 5 * 4096  # divides no field, so that stripes cut transfers in odd places
IDENTITY = StoreIdentity(model_hash="m" * 64, config_hash="c" * 64, data_hash="d" * 64, seed=42, software="ratel 1")


def blocks_of(elements: Sequence[int], dtype: DtypeName = "bfloat16") -> tuple[StoredBlock, ...]:
    """Trained blocks of these sizes."""
    return tuple(StoredBlock(number, ADAMW.record(dtype)) for number in elements)


MIXED = (
    *blocks_of((4096, 2048)),
    StoredBlock(4096, FROZEN.record("bfloat16"), is_frozen=True),
    *blocks_of((2048, 0), "float32"),
    *blocks_of((6144,)),
    StoredBlock(2048, FROZEN.record("float32"), is_frozen=True),
)
"""Blocks of two dtypes, and two frozen ones."""


def progress_of(step: int) -> Progress:
    return Progress(step=step, updates=step, loss_scale=2.0**16, good_steps=step % 3, tokens=100 * step)


@lru_cache(maxsize=512)
def contents(step: int, block: int, field: str, num_bytes: int) -> bytes:
    return random.Random(f"{step} {block} {field}").randbytes(num_bytes)


def create_store(
    paths: Sequence[Path],
    queue: IoQueue,
    *,
    dtype: DtypeName = "bfloat16",
    block_elements: Sequence[int] = BLOCK_ELEMENTS,
    blocks: Sequence[StoredBlock] | None = None,
    num_slots: int = 2,
    in_place: bool = False,
    overwrite: bool = False,
    identity: StoreIdentity = IDENTITY,
    weights: Sequence[int] | None = None,
    stripe_bytes: int = STRIPE_BYTES,
    chunk_elements: int = SMALL_CHUNK,
    notice: Callable[[str], None] = lambda text: None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    barrier: Barrier | None = None,
    store_class: type[Store] = Store,
) -> Store:
    return store_class.create(
        paths,
        Geometry(
            blocks=blocks_of(block_elements, dtype) if blocks is None else tuple(blocks),
            num_slots=1 if in_place else num_slots,
            shares=tuple(weights or [1] * len(paths)),
            stripe_bytes=stripe_bytes,
            chunk_elements=chunk_elements,
        ),
        identity=identity,
        queue=queue,
        overwrite=overwrite,
        notice=notice,
        progress=progress,
        lock_wait_seconds=0.2,
        barrier=barrier,
    )


def write_generation(store: Store, step: int) -> None:
    """Write every record, and larger fields in two parts."""
    with BufferPool(None) as pool:
        shadow, tickets = store.shadow(), []
        for index, block in enumerate(store.blocks):
            if block.is_frozen and step:
                continue
            for field in block.record.fields:
                memory = filled(pool, contents(step, index, field.name, field.num_bytes(block.num_elements)))
                middle = block.num_elements // 4096 * 2048
                first = field.num_bytes(middle)
                tickets.append(shadow.write(index, field.name, 0, middle, memory[:first]))
                tickets.append(shadow.write(index, field.name, middle, block.num_elements, memory[first:]))
        for ticket in tickets:
            ticket.wait()


def import_all(store: Store) -> Store:
    """Write and commit step 0. Returns the store."""
    write_generation(store, 0)
    store.commit_import(progress_of(0))
    return store


def run_step(store: Store) -> None:
    """Write and commit the next step."""
    step = store.progress.step + 1
    store.begin_step()
    write_generation(store, step)
    store.commit(progress_of(step))


def check_generation(store: Store, step: int) -> None:
    """Check progress and every byte of the current generation against those of `step`."""
    assert store.progress == progress_of(step)
    with BufferPool(None) as pool:
        for index, block in enumerate(store.blocks):
            for field in block.record.fields:
                memory = pool.lease(field.num_bytes(block.num_elements), "test").memory
                store.current().read(index, field.name, 0, block.num_elements, memory).wait()
                writer = 0 if block.is_frozen else step
                assert bytes(memory) == contents(writer, index, field.name, len(memory)), (step, index, field.name)


def open_store(
    paths: Sequence[Path],
    queue: IoQueue,
    *,
    identity: StoreIdentity | None = IDENTITY,
    notice: Callable[[str], None] = lambda text: None,
    lock_wait_seconds: float = 0.2,
) -> Store:
    return Store.open(paths, queue=queue, identity=identity, notice=notice, lock_wait_seconds=lock_wait_seconds)


def edit(directory: Path, offset: int, content: bytes) -> None:
    """Write to the data file, past the store."""
    with (directory / DATA_FILE_NAME).open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(directory: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of one byte of the data file."""
    with (directory / DATA_FILE_NAME).open("rb") as file:
        file.seek(offset)
        [byte] = file.read(1)
    edit(directory, offset, bytes([byte ^ mask]))


def flip_in(directory: Path, content: bytes) -> None:
    """Flip a bit of the first place in the data file that has this content."""
    flip(directory, (directory / DATA_FILE_NAME).read_bytes().index(content))
