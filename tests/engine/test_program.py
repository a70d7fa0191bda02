"""A program of another shape than a decoder's trains as plain PyTorch does, and takes what was planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.replay.loss import ChunkSums
from ratel_cli.engine.replay.profiling import BlockProfiler, Sums
from ratel_cli.engine.steps.build import open_device
from ratel_cli.io.buffers import BufferPool
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.schedule.lifetimes import partial_sum_lifetimes
from ratel_cli.schedule.uses import step_uses
from tests.engine.exactness import AHEAD, EVERY_BLOCK, PLACEMENTS
from tests.engine.machine import machine
from tests.engine.programs import NUM_LAYERS, First, NetProgram, check_net, net_steps, net_trained, opened_net
from tests.engine.test_step import moved_by_last_step
from tests.planning.steps import step_traffic
from tests.reference import Recipe
from tests.tiers import pairwise, thinned


@pytest.mark.parametrize(
    ("dtype", "num_micro_batches", "max_grad_norm", "first", "ahead"),
    pairwise([torch.float32, torch.bfloat16], [1, 3], [None, 0.5], ["own", "shared", "none"], [Placement(), AHEAD]),
)
def test_it_trains_as_plain_pytorch_does(
    tmp_path: Path,
    dtype: torch.dtype,
    num_micro_batches: int,
    max_grad_norm: float | None,
    first: First,
    ahead: Placement,
) -> None:
    recipe = Recipe(dtype=dtype, max_grad_norm=max_grad_norm)
    check_net(machine, tmp_path, recipe, num_micro_batches=num_micro_batches, first=first, placement=ahead)


@pytest.mark.parametrize("name", thinned(list(PLACEMENTS), every=3, full_every=2))
def test_so_it_does_wherever_bytes_rest(tmp_path: Path, name: str) -> None:
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5)
    check_net(machine, tmp_path, recipe, num_micro_batches=2, first="own", **PLACEMENTS[name])


def test_its_parts() -> None:
    spec = NetProgram(16, Recipe(), first="none").spec
    assert spec.lookup_block is None and not spec.tied
    assert [[block.name for block in segment.blocks] for segment in spec.segments] == [
        [], ["layer 0", "shared"], ["layer 1"], [], ["layer 3"], [],
    ]  # fmt: skip
    assert [len(segment.unfinished) for segment in spec.segments] == [0, 0, 0, 1, 0, 1]
    assert type(spec).from_json(spec.to_json()) == spec
    [sums] = partial_sum_lifetimes(step_uses(spec.segments))
    assert (sums.of.name, sums.first, sums.last) == ("shared", NUM_LAYERS + 1, 2 * NUM_LAYERS + 1)


@pytest.mark.parametrize("placement", [Placement(), AHEAD, replace(AHEAD, resident_weights=EVERY_BLOCK)])
@pytest.mark.parametrize("max_grad_norm", [None, 1e-3])
def test_its_traffic_is_the_prediction(tmp_path: Path, placement: Placement, max_grad_norm: float | None) -> None:
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    steps = net_steps(3, 2, 64, torch.bfloat16)
    with opened_net(machine, tmp_path, recipe, width=64, first="own", placement=placement) as ratel:
        moved = moved_by_last_step(ratel, recipe, steps)  # type: ignore[arg-type]
        holds = max_grad_norm is not None
        planned = step_traffic(ratel.model.spec, placement, NOTHING_OFFLOADED, holds_gradients=holds)
        assert moved == (planned.read_bytes, planned.written_bytes)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_loss_in_chunks_stays_within_rounding(tmp_path: Path, num_micro_batches: int) -> None:
    """The shared matrix gets a gradient from each chunk, and their sum goes on to the layers below."""
    recipe, steps = Recipe(chunk_tokens=7), net_steps(1, num_micro_batches, 64, torch.float32)
    with opened_net(machine, tmp_path, recipe, width=64, first="own") as ratel:
        [outcome] = ratel.train(steps, recipe)  # type: ignore[arg-type]
    wanted = net_trained(64, steps, replace(recipe, chunk_tokens=None), first="own")
    assert outcome.loss == pytest.approx(wanted.losses[0], rel=1e-6)
    assert outcome.grad_norm == pytest.approx(wanted.norms[0], rel=1e-6)


@pytest.mark.parametrize("first", ["own", "shared", "none"])
def test_its_segments_are_timed(first: First) -> None:
    program, [[batch]] = NetProgram(64, Recipe(), first=first), net_steps(1, 1, 64, torch.float32)
    sums = Sums(num_micro_batches=2, holds_layers=True, holds_head=True)
    with BufferPool(None) as pool, open_device(torch.device("cpu"), Timeline()) as device:
        profiler = BlockProfiler(program, pool, dtype=torch.float32, device=device, sums=sums)
        units, seconds = profiler.record(batch, most_runs=2)
    assert sorted(seconds) == list(range(NUM_LAYERS + 2)) and len(units) >= NUM_LAYERS


def test_a_sum_over_chunks_is_its_own() -> None:
    """What autograd made may be the gradient of another parameter, too."""
    made = [torch.ones(3), torch.full((3,), 2.0)]
    sums = ChunkSums([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))])
    for gradient in (*made, torch.full((3,), 4.0)):
        sums.add([gradient, gradient])
    assert [each.tolist() for each in sums.take() if each is not None] == [[7.0] * 3] * 2
    assert [each.tolist() for each in made] == [[1.0] * 3, [2.0] * 3]
    assert sums.take() == [None, None]
