"""`tokens_per_step`: the plan splits the steps of a new run, and the run keeps that split."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ratel_cli.run.files.run_directory import recorded_config
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    assert_rejected,
    assert_same_result,
    export_hash,
    finetune,
    output_of,
    ratel,
    run_until_killed,
    start_ranks,
    stderr_of,
    succeed,
    succeed_ranks,
    wait,
)
from tests.tiers import sample

TOKENS = 256
"""The step of `plain_run`: two micro-batches of 2 x 64."""
PLANNED: dict[str, object] = {
    "tokens_per_step": TOKENS,
    "micro_batch_size": None,
    "gradient_accumulation_steps": None,
}


def split_words(size: int) -> str:
    number = TOKENS // 64 // size
    return f"{number} micro-batch{'es' if number > 1 else ''} of {size} x 64 = {TOKENS} tokens"


@pytest.mark.full
def test_it_has_the_bits_of_the_chosen_split_written_out(make_config: MakeConfig) -> None:
    planned = make_config("planned", **PLANNED)
    said = succeed(planned, "--dry-run")
    stderr = succeed(planned)
    content = json.loads((output_of(planned) / "run" / "plan.json").read_text())
    size, number = (content["workload"][key] for key in ("micro_batch_size", "num_micro_batches"))
    assert size * number * 64 == TOKENS
    assert content["is_split_planned"] is True
    for text in (said, stderr):
        assert f"{split_words(size)}, split by the plan; steps 1 to 4" in text
    written_out = make_config("written", micro_batch_size=size, gradient_accumulation_steps=number)
    assert "split by the plan" not in succeed(written_out)
    assert_same_result(planned, written_out)
    for config, arguments in ((planned, [f"micro_batch_size={size}"]), (planned, [])):
        assert "all 4 steps are done" in succeed(config, *arguments), "either way it is the same run"


@pytest.mark.full
@pytest.mark.parametrize("size", sample([1, 2, 4], every=3, offset=1))
def test_a_run_resumes_with_the_split_of_its_store(make_config: MakeConfig, plain_run: Path, size: int) -> None:
    """Whatever the plan would choose now, and without the files of the run."""
    config = make_config(micro_batch_size=size, gradient_accumulation_steps=4 // size)
    run_until_killed(config, kill_at="commit.written:3")
    shutil.rmtree(output_of(config))
    planned = make_config(**PLANNED)
    assert planned == config
    stderr = succeed(planned)
    assert f"{split_words(size)}, split by the plan; steps 2 to 4" in stderr
    assert "resuming from step 1" in stderr
    hardware = planned.with_name("machine.json")
    hardware.write_text((output_of(planned) / "run" / "hardware.json").read_text())
    assert f"{split_words(size)}, split by the plan\n" in ratel("plan", planned).stdout
    assert "split by the plan" in ratel("plan", planned, "--hardware", hardware).stdout
    if size == 2:
        assert export_hash(planned) == export_hash(plain_run)


@pytest.mark.full
def test_the_tokens_of_a_step_are_those_of_all_ranks(make_config: MakeConfig) -> None:
    """Each has the micro-batches that rank 0 plans. A run with the same config and another number goes on with them."""
    planned = make_config("planned", **PLANNED)
    stderr = succeed_ranks(planned, 2, "max_steps=2")
    content = json.loads((output_of(planned) / "run" / "plan.json").read_text())
    size, number = (content["workload"][key] for key in ("micro_batch_size", "num_micro_batches"))
    assert 2 * size * number * 64 == TOKENS and content["is_split_planned"] is True
    assert "split by the plan, in each of 2 ranks" in stderr
    recorded = recorded_config(output_of(planned))
    assert recorded is not None
    assert (recorded.split, recorded.tokens_per_step) == ((size, number), None)
    written_out = make_config("written", micro_batch_size=size, gradient_accumulation_steps=number)
    succeed_ranks(written_out, 2, "max_steps=2")
    assert_same_result(planned, written_out)
    assert f"of {size} x 64" in ratel("plan", planned, "--ranks", "2").stdout
    ended = finetune(planned, "max_steps=3")
    assert ended.code == 0 and "split by the plan" in ended.stderr, ended.stderr
    ended = finetune(written_out, "max_steps=3", f"gradient_accumulation_steps={2 * number}")
    assert ended.code == 0, ended.stderr
    assert_same_result(planned, written_out)
    assert_rejected(finetune(planned, "max_steps=4", "learning_rate=0.5"), 2, "settings")
    message = f"a step of this run has {TOKENS // 64} sequences, and not {TOKENS // 32} sequences"
    processes = start_ranks(planned, 2, f"tokens_per_step={2 * TOKENS}", "max_steps=4")
    assert 2 in [wait(process) for process in processes]
    assert message in stderr_of(planned)
    succeed_ranks(planned, 2, f"micro_batch_size={size}")
    processes = start_ranks(planned, 3)
    assert [wait(process) for process in processes] == [2, 2, 2]
    assert f"tokens_per_step: {TOKENS} tokens are 4 sequences, which 3 ranks cannot share equally" in stderr_of(planned)
    processes = start_ranks(planned, 2, "gradient_accumulation_steps=1")
    assert [wait(process) for process in processes] == [2, 2]
    assert f"{TOKENS} tokens are 1 micro-batch, which 2 ranks cannot share equally" in stderr_of(planned)
    processes = start_ranks(planned, 2, f"tokens_per_step={2 * TOKENS}")
    assert {wait(process) for process in processes} <= {2, 75}
    said = "".join(stderr_of(planned, rank) for rank in range(2))
    assert said.count(f"tokens_per_step was {TOKENS}, is now {2 * TOKENS}") == 1


@pytest.mark.full
def test_what_a_resumed_run_may_not_change(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED)
    succeed(config)
    ended = finetune(config, f"tokens_per_step={2 * TOKENS}")
    assert_rejected(ended, 2, f"other settings: tokens_per_step was {TOKENS}, is now {2 * TOKENS}")
    ended = finetune(config, "seed=1")
    assert_rejected(ended, 2, "other settings: seed was 42, is now 1")
    ended = finetune(config, "sequence_len=32")
    assert_rejected(ended, 2, "other settings: sequence_len was 64, is now 32")
    succeed(config, f"tokens_per_step={2 * TOKENS}", "--resume", "no", "--overwrite-store")


def test_no_split_fits(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED, limits={"host_memory": "200MiB"})
    ended = finetune(config)
    assert_rejected(ended, 3, f"no split of {TOKENS} tokens into micro-batches fits; ", "short by")
    assert "hint: raise the limits, or lower tokens_per_step or sequence_len" in ended.stderr


@pytest.mark.full
def test_the_split_of_the_run_does_not_fit_any_more(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED)
    run_until_killed(config, kill_at="commit.written:3")
    before = json.loads((output_of(config) / "run" / "plan.json").read_text())["workload"]
    ended = finetune(config, "limits.host_memory=200MiB")
    assert_rejected(ended, 3, "the split that this run began with, ", " does not fit any more: RAM", "short by")
    assert "hint: free memory or raise the limits" in ended.stderr
    succeed(config)
    assert json.loads((output_of(config) / "run" / "plan.json").read_text())["workload"] == before


@pytest.mark.full
def test_profiling_takes_the_split_that_a_run_would_begin_with(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED)
    assert ratel("profile", config).code == 0
    assert "estimated from shapes" not in succeed(config), "the run found the recorded costs"
