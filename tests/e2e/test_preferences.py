"""Preference tuning gives what TRL's trainers give in memory: losses, rewards and weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.e2e.conftest import MakeConfig
from tests.e2e.preferences import assert_same_training, chats, keys_of, pairs, recipe, verdicts, write
from tests.tiers import rotating, thinned
from tests.trl_oracle import tune

METHODS = ["dpo", "ipo", "orpo", "simpo", "kto"]


@pytest.mark.parametrize(("method", "adapted"), thinned(rotating(METHODS, [False, True]), every=3))
def test_it_trains_what_trl_trains(
    method: str, adapted: bool, make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    rows = verdicts() if method == "kto" else pairs()
    wanted = recipe(method, adapted=adapted)
    config = make_config(rows=write(tmp_path / "rows.jsonl", rows), **keys_of(wanted))
    config.succeed()
    assert_same_training(config, tune(base, rows, wanted))


@pytest.mark.parametrize("adapted", thinned([False, True], every=2, offset=1))
def test_dropout_is_off_as_in_trl(adapted: bool, make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """That of the model's modules, and that of the adapter."""
    wanted = recipe("dpo", adapted=adapted)
    if adapted:
        wanted = replace(wanted, lora=(*(wanted.lora or ()), ("lora_dropout", 0.5)))
    dropping = _save_with_dropout(base, tmp_path / "base")
    keys = {"base": dropping, "rows": write(tmp_path / "rows.jsonl", pairs()), **keys_of(wanted)}
    off, on = (make_config(name, lora_dropout=0.5 if adapted else None, **keys) for name in ("off", "on"))
    off.succeed()
    assert_same_training(off, tune(dropping, pairs(), wanted))
    on.succeed("disable_dropout=false")
    assert on.metrics[-1]["loss"] != off.metrics[-1]["loss"]


def _save_with_dropout(base: Path, directory: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(5)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.3, embd_pdrop=0.3,
            attn_pdrop=0.3, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(directory)  # fmt: skip
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("method", "mark"), thinned(rotating(["dpo", "orpo", "simpo"], ["<|end|>", "<|end|>\n", "\n"]), every=3, offset=1)
)
def test_conversations_end_as_in_trl(
    method: str, mark: str, make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    """ORPO's and SimPO's trainers write an EOS token behind what the template writes, unless it is the last one."""
    tokenizer = AutoTokenizer.from_pretrained(shutil.copytree(base, tmp_path / "base"))
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        f"{{{{ {json.dumps(mark)} }}}}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    wanted = recipe(method, num_steps=2)
    rows = write(tmp_path / "rows.jsonl", chats())
    config = make_config(base=tmp_path / "base", rows=rows, **keys_of(wanted))
    config.succeed()
    assert_same_training(config, tune(tmp_path / "base", chats(), wanted))
