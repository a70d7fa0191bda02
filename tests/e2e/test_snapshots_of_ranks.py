"""Snapshots of several ranks: all have the same step, and `ratel restore` makes all stores again from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, assert_rejected, ratel, wait, works
from tests.e2e.trained import TRAINED
from tests.tiers import sample

CHANGES: dict[str, object] = {"max_steps": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 2}


@pytest.fixture
def what(request: pytest.FixtureRequest) -> str:
    """What a run trains: all weights unless the test asks for something else."""
    return str(getattr(request, "param", "all weights"))


@pytest.fixture
def copied(make_config: MakeConfig, tmp_path: Path, what: str) -> Config:
    """The config of a run of two ranks that has done four steps, of which step 4 is in the snapshot."""
    storage = {"engine": "threads", "snapshot": {"path": str(tmp_path / "snapshot"), "every": 2}}
    config = make_config("copied", **{**CHANGES, **TRAINED[what]}, storage=storage)
    config.succeed_ranks(2, "max_steps=4")
    return config


def snapshots_of(config: Config) -> list[Path]:
    first = config.parents[1] / "snapshot"
    return [first, first / "rank-1.store"]


def steps_of(config: Config) -> list[int]:
    steps = []
    for directory in snapshots_of(config):
        with (
            open_queue("threads", notice=pytest.fail) as queue,
            Store.open([directory], queue=queue, identity=None, read_only=True) as store,
        ):
            steps.append(store.progress.step)
    return steps


@pytest.mark.full
@pytest.mark.parametrize("what", sample(list(TRAINED), every=3), indirect=True)
def test_a_lost_store_of_one_rank(copied: Config, make_config: MakeConfig, what: str) -> None:
    """All go back to the snapshot's step, and end with the weights of a run that lost nothing."""
    assert steps_of(copied) == [4, 4]
    assert copied.run_ranks(2, kill_at={0: "commit.written:2"}) == [-9, 75]
    shutil.rmtree(copied.store.parent / "rank-1.store")
    assert copied.run_ranks(2) == [2, 2]
    assert "rank 1 has no store" in copied.stderr
    assert_rejected(ratel("restore", copied), 2, "is at step 5, and the snapshot at step 4")
    assert "restored step 4 from" in works("restore", copied, "--overwrite").stderr
    copied.succeed_ranks(2)
    whole = make_config("whole", **{**CHANGES, **TRAINED[what]})
    whole.succeed_ranks(2)
    copied.assert_same_result(whole)
    works("verify", copied)


@pytest.mark.full
@pytest.mark.parametrize("what", sample(list(TRAINED), every=5, offset=1), indirect=True)
def test_the_newest_step_that_all_have(copied: Config) -> None:
    """One had ended its copy when all were killed, and the other had not. Restoring twice changes nothing."""
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([snapshots_of(copied)[1]], queue=queue, identity=None) as store,
        BufferPool(None) as pool,
    ):
        store.fall_back(pool)
    assert steps_of(copied) == [4, 2]
    works("verify", copied)
    shutil.rmtree(copied.store.parent)
    for _ in range(2):
        assert "restored step 2 from" in works("restore", copied).stderr
    copied.succeed_ranks(2, "max_steps=5")
    assert "resuming from step 2" in copied.stderr
    assert steps_of(copied) == [4, 4]


@pytest.mark.full
def test_another_number_of_ranks_has_another_snapshot(copied: Config, tmp_path: Path) -> None:
    one = ("gradient_accumulation_steps=4", "max_steps=6")
    assert_rejected(copied.finetune(*one), 2, "is one of 2 ranks, and this command has 1")
    assert steps_of(copied) == [4, 4]
    works("finetune", copied, *one, f"storage.snapshot.path={tmp_path / 'other'}")
    assert_rejected(ratel("restore", copied, "--from", str(tmp_path / "snapshot")), 2, "different runs")
    assert Store.exists(snapshots_of(copied)[:1]) and Store.exists([tmp_path / "other"])
    (snapshots_of(copied)[0] / "ratel.store").unlink()
    processes = copied.start_ranks(4, "gradient_accumulation_steps=1", "max_steps=7")
    assert {wait(process) for process in processes} == {2, 75}
    assert "is one of 2 ranks, and this run has 4" in "".join(copied.stderr_of(rank) for rank in range(4))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(list(TRAINED), every=5, offset=3), indirect=True)
def test_clean_deletes_those_of_all_ranks(copied: Config) -> None:
    works("clean", copied.output, "--store", "--yes")
    assert all(Store.exists([each]) for each in snapshots_of(copied))
    works("clean", copied.output, "--yes")
    assert list(snapshots_of(copied)[0].iterdir()) == []
