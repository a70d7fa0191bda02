"""What `from_pretrained(dtype=...)` keeps in fp32: parameters and buffers, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource, install_buffers, persistent_buffers
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton, read_model_config
from ratel_cli.model.values.kept_precision import keep_in_fp32
from ratel_cli.sizes import DtypeName
from scripts.family_configs import tiny_config
from tests.tiers import rotating

FAMILIES = ("deepseek_v3", "glm4_moe", "llama", "gpt_oss", "hunyuan_v1_moe", "flint", "beam", "olmo_hybrid")
"""With lists for both 16-bit formats, for fp16 alone, for buffers alone; with fp32 in their own code; with nothing."""
KEPT = {
    "bfloat16": {"hunyuan_v1_moe", "flint", "beam", "olmo_hybrid"},
    "float16": {"gpt_oss", "hunyuan_v1_moe", "flint", "beam", "olmo_hybrid"},
}
"""Families of which parameters are kept."""


def save(family: str, directory: Path) -> None:
    """A tiny model whose values, those of its buffers too, cannot be held in 16 bit."""
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *persistent_buffers(model).values()):
            tensor.normal_(generator=generator)
    model.save_pretrained(directory)


def in_fp32(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}


@pytest.mark.parametrize(("family", "dtype"), rotating(FAMILIES, ["bfloat16", "float16", "float32"]))
def test_everything_has_the_dtype_in_which_transformers_loads_it(tmp_path: Path, family: str, dtype: DtypeName) -> None:
    save(family, tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[dtype])
    assert (dtype != "float32" and bool(in_fp32(oracle))) == (family in KEPT.get(dtype, ()))
    skeleton = build_skeleton(read_model_config(tmp_path), dtype=dtype, attn_implementation="eager")
    wanted = {name: tensor.dtype for name, tensor in oracle.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in skeleton.state_dict().items()} == wanted
    spec = find_blocks(skeleton, name="tiny").spec
    blocks = {each.name: block for block in spec.blocks for each in block.parameters}
    assert blocks.keys() == dict(oracle.named_parameters()).keys()
    for name, parameter in oracle.named_parameters():
        assert DTYPES[blocks[name].dtype] == parameter.dtype, name
        assert blocks[name].is_trained == parameter.requires_grad, name
    with CheckpointSource(tmp_path, skeleton, spec) as source:
        install_buffers(skeleton, source.read_buffers())
        for name, parameter in oracle.named_parameters():
            values = torch.empty(parameter.numel(), dtype=parameter.dtype)
            source.read_whole_into(name, values)
            assert torch.equal(values, parameter.detach().flatten()), name
    for name, buffer in persistent_buffers(skeleton).items():
        assert torch.equal(buffer, persistent_buffers(oracle)[name]), name


def test_tied_parameters_stay_one() -> None:
    """Also if both of their names are on transformers' list."""
    config = tiny_config("llama", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model._keep_in_fp32_modules_strict = {"embed_tokens", "lm_head"}
    keep_in_fp32(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.float32
