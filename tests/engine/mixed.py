"""Models whose layers have parameters of several kinds: what transformers keeps in fp32, what their code has frozen."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from transformers import PretrainedConfig

from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.sizes import DtypeName
from scripts.family_configs import tiny_config
from tests.engine.sharing import SharingConfig
from tests.reference import Recipe, kept_in_fp32

IN_FP32, FROZEN, BOTH, TIED_AND_FROZEN = "hunyuan_v1_moe", "afmoe", "ernie4_5_moe", "marian"
"""Routers of layers are kept in fp32; biases of experts are frozen; both, and some parameters are both at once; a table
of positions next to a tied embedding is frozen."""
MIXED = (IN_FP32, FROZEN, BOTH, TIED_AND_FROZEN)
SHARING = "sharing"
"""Layers get what those of Gemma 4 get, and share weights: see `tests.engine.sharing`."""
CARRYING = ("gemma4_text", "gemma3n_text", "zaya", "hy_v4", "deepseek_v4", SHARING)
"""Layers get more than hidden states: an input each from the embedding, and keys and values of layers below; or what
the layer below returns; two have several hidden states for each token."""


_SHARED_STATES = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
"""The last two layers read keys and values of the first two."""
_CHANGES: dict[str, dict[str, object]] = {
    TIED_AND_FROZEN: {"is_encoder_decoder": False},
    "gemma4_text": _SHARED_STATES,
    "gemma3n_text": _SHARED_STATES,
}


def mixed_config(family: str) -> PretrainedConfig:
    if family == SHARING:
        values = mixed_config("gemma4_text").to_dict()
        return SharingConfig(**{name: value for name, value in values.items() if name != "model_type"})
    return tiny_config(family, **_CHANGES.get(family, {}))


@cache
def _kept(family: str, dtype: DtypeName) -> frozenset[str]:
    if family == SHARING:
        return _kept("gemma4_text", dtype)
    with tempfile.TemporaryDirectory() as name:
        return kept_in_fp32(mixed_config(family), DTYPES[dtype], Path(name))


def mixed_recipe(family: str, dtype: DtypeName, *, max_grad_norm: float | None) -> Recipe:
    scale = 1024.0 if dtype == "float16" else 1.0
    return Recipe(dtype=DTYPES[dtype], kept=_kept(family, dtype), max_grad_norm=max_grad_norm, loss_scale=scale)
