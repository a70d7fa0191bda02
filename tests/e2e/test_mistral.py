"""Runs whose texts mistral-common tokenises: every command that reads a tokenizer, from `check` to the export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from ratel_cli.commands import install_extras
from ratel_cli.data.text import mistral_tokenizer
from tests.data.mistral_oracle import prompt, turns, whole
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import CHAT, ROWS, Config, as_json, assert_rejected, ratel, works, write_config
from tests.mistral_vocabularies import save_vocabulary

NUM_TOKENS = 700
KEY = {"tokenizer_use_mistral_common": True, "data_type": CHAT}


@pytest.fixture(scope="module")
def mistral_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral with a small vocabulary of version 13, and no other tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "mistral"
    config = MistralConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=11,
    )
    torch.manual_seed(5)
    MistralForCausalLM(config).save_pretrained(directory)
    save_vocabulary(directory, "v13", num_tokens=NUM_TOKENS)
    return directory


@pytest.fixture(scope="module")
def mistral_run(tmp_path_factory: pytest.TempPathFactory, mistral_base: Path, rows: Path) -> Config:
    """The config of a run. Tests must not change it."""
    config = write_config(tmp_path_factory.mktemp("run"), base=mistral_base, rows=rows, **KEY, max_steps=2)  # type: ignore[arg-type]
    config.succeed()
    return config


def test_what_is_trained(mistral_run: Config, mistral_base: Path) -> None:
    found = as_json("data", mistral_run, "-n", len(ROWS))["samples"]
    path = mistral_base / "tekken.json"
    for sample, row in zip(found, ROWS, strict=True):
        messages = row["messages"]
        assert isinstance(messages, list)
        assert sample["input_ids"] == whole(path, messages)
        trained = [token for token, has_loss in zip(sample["input_ids"], sample["has_loss"], strict=True) if has_loss]
        assert trained == turns(path, messages)[0]
    shown = ratel("data", mistral_run, "-n", 1).stdout
    assert "<s>[INST]Which number is 0?[/INST]\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}0 is even</s>" in shown


def test_the_export_has_the_tokenizer_and_answers(mistral_run: Config, mistral_base: Path, tmp_path: Path) -> None:
    output = mistral_run.output
    assert (output / "tekken.json").read_bytes() == (mistral_base / "tekken.json").read_bytes()
    ids = prompt(output / "tekken.json", [{"role": "user", "content": "Which number is 3?"}])
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    made = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, len(ids) :].tolist()
    moved = shutil.copytree(output, tmp_path / "moved", ignore=shutil.ignore_patterns("run"))
    for named, keys in ((output, []), (moved, ["tokenizer_use_mistral_common=true"])):
        ended = works("generate", named, "Which number is 3?", *keys, "--max-new-tokens", 5, "--json")
        (completion,) = json.loads(ended.stdout)["completions"]
        expected = mistral_tokenizer.MistralTokenizer(output / "tekken.json").decode(
            made, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert completion["text"] == expected


@pytest.mark.full
def test_an_adapters_export_has_the_tokenizer(make_config: MakeConfig, mistral_base: Path) -> None:
    config = make_config(base=mistral_base, adapter="lora", max_steps=1, **KEY)
    config.succeed()
    assert (config.output / "tekken.json").is_file()


def test_a_vocabulary_that_is_larger_than_the_model(
    make_config: MakeConfig, mistral_base: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(mistral_base, tmp_path / "base", ignore=shutil.ignore_patterns("tekken.json"))
    save_vocabulary(directory, "v3")
    ended = ratel("check", make_config(base=directory, **KEY))
    assert ended.code == 2 and "rejected 48 of 48 rows" in ended.errors[0]
    assert "the tokenizer has ids 0 to 32767, but the model's embedding has only" in ended.stderr
    assert "has the id 29572, but the model's embedding has only 700 rows" in ended.stderr


def test_init_and_check(tmp_path: Path, mistral_base: Path) -> None:
    written, rows = tmp_path / "run.yaml", tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in ROWS), encoding="utf-8")
    key = "tokenizer_use_mistral_common=true"
    works("init", mistral_base, key, "--data", rows, "-o", written)
    assert "type: chat_template" in written.read_text() and "chatml" not in written.read_text()
    works("check", written)


def test_no_file_of_a_tokenizer(make_config: MakeConfig, base: Path) -> None:
    config = make_config(**KEY)
    for command in ("check", "finetune", "data"):
        ended = ratel(command, config)
        assert_rejected(
            ended, 2, f"{base}: no tokenizer for mistral-common: there is neither tekken.json nor tokenizer.model"
        )
        assert "hint: remove tokenizer_use_mistral_common" in ended.stderr


def test_the_package_is_missing(make_config: MakeConfig, mistral_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistral_tokenizer, "find_spec", lambda name: None)
    config = make_config(base=mistral_base, **KEY)
    for command in ("check", "finetune", "data"):
        ended = ratel(command, config)
        assert_rejected(ended, 2, "tokenizer_use_mistral_common: the package mistral-common is not installed here")
        assert len(ended.errors) == 1 and install_extras("mistral") in ended.stderr
    assert not config.output.exists()


def test_without_the_key_the_package_changes_nothing(
    make_config: MakeConfig, mistral_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes mistral-common by itself if a recent version is installed, unless it is told not to."""
    read, asked = AutoTokenizer.from_pretrained, []

    def noting(*arguments: object, **options: object) -> object:
        asked.append(options.get("mistral_format"))
        return read(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noting)
    config = make_config(base=mistral_base, special_tokens={"eos_token": "</s>"})
    works("check", config)
    assert asked == [False], "it is read once"
