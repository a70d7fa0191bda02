"""LoRA on the engine: the bits of PEFT in plain PyTorch, for every architecture, and bytes as planned.

`tests/e2e/test_adapters_of_families.py` draws families of transformers, with settings of which each pair occurs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.adapters import inject, is_of_adapter
from ratel_cli.model.files.quantised_model import quantise_layers
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton
from ratel_cli.model.values.adapter_settings import AdapterSettings
from ratel_cli.planning.profile.activations import offload
from ratel_cli.sizes import DtypeName
from scripts.family_configs import tiny_config as any_config
from tests.engine.architectures import tiny_config
from tests.engine.exactness import DROPOUT, PLACEMENTS, check_training
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.mixed import CARRYING, mixed_config
from tests.engine.test_step import PLACEMENTS as AHEAD_AND_RESIDENT
from tests.engine.test_step import moved_by_last_step
from tests.planning.steps import step_traffic
from tests.reference import Recipe
from tests.tiers import rotating, thinned

ARCHITECTURES = (
    "llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "falcon", "gpt_neox",
    "olmo2", "starcoder2", "cohere", "stablelm", "granite", "glm4", "bloom", "gptj", "mpt",
)  # fmt: skip
ADAPTERS: dict[str, AdapterSettings] = {
    "all linear": AdapterSettings(rank=4, alpha=8),
    "dropout": AdapterSettings(rank=2, alpha=4, dropout=0.2),
    "rslora, drawn": AdapterSettings(rank=3, alpha=5, scales_by_root=True, initialisation=False),
    "dora": AdapterSettings(rank=3, alpha=5, has_magnitudes=True),
    "dora, drawn, dropout": AdapterSettings(rank=2, alpha=3, has_magnitudes=True, initialisation=False, dropout=0.2),
}
IN_LAYERS = AdapterSettings(
    rank=4, alpha=8, layers=(1,), initialisation="gaussian", target_modules=("q_proj", "up_proj")
)


def in_peft(settings: AdapterSettings) -> tuple[tuple[str, object], ...]:
    """The same in PEFT's words, written a second time."""
    targets = settings.target_modules
    values = {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "target_parameters": list(settings.target_parameters) or None,
        "layers_to_transform": list(settings.layers) or None,
        "use_rslora": settings.scales_by_root,
        "use_dora": settings.has_magnitudes,
        "modules_to_save": list(settings.saved_modules) or None,
        "init_lora_weights": settings.initialisation,
        "task_type": "CAUSAL_LM",
    }
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in values.items())


def recipe_of(settings: AdapterSettings, dtype: DtypeName, *, max_grad_norm: float | None) -> Recipe:
    scale = 1024.0 if dtype == "float16" else 1.0
    lora = in_peft(settings)
    return Recipe(dtype=DTYPES[dtype], lora=lora, max_grad_norm=max_grad_norm, loss_scale=scale)


@pytest.mark.parametrize(
    ("architecture", "adapter", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(
        ARCHITECTURES,
        list(ADAPTERS),
        ["bfloat16", "float32", "float16"],
        [1, 3],
        [None, 0.5],
        every=4,
        full_rotation=True,
    ),
)
def test_equals_peft(
    tmp_path: Path,
    architecture: str,
    adapter: str,
    dtype: DtypeName,
    num_micro_batches: int,
    max_grad_norm: float | None,
) -> None:
    settings = ADAPTERS[adapter]
    config = tiny_config(architecture, **DROPOUT.get(architecture, {}))
    recipe = recipe_of(settings, dtype, max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, adapter=settings)


@pytest.mark.parametrize("family", thinned(CARRYING[:3], every=3))
def test_layers_that_pass_more_on(tmp_path: Path, family: str) -> None:
    settings = ADAPTERS["all linear"]
    recipe = recipe_of(settings, "bfloat16", max_grad_norm=0.5)
    check_training(machine, tmp_path, mixed_config(family), recipe, adapter=settings)


@pytest.mark.parametrize(
    ("placement", "architecture"), rotating(list(PLACEMENTS), ["llama", "llama_tied", "gpt2"], every=3)
)
def test_wherever_bytes_rest(tmp_path: Path, placement: str, architecture: str) -> None:
    settings = ADAPTERS["dropout"]
    recipe = recipe_of(settings, "bfloat16", max_grad_norm=0.5)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, adapter=settings, **PLACEMENTS[placement])


@pytest.mark.parametrize(("architecture", "dropout"), rotating(["mixtral", "qwen3_moe", "gpt_oss"], [0.0, 0.2]))
def test_mixtures_of_experts(tmp_path: Path, architecture: str, dropout: float) -> None:
    """All modules but the experts may have adapters."""
    attention = AdapterSettings(
        rank=4, alpha=8, dropout=dropout, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")
    )
    recipe = recipe_of(attention, "float32", max_grad_norm=0.5)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, adapter=attention)


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches"),
    rotating(["mixtral", "qwen3_moe", "gpt_oss"], ["bfloat16", "float32"], [1, 3], every=3),
)
def test_experts(tmp_path: Path, architecture: str, dtype: DtypeName, num_micro_batches: int) -> None:
    """Of Mixtral and Qwen3, whose experts were modules once, PEFT takes all for linear layers."""
    parameters = EXPERTS if architecture == "gpt_oss" else ()
    settings = AdapterSettings(rank=2, alpha=6, initialisation=False, target_parameters=parameters)
    recipe = recipe_of(settings, dtype, max_grad_norm=0.5)
    config = tiny_config(architecture)
    check_training(machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, adapter=settings)


@pytest.mark.parametrize("adapter", ["dropout", "dora"])
def test_what_adapters_of_experts_cannot_have(adapter: str) -> None:
    skeleton = build_skeleton(tiny_config("mixtral"), dtype="bfloat16", attn_implementation="sdpa")
    with pytest.raises(
        BadInput, match=r"the experts of .* are stacked: their adapters allow neither dropout"
    ) as raised:
        inject(skeleton, ADAPTERS[adapter])
    assert raised.value.hint is not None and "lora_target_modules: [q_proj" in raised.value.hint


def test_a_head_of_several_layers(tmp_path: Path) -> None:
    """BERT's has a linear layer before the one that makes logits, which PEFT takes, too."""
    settings = ADAPTERS["all linear"]
    recipe = recipe_of(settings, "bfloat16", max_grad_norm=0.5)
    check_training(machine, tmp_path, tiny_config("bert"), recipe, num_micro_batches=3, adapter=settings)


@pytest.mark.parametrize(
    ("family", "module"),
    [("llama4_text", "feed_forward.router: Llama4Router"), ("deepseek_v4", "o_a_proj: DeepseekV4G")],
)
def test_what_is_no_linear_layer_can_have_no_adapter(family: str, module: str) -> None:
    """PEFT would fail in the first step: what such a layer returns is not what its adapter returns."""
    skeleton = build_skeleton(any_config(family), dtype="bfloat16", attn_implementation="eager")
    with pytest.raises(BadInput, match=rf"{module}\w* is no linear layer, though it is made as one") as raised:
        inject(skeleton, ADAPTERS["all linear"])
    end = module.partition(":")[0].rpartition(".")[2]
    assert raised.value.hint == f"name the other modules, and not {end}"


@pytest.mark.parametrize(("family", "part"), [("git", "git.image_encoder"), ("phi4_multimodal", "embed_tokens_extend")])
def test_parts_within_the_decoder_that_text_does_not_use_get_none(family: str, part: str) -> None:
    """They would be no part of the export, and PEFT would look for them."""
    skeleton = build_skeleton(any_config(family), dtype="float32", attn_implementation="eager")
    assert part in str(inject(skeleton, ADAPTERS["all linear"]).exclude_modules).replace("\\", "")
    adapters = {name for name, _ in skeleton.named_parameters() if is_of_adapter(name)}
    found = {each.name for block in find_blocks(skeleton, name="tiny").spec.blocks for each in block.parameters}
    assert adapters and adapters <= found


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_adapters_outside_the_layers(tmp_path: Path, num_micro_batches: int) -> None:
    """OPT projects what it looks up, and its last hidden states."""
    settings = ADAPTERS["rslora, drawn"]
    recipe = recipe_of(settings, "bfloat16", max_grad_norm=0.5)
    config = tiny_config("opt")
    check_training(machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, adapter=settings)


@pytest.mark.parametrize(
    ("architecture", "saved"),
    rotating(
        ["llama", "qwen3", "gpt_neox"],
        [("lm_head",), ("embed_tokens", "lm_head"), ("model.norm", "layers.1.mlp")],
        full_rotation=True,
    ),
)
def test_modules_that_are_trained_whole(tmp_path: Path, architecture: str, saved: tuple[str, ...]) -> None:
    if architecture == "gpt_neox":
        names = {"embed_tokens": "embed_in", "model.norm": "final_layer_norm"}
        saved = tuple(names.get(name, name) for name in saved)
    settings = AdapterSettings(rank=2, alpha=4, dropout=0.1, saved_modules=saved)
    recipe = recipe_of(settings, "bfloat16", max_grad_norm=0.5)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, adapter=settings)


@pytest.mark.parametrize(
    ("architecture", "saved", "message"),
    [
        ("llama", "head", "head: PEFT would take lm_head too"),
        ("llama", "score", "score: no module of the model with weights"),
        ("llama", "act_fn", "act_fn: no module of the model with weights"),
        ("llama_tied", "lm_head", "embedding and head of LlamaForCausalLM are one matrix"),
        ("llama_tied", "embed_tokens", "embedding and head of LlamaForCausalLM are one matrix"),
    ],
)
def test_modules_that_cannot_be_trained_whole(architecture: str, saved: str, message: str) -> None:
    skeleton = build_skeleton(tiny_config(architecture), dtype="bfloat16", attn_implementation="sdpa")
    with pytest.raises(BadInput, match=f"lora_modules_to_save: {message}"):
        inject(skeleton, AdapterSettings(rank=2, alpha=4, saved_modules=(saved,)))


@pytest.mark.parametrize("saved", ["q_proj", "mlp", "layers.1"])
def test_what_is_quantised_cannot_be_trained_whole(saved: str) -> None:
    """Nor can what has it inside."""
    skeleton = build_skeleton(tiny_config("llama"), dtype="bfloat16", attn_implementation="sdpa")
    quantise_layers(skeleton, "nf4")
    with pytest.raises(BadInput, match=f"lora_modules_to_save: {saved} is quantised, and cannot be trained"):
        inject(skeleton, AdapterSettings(rank=2, alpha=4, saved_modules=(saved,)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_layer(tmp_path: Path, dtype: DtypeName) -> None:
    recipe = recipe_of(IN_LAYERS, dtype, max_grad_norm=None)
    check_training(machine, tmp_path, tiny_config("llama"), recipe, adapter=IN_LAYERS)


@pytest.mark.parametrize(
    ("placement", "settings"), rotating(list(AHEAD_AND_RESIDENT), [ADAPTERS["all linear"], IN_LAYERS])
)
def test_traffic_is_the_prediction_to_the_byte(tmp_path: Path, placement: str, settings: AdapterSettings) -> None:
    """The base is read as often as the plan says, and nothing of it is written."""
    config, chosen = tiny_config("llama"), AHEAD_AND_RESIDENT[placement]
    recipe = replace(recipe_of(settings, "bfloat16", max_grad_norm=None), dtype=torch.bfloat16)
    with machine(
        tmp_path,
        config,
        recipe,
        dtype="bfloat16",
        weights=initial_weights(config),
        placement=chosen,
        adapter=settings,
    ) as ratel:
        spec = ratel.model.spec
        unswapped = offload([0], num_micro_batches=1, spilled_units=0)
        wanted = step_traffic(spec, chosen, unswapped, holds_gradients=False)
        moved = moved_by_last_step(ratel, recipe, random_steps(3, 2, packed=False))
        assert moved == (wanted.read_bytes, wanted.written_bytes)
        assert wanted.written_bytes < 12 * sum(each.num_elements for each in spec.blocks if each.is_trained) + 8192
