"""How each family of decoders names and shapes its parameters, written with the words of `planning.estimate.rows`.

`planning.estimate.shapes` lays out the blocks of a config by this table; tests hold every entry against the skeleton
that transformers builds. Pure.

Invariant: rows come in the order of the family's module tree, which is the order of the block.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratel_cli.planning.estimate.config_values import ConfigValues, Default
from ratel_cli.planning.estimate.rows import Family, Row, Rows, conv1d, linear, lm_head, norm, norms, when

_ATTENTION = (
    *linear("self_attn.q_proj", "q", "h", bias="qkv_bias"),
    *linear("self_attn.k_proj", "k", "h", bias="qkv_bias"),
    *linear("self_attn.v_proj", "k", "h", bias="qkv_bias"),
    *linear("self_attn.o_proj", "h", "q", bias="o_bias"),
)
_HEAD_NORMS = (*norm("self_attn.q_norm", "d"), *norm("self_attn.k_norm", "d"))
_MLP = (
    *linear("mlp.gate_proj", "i", "h", bias="mlp_bias"),
    *linear("mlp.up_proj", "i", "h", bias="mlp_bias"),
    *linear("mlp.down_proj", "h", "i", bias="mlp_bias"),
)
_FUSED_MLP = (*linear("mlp.gate_up_proj", "2*i", "h"), *linear("mlp.down_proj", "h", "i"))
_ROUTER = linear("mlp.gate", "e", "h")
_EXPERTS = (Row("mlp.experts.gate_up_proj", ("e", "2*m", "h")), Row("mlp.experts.down_proj", ("e", "h", "m")))
_SHARED_EXPERTS = when(
    "shares_experts",
    (
        *linear("mlp.shared_experts.gate_proj", "n_shared_experts*m", "h"),
        *linear("mlp.shared_experts.up_proj", "n_shared_experts*m", "h"),
        *linear("mlp.shared_experts.down_proj", "h", "n_shared_experts*m"),
    ),
)
_NORMS = norms("input_layernorm", "post_attention_layernorm")
_FINAL_NORM = norm("model.norm")
_GEMMA_NORMS = (*_NORMS, *norms("pre_feedforward_layernorm", "post_feedforward_layernorm"))


def _llama_like(
    architecture: str,
    *,
    attention: Rows = _ATTENTION,
    mlp: Rows = _MLP,
    sparse_mlp: Rows = (),
    norms: Rows = _NORMS,
    final_norm: Rows = _FINAL_NORM,
    **defaults: Default,
) -> Family:
    return Family(
        architecture=architecture,
        embedding=(Row("model.embed_tokens.weight", ("v", "h")),),
        layers="model.layers",
        layer=(*attention, *mlp, *norms),
        sparse_layer=(*attention, *sparse_mlp, *norms) if sparse_mlp else (),
        head=(*final_norm, *lm_head()),
        defaults=defaults,
    )


def _falcon_key_heads(values: ConfigValues) -> int:
    if values.flag("new_decoder_architecture"):
        return values.number("num_kv_heads")
    return 1 if values.flag("multi_query") else values.number("num_attention_heads")


UNKNOWN = _llama_like("", sparse_mlp=(*_EXPERTS, *_ROUTER, *_SHARED_EXPERTS), intermediate_size="4*h")
"""What most new families look like, more or less: an estimate."""

GPT = Family(
    architecture="GPT",
    embedding=(Row("embedding.weight", ("v", "h")),),
    layers="layers",
    layer=(
        *norm("norm1"),
        *linear("qkv", "3*h", "h"),
        *linear("projection", "h", "h"),
        *norm("norm2"),
        *linear("fc1", "4*h", "h"),
        *linear("fc2", "h", "4*h"),
    ),
    head=norm("norm"),
    defaults={"tie_word_embeddings": True},
)
"""The papers' model: 12 h^2 in the matrices of a layer."""

FAMILIES: Mapping[str, Family] = {
    "llama": _llama_like("LlamaForCausalLM"),
    "granite": _llama_like("GraniteForCausalLM"),
    "mistral": _llama_like("MistralForCausalLM", num_key_value_heads=8),
    "qwen2": _llama_like("Qwen2ForCausalLM", qkv_bias=True, o_bias=False),
    "qwen3": _llama_like("Qwen3ForCausalLM", attention=(*_ATTENTION, *_HEAD_NORMS), head_dim=128),
    "gemma": _llama_like("GemmaForCausalLM", head_dim=256, tie_word_embeddings=True),
    "gemma2": _llama_like("Gemma2ForCausalLM", norms=_GEMMA_NORMS, head_dim=256, tie_word_embeddings=True),
    "gemma3_text": _llama_like(
        "Gemma3ForCausalLM",
        attention=(*_ATTENTION, *_HEAD_NORMS),
        norms=_GEMMA_NORMS,
        head_dim=256,
        tie_word_embeddings=True,
    ),
    "phi3": _llama_like(
        "Phi3ForCausalLM",
        attention=(*linear("self_attn.o_proj", "h", "q"), *linear("self_attn.qkv_proj", "q+2*k", "h")),
        mlp=_FUSED_MLP,
    ),
    "glm4": _llama_like(
        "Glm4ForCausalLM",
        mlp=_FUSED_MLP,
        norms=(*_NORMS, *norms("post_self_attn_layernorm", "post_mlp_layernorm")),
        head_dim=128,
        attention_bias=True,
        o_bias=False,
    ),
    "olmo": _llama_like("OlmoForCausalLM", norms=(), final_norm=()),
    "olmo2": _llama_like(
        "Olmo2ForCausalLM",
        attention=(*_ATTENTION, *norm("self_attn.q_norm", "q"), *norm("self_attn.k_norm", "k")),
        norms=norms("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "cohere": _llama_like(
        "CohereForCausalLM",
        attention=(
            *_ATTENTION,
            *when("use_qk_norm", norm("self_attn.q_norm", "n", "d")),
            *when("use_qk_norm", norm("self_attn.k_norm", "num_key_value_heads", "d")),
        ),
        norms=norm("input_layernorm"),
        use_qk_norm=False,
        tie_word_embeddings=True,
    ),
    "stablelm": _llama_like(
        "StableLmForCausalLM",
        attention=(
            *_ATTENTION,
            # One norm a head, each a parameter of its own: written as one, of as many elements.
            *when("qk_layernorm", norm("self_attn.q_layernorm.norms", "n", "d")),
            *when("qk_layernorm", norm("self_attn.k_layernorm.norms", "num_key_value_heads", "d")),
        ),
        norms=(
            *norm("input_layernorm", bias=True),
            *when("not use_parallel_residual", norm("post_attention_layernorm", bias=True)),
        ),
        final_norm=norm("model.norm", bias=True),
        qkv_bias="use_qkv_bias",
        use_qkv_bias=False,
        o_bias=False,
        qk_layernorm=False,
        use_parallel_residual=False,
    ),
    "starcoder2": _llama_like(
        "Starcoder2ForCausalLM",
        mlp=(*linear("mlp.c_fc", "i", "h", bias="use_bias"), *linear("mlp.c_proj", "h", "i", bias="use_bias")),
        norms=norms("input_layernorm", "post_attention_layernorm", bias=True),
        final_norm=norm("model.norm", bias=True),
        use_bias=True,
        attention_bias="use_bias",
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "mixtral": _llama_like(
        "MixtralForCausalLM",
        sparse_mlp=(*_ROUTER, *_EXPERTS),
        num_key_value_heads=8,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": _llama_like(
        "Qwen3MoeForCausalLM",
        attention=(*_ATTENTION, *_HEAD_NORMS),
        sparse_mlp=(*_EXPERTS, *_ROUTER),
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "glm4_moe": _llama_like(
        "Glm4MoeForCausalLM",
        attention=(*_ATTENTION, *when("use_qk_norm", _HEAD_NORMS)),
        sparse_mlp=(*_EXPERTS, *_ROUTER, *_SHARED_EXPERTS),
        o_bias=False,
        use_qk_norm=False,
        num_key_value_heads=8,
        num_experts=128,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "gpt_oss": _llama_like(
        "GptOssForCausalLM",
        attention=(Row("self_attn.sinks", ("n",)), *_ATTENTION),
        sparse_mlp=(
            *linear("mlp.router", "e", "h", bias=True),
            Row("mlp.experts.gate_up_proj", ("e", "h", "2*i")),
            Row("mlp.experts.gate_up_proj_bias", ("e", "2*i")),
            Row("mlp.experts.down_proj", ("e", "i", "h")),
            Row("mlp.experts.down_proj_bias", ("e", "h")),
        ),
        head_dim=64,
        num_key_value_heads=8,
        attention_bias=True,
        num_experts=128,
        num_experts_per_tok=4,
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        embedding=(
            Row("transformer.wte.weight", ("v", "h")),
            Row("transformer.wpe.weight", ("max_position_embeddings", "h")),
        ),
        layers="transformer.h",
        layer=(
            *norm("ln_1", bias=True),
            *conv1d("attn.c_attn", "3*h", "h"),
            *conv1d("attn.c_proj", "h", "h"),
            *norm("ln_2", bias=True),
            *conv1d("mlp.c_fc", "i", "h"),
            *conv1d("mlp.c_proj", "h", "i"),
        ),
        head=(*norm("transformer.ln_f", bias=True), *lm_head()),
        defaults={"intermediate_size": "4*h", "tie_word_embeddings": True},
    ),
    "gptj": Family(
        architecture="GPTJForCausalLM",
        embedding=(Row("transformer.wte.weight", ("v", "h")),),
        layers="transformer.h",
        layer=(
            *norm("ln_1", bias=True),
            *linear("attn.k_proj", "h", "h"),
            *linear("attn.v_proj", "h", "h"),
            *linear("attn.q_proj", "h", "h"),
            *linear("attn.out_proj", "h", "h"),
            *linear("mlp.fc_in", "i", "h", bias=True),
            *linear("mlp.fc_out", "h", "i", bias=True),
        ),
        head=(*norm("transformer.ln_f", bias=True), *lm_head(), Row("lm_head.bias", ("v",))),
        defaults={"intermediate_size": "4*h"},
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        embedding=(Row("gpt_neox.embed_in.weight", ("v", "h")),),
        layers="gpt_neox.layers",
        layer=(
            *norms("input_layernorm", "post_attention_layernorm", bias=True),
            *linear("attention.query_key_value", "3*h", "h", bias="attention_bias"),
            *linear("attention.dense", "h", "h", bias="attention_bias"),
            *linear("mlp.dense_h_to_4h", "i", "h", bias=True),
            *linear("mlp.dense_4h_to_h", "h", "i", bias=True),
        ),
        head=(*norm("gpt_neox.final_layer_norm", bias=True), *lm_head()),
        defaults={"attention_bias": True},
    ),
    "bloom": Family(
        architecture="BloomForCausalLM",
        embedding=(
            Row("transformer.word_embeddings.weight", ("v", "h")),
            *norm("transformer.word_embeddings_layernorm", bias=True),
        ),
        layers="transformer.h",
        layer=(
            *norm("input_layernorm", bias=True),
            *linear("self_attention.query_key_value", "3*h", "h", bias=True),
            *linear("self_attention.dense", "h", "h", bias=True),
            *norm("post_attention_layernorm", bias=True),
            *linear("mlp.dense_h_to_4h", "4*h", "h", bias=True),
            *linear("mlp.dense_4h_to_h", "h", "4*h", bias=True),
        ),
        head=(*norm("transformer.ln_f", bias=True), *lm_head()),
        defaults={"tie_word_embeddings": True},
    ),
    "falcon": Family(
        architecture="FalconForCausalLM",
        embedding=(Row("transformer.word_embeddings.weight", ("v", "h")),),
        layers="transformer.h",
        layer=(
            *linear("self_attention.query_key_value", "h+2*k", "h", bias="bias"),
            *linear("self_attention.dense", "h", "h", bias="bias"),
            *linear("mlp.dense_h_to_4h", "i", "h", bias="bias"),
            *linear("mlp.dense_4h_to_h", "h", "i", bias="bias"),
            *when("not parallel_attn", norm("post_attention_layernorm", bias=True)),
            *when("not norms_each", norm("input_layernorm", bias=True)),
            *when("norms_each", norms("ln_attn", "ln_mlp", bias=True)),
        ),
        head=(*norm("transformer.ln_f", bias=True), *lm_head()),
        defaults={
            "num_key_value_heads": _falcon_key_heads,
            "num_kv_heads": "num_attention_heads",
            "num_ln_in_parallel_attn": lambda values: 2 if values.flag("new_decoder_architecture") else 1,
            "norms_each": lambda values: values.flag("parallel_attn") and values.number("num_ln_in_parallel_attn") == 2,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "intermediate_size": "4*h",
            "tie_word_embeddings": True,
        },
    ),
    "mpt": Family(
        architecture="MptForCausalLM",
        embedding=(Row("transformer.wte.weight", ("v", "h")),),
        layers="transformer.blocks",
        layer=(
            *norm("norm_1"),
            *linear("attn.Wqkv", "3*h", "h"),
            *linear("attn.out_proj", "h", "h"),
            *norm("norm_2"),
            *linear("ffn.up_proj", "4*h", "h"),
            *linear("ffn.down_proj", "h", "4*h"),
        ),
        head=(*norm("transformer.norm_f"), *lm_head()),
        defaults={"tie_word_embeddings": True},
    ),
    "opt": Family(
        architecture="OPTForCausalLM",
        embedding=(
            Row("model.decoder.embed_tokens.weight", ("v", "word_embed_proj_dim")),
            Row("model.decoder.embed_positions.weight", ("max_position_embeddings+2", "h")),
            *when("projects", linear("model.decoder.project_in", "h", "word_embed_proj_dim")),
        ),
        layers="model.decoder.layers",
        layer=(
            *linear("self_attn.k_proj", "h", "h", bias="enable_bias"),
            *linear("self_attn.v_proj", "h", "h", bias="enable_bias"),
            *linear("self_attn.q_proj", "h", "h", bias="enable_bias"),
            *linear("self_attn.out_proj", "h", "h", bias="enable_bias"),
            *when("layer_norm_elementwise_affine", norm("self_attn_layer_norm", bias=True)),
            *linear("fc1", "i", "h", bias="enable_bias"),
            *linear("fc2", "h", "i", bias="enable_bias"),
            *when("layer_norm_elementwise_affine", norm("final_layer_norm", bias=True)),
        ),
        head=(
            *when("projects", linear("model.decoder.project_out", "word_embed_proj_dim", "h")),
            *when(
                "layer_norm_elementwise_affine",
                when("has_final_norm", norm("model.decoder.final_layer_norm", bias=True)),
            ),
            *lm_head(inputs="word_embed_proj_dim"),
        ),
        defaults={
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": "hidden_size",
            "projects": lambda values: values.number("word_embed_proj_dim") != values.number("hidden_size"),
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "has_final_norm": lambda values: (
                values.flag("do_layer_norm_before") and values.flag("not _remove_final_layer_norm")
            ),
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
    ),
}
