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
from tests.e2e.runs import Config, assert_rejected, ratel, wait, works
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


def state_of(config: Config, size: int) -> list[bytes]:
    """All fields of all blocks of the newest step, those of the ranks one behind the other; and its number."""
    output, found, steps = config.output, list[bytes](), set[int]()
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

    def run(config: Config) -> None:
        for number, size in enumerate(SIZES, start=1):
            config.succeed_ranks(size, *of_ranks(size, 2 * number))

    return run_of_each(tmp_path_factory, base=base, rows=rows, run=run, **SAVING)


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "what"), rotating([(1, 2), (2, 1), (1, 4), (4, 3), (3, 1)], list(TRAINED)), ids=str)
def test_the_state_of_any_number_of_ranks(make_config: MakeConfig, sizes: tuple[int, int], what: str) -> None:
    """Every bit of it, and of saved steps. Nothing else is left of the change."""
    before, after = sizes
    config = make_config(**{**CHANGES, **TRAINED[what], "save_steps": 1, "save_total_limit": 2})
    config.succeed_ranks(before, *of_ranks(before, 2))
    wanted = state_of(config, before)
    config.succeed_ranks(after, *of_ranks(after, 2))
    assert state_of(config, after) == wanted
    left = sorted(path.name for path in config.store.parent.rglob("*") if path.is_dir())
    assert left == [f"rank-{rank}.store" for rank in range(1, after)]
    assert not (config.output / "run" / "resharding.json").exists()
    works("verify", config.output)
    assert config.run_ranks(after, *of_ranks(after, 2), "--resume", "1") == [0] * after, config.stderr
    assert "resuming from step 1" in config.stderr


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
            codes = config.run_ranks(size, *arguments, kill_at={0: point})
            if codes[0] == -9:
                num_killed += 1
                assert codes[1:] == [75] * (size - 1)
                is_decided = point.startswith(("reshard.decided", "reshard.moved", "reshard.deleted"))
                assert ratel("verify", config.output).code == (2 if is_decided else 0)
        config.succeed_ranks(size, *arguments)
    assert num_killed >= (1 if point == "reshard.deleted:1" else 2)
    config.assert_same_result(resharded(what))


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "what"), rotating([(3, 2), (2, 1), (1, 3)], WHOLE_OR_ADAPTER), ids=str)
def test_a_new_run_starts_from_a_step_of_another_number(
    make_config: MakeConfig, sizes: tuple[int, int], what: str
) -> None:
    """Its weights are those of that run, had it gone on with the new number; with a fresh optimizer, it has its
    weights. The record of it goes with the ranks."""
    (before, after), keys = sizes, {**CHANGES, **TRAINED[what]}
    other = make_config("other", **{**SAVING, **TRAINED[what]})
    other.succeed_ranks(before, *of_ranks(before, 4))
    branch, fresh = make_config("branch", **keys), make_config("fresh", **keys)
    origin = ("--from", f"{other.output}@2")
    branch.succeed_ranks(after, *origin, *of_ranks(after, 6))
    fresh.succeed_ranks(after, *origin, "--fresh-optimizer", *of_ranks(after, 1))
    if what == "all weights":  # an exported adapter is no base model
        exported = other.output.parent / "exported"
        works("export", other, "--step", 2, "-o", exported)
        begun = make_config("begun", **keys, base=exported)
        begun.succeed_ranks(after, *of_ranks(after, 1))
        fresh.assert_same_result(begun)
    other.succeed_ranks(before, *of_ranks(before, 2), "--resume", "2")
    other.succeed_ranks(after, *of_ranks(after, 6))
    assert branch.export_hash == other.export_hash
    assert branch.curve == other.curve[2:]
    branch.succeed_ranks(before, *origin, *of_ranks(before, 7))
    for rank in range(before):
        directory = branch.output / "run" / "ranks" / str(rank) if rank else branch.output
        assert json.loads((directory / "run" / "origin.json").read_text())["step"] == 2


@pytest.mark.full
@pytest.mark.parametrize("what", sample(list(TRAINED), every=5, offset=1))
def test_a_run_that_started_from_another_one_is_killed(make_config: MakeConfig, what: str) -> None:
    """When one rank has its step, and the other has not; and when another number of ranks has its stores. The same
    command goes on, and all know where the run began."""
    other, branch = (
        make_config(name, **{**keys, **TRAINED[what]}) for name, keys in (("other", SAVING), ("branch", CHANGES))
    )
    other.succeed_ranks(1, *of_ranks(1, 2))
    origin = ("--from", str(other.output))
    assert branch.run_ranks(2, *origin, *of_ranks(2, 4), kill_at={1: "create.filled:1"}) == [75, -9]
    branch.succeed_ranks(2, *origin, *of_ranks(2, 4))
    processes = branch.start_ranks(3, *origin, *of_ranks(3, 6), kill_at={0: "reshard.decided:1"})
    assert wait(processes[0]) == -9
    for process in processes[1:]:
        wait(process)
    branch.succeed_ranks(3, *origin, *of_ranks(3, 6))
    whole = make_config("whole", **{**SAVING, **TRAINED[what]})
    for size, num_steps in ((1, 2), (2, 4), (3, 6)):
        whole.succeed_ranks(size, *of_ranks(size, num_steps))
    assert branch.export_hash == whole.export_hash


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_a_change_that_is_killed_at_any_moment(make_config: MakeConfig, resharded: OfEach, seed: int) -> None:
    """Again and again: any ranks of it, from its start on, or from when new stores are begun."""
    draw, what = random.Random(seed), WHOLE_OR_ADAPTER[seed]
    config = make_config(**{**SAVING, **TRAINED[what]})
    for number, size in enumerate(SIZES, start=1):
        arguments = of_ranks(size, 2 * number)
        for _ in range(0 if number == 1 else 6):
            processes = config.start_ranks(size, *arguments)
            if draw.randrange(2):
                while not is_changing(config) and any(process.is_alive() for process in processes):
                    time.sleep(0.002)
                time.sleep(draw.uniform(0, 0.5))
            else:
                time.sleep(draw.uniform(0, 10))
            for rank in draw.sample(range(size), k=draw.randint(1, size)):
                processes[rank].kill()
            codes = [wait(process) for process in processes]
            assert set(codes) <= {-9, 0, 75}, [config.stderr_of(rank) for rank in range(size)]
        config.succeed_ranks(size, *arguments)
    config.assert_same_result(resharded(what))


def is_changing(config: Config) -> bool:
    return (config.output / "run" / "resharding.json").exists()


@pytest.mark.full
def test_another_number_of_ranks_has_the_same_steps(make_config: MakeConfig) -> None:
    """Else it is rejected, and nothing is changed: so is another directory that is in the way, and a store that is
    missing."""
    config = make_config(**CHANGES)
    config.succeed_ranks(2)
    wanted = state_of(config, 2)
    assert_rejected(config.finetune(), 2, "a step of this run has 12 micro-batches, and not 1 x 6")
    assert config.run_ranks(3) == [2, 75, 75]
    assert "set gradient_accumulation_steps=4; it is that of each rank" in config.stderr
    assert config.stderr_of(1) == config.stderr_of(2) == "", "rank 0 has said it, however long they stay"
    one = of_ranks(1, 2)
    assert_rejected(config.finetune(*one, "--dry-run"), 2, "its stores must be redistributed")
    assert_rejected(config.finetune(*one, "--resume", "1"), 2, "both may not change at once")
    other = config.store.parent / "resharded.store"
    other.mkdir()
    assert_rejected(config.finetune(*one), 2, "is in the way")
    other.rmdir()
    lost = config.store.parent / "rank-1.store"
    lost.rename(lost.with_name("away"))
    assert_rejected(config.finetune(*one), 2, "the store of rank 1 is not here")
    lost.with_name("away").rename(lost)
    assert state_of(config, 2) == wanted
    works("finetune", config, *one)
    assert state_of(config, 1) == wanted


@pytest.mark.full
def test_a_store_can_be_deleted_while_it_changes(make_config: MakeConfig) -> None:
    """With what was begun beside it."""
    config = make_config(**CHANGES)
    config.succeed_ranks(2)
    [process] = config.start_ranks(1, *of_ranks(1, 2), kill_at={0: "reshard.copied:1"})
    assert wait(process) == -9
    works("clean", config.output, "--store", "--yes")
    assert not config.store.parent.exists()
