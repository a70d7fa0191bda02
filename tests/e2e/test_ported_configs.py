"""Configs of other trainers run: as they are or through `ratel import`, with a tiny model and tiny data in their place.

A config that asks for something impossible ends with the line that says so.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM, TrainingArguments

from ratel_cli.config.importing import import_config
from ratel_cli.config.load import dump, load_config
from ratel_cli.config.yaml_marks import Plain
from tests.e2e.ported_configs import IMPOSSIBLE, PORTED
from tests.e2e.runs import Ended, finetune, ratel, save_base
from tests.tiers import sample

LEAST = 40
LEAST_SHARE = 0.9
ROWS_OF: dict[str, dict[str, object]] = {
    "alpaca": {"instruction": "Add one.", "input": "41", "output": "42"},
    "completion": {"text": "one two three four", "chapter": "one two three"},
    "chat_template": {
        "messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}],
        "conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "This one."}],
    },
}


SPECIAL_TOKENS = ["<s>", "</s>", "<unk>", "<|im_end|>", "<|eot_id|>"]
"""What the configs name as special tokens, and the tokenizers of their models have."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose tokenizer has the special tokens."""
    directory = save_base(tmp_path_factory.mktemp("ported") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(SPECIAL_TOKENS, special_tokens=True)
    tokenizer.save_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By dataset type: a file with rows that fit."""
    directory = tmp_path_factory.mktemp("ported")
    files = {}
    for kind, row in ROWS_OF.items():
        files[kind] = directory / f"{kind}.jsonl"
        files[kind].write_text(f"{json.dumps(row)}\n" * 24)
    return files


def dry_run(config: Path, base: Path, data: dict[str, Path]) -> Ended:
    """The dry run with a tiny model and data of the same types, whatever the config names."""
    replaced = [f"base_model={base}", "output_dir=out", "sequence_len=512", "device=cpu", "storage.engine=threads"]
    loaded = load_config(config, replaced).config
    for number, dataset in enumerate(loaded.datasets):
        kind = "chat_template" if dataset.type == "auto" else dataset.type
        replaced.append(f"datasets.{number}.path={data[kind]}")
    return finetune(config, *replaced, "--dry-run")


@pytest.mark.parametrize("name", sample(PORTED, every=14))
def test_a_config_of_another_trainer_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path, data: dict[str, Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = Path("theirs.yaml"), Path("run.yaml")
    content: dict[str, Plain] = json.loads(json.dumps(PORTED[name]))
    theirs.write_text(dump(content))
    ended = ratel("import", theirs, "-o", str(ours))
    if name in IMPOSSIBLE:
        assert ended.code == 2
        assert any(IMPOSSIBLE[name] in error for error in ended.errors), ended.stderr
        assert not ours.exists()
        return
    assert ended.code == 0, ended.stderr
    assert import_config(theirs).tool == name.partition(":")[0]
    ended = dry_run(ours, tiny, data)
    assert ended.code == 0, ended.stderr


def test_there_are_enough_and_nearly_all_run() -> None:
    assert len(PORTED) >= LEAST
    assert IMPOSSIBLE.keys() <= PORTED.keys()
    assert len(PORTED) - len(IMPOSSIBLE) >= LEAST_SHARE * len(PORTED)


def test_the_arguments_that_the_trainer_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path, data: dict[str, Path]
) -> None:
    """Every field of TrainingArguments with its default: nothing of it is unknown."""
    monkeypatch.chdir(tmp_path)
    fields = dataclasses.fields(TrainingArguments)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    Path("training_args.json").write_text(json.dumps(defaults, default=str))
    imported = import_config(Path("training_args.json"))
    assert imported.tool == "transformers"
    undecided = {outcome.written for outcome in imported.outcomes if outcome.fate == "undecided"}
    assert undecided == {"base_model", "datasets"}
    Path("run.yaml").write_text(imported.text)
    config = load_config(Path("run.yaml"), [f"base_model={base}", f"datasets={data['alpaca']}"]).config
    assert (config.lr_scheduler, config.num_epochs, config.micro_batch_size) == ("linear", 3.0, 8)
    assert (config.learning_rate, config.warmup_steps, config.dtype) == (5e-5, 0, "float32")
