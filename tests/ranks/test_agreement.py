"""What the ranks of a run must agree on before anything is trained."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.engine.ranks.launched import OfAllRanks
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import Interrupted
from ratel_cli.io.queue import open_queue
from ratel_cli.run.train.ranks import (
    Beginning,
    check_same,
    check_same_options,
    common_beginning,
    first_rank_first,
    stop_together,
    with_shape_of_first,
)
from ratel_cli.run.train.start import GoBack, Resume, Start, StartOver
from ratel_cli.store.layout import Geometry, RankSlice
from ratel_cli.store.store import Store
from ratel_cli.training.stopping import StopRequest
from tests.ranks.threads import together
from tests.store.stores import BLOCK_ELEMENTS, IDENTITY, SMALL_CHUNK, blocks_of, import_all, run_step


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("model_hash", "another model"),
        ("config_hash", "other settings"),
        ("data_hash", "other data"),
        ("software", "other software"),
    ],
)
def test_ranks_that_differ_are_named(field: str, words: str) -> None:
    def check(ranks: Ranks) -> None:
        changes: dict[str, str] = {} if ranks.rank != 1 else {field: "x"}
        check_same(ranks, replace(IDENTITY, **changes), _config(), Resume())  # type: ignore[arg-type]

    for found in together(3, check):
        assert isinstance(found, OfAllRanks) and found.message == f"rank 1 has {words} than rank 0"


def _config(**changes: object) -> RunConfig:
    return RunConfig.model_validate({"base_model": "m", "datasets": [{"path": "d"}], **changes}, context={"path": "c"})


@pytest.mark.parametrize("change", [{"save_steps": 3}, {"max_steps": 9}, {"storage": {"max_tb_written": 1.0}}])
def test_what_ranks_do_together_is_the_same(change: dict[str, object]) -> None:
    """Not only what decides the bits: else one would wait for a commit, and the other evaluate."""
    found = together(2, lambda ranks: check_same(ranks, IDENTITY, _config(**(change if ranks.rank else {})), Resume()))
    assert [each.message for each in found] == ["rank 1 has other settings than rank 0"] * 2
    starts = together(2, lambda ranks: check_same(ranks, IDENTITY, _config(), Resume() if ranks.rank else GoBack(1)))
    assert all(isinstance(each, OfAllRanks) for each in starts)


def test_the_options_of_the_command_are_the_same() -> None:
    found = together(3, lambda ranks: check_same_options(ranks, Resume() if ranks.rank < 2 else StartOver(), False))
    assert all(isinstance(each, OfAllRanks) for each in found)
    assert {each.message for each in found} == {"rank 2 was started with other options than rank 0"}
    assert together(3, lambda ranks: check_same_options(ranks, Resume(), True)) == [None] * 3


def test_ranks_have_places_and_limits_of_their_own() -> None:
    own: list[dict[str, object]] = [
        {"output_dir": "a", "storage": {"paths": ["x"]}, "limits": {"host_memory": "4GiB"}},
        {"output_dir": "b", "storage": {"paths": ["y"]}, "report_to": ["tensorboard"]},
    ]
    found = together(2, lambda ranks: check_same(ranks, IDENTITY, _config(**own[ranks.rank]), Resume()))
    assert found == [None, None]


def _store(path: Path, rank: int, size: int, num_steps: int) -> None:
    path.mkdir(parents=True)
    geometry = Geometry(
        blocks=blocks_of(BLOCK_ELEMENTS),
        num_slots=2,
        shares=(1,),
        chunk_elements=SMALL_CHUNK,
        rank_slice=RankSlice(rank, size),
    )
    with (
        open_queue("threads", notice=lambda text: None) as queue,
        Store.create([path], geometry, identity=IDENTITY, queue=queue) as store,
    ):
        import_all(store)
        for _ in range(num_steps):
            run_step(store)


@pytest.mark.parametrize(
    ("stores", "start", "wanted"),
    [
        ([None, None], Resume(), Resume()),
        ([(2, 3), (2, 3)], Resume(), Resume()),
        ([(2, 3), (2, 2)], GoBack(2), GoBack(2)),
        ([(2, 0), None], Resume(), StartOver()),
        ([None, (2, 0)], Resume(), StartOver()),
        ([(3, 3), None], StartOver(replaces_others=True), StartOver(replaces_others=True)),
        ([(2, 3), None], Resume(), "rank 1 has no store, and the others are at step 3"),
        ([None, (4, 3)], Resume(), "rank 0 has no store, and the others are at step 3"),
        ([(2, 1), (4, 3)], Resume(), "rank 1 has no store, and the others are at step 1"),
        ([(3, 3), (3, 3)], Resume(), Resume()),
        ([(1, 3), None], Resume(), Resume()),
        ([(3, 3), (3, 3)], GoBack(2), "the run has 3 ranks, and this command 2: both may not change at once"),
    ],
)
def test_all_begin_at_one_place(
    tmp_path: Path, stores: list[tuple[int, int] | None], start: Start, wanted: Start | str
) -> None:
    """`stores`: of each rank, for how many ranks its store was made, and its step."""
    for rank, store in enumerate(stores):
        if store is not None:
            size, num_steps = store
            _store(tmp_path / str(rank), min(rank, size - 1), size, num_steps)

    def begin(ranks: Ranks) -> Beginning:
        return common_beginning(ranks, [tmp_path / str(ranks.rank)], start, first_step=0)

    for found in together(2, begin):
        if isinstance(wanted, str):
            assert isinstance(found, OfAllRanks) and found.message == wanted
        else:
            goes_on = stores[0] is not None and isinstance(wanted, Resume)
            assert found == Beginning(start=wanted, ranks_before=stores[0][0] if goes_on and stores[0] else 0)


def test_all_have_the_shape_that_rank_0_plans() -> None:
    """Each has planned by itself. What the config names stays, and differences in it are found by `check_same`."""
    written = _config(tokens_per_step=8 * 64, sequence_len=64).resolved("c").of_rank(2)
    assert (written.split, written.tokens_per_step) == (None, 4 * 64)

    def shape(ranks: Ranks) -> RunConfig:
        planned = written.split_by(1 + ranks.rank).chunked_by((1 + ranks.rank) << 20)
        return with_shape_of_first(ranks, planned, written)

    for found in together(2, shape):
        assert (found.split, found.head_chunk, found.tokens_per_step) == ((1, 4), 1 << 20, None)
    named = _config(micro_batch_size=2, head_chunk=1 << 21)
    first, second = together(2, lambda ranks: with_shape_of_first(ranks, named.split_by(2 - ranks.rank), named))
    assert (first.split, second.split, second.head_chunk) == ((2, 1), (1, 2), 1 << 21)


def test_a_step_of_another_run_is_no_step_of_this_one(tmp_path: Path) -> None:
    """One rank has copied it, and the other has not: both begin again."""
    _store(tmp_path / "0", 0, 2, 3)
    for first_step, wanted in ((3, StartOver), (2, OfAllRanks)):

        def begin(ranks: Ranks, first_step: int = first_step) -> Beginning:
            return common_beginning(ranks, [tmp_path / str(ranks.rank)], Resume(), first_step=first_step)

        for found in together(2, begin):
            assert isinstance(found.start if isinstance(found, Beginning) else found, wanted)


def test_a_signal_is_one_of_all() -> None:
    def stop(ranks: Ranks) -> None:
        request = StopRequest()
        stop_together(ranks, request)
        if ranks.rank == 2:
            request.note(signal.SIGINT)
        stop_together(ranks, request)

    for found in together(3, stop):
        assert isinstance(found, Interrupted) and found.exit_code == 130


def test_a_signal_that_comes_late_counts_the_next_time() -> None:
    """One rank alone must not end: it came after this one had told the others."""

    class Late(StopRequest):
        asked = 0

        @property
        def received(self) -> int | None:
            self.asked += 1
            found = super().received
            if self.asked == 1:
                self.note(signal.SIGINT)
            return found

    def stop(ranks: Ranks) -> int:
        request = Late() if ranks.rank == 1 else StopRequest()
        stop_together(ranks, request)
        with pytest.raises(Interrupted):
            stop_together(ranks, request)
        return ranks.rank

    assert together(2, stop) == [0, 1]


def test_the_first_rank_goes_first() -> None:
    has_other = threading.Event()

    def enter(ranks: Ranks) -> bool:
        with first_rank_first(ranks):
            if ranks.rank:
                has_other.set()
            return has_other.wait(0.2)

    assert together(4, enter) == [False, True, True, True]
