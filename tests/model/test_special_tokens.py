"""Special tokens of a model's configurations are those that transformers' Trainer gives them."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

from transformers import GenerationConfig, LlamaConfig, PretrainedConfig
from transformers.trainer_utils import align_special_tokens

from ratel_cli.model.values.special_tokens import SpecialTokens

IN_CONFIG = (None, 2, 3, [2, 5], [5, 3])
IN_GENERATION = ("none at all", None, 2, 3, [3], [2, 5], [5, 3, 2])
NAMES = ("eos_token_id", "bos_token_id", "pad_token_id")


def trainers(tokens: SpecialTokens, config: PretrainedConfig, generation: GenerationConfig | None) -> None:
    """Change both as the Trainer does before training."""
    model = SimpleNamespace(config=config, generation_config=generation)
    ids = {"eos_token_id": tokens.eos, "bos_token_id": tokens.bos, "pad_token_id": tokens.pad}
    align_special_tokens(model, SimpleNamespace(**ids))


def test_as_transformers_trainer_aligns_them() -> None:
    for in_config, in_generation, token, (one, other) in product(
        IN_CONFIG, IN_GENERATION, (None, 3), ((None, 4), (4, None), (0, 1))
    ):
        tokens = SpecialTokens(eos=token, bos=one, pad=other)
        config = LlamaConfig(vocab_size=9, eos_token_id=in_config, bos_token_id=1, pad_token_id=other and 0)
        generation = None if in_generation == "none at all" else GenerationConfig(eos_token_id=in_generation)
        new_config, new_generation = tokens.aligned(
            config.to_dict(), None if generation is None else generation.to_dict()
        )
        mine = {name: getattr(config, name) for name in NAMES} | new_config
        of_generation = {name: getattr(generation, name, None) for name in NAMES} | new_generation
        trainers(tokens, config, generation)
        assert mine == {name: getattr(config, name) for name in NAMES}
        if generation is not None:
            assert of_generation == {name: getattr(generation, name) for name in NAMES}


def test_other_ends_are_added() -> None:
    tokens = SpecialTokens(eos=2, other_ends=(7, 2, 8))
    for before in (None, 2, [2], [5, 2]):
        _, new = tokens.aligned({"eos_token_id": 2}, {"eos_token_id": before})
        assert new["eos_token_id"][-2:] == [7, 8] and new["eos_token_id"].count(2) == 1
    assert tokens.aligned({"eos_token_id": 2}, {"eos_token_id": [8, 7, 2]}) == ({}, {})
    assert tokens.aligned({"eos_token_id": 2}, None) == ({}, {})
    assert SpecialTokens(other_ends=(7,)).aligned({}, {"eos_token_id": 2}) == ({}, {"eos_token_id": [2, 7]})
