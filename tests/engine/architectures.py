"""Tiny random configurations of every architecture that the engine is tested on."""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig

VOCAB_SIZE = 97

_LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "is_decoder": True,
}
_BLOOM_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2Config", _GPT_LIKE),  # tied, with dropout in the embedding, in attention and behind every layer
    "opt": ("OPTConfig", {**_BLOOM_LIKE, "ffn_dim": 64, "num_hidden_layers": 3, "word_embed_proj_dim": 16}),
    "llama": ("LlamaConfig", _LLAMA_LIKE),
    "llama_tied": ("LlamaConfig", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_LLAMA_LIKE, "sliding_window": 6}),
    "qwen2": ("Qwen2Config", _LLAMA_LIKE),
    "qwen3": ("Qwen3Config", {**_LLAMA_LIKE, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_LLAMA_LIKE, "head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {**_LLAMA_LIKE, "head_dim": 8}),
    "phi3": ("Phi3Config", _LLAMA_LIKE),
    "bloom": ("BloomConfig", {**_BLOOM_LIKE, "n_layer": 3, "hidden_dropout": 0.1}),
    "gpt_neox": ("GPTNeoXConfig", {**_LLAMA_LIKE, "hidden_dropout": 0.1}),
    "gptj": ("GPTJConfig", {**_GPT_LIKE, "rotary_dim": 4}),
    "falcon": ("FalconConfig", {**_BLOOM_LIKE, "num_hidden_layers": 3}),
    "mpt": ("MptConfig", {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}),
    "mixtral": ("MixtralConfig", {**_LLAMA_LIKE, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_LLAMA_LIKE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss": ("GptOssConfig", {**_LLAMA_LIKE, "head_dim": 8, "num_local_experts": 4, "rope_parameters": None}),
    # Tied, and its norms have no weights, so the head is a block without parameters.
    "olmo": ("OlmoConfig", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2Config", _LLAMA_LIKE),
    # What calls its layers is a part of what embeds the tokens, and the head has its bias by two names.
    "bert": ("BertConfig", {**_BERT_LIKE, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}),
    "starcoder2": ("Starcoder2Config", _LLAMA_LIKE),
    "cohere": ("CohereConfig", _LLAMA_LIKE),
    "stablelm": ("StableLmConfig", _LLAMA_LIKE),
    "granite": ("GraniteConfig", _LLAMA_LIKE),
    "glm4": ("Glm4Config", {**_LLAMA_LIKE, "head_dim": 8}),
}
ARCHITECTURES = tuple(_ARCHITECTURES)


_LARGER: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "n_embd": 256,
    "d_model": 256,
    "ffn_dim": 512,
    "word_embed_proj_dim": 256,
    "rotary_dim": 32,
}


def larger_config(architecture: str, **changes: object) -> PretrainedConfig:
    """`tiny_config` with larger sizes: every parameter takes a multiple of 256 bytes, as in real models."""
    _, values = _ARCHITECTURES[architecture]
    larger = {name: value for name, value in _LARGER.items() if name in values}
    return tiny_config(architecture, **{**larger, **changes})


def tiny_config(architecture: str, **changes: object) -> PretrainedConfig:
    """A new configuration, with `changes` to its values."""
    class_name, values = _ARCHITECTURES[architecture]
    config = getattr(transformers, class_name)(**{**values, **changes})
    assert isinstance(config, PretrainedConfig)
    return config
