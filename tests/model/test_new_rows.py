"""Rows of new tokens: transformers' own resize_token_embeddings is the oracle, for each family, tied and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    PretrainedConfig,
    T5Config,
)

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.files.new_rows import NewRows
from ratel_cli.model.files.skeleton import build_skeleton, read_model_config
from ratel_cli.sizes import NewTokensInit, Task
from tests.model.tiny import FAMILIES, Tensors, read_all, save_tiny
from tests.tiers import rotating, thinned

ROWS, SEED = 103, 5


def opened(directory: Path, init: NewTokensInit, task: Task = "causal_lm", num_rows: int = ROWS) -> CheckpointSource:
    """The files of a model, read as those of a model with more rows."""
    config = read_model_config(directory, task)
    rows = NewRows(base_config=config, num_rows=num_rows, init=init, seed=SEED, task=task)
    skeleton = build_skeleton(rows.config, dtype="float32", attn_implementation="eager", task=task)
    spec = find_blocks(skeleton, name="tiny", task=task).spec
    return CheckpointSource(directory, skeleton, spec, new_rows=rows)


def resized(directory: Path, *, mean: bool, model_class: type[Any] = AutoModelForCausalLM) -> Tensors:
    """What transformers makes of the model."""
    model = model_class.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(SEED)
    model.resize_token_embeddings(ROWS, mean_resizing=mean)
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize(
    ("family", "tied", "init"), thinned(rotating(list(FAMILIES), [False, True], ["mean", "random"]), every=2)
)
def test_weights_are_those_of_transformers(family: str, tied: bool, init: NewTokensInit, tmp_path: Path) -> None:
    save_tiny(family, tmp_path, tie_word_embeddings=tied)
    wanted = resized(tmp_path, mean=init == "mean")
    with opened(tmp_path, init) as source:
        state = torch.get_rng_state()
        found = read_all(source, source._spec)
        assert torch.equal(torch.get_rng_state(), state)
        laid_out = {each.name: each.shape for shard in source.layout("bfloat16").shards for each in shard.tensors}
    assert {name for name in found if not torch.equal(found[name], wanted[name])} == set()
    grown = [shape for shape in laid_out.values() if shape[0] == ROWS]
    assert len(grown) == 2 - tied


@pytest.mark.parametrize(("config", "task", "model_class"), [
    (BertConfig, "masked_lm", AutoModelForMaskedLM),
    (T5Config, "seq2seq", AutoModelForSeq2SeqLM),
], ids=["bert", "t5"])  # fmt: skip
def test_other_tasks(config: type[Any], task: Task, model_class: type[Any], tmp_path: Path) -> None:
    """Their heads have a bias, and stacks that share the matrix."""
    _save(config(vocab_size=96, **_SIZES), model_class, tmp_path)
    wanted = resized(tmp_path, mean=True, model_class=model_class)
    with opened(tmp_path, "mean", task) as source:
        found = read_all(source, source._spec)
    assert {name for name in found if not torch.equal(found[name], wanted[name])} == set()


def test_noise_around_the_mean(tmp_path: Path) -> None:
    """Rows that differ from each other and have the mean of the old ones: as many as make chance small."""
    old = dict(save_tiny("llama", tmp_path).named_parameters())
    with opened(tmp_path, "noisy_mean", num_rows=4096) as source:
        found = read_all(source, source._spec)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(found[name][:96], old[name])
        noise = found[name][96:] - old[name].mean(dim=0)
        assert abs(noise.std() * 32**0.5 - 1) < 0.02
        assert noise.mean(dim=0).abs().max() < 0.02
    assert not torch.equal(found["model.embed_tokens.weight"][96:], found["lm_head.weight"][96:])


def test_what_else_depends_on_the_number_of_tokens(tmp_path: Path) -> None:
    """BART has a buffer with a column for each token."""
    _save(BartConfig(vocab_size=96, **_SIZES), AutoModelForSeq2SeqLM, tmp_path)
    with pytest.raises(BadInput, match="cannot have more tokens: final_logits_bias has another form"):
        opened(tmp_path, "mean", "seq2seq")


def test_an_embedding_that_does_not_follow_the_vocabulary(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = read_model_config(tmp_path)
    rows = NewRows(base_config=config, num_rows=96, init="mean", seed=0, task="causal_lm")
    skeleton = build_skeleton(config, dtype="float32", attn_implementation="eager")
    with pytest.raises(BadInput, match="its embedding does not follow vocab_size"):
        rows.shapes_in_files(skeleton)


_SIZES: dict[str, Any] = {
    "d_model": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 4, "num_heads": 4,
    "intermediate_size": 48, "d_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_kv": 8, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip
"""Sizes of small models, under the names of all these families."""


def _save(config: PretrainedConfig, model_class: type[Any], directory: Path) -> None:
    torch.manual_seed(1)
    model = model_class.from_config(config)
    for each in model.parameters():
        torch.nn.init.normal_(each)
    model.save_pretrained(directory)
