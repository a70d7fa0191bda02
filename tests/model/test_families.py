"""Properties of every causal language model family of transformers, on tiny models, against transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Trainer

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton, read_model_config
from ratel_cli.sizes import DtypeName
from scripts.family_configs import FAMILIES, tiny_config
from tests.model.tiny import assert_same, read_all, reference
from tests.tiers import sample

NOT_BUILT = {
    "dots3_note",
    "emu3",
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "mllama",
    "musicgen",
    "musicgen_melody",
}
"""Families that transformers cannot build, or cannot load again, from these configurations."""
BUILT = [family for family in FAMILIES if family not in NOT_BUILT]


def skeleton_of(config: PretrainedConfig, dtype: DtypeName) -> PreTrainedModel:
    return build_skeleton(config, dtype=dtype, attn_implementation="eager")


@pytest.mark.parametrize("family", sample(BUILT, every=60))
def test_weight_decay_applies_where_trainer_applies_it(family: str) -> None:
    config = tiny_config(family)
    try:
        found = find_blocks(skeleton_of(config, "float32"), name="tiny")
    except BadInput:
        pytest.skip("the family is refused")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    names = {name for name, _ in model.named_parameters()}
    decayed = names & set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    parameters = [parameter for block in found.spec.blocks for parameter in block.parameters]
    of_blocks = {parameter.name for parameter in parameters}
    assert of_blocks <= names if found.has_other_parts else of_blocks == names
    assert {parameter.name for parameter in parameters if parameter.decay} == decayed & of_blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", sample(BUILT, every=60, offset=7))
def test_dtypes_are_those_of_from_pretrained(tmp_path: Path, family: str, dtype: DtypeName) -> None:
    AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[dtype])
    try:
        skeleton = skeleton_of(read_model_config(tmp_path), dtype)
        find_blocks(skeleton, name="tiny")
    except BadInput:
        pytest.skip("the family is refused")
    wanted = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in skeleton.state_dict().items()} == wanted


@pytest.mark.parametrize("family", sample(BUILT, every=60, offset=13))
def test_weights_are_those_of_from_pretrained(tmp_path: Path, family: str) -> None:
    save(tiny_config(family), tmp_path)
    try:
        read = read_back(tmp_path)
    except BadInput:
        pytest.skip("the family is refused")
    wanted = reference(tmp_path)
    assert_same(read, {name: wanted[name] for name in read})


def test_a_row_of_padding_is_that_of_the_file(tmp_path: Path) -> None:
    """The code of this family sets it to zero after it has read the file, so what `from_pretrained` gives is wrong."""
    config = tiny_config("youtu", pad_token_id=3)
    stored = save(config, tmp_path)
    assert_same(read_back(tmp_path), stored)
    name = "model.embed_tokens.weight"
    loaded = reference(tmp_path)
    assert [each for each in stored if not torch.equal(stored[each], loaded[each])] == [name]
    assert (stored[name] != loaded[name]).any(dim=1).nonzero().tolist() == [[3]]
    assert not loaded[name][3].any()


def read_back(directory: Path) -> dict[str, torch.Tensor]:
    skeleton = skeleton_of(read_model_config(directory), "float32")
    spec = find_blocks(skeleton, name="tiny").spec
    with CheckpointSource(directory, skeleton, spec) as source:
        return read_all(source, spec)


def save(config: PretrainedConfig, directory: Path) -> dict[str, torch.Tensor]:
    """Save a model with random weights, and return them."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    model.save_pretrained(directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
