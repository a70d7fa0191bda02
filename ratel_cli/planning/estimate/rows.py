"""The words in which `planning.estimate.families` writes down a family's parameters, one row each. Pure.

Widths are keys of config.json, or letters: `h` hidden size, `v` vocabulary, `q` all query heads, `k` all key
heads, `d` one head, `n` their number, `i` the MLP, `m` an expert's, `e` the experts.

Invariant: a row says nothing about numbers; `planning.estimate.config_values` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ratel_cli.planning.estimate.config_values import Default


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter: its name in its block, its shape, and the switches that must be set for it to be there."""

    name: str
    shape: tuple[str, ...]
    conditions: tuple[str, ...] = ()


Rows = tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`. Layers are all alike but in a mixture of experts, where some may be dense."""

    architecture: str
    """The class in transformers; empty where it is not known."""
    embedding: Rows
    layers: str
    """Where the list of layers is."""
    layer: Rows
    sparse_layer: Rows = ()
    """With experts."""
    head: Rows
    defaults: Mapping[str, Default]
    """Taken where config.json leaves a key out, before those of DEFAULTS."""


DEFAULTS: Mapping[str, Default] = {
    "h": "hidden_size",
    "v": "vocab_size",
    "i": "intermediate_size",
    "d": "head_dim",
    "n": "num_attention_heads",
    "q": "num_attention_heads*head_dim",
    "k": "num_key_value_heads*head_dim",
    "e": "num_experts",
    "m": "moe_intermediate_size",
    "head_dim": lambda values: values.number("hidden_size") // values.number("num_attention_heads"),
    "num_key_value_heads": "num_attention_heads",
    "moe_intermediate_size": "intermediate_size",
    "num_experts": 0,
    "n_shared_experts": 0,
    "shares_experts": lambda values: values.number("n_shared_experts", least=0),
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "attention_bias": False,
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def linear(name: str, outputs: str, inputs: str, *, bias: bool | str = False) -> Rows:
    """`bias` may be the switch that it hangs on."""
    weight = Row(f"{name}.weight", (outputs, inputs))
    if bias is False:
        return (weight,)
    return (weight, Row(f"{name}.bias", (outputs,), (bias,) if isinstance(bias, str) else ()))


def conv1d(name: str, outputs: str, inputs: str) -> Rows:
    """GPT-2's linear layer, whose weight has the inputs first."""
    return (Row(f"{name}.weight", (inputs, outputs)), Row(f"{name}.bias", (outputs,)))


def norm(name: str, *shape: str, bias: bool = False) -> Rows:
    weight = Row(f"{name}.weight", shape or ("h",))
    return (weight, Row(f"{name}.bias", weight.shape)) if bias else (weight,)


def norms(*names: str, bias: bool = False) -> Rows:
    return tuple(row for name in names for row in norm(name, bias=bias))


def when(condition: str, rows: Rows) -> Rows:
    return tuple(replace(row, conditions=(*row.conditions, condition)) for row in rows)


def lm_head(*, inputs: str = "h") -> Rows:
    return when("not tie_word_embeddings", linear("lm_head", "v", inputs))
