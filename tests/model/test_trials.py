"""Samples are packed where plain transformers gives each the logits that it has alone, and nowhere else."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig

from ratel_cli.hardware.host import resident_bytes
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton, supported_attention
from ratel_cli.model.values.carried import LayerCall, LayerOutput
from ratel_cli.run.inputs.text_data import num_positions, position_table
from scripts import family_configs
from tests.engine.architectures import tiny_config
from tests.tiers import sample

LEAK = (
    "falcon_h1", "recurrent_gemma", "mamba", "inkling_text", "bamba", "jamba", "qwen4_exp_text", "qwen3_next",
    "lfm2_moe", "granitemoehybrid", "kimi_linear",
)  # fmt: skip
SEPARATE = (
    "deepseek_v3", "gemma2", "axk2", "glm_moe_dsa", "qwen3_moe", "gpt2", "deepseek_v32", "llama", "mixtral",
    "minimax_m3_vl_text", "longcat_flash", "dbrx", "gpt_neo", "whisper", "dots3_note_text", "cohere_compass_text",
)  # fmt: skip
SAMPLES = (70, 11, 30)


def decoder(config: PretrainedConfig) -> DecoderModel:
    attention = supported_attention(config, "sdpa")
    return find_blocks(build_skeleton(config, dtype="float32", attn_implementation=attention), name="tiny")


def plain(config: PretrainedConfig) -> nn.Module:
    """Plain transformers in fp64, with all parameters random."""
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=supported_attention(config, "sdpa"), experts_implementation="eager"
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            scale = 0.3 if parameter.dim() < 2 else (parameter.shape[-1] * parameter.shape[-2]) ** -0.25
            parameter.copy_(torch.randn_like(parameter) * scale)
    return model.eval()


def difference_when_packed(config: PretrainedConfig) -> float:
    """How far packed logits are from those of each row alone, relative to the largest logit."""
    model = plain(config)
    rows = [torch.randint(3, 90, (1, size)) for size in SAMPLES]
    positions = torch.cat([torch.arange(size) for size in SAMPLES]).unsqueeze(0)
    with torch.no_grad():
        packed = model(input_ids=torch.cat(rows, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], 1)
    return float((packed - alone).abs().max() / alone.abs().max())


@pytest.mark.parametrize("family", sample(LEAK, every=3))
def test_families_whose_samples_leak_are_not_packed(family: str) -> None:
    config = family_configs.tiny_config(family)
    assert not decoder(config).packs
    if family == "mamba":  # takes no positions, so that nothing could tell it where a sample begins
        return
    assert difference_when_packed(config) > 1e-6


@pytest.mark.parametrize("family", sample(SEPARATE, every=4))
def test_families_whose_samples_stay_apart_are_packed(family: str) -> None:
    config = family_configs.tiny_config(family)
    assert difference_when_packed(config) < 1e-6
    assert decoder(config).packs


def reaching_back(tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of `[1, tokens, ..]` that adds a little of what is so many tokens before."""
    return lambda hidden: hidden + 1e-6 * functional.pad(hidden, (0, 0, tokens, 0))[:, : hidden.shape[1]]


def totals(hidden: torch.Tensor) -> torch.Tensor:
    """A state that goes from each chunk of 64 tokens to the next, and is not seen inside one."""
    chunks = [torch.zeros_like(hidden[:, :1]), *(chunk.mean(1, keepdim=True) for chunk in hidden.split(64, 1))]
    return hidden + torch.cat([chunks[number // 64] for number in range(hidden.shape[1])], 1)


def reading_ahead(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + functional.pad(hidden, (0, 0, 0, 1))[:, 1:]


@pytest.mark.parametrize("where", ["embed_tokens", "layers.1", "layers.2.mlp.down_proj", "norm"])
@pytest.mark.parametrize("leak", [reaching_back(1), reaching_back(9), totals, reading_ahead])
def test_a_leak_is_found_wherever_it_is(where: str, leak: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Layers 1 and 2 have kinds of their own only through what leaks."""
    skeleton = build_skeleton(tiny_config("llama"), dtype="bfloat16", attn_implementation="sdpa")
    module = skeleton.get_submodule(f"model.{where}")
    changed = type(
        "Leaking", (type(module),), {"forward": lambda self, *a, **k: leak(super(changed, self).forward(*a, **k))}
    )
    module.__class__ = changed
    assert not find_blocks(skeleton, name="leaks").packs


def test_the_probe_leaves_no_trace() -> None:
    model = decoder(tiny_config("llama_tied"))
    before = {name: id(parameter) for name, parameter in model.skeleton.named_parameters()}
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    assert model.packs
    assert {name: id(parameter) for name, parameter in model.skeleton.named_parameters()} == before
    assert model.skeleton.training and torch.equal(torch.random.get_rng_state(), state)


def test_a_model_that_cannot_run_on_stand_ins_is_not_packed() -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="sdpa")

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("this many tokens")

    skeleton.get_submodule("model.layers.0.mlp").forward = fails
    assert not find_blocks(skeleton, name="fails").packs


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["dense", "experts"])
def test_a_large_model_takes_little_memory(which: str) -> None:
    changes: dict[str, object] = (
        {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
        if which == "dense"
        else {"hidden_size": 4096, "num_attention_heads": 64, "head_dim": 128, "num_experts": 128,
              "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    )  # fmt: skip
    model = decoder(
        tiny_config("llama" if which == "dense" else "qwen3_moe", vocab_size=128256, num_hidden_layers=80, **changes)
    )
    assert model.spec.num_parameters > 70e9
    before = resident_bytes()
    assert model.packs
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 1 << 30


@pytest.mark.parametrize(("is_decoder", "looks_ahead"), [(True, False), (False, True)])
def test_a_model_whose_tokens_see_those_behind_them(is_decoder: bool, looks_ahead: bool) -> None:
    assert decoder(tiny_config("bert", is_decoder=is_decoder)).looks_ahead is looks_ahead


@pytest.mark.parametrize("architecture", ["llama", "mistral", "mpt", "mixtral", "gpt2"])
def test_decoders_do_not_look_ahead(architecture: str) -> None:
    assert not decoder(tiny_config(architecture)).looks_ahead


def test_what_cannot_be_tried_does_not_count_as_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> object:
        raise RuntimeError("no kernel")

    model = decoder(tiny_config("bert", is_decoder=False))
    monkeypatch.setattr(model.layer_runner, "run_layer", fail)
    assert not model.looks_ahead


@pytest.mark.parametrize(("family", "takes_positions"), [("roberta", False), ("bert", True), ("gpt2", True)])
def test_positions_that_do_not_count_from_zero_are_left_to_the_model(family: str, takes_positions: bool) -> None:
    """RoBERTa's begin behind the id of the token that fills up rows."""
    config = family_configs.tiny_config(family)
    assert decoder(config).layer_runner.takes_positions is takes_positions
    whole, tokens = plain(config).eval(), torch.arange(5, 12).unsqueeze(0)
    with torch.no_grad():
        default, given = whole(tokens), whole(tokens, position_ids=torch.arange(7).unsqueeze(0))
    assert torch.equal(default.logits, given.logits) is takes_positions


@pytest.mark.parametrize(("family", "num_fewer"), [("roberta", 2), ("bert", 0), ("gpt2", 0)])
def test_rows_end_where_the_table_of_positions_does(family: str, num_fewer: int) -> None:
    """RoBERTa's positions begin at 2, with 1 as the id of the token that fills up rows."""
    config = family_configs.tiny_config(family, **({"pad_token_id": 1} if family == "roberta" else {}))
    model = decoder(config)
    table = position_table(model, config)
    assert table is not None
    assert table[1] == num_positions(config) - num_fewer
    whole = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        whole(torch.full((1, table[1]), 7))
        with pytest.raises((IndexError, RuntimeError)):
            whole(torch.full((1, table[1] + 1), 7))


def test_numbers_that_are_not_finite_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(tiny_config("llama"))
    run_layer = model.layer_runner.run_layer

    def overflow(index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        output, extra = run_layer(index, hidden, call)
        return output * float("inf"), extra

    monkeypatch.setattr(model.layer_runner, "run_layer", overflow)
    assert not model.looks_ahead
    assert not model.packs
