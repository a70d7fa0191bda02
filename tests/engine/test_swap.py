"""From a recorded step the plan knows what swapping moves: planned bytes are moved bytes, for any swap set."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.measure.telemetry import Span
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.activations import offload
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Placement, Workload
from ratel_cli.planning.profile.recorded import BlockSeconds, recorded_profile
from ratel_cli.planning.search.swap import SwapOrder
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.exactness import assert_same_training, reference
from tests.engine.machine import Machine, attention_of, initial_weights, machine, random_steps
from tests.engine.test_step import moved_by_last_step
from tests.planning.steps import step_traffic
from tests.reference import Recipe
from tests.tiers import sample

NUM_MICRO_BATCHES = 2
AHEAD = Placement(prefetch_blocks=2, pending_updates=2)


def recorded(ratel: Machine, recipe: Recipe, batches: list[MicroBatch]) -> ModelProfile:
    """Run and record the first step."""
    recording = StepRecording()
    outcome = ratel.engine.run(
        batches, step=0, update=1, learning_rate=recipe.learning_rate, loss_scale=1.0, recording=recording
    )
    assert outcome.applied
    ratel.decided = 1
    ratel.settle()
    spec, seconds = ratel.model.spec, seconds_of(ratel.model.spec, ratel.timeline.take().spans)
    estimate = estimate_of(ratel.model, batches)
    return recorded_profile(
        recording.units(),
        seconds,
        spec,
        workload_of(batches),
        num_micro_batches=recording.num_micro_batches,
        estimate=estimate,
    )


def estimate_of(model: DecoderModel, batches: list[MicroBatch]) -> ModelProfile:
    """The profile before the first step."""
    return analytic_profile(model.spec, workload_of(batches), traits=model.traits)


def workload_of(batches: list[MicroBatch]) -> Workload:
    """With all tokens of a micro-batch in one row."""
    return Workload(micro_batch_size=1, num_micro_batches=len(batches), sequence_len=batches[0].input_ids.numel())


def seconds_of(spec: ModelSpec, spans: tuple[Span, ...]) -> dict[int, BlockSeconds]:
    def total(block: int, stage: str) -> float:
        return sum(
            span.end - span.start
            for span in spans
            if (span.resource, span.label.block, span.label.stage) == ("compute", block, stage)
        )

    return {
        block: BlockSeconds(forward=total(block, "forward"), backward=total(block, "backward"))
        for block in range(len(spec.segments))
    }


@pytest.mark.full
@pytest.mark.parametrize("architecture", sample(ARCHITECTURES, every=9))
def test_planned_bytes_are_moved_bytes(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, attn_implementation=attention_of(config))
    weights, choice = initial_weights(config), random.Random(architecture)
    with machine(tmp_path / "first", config, recipe, dtype="bfloat16", weights=weights) as ratel:
        steps = random_steps(3, NUM_MICRO_BATCHES, packed=ratel.model.packs)
        profile = recorded(ratel, recipe, steps[0])
    order = SwapOrder(profile)
    assert order.num_outputs > 0
    for _ in range(2):
        num_outputs = choice.randint(1, order.num_outputs)
        spilled_units = choice.randint(0, NUM_MICRO_BATCHES * (len(profile.layers) - 1))
        placement = replace(AHEAD, swapped=order.keys(num_outputs), spilled_units=spilled_units)
        offloaded = offload(
            order.unit_bytes(num_outputs), num_micro_batches=NUM_MICRO_BATCHES, spilled_units=spilled_units
        )
        directory = tmp_path / f"{num_outputs} {spilled_units}"
        with machine(directory, config, recipe, dtype="bfloat16", weights=weights, placement=placement) as ratel:
            swapped = [outcome.swapped_bytes for outcome in ratel.train(steps[:1], recipe)]
        assert swapped == [offloaded.total_bytes]
        with machine(
            directory / "again", config, recipe, dtype="bfloat16", weights=weights, placement=placement
        ) as ratel:
            last = moved_by_last_step(ratel, recipe, steps)
            wanted = step_traffic(ratel.model.spec, placement, offloaded, holds_gradients=False)
            assert last == (wanted.read_bytes, wanted.written_bytes)
            assert_same_training([], ratel.weights(), replace(reference(config, steps, recipe), losses=(), norms=()))


def test_a_recorded_step_has_the_same_bits(tmp_path: Path) -> None:
    config = tiny_config("gpt2")
    recipe = Recipe(dtype=torch.bfloat16)
    steps = random_steps(2, NUM_MICRO_BATCHES)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        recorded(ratel, recipe, steps[0])
        rest = ratel.train(steps, recipe)
        wanted = reference(config, steps, recipe)
        assert_same_training(rest, ratel.weights(), replace(wanted, losses=wanted.losses[1:], norms=wanted.norms[1:]))


@pytest.mark.full
def test_layers_that_are_alike_share_a_profile(tmp_path: Path) -> None:
    """Every other layer of Gemma attends to a window of tokens only; Llama's layers are all alike."""
    numbers = {}
    for architecture in ("llama", "gemma2"):
        config = tiny_config(architecture)
        recipe = Recipe(dtype=torch.bfloat16, attn_implementation=attention_of(config))
        with machine(
            tmp_path / architecture, config, recipe, dtype="bfloat16", weights=initial_weights(config)
        ) as ratel:
            profile = recorded(ratel, recipe, random_steps(1, NUM_MICRO_BATCHES)[0])
        numbers[architecture] = len(profile.profiles)
        assert profile.source == "recorded"
        assert all(layer.forward_seconds and layer.backward_seconds is not None for layer in profile.profiles)
    assert numbers["llama"] == 1


def test_what_attention_on_a_gpu_saves() -> None:
    """All of its outputs but the mask for debugging, which is empty."""
    recording = StepRecording()
    query = torch.empty(2, 4, 16, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    recorder = recording.recorder([torch.empty(1, device="meta")], [], block=1, micro_batch=0, module=nn.Module())
    with recorder.recording():
        torch.ops.aten._scaled_dot_product_flash_attention(query, query, query)
    (unit,) = recording.units().values()
    (operator,) = unit.operators
    assert not unit.saved.issuperset(operator.writes)
    assert operator.num_bytes == operator.saved_bytes == 2 * 4 * 16 * (32 * 2 + 4)
