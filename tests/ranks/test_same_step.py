"""Slices of several ranks are one generation only if they are of one step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.engine.ranks.remote import read_by_first
from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.store.generation import Generation
from ratel_cli.store.joined import JoinedGeneration
from ratel_cli.training.saved_steps import saved_by_all
from tests.ranks.threads import together
from tests.store.stores import blocks_of, create_store, import_all, run_step

MESSAGE = "the slices of the ranks are of different steps: 1, 1, 0"
SPEC = cast("Any", SimpleNamespace(stored_blocks=(), sliced=lambda rank_slice: SimpleNamespace(stored_blocks=())))


def generation_of(step: int) -> Generation:
    return cast(Generation, SimpleNamespace(progress=SimpleNamespace(step=step), chunk_elements=1, blocks=()))


def test_slices_of_two_steps_are_not_joined(tmp_path: Path) -> None:
    with open_queue("threads", notice=pytest.fail) as queue, BufferPool(None) as pool:
        stores = [import_all(create_store([tmp_path / name], queue)) for name in "abc"]
        for store in stores[:2]:
            run_step(store)
        with pytest.raises(IntegrityFailure) as caught:
            JoinedGeneration(slices=[store.current() for store in stores], blocks=blocks_of((4096,)), pool=pool)
        assert (caught.value.message, caught.value.reported_by) == (MESSAGE, 0)
        run_step(stores[2])
        joined = JoinedGeneration(slices=[store.current() for store in stores], blocks=blocks_of((4096,)), pool=pool)
        assert joined.progress.step == 1
        for store in stores:
            store.close()


@pytest.mark.parametrize("steps", [(1, 1, 0), (1, 1, 1)])
def test_no_rank_reads_slices_of_two_steps(steps: tuple[int, ...]) -> None:
    def read(ranks: Ranks) -> object:
        with BufferPool(None) as pool, read_by_first(ranks, SPEC, generation_of(steps[ranks.rank]), pool) as found:
            return None if found is None else found.progress.step

    found = together(3, read)
    if steps == (1, 1, 1):
        assert found == [1, None, None]
    else:
        assert all(isinstance(each, IntegrityFailure) and each.message == MESSAGE for each in found), found


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [(((2, 5), (5,), (1, 5, 9)), {5}), (((2,), (), (2,)), set()), (((), (), ()), set()), (((3, 4), (3, 4)), {3, 4})],
)
def test_the_steps_that_all_ranks_have_saved(of_ranks: tuple[tuple[int, ...], ...], expected: set[int]) -> None:
    found = together(len(of_ranks), lambda ranks: saved_by_all(ranks, of_ranks[ranks.rank]))
    assert found == [expected] * len(of_ranks)
    assert saved_by_all(ALONE, of_ranks[0]) == set(of_ranks[0])
