"""Tokens that a run adds: the model, the tokenizer and the weights are those that transformers makes of them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import exported, load_data, metrics, output_of, ratel, recipe_of, save_base, succeed
from tests.reference import Trained, train_in_memory

TOKENS = ["Which number", "even"]
"""Both are in the rows."""


def grown(base: Path, directory: Path, *, rows: int, seed: int = 42, mean: bool = True) -> Path:
    """The base model with the tokens of the tests, as a user of transformers makes it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken(each, lstrip=False, rstrip=False, normalized=False) for each in TOKENS])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    model.resize_token_embeddings(rows, mean_resizing=mean)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def plain(config: Path, directory: Path, **changes: object) -> Trained:
    """The run of `config`, on the model in `directory`, with plain PyTorch."""
    data = load_data(config, tokenizer_dir=directory)
    steps = [data.step(step) for step in range(len(metrics(config)))]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return train_in_memory(model.config, load_file(directory / "model.safetensors"), steps, replace(recipe_of(config), **changes))


@pytest.mark.parametrize("init", ["mean", "random"])
@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
def test_a_run_trains_the_grown_model(make_config: MakeConfig, tmp_path: Path, init: str, tied: bool) -> None:
    base = save_base(tmp_path / "base", tied=tied)
    config = make_config(base=base, tokens=TOKENS, new_tokens_init=init)
    succeed(config)
    rows = len(AutoTokenizer.from_pretrained(base)) + len(TOKENS)
    trained = plain(config, grown(base, tmp_path / "grown", rows=rows, mean=init == "mean"))
    assert [line["loss"] for line in metrics(config)] == list(trained.losses)
    weights = exported(config)
    assert {name for name in trained.weights if not torch.equal(weights[name], trained.weights[name])} == set()
    loaded = AutoModelForCausalLM.from_pretrained(output_of(config))
    assert loaded.config.vocab_size == rows == len(AutoTokenizer.from_pretrained(output_of(config)))


def test_an_adapter_trains_both_matrices(make_config: MakeConfig, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    saved = ["embed_tokens", "lm_head"]
    config = make_config(base=base, tokens=TOKENS, adapter="lora", lora_r=4, lora_modules_to_save=saved)
    succeed(config)
    rows = len(AutoTokenizer.from_pretrained(base)) + len(TOKENS)
    directory = grown(base, tmp_path / "grown", rows=rows)
    lora = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "modules_to_save": saved}
    trained = plain(config, directory, lora=tuple(lora.items()))
    assert [line["loss"] for line in metrics(config)] == list(trained.losses)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), output_of(config))
        merged = loaded.merge_and_unload()
    ended = ratel("merge", config, "-o", tmp_path / "merged")
    assert ended.code == 0, ended.stderr
    found = load_file(tmp_path / "merged" / "model.safetensors")
    wanted = merged.state_dict()
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == rows
