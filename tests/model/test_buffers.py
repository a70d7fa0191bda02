"""Buffers that a model's class computes, tables of positions above all, against `from_pretrained` for every class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from ratel_cli.errors import BadInput
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton, read_model_config
from ratel_cli.sizes import DtypeName, Task
from scripts.family_configs import tiny_config
from tests.tiers import rotating, thinned

_AUTO_CLASSES: dict[str, type[Any]] = {
    "causal_lm": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "masked_lm": AutoModelForMaskedLM,
    "classification": AutoModelForSequenceClassification,
    "image": AutoModelForImageTextToText,
}
_OF_TEXT = list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_OF_IMAGES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
_CLASSES: list[tuple[str, str]] = [
    *(("causal_lm", family) for family in _OF_TEXT),
    *(
        ("image", family)
        for family in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if family not in _OF_TEXT
    ),
    *(("seq2seq", family) for family in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    *(("masked_lm", family) for family in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    *(("classification", family) for family in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
]
"""Every class of transformers that is trained here: its table, and its type of model."""
_MOST_PARAMETERS = 30_000_000
"""Some families have shapes that the rules for tiny ones do not shrink, of tens of GB."""
_SKIPPED_AT_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_ROPES: dict[str, dict[str, object]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@pytest.fixture
def unwritten_memory_is_seen() -> Iterator[None]:
    """What no code has written is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_memory_is_seen")
# One takes a second, and there are 490 classes: the full tier has one in 32, the nightly tier all in each dtype.
@pytest.mark.parametrize(("which", "dtype"), thinned(rotating(_CLASSES, list(DTYPES), every=32, offset=1), every=4))
def test_buffers_are_those_of_from_pretrained(tmp_path: Path, which: tuple[str, str], dtype: DtypeName) -> None:
    check_buffers(tmp_path, saved(tmp_path, *which), dtype, "causal_lm" if which[0] == "image" else which[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gptj", "codegen"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_table_of_positions_is_computed_in_fp32(tmp_path: Path, family: str, dtype: DtypeName) -> None:
    """In bf16 its frequencies would be rounded: sines of far positions, in fp32 themselves, would be others."""
    skeleton = check_buffers(tmp_path, saved(tmp_path, "causal_lm", family), dtype, "causal_lm")
    table = skeleton.get_buffer("transformer.h.0.attn.embed_positions")
    angles = torch.arange(256.0)[:, None] / 10_000 ** torch.tensor([0.0, 0.5])
    assert table.dtype == torch.float32
    assert torch.allclose(table, torch.cat([angles.sin(), angles.cos()], dim=1), atol=1e-5)


@pytest.mark.parametrize(("rope_type", "dtype"), rotating(list(_ROPES), ["bfloat16", "float16"], full_pairs=True))
def test_every_kind_of_rotary_frequencies(tmp_path: Path, rope_type: str, dtype: DtypeName) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10_000.0, **_ROPES[rope_type]},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    check_buffers(tmp_path, AutoModelForCausalLM, dtype, "causal_lm")


def saved(directory: Path, table: str, family: str) -> type[Any]:
    """Save a tiny model of the family, in fp32; the class that loads it."""
    auto_class = _AUTO_CLASSES[table]
    try:
        config = tiny_config(family)
        for key in _SKIPPED_AT_RANDOM:
            if hasattr(config, key):
                setattr(config, key, 0.0)
        with torch.device("meta"):
            size = auto_class.from_config(config).num_parameters()
        if size <= _MOST_PARAMETERS:
            auto_class.from_config(config, dtype=torch.float32).save_pretrained(directory)
            auto_class.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001  whatever it is, there is nothing to compare with
        pytest.skip(f"transformers cannot build it so: {type(error).__name__}")
    if size > _MOST_PARAMETERS:
        pytest.skip(f"it would have {size:.1e} parameters")
    return auto_class


def check_buffers(directory: Path, auto_class: type[Any], dtype: DtypeName, task: Task) -> PreTrainedModel:
    """Compare buffers, and tensors that are mere attributes of a module, by name, dtype and bits; the skeleton."""
    loaded = auto_class.from_pretrained(directory, dtype=DTYPES[dtype], attn_implementation="eager")
    try:
        config = read_model_config(directory, task)
        skeleton = build_skeleton(config, dtype=dtype, attn_implementation="eager", task=task)
    except BadInput:
        pytest.skip("the family is refused")
    found, wanted = tensors_of(skeleton), tensors_of(loaded)
    assert found.keys() == wanted.keys()
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in wanted.items()}
    # I-BERT has buffers in the likeness of parameters, which are on meta here until they are read from the files.
    made = {name: each for name, each in found.items() if not each.is_meta}
    assert [name for name, each in made.items() if not torch.equal(each, wanted[name])] == []
    assert len(made) == len(found) or skeleton.config.model_type == "ibert"
    return skeleton


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    attributes = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return {**dict(model.named_buffers(remove_duplicate=False)), **attributes}
