"""Finding the blocks of any decoder, binding weights to them, and rejecting models that cannot be streamed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import memory_bytes, resident_bytes
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton, supported_attention
from ratel_cli.sizes import DtypeName
from scripts import family_configs
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.tiers import thinned

PACKS = {
    "gpt2", "llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox", "gptj",
    "mixtral", "qwen3_moe", "olmo", "olmo2", "starcoder2", "cohere", "stablelm", "granite", "glm4",
}  # fmt: skip
"""Architectures whose masks transformers builds from position ids. All others get one sequence per sample."""


def find(config: PretrainedConfig) -> DecoderModel:
    attention = supported_attention(config, "sdpa")
    return find_blocks(build_skeleton(config, dtype="float32", attn_implementation=attention), name="tiny")


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, every=4, offset=3, full_every=2))
def test_every_parameter_has_one_place(architecture: str) -> None:
    config = tiny_config(architecture)
    model = find(config)
    wanted = {
        name: tuple(parameter.shape) for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
    }
    blocks = model.spec.blocks
    assert {p.name: p.shape for block in blocks for p in block.parameters} == wanted
    assert list(wanted) == list(model.parameter_names)
    assert model.spec.segment_names == ("embedding", "layer 0", "layer 1", "layer 2", "head")
    assert [block.index for block in blocks] == list(range(len(blocks)))
    with_parameters = {block.segment for block in blocks}
    assert with_parameters == set(range(5)) - ({4} if architecture == "olmo" else set()), "its norms have none"
    assert model.spec.num_layers == 3
    assert blocks[0].parameters[0].shape[0] == model.spec.vocab_size
    for block in blocks:
        end = 0
        for parameter in block.parameters:
            assert parameter.start >= end and parameter.start % 32 == 0
            end = parameter.stop
        assert block.num_elements >= end and block.num_elements % 2048 == 0


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, every=2, full_every=2))
def test_packing_is_offered_where_samples_stay_apart(architecture: str) -> None:
    assert find(tiny_config(architecture)).packs == (architecture in PACKS)


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2"])
def test_bound_weights_are_views_and_leave_no_trace(architecture: str) -> None:
    model = find(tiny_config(architecture))
    for block in model.spec.blocks:
        weights = torch.arange(block.num_elements, dtype=torch.float32)
        parameters = model.bind(block, weights)
        for spec, parameter in zip(block.parameters, parameters, strict=True):
            assert model.skeleton.get_parameter(spec.name) is parameter
            assert parameter.data_ptr() == weights[spec.start :].data_ptr()
            assert tuple(parameter.shape) == spec.shape and parameter.requires_grad
        if block.is_looked_up and model.spec.tied:
            assert model.skeleton.get_output_embeddings().weight is parameters[0]
        model.release(model.spec.segments[block.segment])
        for spec in block.parameters:
            resting = model.skeleton.get_parameter(spec.name)
            assert (
                resting.device.type == "meta"
                if block.segment in range(1, 4)
                else resting.untyped_storage().nbytes() <= 4
            )
    if model.spec.tied:
        assert model.skeleton.get_output_embeddings().weight is model.skeleton.get_input_embeddings().weight


@pytest.mark.parametrize("num_ahead", [0, 1, 4, 9])
def test_weights_in_parts_are_bound_as_one(num_ahead: int) -> None:
    model = find(tiny_config("llama"))
    block = model.spec.blocks[1]
    weights = torch.arange(block.num_elements, dtype=torch.float32)
    end = ([each.start for each in block.parameters] + [block.num_elements])[num_ahead]
    first, others = weights[:end].clone(), weights[end:].clone()
    parameters = model.bind(block, first, others)
    for number, (spec, parameter) in enumerate(zip(block.parameters, parameters, strict=True)):
        assert torch.equal(parameter.reshape(-1), weights[spec.start : spec.stop])
        part = first if number < num_ahead else others
        assert parameter.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    model.release(model.spec.segments[block.segment])
    with pytest.raises(AssertionError):
        model.bind(block, first, others, torch.zeros(1))


def test_a_large_skeleton_costs_no_memory() -> None:
    before = resident_bytes()
    model = find(
        tiny_config(
            "llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=128256,
        )
    )  # fmt: skip
    assert model.spec.num_parameters == 70_553_706_496
    assert resident_bytes() - before < 100 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_parameter_may_be_larger_than_main_memory(dtype: DtypeName) -> None:
    """As all experts of a layer are; the system refuses memory for it, even if nobody writes to it."""
    expert_bytes = 32 * (2 << 16) * 2
    num_experts = 2 * memory_bytes() // expert_bytes
    config = tiny_config("qwen3_moe", num_experts=num_experts, moe_intermediate_size=1 << 16, num_hidden_layers=1)
    skeleton = build_skeleton(config, dtype=dtype, attn_implementation="sdpa")
    assert max(parameter.nbytes for parameter in skeleton.parameters()) >= 2 * memory_bytes() - expert_bytes
    assert not any(buffer.is_meta for buffer in skeleton.buffers())


def test_options_that_would_be_dropped_silently_are_rejected() -> None:
    for option in ("output_router_logits", "output_hidden_states"):
        config = tiny_config("mixtral")
        setattr(config, option, True)
        with pytest.raises(BadInput, match=option):
            build_skeleton(config, dtype="float32", attn_implementation="eager")
    with pytest.raises(BadInput, match="layerdrop"):
        build_skeleton(tiny_config("opt", layerdrop=0.1), dtype="float32", attn_implementation="eager")


def test_the_config_is_not_changed() -> None:
    config = tiny_config("llama")
    before = copy.deepcopy(config.to_dict())
    build_skeleton(config, dtype="bfloat16", attn_implementation="eager")
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("num_called", "shared", "message"),
    [(2, {}, "only 2 of its 3 layers|its code does something"), (3, {"cache": set()}, "its layers share a set")],
)
def test_models_that_do_more_than_call_their_layers_are_rejected(
    num_called: int, shared: dict[str, object], message: str
) -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="sdpa")
    owner = skeleton.get_submodule("model")
    plain_forward = owner.forward

    def forward(input_ids: torch.Tensor, use_cache: bool, position_ids: torch.Tensor) -> object:
        hidden = owner.embed_tokens(input_ids)
        for layer in owner.layers[:num_called]:
            hidden = layer(hidden, **shared)
        return plain_forward(inputs_embeds=hidden, position_ids=position_ids, use_cache=use_cache)

    owner.forward = forward  # type: ignore[method-assign]
    with pytest.raises(BadInput, match=message):
        find_blocks(skeleton, name="odd")


VISION = {"num_attention_heads": 4, "image_size": 28, "patch_size": 14, "intermediate_size": 512}
LARGE_TOWERS = {
    "gemma3": {"vision_config": {"hidden_size": 256, "num_hidden_layers": 3, **VISION}},
    "got_ocr2": {"vision_config": {"hidden_size": 256, "num_hidden_layers": 3, **VISION, "output_channels": 32}},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 256, "num_hidden_layers": 3, **VISION, "image_size": 448, "crop_size": 448,
            "nemo_final_size": 256,
        },
        "audio_config": {"hidden_size": 256, "num_blocks": 2, "num_attention_heads": 4, "intermediate_size": 512},
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", LARGE_TOWERS)
def test_the_layers_are_those_of_the_language_model(model_type: str) -> None:
    """Although a tower for images has more parameters, next to the language model or within it."""
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "original_max_position_embeddings": 64, "head_dim": 8,
    }  # fmt: skip
    nested = {} if model_type == "phi4_multimodal" else {"text_config": text}
    config = AutoConfig.for_model(model_type, **({} if nested else text), **nested, **LARGE_TOWERS[model_type])
    skeleton = build_skeleton(config, dtype="float32", attn_implementation="eager")
    model = find_blocks(skeleton, name="m")
    decoder = skeleton.get_decoder()
    assert model.layer_runner.layers == tuple(decoder.layers)
    lists = [module for module in skeleton.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))
    assert largest is not decoder.layers


def test_code_around_the_language_model_may_embed_the_tokens_for_nothing() -> None:
    """After the layers too, where the language model ignores what it is given. The head is a matrix of its own."""
    text = {
        "model_type": "persimmon", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 96, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model("fuyu", text_config=text, vocab_size=96, tie_word_embeddings=False)
    spec = find(config).spec
    assert not spec.tied
    assert "lm_head.weight" in [parameter.name for parameter in spec.blocks[-1].parameters]


def test_an_embedding_that_the_logits_depend_on_is_rejected() -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="sdpa")
    plain_forward = skeleton.forward

    def forward(*, input_ids: torch.Tensor, use_cache: bool) -> object:
        output = plain_forward(input_ids=input_ids, use_cache=use_cache)
        output.logits = output.logits + skeleton.get_input_embeddings()(input_ids).sum(-1, keepdim=True)
        return output

    skeleton.forward = forward
    with pytest.raises(BadInput, match=r"embed_tokens.weight is used both before and after the layers"):
        find_blocks(skeleton, name="odd")


def test_models_without_a_head_are_rejected() -> None:
    class Bare(nn.Module):
        def get_input_embeddings(self) -> nn.Module:
            return nn.Embedding(4, 4)

        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(BadInput, match="has no output head"):
        find_blocks(Bare(), name="odd")  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "olmo"])
def test_buffers_and_placeholders_move_to_the_device(architecture: str) -> None:
    """Bound weights stay where their caller has them."""
    model = find_blocks(
        build_skeleton(tiny_config(architecture), dtype="bfloat16", attn_implementation="sdpa"), name="m"
    )
    shapes = {name: parameter.shape for name, parameter in model.skeleton.named_parameters()}
    buffers = dict(model.skeleton.named_buffers())
    assert not any(buffer.is_meta for buffer in buffers.values())
    model.move_to(torch.device("cpu"))
    assert all(buffer is buffers[name] for name, buffer in model.skeleton.named_buffers())
    model.move_to(torch.device("meta"))
    assert all(buffer.is_meta for buffer in model.skeleton.buffers())
    assert all(parameter.is_meta for parameter in model.skeleton.parameters())
    assert {name: parameter.shape for name, parameter in model.skeleton.named_parameters()} == shapes
    embedding = model.spec.blocks[0]
    bound = model.bind(embedding, torch.zeros(embedding.num_elements, dtype=torch.bfloat16))
    assert model.skeleton.get_input_embeddings().weight is bound[0]
    model.release(model.spec.embedding)
    assert model.skeleton.get_input_embeddings().weight.is_meta


def test_a_head_that_the_model_calls_its_decoder() -> None:
    skeleton = build_skeleton(
        family_configs.tiny_config("modernbert-decoder"), dtype="float32", attn_implementation="sdpa"
    )
    assert isinstance(skeleton.get_decoder(), nn.Linear)
    assert find_blocks(skeleton, name="m").spec.num_layers == family_configs.NUM_LAYERS


def test_layers_within_nothing_that_takes_tokens_are_refused() -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="sdpa")

    def forward(inputs_embeds: torch.Tensor) -> torch.Tensor:
        return inputs_embeds

    skeleton.model.forward = forward
    with pytest.raises(BadInput, match=r"has no list of layers; .* within a module that takes"):
        find_blocks(skeleton, name="tiny")
