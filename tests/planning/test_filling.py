"""Steps of data whose rows are shorter than they may be: planned for the widest, predicted as the data has them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.plan import Plan, make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.sizes import Filling
from ratel_cli.units import GIB, MIB
from tests.planning.profiles import estimated
from tests.planning.shapes import gpt, machine

SPEC = gpt(num_layers=4, hidden_size=512, vocab_size=2000)
FULL = Workload(micro_batch_size=4, num_micro_batches=6, sequence_len=1024)


def plan(workload: Workload, *, profile: ModelProfile | None = None, spec: ModelSpec = SPEC, has_gpu: bool) -> Plan:
    hardware = machine() if has_gpu else replace(machine(), link=None)
    decisions = Decisions(
        holds_gradients=True, num_slots=2, host_limit_bytes=16 * GIB, activations="recompute", device_limit_bytes=None
    )
    return make_plan(
        Problem(
            spec=spec,
            workload=workload,
            profile=profile or estimated(spec, workload),
            hardware=hardware,
            decisions=decisions,
            process_bytes=200 * MIB,
        )
    )


def filled(*, width: int, num_micro_batches: int = 6, padding: float = 0.25) -> Workload:
    computed = width * num_micro_batches / (FULL.sequence_len * FULL.num_micro_batches)
    filling = Filling(micro_batches=num_micro_batches / 6, computed=computed, tokens=(1 - padding) * computed)
    return replace(FULL, filling=filling)


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize(("width", "number"), [(1024, 6), (256, 6), (32, 6), (8, 2)])
def test_a_step_takes_the_time_of_its_data_and_the_memory_of_the_widest(width: int, number: int, has_gpu: bool) -> None:
    """The time, the traffic and the FLOPs are those of a plan for rows that all have this width; the memory is that of
    a plan for the full width."""
    found = plan(filled(width=width, num_micro_batches=number), has_gpu=has_gpu)
    full = plan(FULL, has_gpu=has_gpu)
    short = plan(replace(FULL, num_micro_batches=number, sequence_len=width), has_gpu=has_gpu)
    assert (found.memory, found.placement, found.offloaded) == (full.memory, full.placement, full.offloaded)
    assert found.time.total == pytest.approx(short.time.total, rel=1e-6)
    assert found.flops_model == pytest.approx(short.flops_model, rel=1e-6)
    assert found.flops_recomputed == pytest.approx(short.flops_recomputed, rel=1e-6)
    assert found.traffic.written_bytes == short.traffic.written_bytes
    assert width == 1024 or found.time.total < full.time.total


def test_rates_are_those_of_samples() -> None:
    """Padding takes time, and is no token of the data: as `tokens_per_second` of a step counts."""
    found = plan(filled(width=256), has_gpu=False)
    assert found.tokens_per_second == pytest.approx(0.75 * 256 * 4 * 6 / found.time.total)
    assert plan(FULL, has_gpu=False).tokens_per_second == pytest.approx(
        FULL.tokens / plan(FULL, has_gpu=False).time.total
    )


@pytest.mark.parametrize("width", [512, 128, 16])
def test_measured_seconds_grow_with_the_lengths(width: int) -> None:
    """Of a recorded profile, whose seconds are those of full rows: computing takes as much less time as there are
    tokens."""
    estimate = estimated(SPEC, FULL)
    layers = tuple(
        replace(each, forward_seconds=30.0, recomputed_seconds=20.0, backward_seconds=60.0)
        for each in estimate.profiles
    )
    profile = replace(estimate, source="recorded", profiles=layers, embedding_seconds=4.0, head_seconds=8.0)
    full, found = (
        plan(workload, profile=profile, has_gpu=False).time.total for workload in (FULL, filled(width=width))
    )
    assert full == pytest.approx(6 * (4 * 110 + 12), rel=0.05)
    assert found == pytest.approx(6 * (4 * 110 + 12) * width / 1024, rel=0.1)


def test_spilled_activations_are_as_long_as_the_rows() -> None:
    """What goes to the drives for a want of memory wears them by what the data has, and has space for the widest."""

    def spilling(workload: Workload) -> Plan:
        problem = Problem(
            spec=SPEC,
            workload=workload,
            profile=estimated(SPEC, FULL),
            hardware=machine(),
            decisions=Decisions(
                holds_gradients=False, num_slots=2, host_limit_bytes=0, activations="swap_all", overlap="separate"
            ),
            process_bytes=200 * MIB,
        )
        limit_bytes = next(
            limit for limit in range(256 * MIB, 8 * GIB, 16 * MIB) if _fits(replace_limit(problem, limit))
        )
        return make_plan(replace_limit(problem, limit_bytes))

    full, found = spilling(FULL), spilling(filled(width=128))
    state_bytes = full.traffic.written_bytes - full.offloaded.written_bytes
    assert full.offloaded.written_bytes > 0
    assert found.offloaded.written_bytes == full.offloaded.written_bytes and found.nvme_bytes == full.nvme_bytes
    written = found.traffic.written_bytes - state_bytes
    assert math.isclose(written, full.offloaded.written_bytes / 8, rel_tol=1e-3)


def replace_limit(problem: Problem, limit_bytes: int) -> Problem:
    return replace(problem, decisions=replace(problem.decisions, host_limit_bytes=limit_bytes))


def _fits(problem: Problem) -> bool:
    from ratel_cli.errors import DoesNotFit

    try:
        make_plan(problem)
    except DoesNotFit:
        return False
    return True
