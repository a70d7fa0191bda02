"""A run that is stopped anywhere and resumed ends with the same bytes and losses as an undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from ratel_cli.store.store import Staged, Store
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, as_json, assert_rejected, file_hash, wait, write_rows
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


def run_with_other_losses(config: Config) -> None:
    """Run it. Each step has a loss of its own, so that no step can stand for another one."""
    config.succeed()
    assert len({loss for _, loss, _ in config.curve}) == NUM_STEPS


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
        config.run_until_killed(kill_at=point)
        assert not (config.output / "run" / "metrics.jsonl").exists()
        [row] = as_json("status", config.output)["runs"]
        assert (row["state"], row["step"], row["num_steps"]) == ("killed", 0, NUM_STEPS), "listed from its import on"
    config.run_until_killed(kill_at="commit.written:4")  # the first commit is that of the import, so this is step 3
    assert [step for step, _, _ in config.curve] == [1, 2, 3], "the third step was announced, but not committed"
    [row] = as_json("status", config.output)["runs"]
    assert (row["state"], row["step"], row["loss"]) == ("killed", 2, config.curve[1][1])
    for point in training:
        config.run_until_killed(kill_at=point)
        assert "resuming from step" in config.stderr
    assert "resuming from step" in config.succeed()
    config.assert_same_result(undisturbed(what))


@pytest.mark.parametrize(
    ("what", "number"),
    thinned(
        rotating(WHOLE_OR_ADAPTER, [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], every=2, full_rotation=True),
        every=2,
    ),
)
def test_stopped_by_a_signal(make_config: MakeConfig, undisturbed: OfEach, what: str, number: signal.Signals) -> None:
    config, code = make_config(**{**CHANGES, **TRAINED[what]}), -9 if number == signal.SIGKILL else 128 + number
    process = config.start()
    config.wait_for_step(5, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait(process) == code
    num_steps = len(config.curve)
    assert 5 <= num_steps < NUM_STEPS
    if code > 0:
        stopped = f"Stopped at step {num_steps} (saved). Run the same command to continue."
        assert config.stderr.splitlines()[-1] == stopped
    assert not config.weights_path.exists()
    assert f"resuming from step {num_steps}" in config.succeed() or code == -9
    config.assert_same_result(undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "what", "number"),
    rotating(["import", "export"], WHOLE_OR_ADAPTER, [signal.SIGINT, signal.SIGTERM], offset=1),
)
def test_stopped_while_importing_or_exporting(
    make_config: MakeConfig, undisturbed: OfEach, phase: str, what: str, number: signal.Signals
) -> None:
    config = make_config(**{**CHANGES, **TRAINED[what]})
    process = config.start()
    if phase == "import":
        config.wait_until(config.store.exists, process)
    else:
        config.wait_for_step(NUM_STEPS, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait(process) in (128 + number, 0)  # 0: the run had just ended
    config.succeed()
    config.assert_same_result(undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=3, offset=1))
def test_going_back_to_a_saved_step(make_config: MakeConfig, undisturbed: OfEach, what: str) -> None:
    config = make_config(**{**CHANGES, **TRAINED[what]})
    config.succeed()
    before = file_hash(config.store)
    ended = config.finetune("--resume", "11")
    assert (ended.code, ended.errors) == (
        2,
        ["error: --resume 11: that step is not saved; saved steps: 20, 30"],
    )
    assert file_hash(config.store) == before
    stderr = config.succeed("--resume", "20")
    assert "resuming from step 20" in stderr
    assert "step 20/30" not in stderr
    assert "step 21/30" in stderr
    config.assert_same_result(undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(TRAINED, every=3))
def test_a_finished_run_exports_again(make_config: MakeConfig, what: str) -> None:
    config = make_config(**TRAINED[what])
    config.succeed()
    before = file_hash(config.store), file_hash(config.weights_path), config.curve
    config.weights_path.unlink()
    stderr = config.succeed()
    assert "all 4 steps are done" in stderr
    assert "this run is finished: step 4 is its last; exporting its model again" in stderr and "resuming" not in stderr
    assert "step 4/4" not in stderr
    assert (file_hash(config.store), file_hash(config.weights_path), config.curve) == before


@pytest.mark.full
def test_starting_over(make_config: MakeConfig, plain_run: Config) -> None:
    config = make_config()
    config.succeed("seed=7")
    assert config.export_hash != plain_run.export_hash
    before = file_hash(config.store)
    ended = config.finetune()
    assert_rejected(
        ended, 2, f"{config.store.parent} holds the store of the run out (step 4, made ",
        "), which has other settings: seed was 7, is now 42",
    )  # fmt: skip
    assert "for a new run, set another output_dir" in ended.stderr
    ended = config.finetune("--resume", "no", "learning_rate=0.02")
    assert_rejected(
        ended, 2, f"{config.store.parent} holds the store of the run out (step 4, made ",
        "), which has other settings: learning_rate was 0.01, is now 0.02; seed was 7, is now 42",
    )  # fmt: skip
    assert f"(--from {config.output} starts it from this run's state)" in ended.stderr
    assert "to discard that run, use --resume no --overwrite-store" in ended.stderr
    assert_rejected(config.finetune("--overwrite-store"), 2, "it belongs to --resume no")
    assert file_hash(config.store) == before
    config.succeed("--resume", "no", "--overwrite-store")
    config.assert_same_result(plain_run)


@pytest.mark.full
def test_starting_over_with_other_data(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(max_steps=1)
    config.succeed()
    other = write_rows(tmp_path / "other.jsonl")
    other.write_text(other.read_text().replace("odd", "even"))
    changed = f"datasets=[{{path: {other}, type: completion}}]"
    for arguments in ((), ("--resume", "no")):
        ended = config.finetune(changed, *arguments)
        assert_rejected(ended, 2, "the training data changed since this run began", str(other))
        assert f"--from {config.output}" in ended.stderr


@pytest.mark.full
def test_a_file_of_the_users_where_the_store_would_be(make_config: MakeConfig) -> None:
    """The hint works."""
    config = make_config(max_steps=1)
    for text in ("mine", "mine" * 5000):
        config.store.parent.mkdir(exist_ok=True)
        config.store.write_text(text)
        ended = config.finetune()
        assert_rejected(ended, 2, f"{config.store} is not a data file of Ratel")
        assert "hint: move the file away, so that a store can be made there" in ended.stderr
        assert config.store.read_text() == text
    config.store.rename(config.store.with_name("moved"))
    config.succeed()


def test_going_back_without_a_store(make_config: MakeConfig) -> None:
    config = make_config()
    ended = config.finetune("--resume", "3")
    assert ended.code == 2
    assert ended.errors == [f"error: there is no saved step 3: there is no store in {config.store.parent}"]
    assert not config.store.parent.exists()


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_two_runs_on_one_store(make_config: MakeConfig) -> None:
    """The second one waits, and then reports which process uses the store."""
    config = make_config(max_steps=10**6)
    process = config.start()
    config.wait_for_step(1, process)
    ended = config.finetune()
    assert ended.code == 3
    assert f"{process.pid}" in ended.errors[0]
    assert "in use" in ended.errors[0]
    assert process.is_alive()
    process.terminate()
    assert wait(process) == 143


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_store_that_is_deleted_while_its_run_trains(
    make_config: MakeConfig, plain_run: Config, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """The run says so at once and writes its model; if it is stopped, it claims no step that could be resumed."""
    config, publish = make_config(), Store.publish

    def publish_and_delete(store: Store, staged: Staged) -> None:
        publish(store, staged)
        if store.progress.step == 2:
            shutil.rmtree(config.store.parent)
            if is_stopped:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Store, "publish", publish_and_delete)
    ended = config.finetune()
    assert f"warning: {config.store} was deleted while it is in use" in " ".join(ended.stderr.split())
    if is_stopped:
        assert ended.code == 130 and "Stopped. Run the same command again." in ended.stderr
    else:
        assert ended.code == 0
        assert config.export_hash == plain_run.export_hash
