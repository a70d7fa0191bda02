"""The tables of other trainers' keys, `ratel_cli/config/fates`: each row against what `ratel import` does with its
example, and all of them against the argument classes of the packages that are installed."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from scripts.foreign_keys import keys_of, table_of
from scripts.write_fates import CONFIGS, outcome_of
from tests.tiers import sample

PARTS = [(tool, start) for tool in CONFIGS for start in range(0, len(table_of(tool)), 25)]


@pytest.mark.parametrize("part", sample(PARTS, every=12))
def test_each_row_says_what_import_does(part: tuple[str, int], tmp_path: Path) -> None:
    """What is kept or translated stands in the file that is written."""
    tool, start = part
    for row in table_of(tool)[start : start + 25]:
        outcome, found = outcome_of(tool, row, tmp_path)
        assert outcome == {name: row[name] for name in outcome}, f"{row}; run: python -m scripts.write_fates"
        assert (found is None) == (row["fate"] == "refused"), row
        if found is not None and row["fate"] in ("kept", "translated"):
            ours = (row["ours"].partition(":")[0] or row["key"]).partition(",")[0].rpartition(".")[2]
            assert f"{ours}:" in found.text, (row, found.text)


@pytest.mark.parametrize("tool", CONFIGS)
def test_nothing_is_left_out_without_a_reason(tool: str) -> None:
    for row in table_of(tool):
        assert row["fate"] in ("kept", "translated", "dropped", "decision", "refused", "parts"), row
        assert row["why"] or row["fate"] in ("kept", "translated"), row
        assert row["source"], row


@pytest.mark.parametrize("tool", ["TRL", "transformers"])
def test_every_field_of_the_installed_classes_has_a_row(tool: str) -> None:
    package = importlib.util.find_spec(tool.lower())
    assert package is not None and package.origin is not None
    rows = {row["key"] for row in table_of(tool)}
    assert {key.name for key in keys_of(tool, Path(package.origin).parents[1])} == rows


@pytest.mark.full
def test_the_script_sees_every_field() -> None:
    """What it reads from syntax trees is what Python makes of the classes."""
    import transformers
    import trl

    known = {row["key"] for tool in ("TRL", "transformers") for row in table_of(tool)}
    configs = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Model", "DatasetMixture")
    of_trl = (getattr(trl, f"{name}Config") for name in configs)
    for each in (*of_trl, trl.ScriptArguments, transformers.TrainingArguments):
        fields = {field.name for field in dataclasses.fields(each) if field.init and not field.name.startswith("_")}
        assert fields <= known, (each.__name__, sorted(fields - known))
