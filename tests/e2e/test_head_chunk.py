"""`head_chunk`: the plan chooses it for a new run, the run keeps it, and it decides the bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ratel_cli.config.load import load_config
from ratel_cli.units import MIB
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import COMPLETION, Config, as_json, assert_rejected


def chunk_of(config: Config) -> int | str:
    """As the run has written it out."""
    return load_config(config.output / "run" / "config.yaml").config.head_chunk


def tokens_of(config: Config) -> tuple[int, int]:
    """Tokens of a chunk: in the run's plan, and in what `ratel plan` says of it."""
    of_run = json.loads((config.output / "run" / "plan.json").read_text())
    of_plan = as_json("plan", config)
    return of_run["workload"]["chunk_tokens"], of_plan["workload"]["chunk_tokens"]


@pytest.mark.full
def test_on_the_cpu_it_is_64_mib(make_config: MakeConfig) -> None:
    config, written_out = make_config("auto"), make_config("written", head_chunk="64MiB")
    config.succeed()
    written_out.succeed()
    assert chunk_of(config) == chunk_of(written_out) == 64 * MIB
    config.assert_same_result(written_out)
    assert "all 4 steps are done" in config.succeed("head_chunk=64MiB"), "it is the same run"


@pytest.mark.full
def test_a_run_resumes_with_the_chunks_of_its_store(make_config: MakeConfig) -> None:
    """Whatever the plan would choose here, and without the files of the run."""
    config = make_config(head_chunk="512MiB")
    config.run_until_killed(kill_at="commit.written:3")
    shutil.rmtree(config.output)
    config = make_config()
    assert "resuming from step 1" in config.succeed()
    assert chunk_of(config) == 512 * MIB
    of_run, of_plan = tokens_of(config)
    assert of_run == of_plan > 0
    ended = config.finetune("head_chunk=64MiB")
    assert_rejected(ended, 2, f"other settings: head_chunk was {512 * MIB}, is now {64 * MIB}")
    ended = config.finetune("seed=1")
    assert_rejected(ended, 2, "other settings: seed was 42, is now 1")
    assert "head_chunk" not in ended.stderr
    config.succeed("--resume", "no")
    assert chunk_of(config) == 64 * MIB, "a new run chooses anew"


@pytest.mark.full
def test_a_size_that_no_plan_chooses_must_be_named_again(make_config: MakeConfig) -> None:
    config = make_config(head_chunk="1MiB")
    config.succeed()
    ended = make_config().finetune()
    assert_rejected(ended, 2, f"other settings: head_chunk was {MIB}, is now auto")
    assert "all 4 steps are done" in config.succeed("head_chunk=1MiB")


@pytest.mark.full
def test_it_decides_the_order_of_the_sum(make_config: MakeConfig, rows: Path) -> None:
    """A micro-batch of 32 x 64 tokens has 2.3 MiB of logits."""
    data = [{"path": str(rows), "type": COMPLETION}] * 6
    larger = {"micro_batch_size": 32, "gradient_accumulation_steps": 1, "max_steps": 2, "datasets": data}
    whole, parts = make_config("whole", **larger), make_config("parts", **larger, head_chunk="1MiB")
    whole.succeed()
    parts.succeed()
    of_whole, of_parts = tokens_of(whole)[0], tokens_of(parts)[0]
    assert of_parts < 32 * 64 < of_whole
    assert whole.export_hash != parts.export_hash
