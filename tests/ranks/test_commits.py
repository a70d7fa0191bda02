"""Commits of all ranks at the level of their stores, ended at random moments of any ranks, again and again.

Ranks are threads, and write steps whose contents follow from their number. Some end before or after one of their
moments: a write, a sync, a manifest, a meeting. The others get no more answers, and end. Then all start again. They go
on from one step, which has its contents in every rank, and no step is lost whose commit any rank had seen the end of.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratel_cli.engine.ranks.commits import commit_progress_together, commit_together, resume_together
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.store.store import Progress, Store
from tests.ranks.moments import KillingBarrier, KillingChannel, Moments
from tests.ranks.threads import Killed, together
from tests.store.stores import IDENTITY, check_generation, create_store, import_all, progress_of, write_generation
from tests.tiers import sample

NUM_GROUPS, NUM_IN_GROUP = 16, 20
"""320 histories in all; the short tier has one group."""
NUM_STEPS, NUM_STARTS = 3, 4
Commit = Callable[[Store, Ranks, Progress], None]


@pytest.fixture(scope="module")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store at step 0. Tests get copies."""
    path = tmp_path_factory.mktemp("new") / "store"
    path.mkdir()
    with open_queue("threads", notice=lambda text: None) as queue, create_store([path], queue) as store:
        import_all(store)
    return path


def train(
    ranks: Ranks, path: Path, moments: Moments, seen: list[int], commit: Commit = commit_together
) -> tuple[int, int]:
    """Go on from the newest common step, and write steps. Returns the first and the last. `seen` gets each step whose
    commit has ended."""
    watched = replace(ranks, control=KillingChannel(ranks.control, moments))
    with (
        open_queue("threads", notice=lambda text: None) as queue,
        BufferPool(None) as pool,
        Store.open([path], queue=queue, identity=IDENTITY, barrier=KillingBarrier(moments)) as store,
    ):
        store.ensure_whole(pool, progress=lambda num_bytes: None, notice=lambda text: None)
        resume_together(store, watched, pool)
        first = store.progress.step
        check_generation(store, first)
        for step in range(first + 1, first + 1 + NUM_STEPS):
            store.begin_step()
            moments.pass_("write", lambda store=store, step=step: write_generation(store, step))
            commit(store, watched, progress_of(step))
            seen.append(step)
        check_generation(store, store.progress.step)
        return first, store.progress.step


def history(number: int, new_store: Path, directory: Path, commit: Commit = commit_together) -> list[Any]:
    """Start, end and start again. Returns what the ranks of the last start came to."""
    draw = random.Random(number)
    size = draw.choice([2, 3, 4])
    paths = [directory / f"{number}-{rank}" for rank in range(size)]
    for path in paths:
        shutil.copytree(new_store, path)
    newest = 0
    for start in range(NUM_STARTS):
        moments = [Moments() for _ in range(size)]
        if start < NUM_STARTS - 1:
            for rank in draw.sample(range(size), k=draw.randint(1, size)):
                moments[rank] = Moments(kill_at=draw.randrange(14), after=draw.random() < 0.5)
        seen: list[list[int]] = [[] for _ in range(size)]

        def start_again(ranks: Ranks, moments: list[Moments] = moments, seen: list[list[int]] = seen) -> object:
            return train(ranks, paths[ranks.rank], moments[ranks.rank], seen[ranks.rank], commit)

        found = together(size, start_again)
        assert all(isinstance(each, tuple | Killed | EnvironmentFailure) for each in found), (number, start, found)
        firsts = {each[0] for each in found if isinstance(each, tuple)}
        assert len(firsts) <= 1 and all(first >= newest for first in firsts), (number, start, found, newest)
        newest = max([newest, *(step for steps in seen for step in steps)])
    for path in paths:
        shutil.rmtree(path)
    return found


@pytest.mark.parametrize("group", sample(range(NUM_GROUPS), every=NUM_GROUPS, offset=7))
def test_no_committed_step_is_lost(new_store: Path, tmp_path: Path, group: int) -> None:
    for number in range(group * NUM_IN_GROUP, (group + 1) * NUM_IN_GROUP):
        found = history(number, new_store, tmp_path)
        assert all(isinstance(each, tuple) for each in found), (number, found)
        assert len(set(found)) == 1


def test_a_commit_without_a_meeting_is_noticed(new_store: Path, tmp_path: Path) -> None:
    """One rank overwrites the last step that another has: a committed one is lost, or all that they have in common."""

    def hasty(store: Store, ranks: Ranks, progress: Progress) -> None:
        store.commit(progress)

    def is_noticed(number: int) -> bool:
        try:
            history(number, new_store, tmp_path, hasty)
        except AssertionError:
            return True
        return False

    assert any(map(is_noticed, range(NUM_IN_GROUP)))


def test_ranks_at_different_steps_do_not_go_on(new_store: Path, tmp_path: Path) -> None:
    def commit(ranks: Ranks) -> None:
        shutil.copytree(new_store, path := tmp_path / str(ranks.rank))
        with (
            open_queue("threads", notice=lambda text: None) as queue,
            Store.open([path], queue=queue, identity=IDENTITY) as store,
        ):
            store.begin_step()
            write_generation(store, 1)
            commit_together(store, ranks, progress_of(1 + ranks.rank))

    for found in together(2, commit):
        assert isinstance(found, IntegrityFailure) and "different steps: 1, 2" in found.message


def test_stores_without_a_common_step_are_rejected(new_store: Path, tmp_path: Path) -> None:
    """Rank 0 is two steps ahead; or it is one step ahead, and the one before is overwritten."""

    def resume(ranks: Ranks, directory: Path, num_steps: int) -> None:
        shutil.copytree(new_store, path := directory / str(ranks.rank))
        with (
            open_queue("threads", notice=lambda text: None) as queue,
            BufferPool(None) as pool,
            Store.open([path], queue=queue, identity=IDENTITY) as store,
        ):
            for step in range(1, 1 + (num_steps if ranks.rank == 0 else 0)):
                store.begin_step()
                write_generation(store, step)
                store.commit(progress_of(step))
            if ranks.rank == 0:
                store.begin_step()
                write_generation(store, 1 + num_steps)
                store.discard()
            resume_together(store, ranks, pool)

    found = together(2, lambda ranks: resume(ranks, tmp_path / "two", 2))
    assert all(isinstance(each, IntegrityFailure) and "they are at steps 2, 0" in each.message for each in found), found
    ahead, behind = together(2, lambda ranks: resume(ranks, tmp_path / "one", 1))
    assert isinstance(ahead, IntegrityFailure) and "are not what step 0 wrote" in ahead.message
    assert isinstance(behind, EnvironmentFailure)


def test_a_step_that_was_skipped_is_taken_back_where_not_all_have_it(new_store: Path, tmp_path: Path) -> None:
    """Rank 0 has committed the progress of step 2, which was not applied; rank 1 has not."""

    def run(ranks: Ranks, *, is_killed: bool) -> int:
        path = tmp_path / str(ranks.rank)
        if is_killed:
            shutil.copytree(new_store, path)
        moments = Moments()
        with (
            open_queue("threads", notice=lambda text: None) as queue,
            BufferPool(None) as pool,
            Store.open([path], queue=queue, identity=IDENTITY, barrier=KillingBarrier(moments)) as store,
        ):
            resume_together(store, ranks, pool)
            if not is_killed:
                check_generation(store, 1)
                commit_progress_together(store, ranks, progress_of(2))
                return store.progress.step
            store.begin_step()
            write_generation(store, 1)
            commit_together(store, ranks, progress_of(1))
            moments.kill_at, moments.after = len(moments.seen), ranks.rank == 0
            commit_progress_together(store, ranks, progress_of(2))
            return store.progress.step

    assert all(isinstance(each, Killed) for each in together(2, lambda ranks: run(ranks, is_killed=True)))
    assert together(2, lambda ranks: run(ranks, is_killed=False)) == [2, 2]
