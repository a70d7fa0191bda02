"""`ratel bench`: its plain PyTorch is the loop that a run equals; a whole bench leaves nothing but what it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratel_cli.cli.app import main
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.run.ask.plain_training import ExactTraining, PlainTraining
from tests.reference import Recipe, loaded_model, train_in_memory

LLAMA = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)


def batches(number: int) -> list[MicroBatch]:
    positions, made = torch.arange(8).expand(2, 8).contiguous(), []
    for _ in range(number):
        ids = torch.randint(64, (2, 9))
        batch = MicroBatch.of_tokens(ids[:, :-1].contiguous(), positions)
        made.append(replace(batch, targets=ids[:, 1:].contiguous(), num_targets=16))
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_exact", [True, False])
def test_the_loop_is_that_of_the_oracle(dtype: str, is_exact: bool) -> None:
    """To the bit where it is exact; the fused update, and sums in bf16, round a few weights otherwise."""
    torch.manual_seed(0)
    steps = [batches(2) for _ in range(4)]
    model = loaded_model(LLAMA, getattr(torch, dtype), "sdpa", LlamaForCausalLM)
    weights = {name: each.detach().float().clone() for name, each in model.named_parameters()}
    recipe = Recipe(dtype=getattr(torch, dtype), gradient_dtype=getattr(torch, dtype), weight_decay=0.0)
    expected = train_in_memory(LLAMA, weights, steps, recipe).losses
    training = (ExactTraining if is_exact else PlainTraining)(model, learning_rate=recipe.learning_rate)
    losses = [training.step([({"input_ids": each.input_ids}, each.targets) for each in step]) for step in steps]
    assert losses == pytest.approx(expected, rel=0 if is_exact else 1e-3)


@pytest.mark.full
def test_a_whole_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--size", "tiny", "--seconds", "1", "--storage", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert "| losses | 4 of 4 equal those of plain PyTorch, to the bit |" in printed.err
    content = json.loads(printed.out)
    [ran] = content["rounds"]
    assert list(ran) == ["plain PyTorch", "with checkpointing", "Ratel"]
    assert ran["Ratel"]["losses"] == content["exact_losses"]
    assert min(ran["Ratel"]["planned_bytes"], ran["Ratel"]["moved_bytes"]) > 0
    assert {*content["layers"]} == {"layer", "packed"}
    assert str(tmp_path) not in printed.out + printed.err.replace(f"measuring {tmp_path}", "")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--storage", str(tmp_path / "none")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
