"""A profile measured without training is that of a recorded step, apart from times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.replay.profiling import BlockProfiler, Sums
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.freezing import freeze
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.recorded import recorded_profile
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.machine import attention_of, initial_weights, machine, random_steps
from tests.engine.test_frozen_parts import PARTS, names_of
from tests.engine.test_swap import estimate_of, recorded, workload_of
from tests.reference import Recipe
from tests.tiers import sample, thinned


def timeless(profile: ModelProfile) -> list[LayerProfile]:
    """Each layer's profile without times, and without the candidates, whose order depends on times."""
    layers = [profile.profiles[number] for number in profile.layers]
    return [
        replace(
            layer,
            candidates=(),
            saved_bytes=0,
            backward_bytes=0,
            making_bytes=0,
            replay_bytes=0,
            replay_held_bytes=0,
            forward_seconds=None,
            recomputed_seconds=None,
            backward_seconds=None,
        )
        for layer in layers
    ]


@pytest.mark.parametrize("architecture", thinned(sample(ARCHITECTURES, every=4, offset=1), every=2))
def test_it_is_the_profile_of_a_recorded_step(tmp_path: Path, architecture: str) -> None:
    check_profile(tmp_path, architecture)


@pytest.mark.parametrize("part", list(PARTS))
def test_of_a_model_of_which_a_part_is_trained(tmp_path: Path, part: str) -> None:
    check_profile(tmp_path, "llama", part)


def check_profile(tmp_path: Path, architecture: str, part: str | None = None) -> None:
    config = tiny_config(architecture)
    attention = attention_of(config)
    unfrozen = None if part is None else names_of(config, part)
    recipe = Recipe(dtype=torch.bfloat16, attn_implementation=attention, unfrozen=unfrozen)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        batches = random_steps(1, 2, packed=ratel.model.packs)[0]
        wanted = recorded(ratel, recipe, batches)
    skeleton = build_skeleton(tiny_config(architecture), dtype="bfloat16", attn_implementation=attention)
    freeze(skeleton, unfrozen=unfrozen or (), frozen=())
    model = find_blocks(skeleton, name="tiny")
    device, sums = HostDevice(Timeline()), Sums(num_micro_batches=2, holds_layers=True, holds_head=True)
    with BufferPool(None) as pool:
        profiler = BlockProfiler(model, pool, dtype=torch.bfloat16, device=device, sums=sums)
        units, seconds = profiler.record(batches[0])
    found = recorded_profile(
        units,
        seconds,
        model.spec,
        workload_of(batches),
        num_micro_batches=1,
        estimate=estimate_of(model, batches),
    )
    assert timeless(found) == timeless(wanted)
    for layer, other in zip(found.profiles, wanted.profiles, strict=True):
        # A number that torch wraps in a tensor counts only if its address is new.
        assert layer.saved_bytes == pytest.approx(other.saved_bytes, abs=64)
    assert found.head_seconds and found.embedding_seconds
    for layer, other in zip(model.spec.layers, [found.profiles[number] for number in found.layers], strict=True):
        assert other.forward_seconds
        assert model.spec.has_backward(layer) == bool(other.backward_seconds) == bool(other.input_bytes)
