"""`tokens_per_step`: the plan splits the steps of a new run, and the run keeps that split."""

from __future__ import annotations

import json
import shutil

import pytest

from ratel_cli.run.files.run_directory import recorded_config
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, assert_rejected, ratel, wait, works
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
    said = planned.succeed("--dry-run")
    stderr = planned.succeed()
    content = json.loads((planned.output / "run" / "plan.json").read_text())
    size, number = (content["workload"][key] for key in ("micro_batch_size", "num_micro_batches"))
    assert size * number * 64 == TOKENS
    assert content["is_split_planned"] is True
    for text in (said, stderr):
        assert f"{split_words(size)}, split by the plan; steps 1 to 4" in text
    written_out = make_config("written", micro_batch_size=size, gradient_accumulation_steps=number)
    assert "split by the plan" not in written_out.succeed()
    planned.assert_same_result(written_out)
    for config, arguments in ((planned, [f"micro_batch_size={size}"]), (planned, [])):
        assert "all 4 steps are done" in config.succeed(*arguments), "either way it is the same run"


@pytest.mark.full
@pytest.mark.parametrize("size", sample([1, 2, 4], every=3, offset=1))
def test_a_run_resumes_with_the_split_of_its_store(make_config: MakeConfig, plain_run: Config, size: int) -> None:
    """Whatever the plan would choose now, and without the files of the run."""
    config = make_config(micro_batch_size=size, gradient_accumulation_steps=4 // size)
    config.run_until_killed(kill_at="commit.written:3")
    shutil.rmtree(config.output)
    planned = make_config(**PLANNED)
    assert planned == config
    stderr = planned.succeed()
    assert f"{split_words(size)}, split by the plan; steps 2 to 4" in stderr
    assert "resuming from step 1" in stderr
    hardware = planned.with_name("machine.json")
    hardware.write_text((planned.output / "run" / "hardware.json").read_text())
    assert f"{split_words(size)}, split by the plan\n" in ratel("plan", planned).stdout
    assert "split by the plan" in ratel("plan", planned, "--hardware", hardware).stdout
    if size == 2:
        assert planned.export_hash == plain_run.export_hash


@pytest.mark.full
def test_the_tokens_of_a_step_are_those_of_all_ranks(make_config: MakeConfig) -> None:
    """Each has the micro-batches that rank 0 plans. A run with the same config and another number goes on with them."""
    planned = make_config("planned", **PLANNED)
    stderr = planned.succeed_ranks(2, "max_steps=2")
    content = json.loads((planned.output / "run" / "plan.json").read_text())
    size, number = (content["workload"][key] for key in ("micro_batch_size", "num_micro_batches"))
    assert 2 * size * number * 64 == TOKENS and content["is_split_planned"] is True
    assert "split by the plan, in each of 2 ranks" in stderr
    recorded = recorded_config(planned.output)
    assert recorded is not None
    assert (recorded.split, recorded.tokens_per_step) == ((size, number), None)
    written_out = make_config("written", micro_batch_size=size, gradient_accumulation_steps=number)
    written_out.succeed_ranks(2, "max_steps=2")
    planned.assert_same_result(written_out)
    assert f"of {size} x 64" in ratel("plan", planned, "--ranks", "2").stdout
    assert "split by the plan" in works("finetune", planned, "max_steps=3").stderr
    works("finetune", written_out, "max_steps=3", f"gradient_accumulation_steps={2 * number}")
    planned.assert_same_result(written_out)
    assert_rejected(planned.finetune("max_steps=4", "learning_rate=0.5"), 2, "settings")
    message = f"a step of this run has {TOKENS // 64} sequences, and not {TOKENS // 32} sequences"
    assert 2 in planned.run_ranks(2, f"tokens_per_step={2 * TOKENS}", "max_steps=4")
    assert message in planned.stderr
    planned.succeed_ranks(2, f"micro_batch_size={size}")
    assert planned.run_ranks(3) == [2, 2, 2]
    assert f"tokens_per_step: {TOKENS} tokens are 4 sequences, which 3 ranks cannot share equally" in planned.stderr
    assert planned.run_ranks(2, "gradient_accumulation_steps=1") == [2, 2]
    assert f"{TOKENS} tokens are 1 micro-batch, which 2 ranks cannot share equally" in planned.stderr
    processes = planned.start_ranks(2, f"tokens_per_step={2 * TOKENS}")
    assert {wait(process) for process in processes} <= {2, 75}
    said = "".join(planned.stderr_of(rank) for rank in range(2))
    assert said.count(f"tokens_per_step was {TOKENS}, is now {2 * TOKENS}") == 1


@pytest.mark.full
def test_what_a_resumed_run_may_not_change(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED)
    config.succeed()
    ended = config.finetune(f"tokens_per_step={2 * TOKENS}")
    assert_rejected(ended, 2, f"other settings: tokens_per_step was {TOKENS}, is now {2 * TOKENS}")
    ended = config.finetune("seed=1")
    assert_rejected(ended, 2, "other settings: seed was 42, is now 1")
    ended = config.finetune("sequence_len=32")
    assert_rejected(ended, 2, "other settings: sequence_len was 64, is now 32")
    config.succeed(f"tokens_per_step={2 * TOKENS}", "--resume", "no", "--overwrite-store")


def test_no_split_fits(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED, limits={"host_memory": "200MiB"})
    ended = config.finetune()
    assert_rejected(ended, 3, f"no split of {TOKENS} tokens into micro-batches fits; ", "short by")
    assert "hint: raise the limits, or lower tokens_per_step or sequence_len" in ended.stderr


@pytest.mark.full
def test_the_split_of_the_run_does_not_fit_any_more(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED)
    config.run_until_killed(kill_at="commit.written:3")
    before = json.loads((config.output / "run" / "plan.json").read_text())["workload"]
    ended = config.finetune("limits.host_memory=200MiB")
    assert_rejected(ended, 3, "the split that this run began with, ", " does not fit any more: RAM", "short by")
    assert "hint: free memory or raise the limits" in ended.stderr
    config.succeed()
    assert json.loads((config.output / "run" / "plan.json").read_text())["workload"] == before


@pytest.mark.full
def test_profiling_takes_the_split_that_a_run_would_begin_with(make_config: MakeConfig) -> None:
    config = make_config(**PLANNED)
    works("profile", config)
    assert "estimated from shapes" not in config.succeed(), "the run found the recorded costs"
