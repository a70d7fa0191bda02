"""Tokens that other trainers add to the vocabulary, and how they draw their rows.

Invariant: the rows of a rewritten config are drawn as the other trainer draws them, but for its random numbers.
"""

from __future__ import annotations

from ratel_cli.config.others.row import ForeignKey, Given, Value, adds, is_text, sets, split
from ratel_cli.config.yaml.yaml_marks import Plain

_OF_LLAMA_FACTORY: dict[str, Value] = {"pad_vocab_to_multiple_of": 64, "new_tokens_init": "noisy_mean"}
"""A new token resizes its embedding so, and draws its rows around the mean."""


def _names_in(key: str) -> Value:
    """The tokens that a text names, with commas between."""

    def names(given: Given) -> Plain:
        return [each.strip() for each in str(given.value(key)).split(",")]

    return names


VOCABULARY = (
    ForeignKey(theirs="add_tokens", how=sets({"tokens": _names_in("add_tokens"), **_OF_LLAMA_FACTORY}), only=is_text),
    ForeignKey(
        theirs="add_special_tokens",
        how=sets({"new_special_tokens": _names_in("add_special_tokens"), **_OF_LLAMA_FACTORY}),
        only=is_text,
    ),
    ForeignKey(theirs="new_special_tokens", how=adds(_OF_LLAMA_FACTORY), only=is_text),
    ForeignKey(theirs="new_special_tokens", how=split, only=is_text),
    ForeignKey(theirs="resize_vocab", how=sets(_OF_LLAMA_FACTORY), only=(True,)),
    ForeignKey(
        theirs="init_special_tokens", how="ignored", only=("noise_init",), why="`new_tokens_init: noisy_mean` is that"
    ),
    ForeignKey(theirs="resize_token_embeddings_to_32x", how=sets({"pad_vocab_to_multiple_of": 32}), only=(True,)),
    ForeignKey(theirs="mean_resizing_embeddings", how=sets({"new_tokens_init": "mean"}), only=(True,)),
    ForeignKey(theirs="mean_resizing_embeddings", how=sets({"new_tokens_init": "random"}), only=(False,)),
)
