"""A run that is stopped anywhere and resumed ends with the same bytes and losses as an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from ratel_cli.store.store import Staged, Store
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    assert_rejected,
    assert_same_result,
    curve,
    export_hash,
    file_hash,
    finetune,
    output_of,
    ratel,
    run_until_killed,
    start,
    stderr_of,
    store_of,
    succeed,
    wait,
    wait_for_step,
    wait_until,
    weights_path,
    write_rows,
)
from tests.e2e.trained import TRAINED, WHOLE_OR_ADAPTER, OfEach, run_of_each
from tests.tiers import rotating, sample, thinned

NUM_STEPS = 30
CHANGES: dict[str, object] = {
    "max_steps": NUM_STEPS,
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "warmup_steps": 3,
    "warmup_ratio": None,
    "save_steps": 10,
    "save_total_limit": 2,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    return run_of_each(tmp_path_factory, base=base, rows=rows, run=run_with_other_losses, **CHANGES)


def run_with_other_losses(config: Path) -> None:
    """Run it. Each step has a loss of its own, so that no step can stand for another one."""
    succeed(config)
    assert len({loss for _, loss, _ in curve(config)}) == NUM_STEPS


LIVES = {
    "twice": (("commit.written:1",), ("manifest.published:6",)),
    "and again": (("create.filled:1",), ("commit.synced:4", "manifest.ready:4", "commit.published:5")),
}
"""The failpoints at which a run is killed: while it imports, and while it trains."""


@pytest.mark.full
@pytest.mark.parametrize(("lives", "what"), rotating(list(LIVES), list(TRAINED)))
def test_killed_again_and_again(make_config: MakeConfig, undisturbed: OfEach, lives: str, what: str) -> None:
    """SIGKILL while the store is created, and at every failpoint of a commit, each time a few steps later."""
    config, (importing, training) = make_config(**{**CHANGES, **TRAINED[what]}), LIVES[lives]
    for point in importing:
        run_until_killed(config, kill_at=point)
        assert not (output_of(config) / "run" / "metrics.jsonl").exists()
        [row] = json.loads(ratel("status", output_of(config), "--json").stdout)["runs"]
        assert (row["state"], row["step"], row["num_steps"]) == ("killed", 0, NUM_STEPS), "listed from its import on"
    run_until_killed(config, kill_at="commit.written:4")  # the first commit is that of the import, so this is step 3
    assert [step for step, _, _ in curve(config)] == [1, 2, 3], "the third step was announced, but not committed"
    [row] = json.loads(ratel("status", output_of(config), "--json").stdout)["runs"]
    assert (row["state"], row["step"], row["loss"]) == ("killed", 2, curve(config)[1][1])
    for point in training:
        run_until_killed(config, kill_at=point)
        assert "resuming from step" in stderr_of(config)
    assert "resuming from step" in succeed(config)
    assert_same_result(config, undisturbed(what))


@pytest.mark.parametrize(
    ("what", "number"),
    thinned(
        rotating(WHOLE_OR_ADAPTER, [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], every=2, full_rotation=True),
        every=2,
    ),
)
def test_stopped_by_a_signal(make_config: MakeConfig, undisturbed: OfEach, what: str, number: signal.Signals) -> None:
    config, code = make_config(**{**CHANGES, **TRAINED[what]}), -9 if number == signal.SIGKILL else 128 + number
    process = start(config)
    wait_for_step(config, 5, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait(process) == code
    num_steps = len(curve(config))
    assert 5 <= num_steps < NUM_STEPS
    if code > 0:
        stopped = f"Stopped at step {num_steps} (saved). Run the same command to continue."
        assert stderr_of(config).splitlines()[-1] == stopped
    assert not weights_path(config).exists()
    assert f"resuming from step {num_steps}" in succeed(config) or code == -9
    assert_same_result(config, undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "what", "number"),
    rotating(["import", "export"], WHOLE_OR_ADAPTER, [signal.SIGINT, signal.SIGTERM], offset=1),
)
def test_stopped_while_importing_or_exporting(
    make_config: MakeConfig, undisturbed: OfEach, phase: str, what: str, number: signal.Signals
) -> None:
    config = make_config(**{**CHANGES, **TRAINED[what]})
    process = start(config)
    if phase == "import":
        wait_until(lambda: store_of(config).exists(), config, process)
    else:
        wait_for_step(config, NUM_STEPS, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait(process) in (128 + number, 0)  # 0: the run had just ended
    succeed(config)
    assert_same_result(config, undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=3, offset=1))
def test_going_back_to_a_saved_step(make_config: MakeConfig, undisturbed: OfEach, what: str) -> None:
    config = make_config(**{**CHANGES, **TRAINED[what]})
    succeed(config)
    before = file_hash(store_of(config))
    ended = finetune(config, "--resume", "11")
    assert (ended.code, ended.errors) == (
        2,
        ["error: --resume 11: that step is not saved; saved steps: 20, 30"],
    )
    assert file_hash(store_of(config)) == before
    stderr = succeed(config, "--resume", "20")
    assert "resuming from step 20" in stderr
    assert "step 20/30" not in stderr
    assert "step 21/30" in stderr
    assert_same_result(config, undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(TRAINED, every=3))
def test_a_finished_run_exports_again(make_config: MakeConfig, what: str) -> None:
    config = make_config(**TRAINED[what])
    succeed(config)
    before = file_hash(store_of(config)), file_hash(weights_path(config)), curve(config)
    weights_path(config).unlink()
    stderr = succeed(config)
    assert "all 4 steps are done" in stderr
    assert "this run is finished: step 4 is its last; exporting its model again" in stderr and "resuming" not in stderr
    assert "step 4/4" not in stderr
    assert (file_hash(store_of(config)), file_hash(weights_path(config)), curve(config)) == before


@pytest.mark.full
def test_starting_over(make_config: MakeConfig, plain_run: Path) -> None:
    config = make_config()
    succeed(config, "seed=7")
    assert export_hash(config) != export_hash(plain_run)
    before = file_hash(store_of(config))
    ended = finetune(config)
    assert_rejected(
        ended, 2, f"{store_of(config).parent} holds the store of the run out (step 4, made ",
        "), which has other settings: seed was 7, is now 42",
    )  # fmt: skip
    assert "for a new run, set another output_dir" in ended.stderr
    ended = finetune(config, "--resume", "no", "learning_rate=0.02")
    assert_rejected(
        ended, 2, f"{store_of(config).parent} holds the store of the run out (step 4, made ",
        "), which has other settings: learning_rate was 0.01, is now 0.02; seed was 7, is now 42",
    )  # fmt: skip
    assert f"(--from {output_of(config)} starts it from this run's state)" in ended.stderr
    assert "to discard that run, use --resume no --overwrite-store" in ended.stderr
    assert_rejected(finetune(config, "--overwrite-store"), 2, "it belongs to --resume no")
    assert file_hash(store_of(config)) == before
    succeed(config, "--resume", "no", "--overwrite-store")
    assert_same_result(config, plain_run)


@pytest.mark.full
def test_starting_over_with_other_data(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(max_steps=1)
    succeed(config)
    other = write_rows(tmp_path / "other.jsonl")
    other.write_text(other.read_text().replace("odd", "even"))
    changed = f"datasets=[{{path: {other}, type: completion}}]"
    for arguments in ((), ("--resume", "no")):
        ended = finetune(config, changed, *arguments)
        assert_rejected(ended, 2, "the training data changed since this run began", str(other))
        assert f"--from {output_of(config)}" in ended.stderr


@pytest.mark.full
def test_a_file_of_the_users_where_the_store_would_be(make_config: MakeConfig) -> None:
    """The hint works."""
    config = make_config(max_steps=1)
    for text in ("mine", "mine" * 5000):
        store_of(config).parent.mkdir(exist_ok=True)
        store_of(config).write_text(text)
        ended = finetune(config)
        assert_rejected(ended, 2, f"{store_of(config)} is not a data file of Ratel")
        assert "hint: move the file away, so that a store can be made there" in ended.stderr
        assert store_of(config).read_text() == text
    store_of(config).rename(store_of(config).with_name("moved"))
    succeed(config)


def test_going_back_without_a_store(make_config: MakeConfig) -> None:
    config = make_config()
    ended = finetune(config, "--resume", "3")
    assert ended.code == 2
    assert ended.errors == [f"error: there is no saved step 3: there is no store in {store_of(config).parent}"]
    assert not store_of(config).parent.exists()


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_two_runs_on_one_store(make_config: MakeConfig) -> None:
    """The second one waits, and then reports which process uses the store."""
    config = make_config(max_steps=10**6)
    process = start(config)
    wait_for_step(config, 1, process)
    ended = finetune(config)
    assert ended.code == 3
    assert f"{process.pid}" in ended.errors[0]
    assert "in use" in ended.errors[0]
    assert process.is_alive()
    process.terminate()
    assert wait(process) == 143


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_store_that_is_deleted_while_its_run_trains(
    make_config: MakeConfig, plain_run: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """The run says so at once and writes its model; if it is stopped, it claims no step that could be resumed."""
    config, publish = make_config(), Store.publish

    def publish_and_delete(store: Store, staged: Staged) -> None:
        publish(store, staged)
        if store.progress.step == 2:
            shutil.rmtree(store_of(config).parent)
            if is_stopped:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Store, "publish", publish_and_delete)
    ended = finetune(config)
    assert f"warning: {store_of(config)} was deleted while it is in use" in " ".join(ended.stderr.split())
    if is_stopped:
        assert ended.code == 130 and "Stopped. Run the same command again." in ended.stderr
    else:
        assert ended.code == 0
        assert export_hash(config) == export_hash(plain_run)
