"""LoRA beside a quantised model on the engine: the bits of PEFT beside the matrices that bitsandbytes makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ratel_cli.io.buffers import BufferPool, _Region
from ratel_cli.model.files.quantised_model import quantised_weights
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.adapter_settings import AdapterSettings
from ratel_cli.planning.profile.activations import offload
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.sizes import DtypeName, QuantisedForm
from tests.engine.architectures import tiny_config
from tests.engine.exactness import AHEAD, PLACEMENTS, OpenMachine
from tests.engine.machine import attention_of, initial_weights, machine, packs, random_steps
from tests.engine.swaps import EVERYTHING
from tests.engine.test_adapters import ADAPTERS, recipe_of
from tests.engine.test_step import PLACEMENTS as AHEAD_AND_RESIDENT
from tests.engine.test_step import moved_by_last_step
from tests.planning.steps import step_traffic
from tests.quantised import GPT2OfLinearLayers, dequantised_weights, quantised_bytes, quantised_names
from tests.reference import train_in_memory
from tests.tiers import rotating

LORA = [name for name, each in ADAPTERS.items() if not each.has_magnitudes]
"""DoRA is refused: PEFT reads the matrix as it is."""
ATTENTION = AdapterSettings(rank=4, alpha=8, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
FORMS: tuple[QuantisedForm, ...] = ("nf4 double", "nf4", "int8")


def check_quantised(
    open_machine: OpenMachine,
    directory: Path,
    architecture: str,
    form: QuantisedForm,
    adapter: AdapterSettings,
    *,
    dtype: DtypeName = "bfloat16",
    num_micro_batches: int = 2,
    max_grad_norm: float | None = 0.5,
    with_experts: bool = False,
    **options: object,
) -> None:
    config = tiny_config(architecture)
    recipe = replace(
        recipe_of(adapter, dtype, max_grad_norm=max_grad_norm),
        attn_implementation=attention_of(config),
        model_class=GPT2OfLinearLayers if architecture == "gpt2" else None,
    )
    weights = initial_weights(config)
    plain = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    steps = random_steps(2, num_micro_batches, packed=packs(config))
    options |= {"weights": weights, "adapter": adapter, "quantised": form, "quantises_experts": with_experts}
    with open_machine(directory, config, recipe, dtype=dtype, **options) as ratel:
        outcomes, found = ratel.train(steps, recipe), ratel.weights()
        recipe = replace(recipe, device=ratel.device)
    before = dequantised_weights(plain, weights, form, DTYPES[dtype], with_experts=with_experts)
    wanted = train_in_memory(config, before, steps, recipe)
    assert [outcome.loss for outcome in outcomes] == list(wanted.losses)
    assert [outcome.grad_norm for outcome in outcomes] == list(wanted.norms)
    quantised = quantised_names(plain, with_experts=with_experts)
    for name, values in found.items():
        own = name.replace(".base_layer", "")
        if own not in quantised:
            assert torch.equal(values, wanted.weights[name]), name
    assert found.keys() == wanted.weights.keys()


@pytest.mark.parametrize(
    ("architecture", "adapter", "form", "dtype", "num_micro_batches"),
    rotating(
        ["llama", "llama_tied", "gpt2", "mistral", "qwen3", "gemma2", "gpt_neox", "phi3"],
        LORA,
        FORMS,
        ["bfloat16", "float32", "float16"],
        [1, 3],
        every=3,
        full_rotation=True,
    ),
)
def test_equals_peft_beside_what_bitsandbytes_makes(
    tmp_path: Path, architecture: str, adapter: str, form: QuantisedForm, dtype: DtypeName, num_micro_batches: int
) -> None:
    check_quantised(
        machine, tmp_path, architecture, form, ADAPTERS[adapter], dtype=dtype, num_micro_batches=num_micro_batches
    )


@pytest.mark.parametrize("form", FORMS)
def test_quantised_layers_outside_the_stack(tmp_path: Path, form: QuantisedForm) -> None:
    """OPT projects what it looks up, and its last hidden states."""
    check_quantised(machine, tmp_path, "opt", form, ADAPTERS["rslora, drawn"])


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_stay_as_they_are(tmp_path: Path, architecture: str) -> None:
    """Stacks of experts are no linear layers, which transformers does not quantise with bitsandbytes either."""
    check_quantised(machine, tmp_path, architecture, "nf4 double", ATTENTION, dtype="float32")


@pytest.mark.parametrize(
    ("architecture", "form", "num_micro_batches", "placement"),
    rotating(
        ["mixtral", "qwen3_moe", "gpt_oss"],
        FORMS,
        [1, 3],
        [Placement(), replace(AHEAD, swapped=EVERYTHING)],
        full_rotation=True,
    ),
)
def test_quantised_experts(
    tmp_path: Path, architecture: str, form: QuantisedForm, num_micro_batches: int, placement: Placement
) -> None:
    check_quantised(
        machine,
        tmp_path,
        architecture,
        form,
        ATTENTION,
        dtype="float32",
        with_experts=True,
        num_micro_batches=num_micro_batches,
        placement=placement,
    )


@pytest.mark.parametrize(("placement", "form"), rotating(list(PLACEMENTS), FORMS, every=5))
def test_wherever_bytes_rest(tmp_path: Path, placement: str, form: QuantisedForm) -> None:
    options = dict(PLACEMENTS[placement])
    for key in ("group_elements", "chunk_elements"):  # a page of bytes has twice as many
        if isinstance(number := options.get(key), int):
            options[key] = 2 * number
    check_quantised(machine, tmp_path, "llama", form, ADAPTERS["all linear"], **options)


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_are_those_of_bitsandbytes(tmp_path: Path, form: QuantisedForm) -> None:
    config, recipe = tiny_config("llama"), recipe_of(ADAPTERS["all linear"], "bfloat16", max_grad_norm=None)
    weights = initial_weights(config)
    options = {"dtype": "bfloat16", "weights": weights, "adapter": ADAPTERS["all linear"], "quantised": form}
    with machine(tmp_path, config, recipe, **options) as ratel:
        layers, found = quantised_weights(ratel.model.skeleton), ratel.weights()
        assert len(layers) == 7 * config.num_hidden_layers
        for name, layer in layers.items():
            wanted = quantised_bytes(weights[name.replace(".base_layer", "")].bfloat16(), form)
            for part, bytes_of in zip(layer.layout.parts(found[name].to(torch.uint8)), wanted, strict=True):
                assert torch.equal(part, bytes_of), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", list(AHEAD_AND_RESIDENT))
def test_traffic_is_the_prediction_to_the_byte(tmp_path: Path, placement: str, form: QuantisedForm) -> None:
    config, chosen = tiny_config("llama"), AHEAD_AND_RESIDENT[placement]
    recipe = recipe_of(ADAPTERS["all linear"], "bfloat16", max_grad_norm=None)
    options = {"dtype": "bfloat16", "weights": initial_weights(config), "adapter": ADAPTERS["all linear"]}
    with machine(tmp_path, config, recipe, placement=chosen, quantised=form, **options) as ratel:
        spec = ratel.model.spec
        unswapped = offload([0], num_micro_batches=1, spilled_units=0)
        wanted = step_traffic(spec, chosen, unswapped, holds_gradients=False)
        moved = moved_by_last_step(ratel, recipe, random_steps(3, 2, packed=False))
        assert moved == (wanted.read_bytes, wanted.written_bytes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", [Placement(), replace(AHEAD, swapped=EVERYTHING)], ids=["recomputed", "swapped"])
def test_released_buffers_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: QuantisedForm, placement: Placement
) -> None:
    """Every buffer is filled with NaN when it is given back: ones in all bits, in 16 and 32 bit."""
    num_spoiled, give_back = 0, BufferPool._take_back

    def spoil(pool: BufferPool, region: _Region) -> None:
        nonlocal num_spoiled
        region.memory[:] = b"\xff" * len(region.memory)
        num_spoiled += 1
        give_back(pool, region)

    monkeypatch.setattr(BufferPool, "_take_back", spoil)
    check_quantised(machine, tmp_path, "llama", form, ADAPTERS["all linear"], placement=placement)
    assert num_spoiled > 20
