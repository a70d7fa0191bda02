"""Which numbers of tokens a model's layers train on."""

from __future__ import annotations

import pytest
import torch

from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton, supported_attention
from scripts import family_configs
from tests.tiers import sample


def multiple_of(family: str, **changes: object) -> int:
    config = family_configs.tiny_config(family, **changes)
    attention = supported_attention(config, "sdpa")
    return find_blocks(build_skeleton(config, dtype="bfloat16", attn_implementation=attention), name="m").row_multiple


@pytest.mark.parametrize("chunk", sample([8, 12], every=2, offset=1))
def test_rows_of_a_model_that_computes_in_chunks_are_multiples_of_them(chunk: int) -> None:
    state = torch.random.get_rng_state()
    assert multiple_of("xlstm", mode="train", chunk_size=chunk) == chunk
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("family", sample(["llama", "xlstm", "mamba2", "qwen3_next", "gpt2", "minimax"], every=3))
def test_other_models_take_rows_of_any_length(family: str) -> None:
    assert multiple_of(family) == 1


@pytest.mark.parametrize("num_positions", sample([1, 2, 3, 64, 66, 67], every=5))
def test_a_table_of_few_positions_is_no_chunk(num_positions: int) -> None:
    assert multiple_of("gpt2", n_positions=num_positions) == 1
