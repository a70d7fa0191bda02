"""Damaged files in a run's `run/` directory: the same run resumes, a run with other settings is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import write_config
from tests.tiers import sample

RUN_FILES = ("config.yaml", "hardware.json", "model.json", "plan.json", "run.json", "metrics.jsonl")
GARBAGE = {
    "empty": b"",
    "zeros": bytes(5_000),
    "nested deeply": b"[" * 50_000,
    "no line of ours": b'{"step": "x", "profile": {"made_for": 7}}\n',
}


@pytest.mark.full
@pytest.mark.parametrize("garbage", sample(GARBAGE, every=2, offset=1))
def test_a_run_with_damaged_files_resumes(tmp_path: Path, base: Path, rows: Path, garbage: str) -> None:
    config = write_config(tmp_path, base=base, rows=rows, max_steps=2)
    config.succeed()
    before = config.export_hash
    for name in RUN_FILES:
        (config.output / "run" / name).write_bytes(GARBAGE[garbage])
    ended = config.finetune("seed=7")
    assert ended.code == 2, ended.stderr
    assert "changed since the store in" in ended.errors[0], "the changed setting is not known"
    ended = config.finetune()
    assert (ended.code, ended.errors) == (0, []), ended.stderr
    assert "all 2 steps are done" in ended.stderr
    assert config.export_hash == before
    assert [line for line in config.metrics if "loss" in line] == [], "no step of the lost log is reported again"
    assert json.loads((config.output / "run" / "plan.json").read_bytes())
