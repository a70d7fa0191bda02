"""The tokens that a model's configurations name by their ids: what ends a text, what begins one, what fills rows up.

The tokenizer of a run may have others than the base model. Invariant: the configurations get the tokens that the
tokenizer has, as transformers' Trainer gives them; what it lacks stays as it is, and no token that ends a text is taken
out of a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_EOS = "eos_token_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens of a run. None: it has no such token."""

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    other_ends: tuple[int, ...] = ()
    """Other tokens with which an answer may end, besides `eos`."""

    def aligned(
        self, config: Mapping[str, object], generation: Mapping[str, object] | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        """What changes in the configuration of a language model, and in its defaults for generation.

        `generation`: None: it has none, as a model that generates no text.
        """
        new_config: dict[str, object] = {}
        new_generation: dict[str, object] = {}
        for name, token in ((_EOS, self.eos), ("bos_token_id", self.bos), ("pad_token_id", self.pad)):
            in_config, in_generation = _ids(config.get(name)), _ids((generation or {}).get(name))
            if token is None or (token in in_config and (generation is None or token in in_generation)):
                continue
            has_several = name == _EOS and isinstance(config.get(name), list)
            new_config[name] = _first(token, in_config) if has_several else token
            new_generation[name] = _first(token, in_generation) if name == _EOS else token
        known = _ids(new_generation.get(_EOS, (generation or {}).get(_EOS)))
        missing = [each for each in self.other_ends if each not in known]
        if missing and generation is not None:
            new_generation[_EOS] = [*known, *missing]
        return new_config, new_generation


def _ids(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _first(token: int, others: list[object]) -> list[object]:
    """The token first, and the others without a repetition of it."""
    return [token, *(each for each in others if each != token)]
