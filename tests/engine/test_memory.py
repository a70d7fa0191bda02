"""Peak host memory does not grow with the number of layers, but for notes on each unit, which plans count."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.io.buffers import BufferPool, PinMemory
from ratel_cli.planning.memory.capacity import notes_bytes
from ratel_cli.planning.profile.placement import Workload
from tests.engine.architectures import tiny_config
from tests.engine.machine import initial_weights, machine, random_steps
from tests.reference import Recipe
from tests.tiers import sample

ROOT = Path(__file__).parents[2]


def peak_bytes(num_layers: int) -> tuple[int, int]:
    """Train in a process of its own. Returns (parameters, peak resident bytes)."""
    command = [sys.executable, "-m", "tests.engine.memory_child", str(num_layers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    parameters, _, peak = map(int, output.split())
    return parameters, peak


@pytest.mark.nightly
def test_peak_does_not_grow_from_8_to_32_layers_at_64_tokens_a_step() -> None:
    shallow_parameters, shallow = peak_bytes(8)
    deep_parameters, deep = peak_bytes(32)
    assert deep_parameters > 3.9 * shallow_parameters
    assert deep - shallow < 0.1 * shallow
    # Plain PyTorch would need 16 bytes of memory for each additional parameter.
    assert deep - shallow < 0.05 * 16 * (deep_parameters - shallow_parameters)


@pytest.mark.full
@pytest.mark.parametrize("architecture", sample(["llama", "gpt2"], every=2, offset=1))
def test_what_is_noted_of_each_unit_is_less_than_a_plan_counts(tmp_path: Path, architecture: str) -> None:
    config, recipe = tiny_config(architecture), Recipe(dtype=torch.bfloat16)
    peaks, planned = [], []
    for number, recording in ((4, None), (36, None), (36, StepRecording())):
        weights, directory = initial_weights(config), tmp_path / str(len(peaks))
        with machine(directory, config, recipe, dtype="bfloat16", weights=weights) as ratel:
            [first, second] = random_steps(2, number)
            ratel.train([first], recipe)
            tracemalloc.start()
            ratel.engine.run(second, step=1, update=2, learning_rate=0.0, recording=recording)
            assert recording is None or len(recording.units()) == 4 * ratel.model.spec.num_layers
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        workload = Workload(micro_batch_size=2, num_micro_batches=number, sequence_len=12)
        spec = ratel.model.spec
        planned.append(notes_bytes(spec.segments, workload, num_layers=spec.num_layers))
    assert 0.1 < (peaks[1] - peaks[0]) / (planned[1] - planned[0]) < 1
    assert peaks[2] - peaks[1] < 4 * 100 * 1024 * ratel.model.spec.num_layers


@pytest.mark.parametrize(("spare_bytes", "makes_any"), [(0, True), (1 << 30, False)])
def test_buffers_stay_for_the_next_step_in_memory_that_the_plan_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_bytes: int, makes_any: bool
) -> None:
    config, recipe, made = tiny_config("llama"), Recipe(), list[int]()
    make = BufferPool._made

    def noting(pool: BufferPool, size_bytes: int, purpose: str, pin: PinMemory | None) -> object:
        made.append(size_bytes)
        return make(pool, size_bytes, purpose, pin)

    monkeypatch.setattr(BufferPool, "_made", noting)
    weights, steps = initial_weights(config), random_steps(3, 2)
    with machine(tmp_path, config, recipe, weights=weights, spare_bytes=spare_bytes) as ratel:
        ratel.train(steps[:2], recipe)
        made.clear()
        ratel.engine.run(steps[2], step=2, update=3, learning_rate=0.0)
        ratel.engine.settle()
    assert any(made) == makes_any
