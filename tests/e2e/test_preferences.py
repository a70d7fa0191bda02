"""Preference tuning gives what TRL's trainers give in memory: losses, rewards and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import MakeConfig
from tests.e2e.preferences import assert_same_training, keys_of, pairs, recipe, verdicts, write
from tests.e2e.runs import succeed
from tests.tiers import rotating
from tests.trl_oracle import tune

METHODS = ["dpo", "ipo", "orpo", "simpo", "kto"]


@pytest.mark.parametrize(("method", "adapted"), rotating(METHODS, [False, True]))
def test_it_trains_what_trl_trains(
    method: str, adapted: bool, make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    rows = verdicts() if method == "kto" else pairs()
    wanted = recipe(method, adapted=adapted)
    config = make_config(rows=write(tmp_path / "rows.jsonl", rows), **keys_of(wanted))
    succeed(config)
    assert_same_training(config, tune(base, rows, wanted))
