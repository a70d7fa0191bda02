"""The numbers and switches of a model's config.json, each under one name, whatever the family calls it.

`planning.estimate.families` writes down what the model's own code takes where config.json leaves a key out;
`planning.estimate.shapes` asks. Pure.

Invariant: who asks gets a whole number, a switch, or BadInput that names the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ratel_cli.errors import BadInput

Default: TypeAlias = "int | str | Callable[[ConfigValues], int]"
"""A number or switch, an expression of other keys (`2*head_dim+1`), or what has to be worked out."""

_OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}


class ConfigValues:
    """A config with its defaults. A key that is null counts as left out, as it does in transformers."""

    def __init__(self, config: Mapping[str, object], defaults: Mapping[str, Default]) -> None:
        self._config = config
        self._defaults = defaults

    def number(self, key: str, *, least: int = 1) -> int:
        """The whole number under `key`."""
        value = self._given(key)
        if value is None:
            value = self._default(key, self.width)
        if type(value) is not int or value < least:
            raise BadInput(f"config.json: `{key}` must be a whole number, at least {least}, not {value!r}")
        return value

    def flag(self, key: str) -> bool:
        """The switch under `key`; `not key` is its opposite."""
        if key.startswith("not "):
            return not self.flag(key.removeprefix("not "))
        value = self._given(key)
        if value is None:
            value = bool(self._default(key, self.flag))
        if not isinstance(value, bool):
            raise BadInput(f"config.json: `{key}` must be true or false, not {value!r}")
        return value

    def indices(self, key: str) -> frozenset[int]:
        """The list of layers under `key`, empty where it is left out."""
        value = self._given(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(index) is int for index in value):
            raise BadInput(f"config.json: `{key}` must be a list of whole numbers, not {value!r}")
        return frozenset(value)

    def width(self, expression: str) -> int:
        """A sum of products of numbers and keys."""
        return sum(
            math.prod(int(factor) if factor.isdigit() else self.number(factor) for factor in term.split("*"))
            for term in expression.split("+")
        )

    def _given(self, key: str) -> object:
        for name in (key, *_OTHER_NAMES.get(key, ())):
            if self._config.get(name) is not None:
                return self._config[name]
        return None

    def _default(self, key: str, evaluate: Callable[[str], int]) -> int:
        default = self._defaults.get(key)
        if default is None:
            raise BadInput(f"config.json: `{key}` is missing")
        if isinstance(default, str):
            return evaluate(default)
        return default(self) if callable(default) else default
