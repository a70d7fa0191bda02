"""What `from_pretrained(dtype=...)` keeps in fp32: a model with such parameters is refused, and buffers are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ratel_cli.errors import BadInput
from ratel_cli.model.blocks import find_blocks
from ratel_cli.model.checkpoint import CheckpointSource, install_buffers, persistent_buffers
from ratel_cli.model.skeleton import DTYPES, build_skeleton, read_model_config
from ratel_cli.sizes import DtypeName
from tests.tiers import rotating

_DENSE: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "head_dim": 8, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, object] = _DENSE | {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT: dict[str, object] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, object]] = {
    "deepseek_v3": _EXPERTS | _LATENT,
    "glm4_moe": _EXPERTS,
    "llama": _DENSE,
    "gpt_oss": _EXPERTS | {"rope_parameters": None},
    "hunyuan_v1_moe": _EXPERTS | {"moe_topk": 2},
    "flint": _EXPERTS,
    "beam": _EXPERTS | {"num_hidden_layers": 4},
    "olmo_hybrid": _DENSE | {
        "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}  # fmt: skip
"""With lists for both 16-bit formats, for fp16 alone, for buffers alone; with fp32 in their own code; with nothing."""
REFUSED = {
    "bfloat16": {"hunyuan_v1_moe", "flint", "beam", "olmo_hybrid"},
    "float16": {"gpt_oss", "hunyuan_v1_moe", "flint", "beam", "olmo_hybrid"},
}


def save(family: str, directory: Path) -> None:
    """A tiny model whose values, those of its buffers too, cannot be held in 16 bit."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]), dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *persistent_buffers(model).values()):
            tensor.normal_(generator=generator)
    model.save_pretrained(directory)


def in_fp32(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}


@pytest.mark.parametrize(("family", "dtype"), rotating(list(FAMILIES), ["bfloat16", "float16", "float32"]))
def test_refused_or_loaded_as_transformers_does(tmp_path: Path, family: str, dtype: DtypeName) -> None:
    save(family, tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[dtype])
    kept = in_fp32(oracle)
    assert (dtype != "float32" and bool(kept)) == (family in REFUSED.get(dtype, ()))
    config = read_model_config(tmp_path)
    if family in REFUSED.get(dtype, ()):
        skeleton = build_skeleton(config, dtype=dtype, attn_implementation="eager")
        with pytest.raises(BadInput, match=r"transformers keeps .* in fp32") as raised:
            find_blocks(skeleton, name="tiny")
        listed = raised.value.message.partition("transformers keeps ")[2].partition(" in fp32")[0]
        names, _, more = listed.partition(" and ")
        assert set(names.split(", ")) <= kept
        assert len(names.split(", ")) + int(more.partition(" ")[0] or 0) == len(kept)
        assert (raised.value.hint, raised.value.key) == ("set dtype: float32", ("dtype",))
        return
    skeleton = build_skeleton(config, dtype=dtype, attn_implementation="eager")
    assert {each.dtype for each in skeleton.parameters()} == {DTYPES[dtype]}
    with CheckpointSource(tmp_path, skeleton, find_blocks(skeleton, name="tiny").spec) as source:
        install_buffers(skeleton, source.read_buffers())
    wanted = persistent_buffers(oracle)
    for name, buffer in persistent_buffers(skeleton).items():
        assert buffer.dtype == wanted[name].dtype, name
        assert torch.equal(buffer, wanted[name]), name
