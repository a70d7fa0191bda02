"""Tokens that a run adds to families of transformers that are drawn by the release: the bits of transformers and PEFT.

The full tier tries ten, half of them with an adapter, among those with one matrix for embedding and head and with two;
the nightly tier tries all of them, with and without.
"""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from scripts.families import Refused, finetune, recipe_of, save_base, train_plain, training_rows
from tests.e2e.runs import Config, works
from tests.e2e.test_adapters_of_families import ADAPTABLE

SEED = version("ratel-cli")
TOKENS = ["<first>", "<second>"]
CANNOT_GROW = {"moshi": "has another form", "xlstm": "has no attribute"}
"""Families whose models cannot have more tokens, and why: an embedding with one more row; code that fails."""


def cases() -> list[ParameterSet]:
    draw = random.Random(SEED)
    chosen = draw.sample([family for family in ADAPTABLE if family not in CANNOT_GROW], 10)
    full = {(family, place % 2 == 0) for place, family in enumerate(chosen)}
    return [
        pytest.param(
            family,
            adapts,
            marks=pytest.mark.full if (family, adapts) in full else pytest.mark.nightly,
            id=f"seed {SEED}-{family}-{'adapter' if adapts else 'full'}",
        )
        for family in ADAPTABLE
        for adapts in (False, True)
    ]


def add_tokenizer(base: Path, num_tokens: int) -> tuple[list[int], int]:
    """Give a model without a tokenizer one that has a token for each row of its embedding. Returns the ids of the new
    tokens, and how many ids there are then: the classes of some families have tokens of their own."""
    backend = Tokenizer(models.WordLevel({f"word{number}": number for number in range(num_tokens)}, "word0"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(TOKENS)
    return tokenizer.convert_tokens_to_ids(TOKENS), len(tokenizer)


@pytest.mark.filterwarnings("ignore")  # of transformers about tiny models, and of PEFT about names that it corrects
@pytest.mark.parametrize(("family", "adapts"), cases())
def test_it_is_what_transformers_and_peft_train(tmp_path: Path, family: str, *, adapts: bool) -> None:
    base = save_base(family, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    first = model.get_input_embeddings().weight.shape[0]
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = [
        name
        for name, each in model.named_modules()
        if each in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    new, num_rows = add_tokenizer(base, first)
    rows = [
        [new[at % 2] if (at + number) % 5 == 0 else each for at, each in enumerate(row)]
        for number, row in enumerate(training_rows())
    ]
    recipe = recipe_of(base, "float32")
    if family in CANNOT_GROW:
        with pytest.raises(Refused, match=f"cannot have more tokens: .*{CANNOT_GROW[family]}"):
            finetune(base, tmp_path / "run", recipe, rows, tokens=TOKENS)
        return
    torch.manual_seed(42)
    model.resize_token_embeddings(num_rows)
    model.save_pretrained(tmp_path / "grown")

    keys: dict[str, object] = {"adapter": "lora", "lora_r": 2} if adapts else {}
    if adapts and model.get_output_embeddings().bias is not None:
        with pytest.raises(Refused, match="has a bias, which PEFT"):
            finetune(base, tmp_path / "run", recipe, rows, tokens=TOKENS, **keys)
        return
    finetune(base, tmp_path / "run", recipe, rows, tokens=TOKENS, **keys)
    config = Config(tmp_path / "run" / "run.yaml")
    if adapts:
        trained = {name: list(range(first, num_rows)) for name in (names[:1] if is_tied else names)}
        words = {"r": 2, "lora_alpha": 2, "target_modules": "all-linear", "trainable_token_indices": trained}
        recipe = replace(recipe, lora=tuple(words.items()))
    wanted = train_plain(tmp_path / "grown", recipe, rows=rows)
    assert [line["loss"] for line in config.metrics] == list(wanted.losses)
    assert [line["grad_norm"] for line in config.metrics] == list(wanted.norms)
    if adapts:
        found = load_file(config.output / "adapter_model.safetensors")
        deltas = {name: each for name, each in wanted.weights.items() if "trainable_tokens_delta" in name}
        assert len(deltas) == len(trained)
        for name, each in deltas.items():
            assert torch.equal(found[f"base_model.model.{name.removesuffix('.default')}"], each)
        works("verify", config)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(config.output).state_dict()
        assert {name for name, each in wanted.weights.items() if not torch.equal(loaded[name], each)} == set()
