"""Rows that change the rotary frequencies of other rows are reported, wherever transformers lets them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.run.inputs.text_data import report_mixed_lengths
from tests.data.conftest import Load, WriteRows

ROPES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 8,
    },
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
}  # fmt: skip


def model_config(rope_type: str) -> LlamaConfig:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **ROPES[rope_type]}
    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, rope_parameters=rope,
    )  # fmt: skip


def depends_on_neighbours(config: LlamaConfig, lengths: list[int]) -> bool:
    """Whether the logits of the first row are others in one batch with the other rows than alone."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    rows = torch.randint(0, 32, (len(lengths), max(lengths)))
    first = rows[:1, : lengths[0]]
    together, alone = model(rows).logits[:1, : lengths[0]], model(first).logits
    return not torch.allclose(together, alone, atol=1e-9)


@pytest.mark.parametrize("rope_type", list(ROPES))
@pytest.mark.parametrize("lengths", [[5, 12], [5, 8], [12, 12]])
def test_rows_on_both_sides_of_the_boundary(
    load: Load, write_rows: WriteRows, rope_type: str, lengths: list[int]
) -> None:
    data = load(write_rows(*({"input_ids": [5] * length} for length in lengths)), packing=False, sequence_len=16)
    config = RunConfig.model_validate({"base_model": "m", "datasets": [{"path": "p"}], "micro_batch_size": 2})
    said: list[str] = []
    report_mixed_lengths(config, data, model_config(rope_type), said.append)
    assert bool(said) == depends_on_neighbours(model_config(rope_type), lengths)
    words = f"more than 8 tokens changes the rotary frequencies of all rows in its micro-batch (rope_type: {rope_type})"
    assert all(words in text for text in said)


def test_rows_that_are_apart(load: Load, write_rows: WriteRows) -> None:
    """Packed ones are not, even in micro-batches of one sequence; those of a split that is planned may be not."""
    rows = write_rows({"input_ids": [5] * 5}, {"input_ids": [5] * 12})
    for size, packing, expected in ((1, False, 0), (1, True, 1), (None, False, 1)):
        data = load(rows, packing=packing, sequence_len=32)
        changes = {"micro_batch_size": 1} if size else {"tokens_per_step": 32}
        config = RunConfig.model_validate(
            {"base_model": "m", "datasets": [{"path": "p"}], "sequence_len": 16, **changes}
        )
        said: list[str] = []
        report_mixed_lengths(config, data, model_config("longrope"), said.append)
        assert len(said) == expected
