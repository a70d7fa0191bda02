"""A model that computes rows in chunks: its rows are padded to whole chunks, and `check` says what `finetune` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import family_configs
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import assert_rejected, ratel
from tests.reference import Recipe, train_in_memory

CHUNK = 8


@pytest.fixture
def chunked(tmp_path: Path, base: Path) -> Path:
    """An xLSTM that trains, with the tokenizer of the other tests."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = family_configs.tiny_config(
        "xlstm", mode="train", chunk_size=CHUNK, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    directory = tmp_path / "chunked"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.full
def test_ragged_rows_train_as_in_plain_torch(make_config: MakeConfig, chunked: Path) -> None:
    config = make_config(base=chunked, max_steps=2, sample_packing=False)
    config.succeed()
    data = config.load_data(row_multiple=CHUNK)
    steps = [data.step(number) for number in range(2)]
    assert all(batch.input_ids.shape[1] % CHUNK == 0 for batches in steps for batch in batches)
    model = AutoModelForCausalLM.from_pretrained(chunked)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    recipe = Recipe(learning_rate=0.01, max_grad_norm=1.0, attn_implementation="eager")
    wanted = train_in_memory(model.config, weights, steps, recipe)
    found = config.exported
    assert [line["loss"] for line in config.metrics] == list(wanted.losses)
    assert [name for name, weight in wanted.weights.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.full
def test_a_length_that_no_chunk_divides_is_refused(make_config: MakeConfig, chunked: Path) -> None:
    config = make_config(base=chunked, sequence_len=60)
    message = "sequence_len is 60, but xlstm computes rows in chunks of 8 tokens"
    ended = config.finetune()
    assert_rejected(ended, 2, message)
    assert "set sequence_len to 56 or 64" in ended.stderr
    ended = ratel("check", config)
    assert ended.code == 2 and message in ended.stdout + ended.stderr
