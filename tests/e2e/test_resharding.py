"""Runs that go on with another number of ranks: the same state, and the weights as if that number had resumed."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.run.files.run_directory import recorded_config
from ratel_cli.store.generation import Generation
from ratel_cli.store.layout import RankSlice
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    assert_rejected,
    assert_same_result,
    curve,
    export_hash,
    finetune,
    output_of,
    ratel,
    start_ranks,
    stderr_of,
    store_of,
    succeed_ranks,
    wait,
)
from tests.e2e.trained import TRAINED, WHOLE_OR_ADAPTER, OfEach, run_of_each
from tests.tiers import rotating, sample

MICRO_BATCHES = 12
"""Of a step, in all ranks together: as many as each number of ranks that is tried divides."""
SIZES = (1, 4, 3, 1)
CHANGES: dict[str, object] = {
    "micro_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES // 2, "max_steps": 2,
}  # fmt: skip
"""Of a run of two ranks."""
SAVING: dict[str, object] = {**CHANGES, "save_steps": 2, "save_total_limit": 9}
RESHARDING_POINTS = (
    "create.filled:1", "commit.synced:1", "manifest.published:1", "reshard.copied:1", "reshard.copied:2",
    "reshard.decided:1", "reshard.moved:1", "reshard.moved:2", "reshard.deleted:1",
)  # fmt: skip


def of_ranks(size: int, num_steps: int) -> tuple[str, ...]:
    return f"gradient_accumulation_steps={MICRO_BATCHES // size}", f"max_steps={num_steps}"


def state_of(config: Path, size: int) -> list[bytes]:
    """All fields of all blocks of the newest step, those of the ranks one behind the other; and its number."""
    output, found, steps = output_of(config), list[bytes](), set[int]()
    for rank in range(size):
        directory = output / "run" / "ranks" / str(rank) if rank else output
        recorded = recorded_config(directory)
        assert recorded is not None
        with (
            open_queue("threads", notice=lambda text: None) as queue,
            Store.open(recorded.storage.paths, queue=queue, identity=None, read_only=True) as store,
        ):
            assert store.rank_slice == RankSlice(rank, size)
            steps.add(store.progress.step)
            fields = [
                read_all(store.current(), block, field.name)
                for block in range(len(store.blocks))
                for field in store.blocks[block].record.fields
            ]
        found = fields if not found else [one + other for one, other in zip(found, fields, strict=True)]
    [step] = steps
    return [*found, str(step).encode()]


def read_all(generation: Generation, block: int, field: str) -> bytes:
    number = generation.blocks[block].num_elements
    num_bytes = generation.blocks[block].record.field(field).num_bytes(number)
    with BufferPool(None) as pool, pool.lease(max(1, num_bytes), "a field") as lease:
        generation.read(block, field, 0, number, lease.memory[:num_bytes]).wait()
        return bytes(lease.memory[:num_bytes])


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    """Of runs that one rank began, and four, three and one went on with."""

    def run(config: Path) -> None:
        for number, size in enumerate(SIZES, start=1):
            succeed_ranks(config, size, *of_ranks(size, 2 * number))

    return run_of_each(tmp_path_factory, base=base, rows=rows, run=run, **SAVING)


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "what"), rotating([(1, 2), (2, 1), (1, 4), (4, 3), (3, 1)], list(TRAINED)), ids=str)
def test_the_state_of_any_number_of_ranks(make_config: MakeConfig, sizes: tuple[int, int], what: str) -> None:
    """Every bit of it, and of saved steps. Nothing else is left of the change."""
    before, after = sizes
    config = make_config(**{**CHANGES, **TRAINED[what], "save_steps": 1, "save_total_limit": 2})
    succeed_ranks(config, before, *of_ranks(before, 2))
    wanted = state_of(config, before)
    succeed_ranks(config, after, *of_ranks(after, 2))
    assert state_of(config, after) == wanted
    left = sorted(path.name for path in store_of(config).parent.rglob("*") if path.is_dir())
    assert left == [f"rank-{rank}.store" for rank in range(1, after)]
    assert not (output_of(config) / "run" / "resharding.json").exists()
    assert ratel("verify", output_of(config)).code == 0
    processes = start_ranks(config, after, *of_ranks(after, 2), "--resume", "1")
    assert [wait(process) for process in processes] == [0] * after, stderr_of(config)
    assert "resuming from step 1" in stderr_of(config)


@pytest.mark.full
@pytest.mark.parametrize(("point", "what"), rotating(RESHARDING_POINTS, WHOLE_OR_ADAPTER))
def test_a_change_that_is_killed_is_made_at_the_next_start(
    make_config: MakeConfig, resharded: OfEach, point: str, what: str
) -> None:
    """The weights are those of a run that was not killed, whichever of its changes was."""
    config = make_config(**{**SAVING, **TRAINED[what]})
    num_killed = 0
    for number, size in enumerate(SIZES, start=1):
        arguments = of_ranks(size, 2 * number)
        if number > 1:
            processes = start_ranks(config, size, *arguments, kill_at={0: point})
            codes = [wait(process) for process in processes]
            if codes[0] == -9:
                num_killed += 1
                assert codes[1:] == [75] * (size - 1)
                is_decided = point.startswith(("reshard.decided", "reshard.moved", "reshard.deleted"))
                assert ratel("verify", output_of(config)).code == (2 if is_decided else 0)
        succeed_ranks(config, size, *arguments)
    assert num_killed >= (1 if point == "reshard.deleted:1" else 2)
    assert_same_result(config, resharded(what))


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "what"), rotating([(3, 2), (2, 1), (1, 3)], WHOLE_OR_ADAPTER), ids=str)
def test_a_new_run_starts_from_a_step_of_another_number(
    make_config: MakeConfig, sizes: tuple[int, int], what: str
) -> None:
    """Its weights are those of that run, had it gone on with the new number; with a fresh optimizer, it has its
    weights. The record of it goes with the ranks."""
    (before, after), keys = sizes, {**CHANGES, **TRAINED[what]}
    other = make_config("other", **{**SAVING, **TRAINED[what]})
    succeed_ranks(other, before, *of_ranks(before, 4))
    branch, fresh = make_config("branch", **keys), make_config("fresh", **keys)
    origin = ("--from", f"{output_of(other)}@2")
    succeed_ranks(branch, after, *origin, *of_ranks(after, 6))
    succeed_ranks(fresh, after, *origin, "--fresh-optimizer", *of_ranks(after, 1))
    if what == "all weights":  # an exported adapter is no base model
        exported = output_of(other).parent / "exported"
        assert ratel("export", other, "--step", 2, "-o", exported).code == 0
        begun = make_config("begun", **keys, base=exported)
        succeed_ranks(begun, after, *of_ranks(after, 1))
        assert_same_result(fresh, begun)
    succeed_ranks(other, before, *of_ranks(before, 2), "--resume", "2")
    succeed_ranks(other, after, *of_ranks(after, 6))
    assert export_hash(branch) == export_hash(other)
    assert curve(branch) == curve(other)[2:]
    succeed_ranks(branch, before, *origin, *of_ranks(before, 7))
    for rank in range(before):
        directory = output_of(branch) / "run" / "ranks" / str(rank) if rank else output_of(branch)
        assert json.loads((directory / "run" / "origin.json").read_text())["step"] == 2


@pytest.mark.full
@pytest.mark.parametrize("what", sample(list(TRAINED), every=5, offset=1))
def test_a_run_that_started_from_another_one_is_killed(make_config: MakeConfig, what: str) -> None:
    """When one rank has its step, and the other has not; and when another number of ranks has its stores. The same
    command goes on, and all know where the run began."""
    other, branch = (
        make_config(name, **{**keys, **TRAINED[what]}) for name, keys in (("other", SAVING), ("branch", CHANGES))
    )
    succeed_ranks(other, 1, *of_ranks(1, 2))
    origin = ("--from", str(output_of(other)))
    processes = start_ranks(branch, 2, *origin, *of_ranks(2, 4), kill_at={1: "create.filled:1"})
    assert [wait(process) for process in processes] == [75, -9]
    succeed_ranks(branch, 2, *origin, *of_ranks(2, 4))
    processes = start_ranks(branch, 3, *origin, *of_ranks(3, 6), kill_at={0: "reshard.decided:1"})
    assert wait(processes[0]) == -9
    for process in processes[1:]:
        wait(process)
    succeed_ranks(branch, 3, *origin, *of_ranks(3, 6))
    whole = make_config("whole", **{**SAVING, **TRAINED[what]})
    for size, num_steps in ((1, 2), (2, 4), (3, 6)):
        succeed_ranks(whole, size, *of_ranks(size, num_steps))
    assert export_hash(branch) == export_hash(whole)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_a_change_that_is_killed_at_any_moment(make_config: MakeConfig, resharded: OfEach, seed: int) -> None:
    """Again and again: any ranks of it, from its start on, or from when new stores are begun."""
    draw, what = random.Random(seed), WHOLE_OR_ADAPTER[seed]
    config = make_config(**{**SAVING, **TRAINED[what]})
    for number, size in enumerate(SIZES, start=1):
        arguments = of_ranks(size, 2 * number)
        for _ in range(0 if number == 1 else 6):
            processes = start_ranks(config, size, *arguments)
            if draw.randrange(2):
                while not is_changing(config) and any(process.is_alive() for process in processes):
                    time.sleep(0.002)
                time.sleep(draw.uniform(0, 0.5))
            else:
                time.sleep(draw.uniform(0, 10))
            for rank in draw.sample(range(size), k=draw.randint(1, size)):
                processes[rank].kill()
            codes = [wait(process) for process in processes]
            assert set(codes) <= {-9, 0, 75}, [stderr_of(config, rank) for rank in range(size)]
        succeed_ranks(config, size, *arguments)
    assert_same_result(config, resharded(what))


def is_changing(config: Path) -> bool:
    return (output_of(config) / "run" / "resharding.json").exists()


@pytest.mark.full
def test_another_number_of_ranks_has_the_same_steps(make_config: MakeConfig) -> None:
    """Else it is rejected, and nothing is changed: so is another directory that is in the way, and a store that is
    missing."""
    config = make_config(**CHANGES)
    succeed_ranks(config, 2)
    wanted = state_of(config, 2)
    assert_rejected(finetune(config), 2, "a step of this run has 12 micro-batches, and not 1 x 6")
    processes = start_ranks(config, 3)
    assert [wait(process) for process in processes] == [2, 75, 75]
    assert "set gradient_accumulation_steps=4; it is that of each rank" in stderr_of(config)
    assert stderr_of(config, 1) == stderr_of(config, 2) == "", "rank 0 has said it, however long they stay"
    one = of_ranks(1, 2)
    assert_rejected(finetune(config, *one, "--dry-run"), 2, "its stores must be redistributed")
    assert_rejected(finetune(config, *one, "--resume", "1"), 2, "both may not change at once")
    other = store_of(config).parent / "resharded.store"
    other.mkdir()
    assert_rejected(finetune(config, *one), 2, "is in the way")
    other.rmdir()
    lost = store_of(config).parent / "rank-1.store"
    lost.rename(lost.with_name("away"))
    assert_rejected(finetune(config, *one), 2, "the store of rank 1 is not here")
    lost.with_name("away").rename(lost)
    assert state_of(config, 2) == wanted
    ended = finetune(config, *one)
    assert ended.code == 0, ended.stderr
    assert state_of(config, 1) == wanted


@pytest.mark.full
def test_a_store_can_be_deleted_while_it_changes(make_config: MakeConfig) -> None:
    """With what was begun beside it."""
    config = make_config(**CHANGES)
    succeed_ranks(config, 2)
    [process] = start_ranks(config, 1, *of_ranks(1, 2), kill_at={0: "reshard.copied:1"})
    assert wait(process) == -9
    assert ratel("clean", output_of(config), "--store", "--yes").code == 0
    assert not store_of(config).parent.exists()
