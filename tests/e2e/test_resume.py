"""Stopped anywhere and started again, a run ends as if nothing had happened: same bytes, same losses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    curve,
    export_hash,
    file_hash,
    finetune,
    output_of,
    run_to_the_kill,
    start,
    store_of,
    succeed,
    told_by,
    wait,
    wait_for_step,
    wait_until,
    write_config,
)
from tests.tiers import rotating

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
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Path:
    config = write_config(tmp_path_factory.mktemp("undisturbed"), base=base, rows=rows, **CHANGES)
    succeed(config)
    assert len({loss for _, loss, _ in curve(config)}) == NUM_STEPS
    return config


def check_as_if_nothing_had_happened(config: Path, undisturbed: Path) -> None:
    assert export_hash(config) == export_hash(undisturbed)
    assert curve(config) == curve(undisturbed)


def test_killed_again_and_again(make_config: MakeConfig, undisturbed: Path) -> None:
    """SIGKILL while the store is made, and at every point of a commit, each time a few steps further."""
    config = make_config(**CHANGES)
    for point in ("create.filled:1", "commit.written:1"):
        run_to_the_kill(config, kill_at=point)
        assert not (output_of(config) / "run" / "metrics.jsonl").exists()
    run_to_the_kill(config, kill_at="commit.written:4")  # the import is the first, so this is step 3
    assert [step for step, _, _ in curve(config)] == [1, 2, 3], "the third was announced, and not committed"
    for point in ("commit.synced:4", "manifest.ready:4", "manifest.published:6", "commit.published:5"):
        run_to_the_kill(config, kill_at=point)
        assert "resuming at step" in told_by(config)
    assert "resuming at step" in succeed(config)
    check_as_if_nothing_had_happened(config, undisturbed)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full), (signal.SIGKILL, -9)],
)
def test_stopped_by_a_signal(make_config: MakeConfig, undisturbed: Path, number: int, code: int) -> None:
    config = make_config(**CHANGES)
    process = start(config)
    wait_for_step(config, 5, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait(process) == code
    num_steps = len(curve(config))
    assert 5 <= num_steps < NUM_STEPS
    if code > 0:
        stopped = f"Stopped at step {num_steps} (saved). Run the same command to continue."
        assert told_by(config).splitlines()[-1] == stopped
    assert not (output_of(config) / "model.safetensors").exists()
    assert f"resuming at step {num_steps}" in succeed(config) or code == -9
    check_as_if_nothing_had_happened(config, undisturbed)


@pytest.mark.parametrize(("phase", "number"), rotating(["import", "export"], [signal.SIGINT, signal.SIGTERM]))
def test_stopped_while_it_imports_or_exports(
    make_config: MakeConfig, undisturbed: Path, phase: str, number: signal.Signals
) -> None:
    config = make_config(**CHANGES)
    process = start(config)
    if phase == "import":
        wait_until(lambda: store_of(config).exists(), config, process)
    else:
        wait_for_step(config, NUM_STEPS, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert wait(process) in (128 + number, 0)  # 0: it had just ended
    succeed(config)
    check_as_if_nothing_had_happened(config, undisturbed)


def test_going_back_to_a_saved_step(make_config: MakeConfig, undisturbed: Path) -> None:
    config = make_config(**CHANGES)
    succeed(config)
    before = file_hash(store_of(config))
    ended = finetune(config, "--resume", "11")
    assert (ended.code, ended.errors) == (
        2,
        ["error: --resume 11: that step is not saved; saved steps: 20, 30"],
    )
    assert file_hash(store_of(config)) == before
    told = succeed(config, "--resume", "20")
    assert "resuming at step 20" in told
    assert "step 20/30" not in told
    assert "step 21/30" in told
    check_as_if_nothing_had_happened(config, undisturbed)


def test_a_finished_run_exports_again(make_config: MakeConfig, plain_run: Path) -> None:
    config = make_config()
    succeed(config)
    before = file_hash(store_of(config))
    (output_of(config) / "model.safetensors").unlink()
    told = succeed(config)
    assert "all 4 steps are done" in told
    assert "step 4/4" not in told
    check_as_if_nothing_had_happened(config, plain_run)
    assert file_hash(store_of(config)) == before


def test_starting_again(make_config: MakeConfig, plain_run: Path) -> None:
    config = make_config()
    succeed(config, "seed=7")
    assert export_hash(config) != export_hash(plain_run)
    before = file_hash(store_of(config))
    ended = finetune(config)
    assert (ended.code, ended.errors) == (
        2,
        [f"error: the store in {store_of(config).parent} belongs to a run with other settings: seed was 7, is 42"],
    )
    assert file_hash(store_of(config)) == before
    succeed(config, "--resume", "no")
    check_as_if_nothing_had_happened(config, plain_run)


def test_going_back_without_a_store(make_config: MakeConfig) -> None:
    config = make_config()
    ended = finetune(config, "--resume", "3")
    assert ended.code == 2
    assert ended.errors == [f"error: there is no saved step 3: there is no store in {store_of(config).parent}"]
    assert not store_of(config).parent.exists()


def test_two_runs_on_one_store(make_config: MakeConfig) -> None:
    """The second one waits for ten seconds, and then says who is in the way."""
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
