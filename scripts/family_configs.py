"""A tiny configuration of any family of transformers, made from the family's own default by rules.

`tiny_config` shrinks each number by the name of its key, each list of layers to as many layers, and goes into nested
configurations. What the rules get wrong for one family is in `_CHANGES`. Invariant: a family's default values that are
no sizes (its switches, its activation, its kinds of layers) stay as they are, so that the model's own code runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every model type of which transformers has a causal language model, in its own order."""

NUM_LAYERS = 4
VOCAB_SIZE = 131

_RULES: tuple[tuple[str, object], ...] = (
    (r"vocab_size|n_tokens|vocab_size_per_layer_input", VOCAB_SIZE),
    (r"num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|num_(en|de)coder_layers|depth", NUM_LAYERS),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embedding_size|word_embed_proj_dim|hidden_size_global", 32),
    (r"attention_hidden_size", 64),
    (r"attention_head_dim", 16),
    (r"(\w+_)?intermediate_size(_mlp)?|(expert_)?ffn_(hidden_size|dim)|d_ff|dff|dim_ff|n_inner|block_ff_dim", 48),
    (r"(en|de)coder_ffn_dim", 48),
    (r"(swa_|linear_)?num_(attention_)?heads|n_heads?|(en|de)coder_attention_heads", 4),
    (r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads", 2),
    (r"(swa_|linear_|global_)?head_dim|kv_channels|dim_head|d_kv", 8),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|(max_)?(source|target)_positions|model_max_length", 256),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk?|moe_top_k|num_selected_experts", 2),
    (r"n_group|num_expert_group|topk_group|num_limited_groups", 1),
    (r"(kv|q|o)_lora_rank", 16),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"qk_nope_head_dim|v_head_dim", 8),
    (r"qk_head_dim", 12),
    (r"index_head_dim", 8),
    (r"index_n_heads", 32),
    (r"index_topk", 16),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_nextn_predict_layers", 0),
    (r"(attention_)?sliding_window(_size)?|attention_window_size|attention_chunk_size", 16),
    (r"(mamba_|linear_)?chunk_size|mamba_chunk_size", 8),
    (r"linear_num_(key|value)_heads", 4),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),
    (r"linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim", 8),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r"mamba_n_groups|n_groups", 1),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"lru_width|d_inner|router_hidden_size|mamba_d_ssm", 64),
    (r"zero_expert_num", 2),
    (r"mamba_headdim", 8),
    (r"(pronunciation|shape)_embed_dim", 16),
    (r"(pronunciation|shape)_vocab_size", VOCAB_SIZE),
    (r"original_max_position_embeddings", 128),
)  # fmt: skip
"""Names of keys, and their values. The first one that fits the whole name decides."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER: Mapping[str, object] = {
    "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
    "indexer_compress_ratio": 1, "hc_lowrank": 8, "ple_embed_dim": 32, "ngram_vocab_size_base": 100,
}  # fmt: skip
_DECODERS_IF_ASKED = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Encoders by default: their tokens see each other."""
_CHANGES: Mapping[str, Mapping[str, object]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3], "local_attention_window_len": 16,
        "patcher_config.intermediate_size": 48,
    },
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config.head_dim": 12, "vision_config.adapter_in_dim": 32, "vision_config.adapter_out_dim": 32,
    },
    "dots3_note_text": {"head_dim": 12},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    "hrm_text": {"num_layers_per_stack": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {f"text_config.{key}": value for key, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [6, 8], "attention_head_size": 8,
        "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "attn_layers": ["local", "lsh"] * 2, "num_buckets": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a family needs beyond the rules; a dot goes into a nested configuration."""

_UNTOUCHED = re.compile(r".*(token_id|_id)s?|chunk_size_feed_forward|type_vocab_size|pretraining_tp|label2id|id2label")
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "depth")


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """A small configuration of the family, with `changes` to its values."""
    default = AutoConfig.for_model(family).to_dict()
    values = _shrink(default)
    is_decoder = {"is_decoder": True} if family in _DECODERS_IF_ASKED else {}
    for key, value in {**is_decoder, **_CHANGES.get(family, {}), **changes}.items():
        _put(values, key.split("."), value)
    values.pop("model_type", None)
    return AutoConfig.for_model(family, **values)


def _shrink(default: Mapping[str, object]) -> dict[str, object]:
    """The values that differ from the default's."""
    shrunk: dict[str, object] = {}
    depth = next((default[key] for key in _DEPTHS if isinstance(default.get(key), int)), None)
    layers = _chosen_layers(default, depth) if isinstance(depth, int) else []
    for key, value in default.items():
        if _UNTOUCHED.fullmatch(key):
            if key.endswith("token_id") and isinstance(value, int) and value >= VOCAB_SIZE:
                shrunk[key] = VOCAB_SIZE - 1
        elif key == "per_layer_config" and isinstance(value, dict):
            of_layer = {int(place): _shrink(inner) for place, inner in value.items()}
            shrunk[key] = {new: of_layer[old] for new, old in enumerate(layers) if old in of_layer}
        elif isinstance(value, dict):
            if "rope" not in key and (inner := _shrink(value)):
                shrunk[key] = {**{name: value[name] for name in ("model_type",) if name in value}, **inner}
        elif isinstance(value, list) and layers and len(value) == depth:
            shrunk[key] = [_small(key, value[place]) for place in layers]
        elif (small := _small(key, value)) != value:
            shrunk[key] = small
    if "kv_lora_rank" in default:  # latent attention: as many keys as queries, and rotary dimensions apart
        shrunk.update({key: 4 for key in ("num_key_value_heads", "head_dim") if key in default})
    return shrunk


def _small(key: str, value: object) -> object:
    """The value by the first rule that fits its key; itself if it is no size, or no rule does."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return next((small for pattern, small in _RULES if re.fullmatch(pattern, key)), value)


def _chosen_layers(default: Mapping[str, object], depth: int) -> list[int]:
    """`NUM_LAYERS` of the default's layers, with as many kinds of them as possible."""
    of_layers = [value for value in default.values() if isinstance(value, list) and len(value) == depth]
    first_of_kind: dict[str, int] = {}
    for place, *kinds in zip(range(depth), *of_layers, strict=True):
        first_of_kind.setdefault(str(kinds), place)
    chosen = list(first_of_kind.values())[:NUM_LAYERS]
    others = [place for place in range(depth) if place not in chosen]
    return sorted([*chosen, *others[: NUM_LAYERS - len(chosen)]])


def _put(values: dict[str, object], path: list[str], value: object) -> None:
    for key in path[:-1]:
        inner = values.setdefault(key, {})
        assert isinstance(inner, dict)
        values = inner
    values[path[-1]] = value
