"""A program of another shape than a decoder's on a GPU: the bits of plain PyTorch, and the memory that was planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.planning.memory import gpu_memory
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.profile.recorded import BlockSeconds, recorded_profile
from ratel_cli.planning.search.swap import SwapOrder
from tests.engine.exactness import AHEAD, PLACEMENTS
from tests.engine.programs import First, NetProgram, check_net, net_steps, opened_net
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.gpu.test_memory import peak_bytes
from tests.gpu.test_planned_memory import MOST, SMALL_BYTES, with_seconds_of_flops
from tests.reference import Recipe
from tests.simulated_gpu import is_simulated
from tests.tiers import pairwise, rotating

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("dtype", "num_micro_batches", "max_grad_norm", "first"),
    pairwise([torch.float32, torch.bfloat16], [1, 3], [None, 0.5], ["own", "shared", "none"]),
)
def test_it_trains_as_plain_pytorch_does(
    tmp_path: Path, dtype: torch.dtype, num_micro_batches: int, max_grad_norm: float | None, first: First
) -> None:
    recipe = Recipe(dtype=dtype, max_grad_norm=max_grad_norm)
    check_net(gpu_machine, tmp_path, recipe, num_micro_batches=num_micro_batches, first=first, placement=AHEAD)


@pytest.mark.parametrize(
    ("name", "num_micro_batches"), rotating(list(PLACEMENTS), [2, 1], every=5, offset=1, full_rotation=True)
)
def test_so_it_does_wherever_bytes_rest(tmp_path: Path, name: str, num_micro_batches: int) -> None:
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5)
    check_net(gpu_machine, tmp_path, recipe, num_micro_batches=num_micro_batches, first="own", **PLACEMENTS[name])


@pytest.mark.parametrize(
    ("num_micro_batches", "holds_sums", "swaps", "first", "num_chunks"),
    rotating([3, 1], [True, False], [False, True], ["own", "shared"], [1, 3], full_pairs=True),
)
def test_a_step_takes_what_was_planned(
    tmp_path: Path, num_micro_batches: int, holds_sums: bool, swaps: bool, first: First, num_chunks: int
) -> None:
    width, rows, tokens = 256, 4, 256
    workload = Workload(
        micro_batch_size=rows,
        num_micro_batches=num_micro_batches,
        sequence_len=tokens,
        chunk_tokens=-(-rows * tokens // num_chunks),
    )
    recipe = Recipe(chunk_tokens=workload.chunk_tokens)
    program = NetProgram(width, recipe, first=first)
    estimate = analytic_profile(program.spec, workload, traits=measured_traits(program))
    placement = replace(AHEAD, gpu_holds_sums=holds_sums, gpu_holds_head=True)
    [batches] = net_steps(1, num_micro_batches, width, recipe.dtype, rows=rows, tokens=tokens)
    with opened_net(gpu_machine, tmp_path / "recorded", recipe, width=width, first=first, placement=placement) as ratel:
        found, recording, spec = peak_bytes(ratel, batches), StepRecording(), ratel.model.spec
        ratel.engine.run(batches, step=2, update=3, learning_rate=0.0, recording=recording)
    profile = recorded_profile(
        {key: with_seconds_of_flops(unit) for key, unit in recording.units().items()},
        dict.fromkeys(range(len(spec.segments)), BlockSeconds(forward=1.0, backward=1.0)),
        spec,
        workload,
        num_micro_batches=num_micro_batches,
        estimate=estimate,
    )
    order, memory = SwapOrder(profile), GpuMemory(spec, workload, profile)
    num_outputs = order.num_outputs if swaps else 0
    if swaps:
        swapping = replace(placement, swapped=order.keys(num_outputs))
        with opened_net(
            gpu_machine, tmp_path / "swapping", recipe, width=width, first=first, placement=swapping
        ) as ratel:
            found = peak_bytes(ratel, batches)
    planned = memory.needed_bytes(
        order.largest_unit(num_outputs), holds_sums=holds_sums, window_bytes=placement.gpu_window_bytes
    )
    planned -= GPU_CONTEXT_BYTES
    if is_simulated():
        planned -= gpu_memory._WORKSPACE_BYTES
        assert planned <= MOST * found
    assert planned >= found - SMALL_BYTES
