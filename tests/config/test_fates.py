"""The tables of other trainers' keys, `ratel_cli/config/fates`: each row against what `ratel import` does with its
example, and all of them against the argument classes of the packages that are installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import Seq2SeqTrainingArguments
from trl import (
    DatasetMixtureConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ModelConfig,
    RewardConfig,
    RLOOConfig,
    ScriptArguments,
    SFTConfig,
)

from ratel_cli.config.importing import import_config
from ratel_cli.config.load import dump
from ratel_cli.config.yaml_marks import Plain
from ratel_cli.errors import BadInput
from scripts.foreign_keys import keys_of, table_of
from tests.tiers import sample

SET: Plain = {"path": "d.jsonl", "type": "chat_template"}
CONFIGS: Mapping[str, dict[str, Plain]] = {
    "axolotl": {
        "base_model": "m",
        "datasets": [SET],
        "sequence_len": 512,
        "micro_batch_size": 1,
        "num_epochs": 1,
    },
    "LLaMA-Factory": {
        "model_name_or_path": "m",
        "stage": "sft",
        "finetuning_type": "full",
        "dataset": "d.jsonl",
        "template": "llama3",
        "cutoff_len": 512,
    },
    "LLaMA-Factory v1": {"model": "m", "model_class": "llm", "train_dataset": "d.jsonl", "cutoff_len": 512},
    "TRL": {"model_name_or_path": "m", "dataset_name": "d.jsonl", "max_length": 512},
    "transformers": {
        "model_name_or_path": "m",
        "datasets": "d.jsonl",
        "per_device_train_batch_size": 2,
        "logging_dir": "logs",
    },
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "t", "max_seq_len": 512},
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": "d.jsonl",
        },
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
        "batch_size": 1,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    },
}
"""By tool: a config that has what each run needs."""
FATES = {"kept": "kept", "translated": "translated", "ignored": "dropped", "noted": "dropped", "undecided": "decision"}
PARTS = [(tool, start) for tool in CONFIGS for start in range(0, len(table_of(tool)), 25)]


def put(config: dict[str, Plain], key: str, value: Plain) -> None:
    """Set a dotted key, in the first set of a list."""
    *path, last = key.split(".")
    for part in path:
        inner = config.get(part)
        if isinstance(inner, list) and inner:
            inner = inner[0]
        if not isinstance(inner, dict):
            inner = config[part] = {}
        config = inner
    config[last] = value


def imported(tool: str, row: Mapping[str, str]) -> dict[str, str]:
    """What became of a row's example: fate, ours and why, as the row has them."""
    config: dict[str, Plain] = json.loads(json.dumps(CONFIGS[tool]))
    for key, value in json.loads(row["given"] or "{}").items():
        put(config, key, value)
    put(config, row["key"], json.loads(row["example"]))
    path = Path("theirs.yaml")
    path.write_text(dump(config))
    try:
        found = import_config(path)
    except BadInput as error:
        messages = " ".join([str(error), *map(str, getattr(error, "others", ()))])
        assert row["why"] in messages, (row, messages)
        return {"fate": "refused", "ours": "", "why": row["why"]}
    key = row["key"]
    named = [
        (".".join(part for part in each.written.split(".") if not part.isdigit()), each) for each in found.outcomes
    ]
    exact = [each for written, each in named if written == key]
    for outcome in exact[-1:] or [each for written, each in named if key.startswith(f"{written}.")]:
        if outcome.fate in ("kept", "translated"):
            ours = outcome.ours.partition(":")[0] or key
            assert f"{ours.rpartition('.')[2].partition(',')[0]}:" in found.text, (row, found.text)
        return {"fate": FATES[outcome.fate], "ours": outcome.ours, "why": outcome.reason}
    inside = any(outcome.written.startswith(f"{key}.") for outcome in found.outcomes)
    return {"fate": "parts" if inside else "lost", "ours": "", "why": row["why"]}


@pytest.mark.parametrize("part", sample(PARTS, every=12))
def test_each_row_says_what_import_does(part: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, start = part
    monkeypatch.chdir(tmp_path)
    for row in table_of(tool)[start : start + 25]:
        assert imported(tool, row) == {name: row[name] for name in ("fate", "ours", "why")}, row


@pytest.mark.parametrize("tool", CONFIGS)
def test_nothing_is_left_out_without_a_reason(tool: str) -> None:
    for row in table_of(tool):
        assert row["fate"] in ("kept", "translated", "dropped", "decision", "refused", "parts"), row
        assert row["why"] or row["fate"] in ("kept", "translated"), row
        assert row["source"] and json.loads(row["example"]) != json.loads("{}"), row


@pytest.mark.parametrize("tool", ["TRL", "transformers"])
def test_every_field_of_the_installed_classes_has_a_row(tool: str) -> None:
    package = importlib.util.find_spec(tool.lower())
    assert package is not None and package.origin is not None
    site = Path(package.origin).parents[1]
    rows = {row["key"] for row in table_of(tool)}
    assert {key.name for key in keys_of(tool, site)} == rows


def test_the_script_sees_every_field() -> None:
    """What it reads from syntax trees is what Python makes of the classes."""
    known = {row["key"] for tool in ("TRL", "transformers") for row in table_of(tool)}
    for each in (
        Seq2SeqTrainingArguments,
        SFTConfig,
        DPOConfig,
        KTOConfig,
        RewardConfig,
        GRPOConfig,
        RLOOConfig,
        ModelConfig,
        ScriptArguments,
        DatasetMixtureConfig,
    ):
        fields = {field.name for field in dataclasses.fields(each) if field.init and not field.name.startswith("_")}
        assert fields <= known, (each.__name__, sorted(fields - known))
