"""Held generations: steps do not overwrite them, they need no manifest, and a crash ends the hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.store.generation import Generation
from tests.store.stores import contents, create_store, import_all, open_store, run_step


def check_held(generation: Generation, step: int, pool: BufferPool) -> None:
    assert generation.progress.step == step
    for block, num_elements in enumerate(each.num_elements for each in generation.blocks):
        for field in generation.blocks[block].record.fields:
            with pool.lease(field.num_bytes(num_elements), "test") as lease:
                generation.read(block, field.name, 0, num_elements, lease.memory).wait()
                assert bytes(lease.memory) == contents(step, block, field.name, len(lease.memory))


def test_steps_do_not_overwrite_it(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=3)) as store:
        run_step(store)
        held = store.hold()
        for _ in range(4):
            run_step(store)
            check_held(held, 1, pool)
        store.release(held)
        run_step(store)
        run_step(store)
        assert store.pinned_steps == ()


def test_it_counts_with_the_pinned_ones(queue: IoQueue, tmp_path: Path) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=4)) as store:
        run_step(store)
        held = store.hold()
        run_step(store)
        store.pin()
        run_step(store)
        with pytest.raises(EnvironmentFailure, match=r"step 3 cannot be saved: .* 4 slots, .* other steps use 2"):
            store.pin()
        with pytest.raises(EnvironmentFailure, match="step 3 cannot be saved"):
            store.hold()
        store.release(held)
        store.pin()
        assert store.pinned_steps == (2, 3)


def test_a_pinned_generation_may_be_held_too(queue: IoQueue, pool: BufferPool, tmp_path: Path) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=3)) as store:
        run_step(store)
        store.pin()
        held = store.hold()
        run_step(store)
        store.unpin(1)
        run_step(store)
        run_step(store)
        check_held(held, 1, pool)


def test_a_store_without_a_free_slot_for_it(queue: IoQueue, tmp_path: Path) -> None:
    with import_all(create_store([tmp_path], queue)) as store, pytest.raises(EnvironmentFailure, match="2 slots"):
        store.hold()


def test_the_next_process_does_not_hold_it(queue: IoQueue, tmp_path: Path) -> None:
    with import_all(create_store([tmp_path], queue, num_slots=3)) as store:
        store.hold()
    with open_store([tmp_path], queue) as store:
        assert store.pinned_steps == ()
        store.hold()
