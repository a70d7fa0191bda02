"""A model as a value: its layout, its way through JSON, and which of its parameters decay."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.spec import (
    LayerActivations,
    LayerTraits,
    ModelSpec,
    NormActivations,
    RestOfBackward,
    decays,
    is_matrix,
    name_in_layer,
)
from ratel_cli.schedule.blocks import lay_out_block
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.json_values import json_values
from tests.tiers import examples, thinned

SPEC = ModelSpec(
    name="tiny",
    architecture="TinyForCausalLM",
    blocks=(
        lay_out_block(
            dtype="bfloat16",
            index=0,
            name="embedding",
            parameters=[("wte.weight", (7, 3), True)],
            borrowers=(2,),
            is_looked_up=True,
        ),
        lay_out_block(
            dtype="bfloat16",
            index=1,
            name="layer 0",
            parameters=[("h.0.w", (3, 3), True), ("h.0.b", (), False)],
        ),
        lay_out_block(dtype="bfloat16", index=2, name="head", parameters=[]),
    ),
    segment_names=("embedding", "layer 0", "head"),
    dtype="bfloat16",
    hidden_size=3,
    vocab_size=7,
)
TRAITS = LayerTraits(num_heads=4, head_dim=8, active_experts=2, inputs_first=("attn.c_attn.weight",))
NORM = NormActivations(held_per_token=17, most_per_token=18)
REST = RestOfBackward(
    after="mlp.up_proj.weight", per_token=15, per_pair=16, products=("qkv.weight",), has_attention=True
)
NUMBERS = {each.name: at for at, each in enumerate(fields(LayerActivations)) if "_per_" in each.name}
ACTIVATIONS = LayerActivations(**NUMBERS, rests=(REST,), saved_products=("mlp.up_proj.weight",))
VALUES = json_values()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("lm_head.weight", True),
        ("model.layers.0.self_attn.sinks", True),
        ("backbone.norm_f.weight", True),
        ("model.layers.0.dt_bias", False),
        ("model.layers.0.bias.weight", False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", False),
        ("transformer.h.0.attn.c_attn.bias", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", False),
        ("model.layers.0.LayerNorm.weight", False),
        ("model.layers.0.NORM.scale", False),
        ("norm.weight", False),
    ],
)
def test_which_names_decay(name: str, expected: bool) -> None:
    assert decays(name) is expected
    assert not decays(name, is_in_layer_norm=True)


@pytest.mark.parametrize(
    ("name", "num_dimensions", "expected"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", 3, True),
        ("transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", 2, True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", 2, False),
        ("model.layers.0.self_attn.q_norm.weight", 2, False),
        ("model.layers.0.self_attn.sinks", 1, False),
    ],
)
def test_what_is_taken_for_a_matrix(name: str, num_dimensions: int, expected: bool) -> None:
    assert is_matrix(name, num_dimensions) is expected


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, every=4, offset=1, full_every=2))
def test_a_spec_and_its_traits_survive_json(architecture: str) -> None:
    skeleton = build_skeleton(tiny_config(architecture), dtype="float32", attn_implementation="eager")
    model = find_blocks(skeleton, name="tiny")
    assert ModelSpec.from_json(through_json(model.spec.to_json())) == model.spec
    assert LayerTraits.from_json(through_json(model.traits.to_json())) == model.traits


def test_measured_activations_survive_json() -> None:
    traits = replace(TRAITS, activations=ACTIVATIONS, norm=NORM)
    assert LayerTraits.from_json(through_json(traits.to_json())) == traits


def through_json(content: object) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(content, allow_nan=False))
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 1}, "another version"),
        ({"name": None}, "name is not text"),
        ({"blocks": {}}, "blocks is not a list"),
        ({"blocks": [3]}, "expected an object"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"looks_up_rows": 1}, "looks_up_rows is neither true nor false"),
        ({"hidden_size": "3"}, "hidden_size is not a whole number"),
    ],
)
def test_content_that_is_no_spec_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_json(through_json(SPEC.to_json()) | changes)


PARAMETER: dict[str, object] = {
    "name": "w", "shape": [3], "start": 0, "decay": True, "first": 0, "quantised_shape": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": 2}, "block 1 has another layout"),
        ({"rule": "middle"}, "block 1 is not described"),
        ({"num_elements": 2048 * 3}, "block 1 has another layout"),
        ({"parameters": [{**PARAMETER, "start": 128}]}, "block 1 has another layout"),
        ({"parameters": [{**PARAMETER, "shape": [-3]}]}, "shape is negative"),
        ({"parameters": [{"name": "w", "shape": [3], "start": 0}]}, "decay is missing"),
    ],
)
def test_a_block_that_is_none_is_rejected(changes: dict[str, object], message: str) -> None:
    content = json.loads(json.dumps(SPEC.to_json()))
    content["blocks"][1] |= changes
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_json(content)


@examples(100)
@given(data=st.data(), value=VALUES)
def test_any_value_gives_a_spec_or_a_value_error(data: st.DataObject, value: object) -> None:
    content = json.loads(json.dumps(SPEC.to_json()))
    fields = data.draw(st.sampled_from([content, content["blocks"][1], content["blocks"][1]["parameters"][0]]))
    fields[data.draw(st.sampled_from(sorted(fields)))] = value
    try:
        found = ModelSpec.from_json(content)
    except ValueError as error:
        assert str(error)
    else:
        assert ModelSpec.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": None},
        {"inputs_first": "w"},
        {"inputs_first": [1]},
        {"activations": 1},
        {"activations": {"saved_per_token": 1}},
    ],
)
def test_content_that_is_no_traits_is_rejected(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"num_heads|inputs_first|expected an object|saved_per_pair"):
        LayerTraits.from_json(TRAITS.to_json() | changes)


def test_a_parameters_name_within_its_layer() -> None:
    assert name_in_layer("model.layers.3.self_attn.q_proj.weight") == "self_attn.q_proj.weight"
    assert name_in_layer("h.12.mlp.experts.0.w") == "mlp.experts.0.w"
    assert name_in_layer("3.qkv") == "qkv"
    assert name_in_layer("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize(
    ("architecture", "active_experts", "inputs_first"),
    [
        ("llama", 1, ()),
        ("gpt2", 1, ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")),
        ("mpt", 1, ()),
        ("mixtral", 2, ()),
        ("qwen3_moe", 2, ()),
        ("gpt_oss", 4, ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")),
    ],
)
def test_traits_are_those_of_the_model(architecture: str, active_experts: int, inputs_first: tuple[str, ...]) -> None:
    skeleton = build_skeleton(tiny_config(architecture), dtype="float32", attn_implementation="eager")
    found = find_blocks(skeleton, name="tiny").traits
    assert (found.num_heads, found.head_dim, found.active_experts) == (4, 8, active_experts)
    assert found.inputs_first == inputs_first
