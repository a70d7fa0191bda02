"""Steps of models that one process trains, and what the ledger has of them at each use; for tests."""

from __future__ import annotations

from collections.abc import Sequence

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import OffloadedActivations
from ratel_cli.planning.profile.placement import Overlap, Placement, Workload
from ratel_cli.planning.time.network import NetworkTraffic, network_of
from ratel_cli.planning.time.traffic import Traffic, traffic_of
from ratel_cli.schedule.ledger import Purpose
from ratel_cli.store.layout import RankSlice
from tests.planning.shapes import WORKLOAD


def planned_step(
    spec: ModelSpec,
    workload: Workload = WORKLOAD,
    *,
    holds_gradients: bool = False,
    overlap: Overlap = "optimized",
    on_gpu: bool = False,
    has_sums: bool = True,
) -> PlannedStep:
    return PlannedStep(
        spec=spec,
        own=spec,
        workload=workload,
        on_gpu=on_gpu,
        holds_gradients=holds_gradients,
        overlap=overlap,
        has_sums=has_sums,
    )


def most_by_use(placed: PlacedStep, metered: Sequence[tuple[Purpose, ...]]) -> dict[tuple[Purpose, ...], list[int]]:
    """Host memory of each use for purposes together, whichever way a step goes; and of the turn, or of all updates
    there."""
    turn = placed.step.turn
    most = {purposes: [0] * (turn + 1) for purposes in metered}
    for way in placed.ways:
        memory = placed.memory(way)
        for purposes, found in most.items():
            for position in range(placed.step.cycle):
                taken = sum(memory[purpose][position] for purpose in purposes if purpose in memory)
                found[min(position, turn)] = max(found[min(position, turn)], taken)
    return most


def step_traffic(
    spec: ModelSpec,
    placement: Placement,
    offloaded: OffloadedActivations,
    *,
    holds_gradients: bool,
    spilled_segments: int = 0,
    overlap: Overlap = "optimized",
) -> Traffic:
    """What one applied step moves over NVMe."""
    step = planned_step(spec, holds_gradients=holds_gradients, overlap=overlap)
    return traffic_of(PlacedStep(step, placement), offloaded, spilled_segments=spilled_segments)


def network_traffic(spec: ModelSpec, rank_slice: RankSlice) -> NetworkTraffic:
    """What a rank sends and receives in one step of this model."""
    own = spec.sliced(rank_slice)
    return network_of(PlannedStep(spec=spec, own=own, num_ranks=rank_slice.size, holds_gradients=False))
