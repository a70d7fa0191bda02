"""Blocks from config.json alone, against those of the skeletons that transformers builds from the same config."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from ratel_cli.errors import BadInput
from ratel_cli.model.blocks import find_blocks
from ratel_cli.model.skeleton import build_skeleton, supported_attention
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.estimate.families import FAMILIES
from ratel_cli.planning.estimate.shapes import (
    LayerTraits,
    is_estimated,
    spec_from_config,
    spec_from_shape,
    traits_from_config,
)
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.model.tiny import tiny_config as other_tiny_config

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA_405B: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}


def real(config: PretrainedConfig) -> ModelSpec:
    attention = supported_attention(config, "sdpa")
    return find_blocks(build_skeleton(config, dtype="float32", attn_implementation=attention), name="tiny").spec


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_block_is_that_of_the_skeleton(architecture: str, tmp_path: Path) -> None:
    """Once with all keys, once with those that are saved."""
    config = tiny_config(architecture)
    wanted = real(config)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert spec_from_config(config.to_dict(), name="tiny") == wanted
    assert spec_from_config(saved, name="tiny") == wanted
    assert not is_estimated(saved)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None}),
        ("llama", {"head_dim": 16}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gpt2", {"n_inner": 48, "tie_word_embeddings": False}),
        ("gptj", {"n_inner": 48, "tie_word_embeddings": True}),
        ("gpt_neox", {"attention_bias": False}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
        ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 48}),
        ("cohere", {"use_qk_norm": True, "attention_bias": True}),
        ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
        ("starcoder2", {"use_bias": False, "num_key_value_heads": 4}),
        ("glm4", {"attention_bias": False}),
        ("gpt_oss", {"attention_bias": False}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("bloom", {"tie_word_embeddings": False}),
        ("mpt", {"tie_word_embeddings": False}),
    ],
)
def test_switches_are_followed(architecture: str, changes: dict[str, object]) -> None:
    config = tiny_config(architecture, **changes)
    assert spec_from_config(config.to_dict(), name="tiny") == real(config)


@pytest.mark.parametrize(
    "config",
    [
        other_tiny_config("glm4_moe"),
        other_tiny_config("glm4_moe", use_qk_norm=True, first_k_dense_replace=2, n_shared_experts=2),
        AutoConfig.for_model(**{**LLAMA, "model_type": "gemma", "head_dim": 8}),
    ],
    ids=["glm4_moe", "glm4_moe with switches", "gemma"],
)
def test_families_that_the_engine_is_not_tested_on(config: PretrainedConfig) -> None:
    assert spec_from_config(config.to_dict(), name="tiny") == real(config)


def test_every_family_of_the_table_is_tested() -> None:
    tested = {tiny_config(architecture).model_type for architecture in ARCHITECTURES}
    assert set(FAMILIES) == tested | {"glm4_moe", "gemma"}


@pytest.mark.parametrize(
    "config",
    [
        {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
        {"model_type": "mistral", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64,
         "num_hidden_layers": 2, "num_attention_heads": 16},
        {**LLAMA, "model_type": "mixtral"},
        {**LLAMA, "model_type": "qwen3"},
        {**LLAMA, "model_type": "gemma2"},
        {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {"model_type": "gptj", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        {"model_type": "opt", "vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4},
        {"model_type": "bloom", "vocab_size": 97, "n_embed": 32, "n_layer": 2, "num_attention_heads": 4},
        {"model_type": "mpt", "vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4},
        {"model_type": "falcon", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4},
    ],
    ids=lambda config: str(config["model_type"]),
)  # fmt: skip
def test_what_a_config_leaves_out_is_what_transformers_takes(config: dict[str, object]) -> None:
    assert spec_from_config(config, name="tiny") == real(AutoConfig.for_model(**config))


def test_norms_for_each_head_are_counted_as_one() -> None:
    config = tiny_config("stablelm", qk_layernorm=True, hidden_size=128)
    found, wanted = spec_from_config(config.to_dict(), name="tiny"), real(config)
    assert [block.num_elements for block in found.blocks] == [block.num_elements for block in wanted.blocks]
    assert found.num_parameters == wanted.num_parameters


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (LLAMA_405B, 405_853_388_800),
        ({"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}, 46_702_792_704),
        ({"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
          "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128}, 30_532_122_624),
        ({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25,
          "n_positions": 1024}, 1_557_611_200),
    ],
    ids=["llama-405b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2-xl"],
)  # fmt: skip
def test_sizes_of_published_models(config: dict[str, object], num_parameters: int) -> None:
    assert spec_from_config(config, name="published").num_parameters == num_parameters


def test_a_large_model_takes_no_time() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        spec_from_config(LLAMA_405B, name="405b")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.05


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "num_key_value_heads"])
@pytest.mark.parametrize("value", ["left out", None])
def test_a_missing_key_is_named(key: str, value: object) -> None:
    config = {**LLAMA, key: value}
    if value == "left out":
        del config[key]
    with pytest.raises(BadInput, match=f"`{key}` is missing"):
        spec_from_config(config, name="broken")


@pytest.mark.parametrize("value", ["32", 0, -1, 3.5, True, [32]])
def test_a_garbled_number_is_named(value: object) -> None:
    with pytest.raises(BadInput, match="`hidden_size` must be a whole number, at least 1, not"):
        spec_from_config({**LLAMA, "hidden_size": value}, name="broken")


@pytest.mark.parametrize("value", ["yes", 1])
def test_a_garbled_switch_is_named(value: object) -> None:
    with pytest.raises(BadInput, match="`tie_word_embeddings` must be true or false, not"):
        spec_from_config({**LLAMA, "tie_word_embeddings": value}, name="broken")


@pytest.mark.parametrize("value", ["1", [0.5], [True]])
def test_a_garbled_list_of_layers_is_named(value: object) -> None:
    config = {**tiny_config("qwen3_moe").to_dict(), "mlp_only_layers": value}
    with pytest.raises(BadInput, match="`mlp_only_layers` must be a list of whole numbers, not"):
        spec_from_config(config, name="broken")


def test_heads_that_are_wider_than_the_model_are_refused() -> None:
    with pytest.raises(BadInput, match="`head_dim` must be a whole number, at least 1, not 0"):
        spec_from_config({**LLAMA, "num_attention_heads": 64}, name="broken")


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(BadInput, match="t5 is an encoder-decoder"):
        spec_from_config({"model_type": "t5", "is_encoder_decoder": True}, name="t5")


def test_an_unknown_family_is_taken_for_a_llama_and_said_to_be_an_estimate() -> None:
    config = {**LLAMA, "model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]}
    found = spec_from_config(config, name="tiny")
    assert is_estimated(config)
    assert found.blocks == spec_from_config(LLAMA, name="tiny").blocks
    assert found.architecture == "BrandNewForCausalLM"
    del config["architectures"]
    assert spec_from_config(config, name="tiny").architecture == "brand_new"


def test_an_unknown_familys_experts_are_counted() -> None:
    config = {**LLAMA, "model_type": "brand_new", "n_routed_experts": 16, "num_experts_per_tok": 4,
              "moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
    dense, sparse = spec_from_config(config, name="tiny").blocks[1:3]
    assert sparse.num_parameters - dense.num_parameters == 16 * 3 * 8 * 32 + 16 * 32 + 3 * 8 * 32 - 3 * 64 * 32
    assert traits_from_config(config) == LayerTraits(num_heads=4, head_dim=8, active_experts=4)
    del config["num_experts_per_tok"]
    with pytest.raises(BadInput, match="`num_experts_per_tok` is missing"):
        traits_from_config(config)


@pytest.mark.parametrize(
    ("architecture", "active_experts"),
    [("llama", 1), ("gpt2", 1), ("mpt", 1), ("mixtral", 2), ("qwen3_moe", 2), ("gpt_oss", 4)],
)
def test_traits_are_those_of_the_config(architecture: str, active_experts: int) -> None:
    wanted = LayerTraits(num_heads=4, head_dim=8, active_experts=active_experts)
    assert traits_from_config(tiny_config(architecture).to_dict()) == wanted


def test_a_shape_is_the_papers_gpt() -> None:
    spec = spec_from_shape(name="13b", num_layers=40, hidden_size=5120, vocab_size=50257)
    assert spec.num_layers == 40 and spec.tied
    assert [block.kind for block in spec.blocks] == ["embedding", *["layer"] * 40, "head"]
    for block in spec.blocks[1:-1]:
        assert sum(p.num_elements for p in block.parameters if p.decay) == 12 * 5120**2
    assert spec.blocks[0].num_parameters == 50257 * 5120


@pytest.mark.parametrize("nominal", [13 * 10**9, 13_000_000_019])
def test_a_nominal_size_is_reached_with_vectors(nominal: int) -> None:
    spec = spec_from_shape(name="13b", num_layers=40, hidden_size=5120, vocab_size=50257, num_parameters=nominal)
    assert nominal - 40 < spec.num_parameters <= nominal
    assert sum(p.num_elements for p in spec.blocks[1].parameters if p.decay) == 12 * 5120**2


def test_a_nominal_size_that_was_rounded_down_changes_nothing() -> None:
    shape = spec_from_shape(name="276b", num_layers=112, hidden_size=14336, vocab_size=50257)
    nominal = 276 * 10**9
    assert shape.num_parameters > nominal
    assert shape == spec_from_shape(
        name="276b", num_layers=112, hidden_size=14336, vocab_size=50257, num_parameters=nominal
    )


def test_a_depth_that_only_a_mistake_can_be() -> None:
    with pytest.raises(BadInput, match="1000000000000 layers are more than 10000, the most there can be"):
        spec_from_shape(name="m", num_layers=10**12, hidden_size=64, vocab_size=100)
