"""A plan for a loop of the caller's own: how far transfers run ahead within a limit on host memory. Pure.

Blocks are called in forward and in backward, as in a step of one micro-batch; what the caller's code computes between
them is not known, so neither time nor activations are planned. What is outside of the blocks stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ratel_cli.errors import DoesNotFit
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.memory.capacity import HostMemory, StepMemory
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED
from ratel_cli.planning.profile.placement import GroupShape, Placement
from ratel_cli.planning.search.choose import shape_for
from ratel_cli.planning.time.traffic import Traffic, traffic_of
from ratel_cli.units import format_bytes

_PREFETCH = ((2, 2), (2, 1), (1, 1), (1, 0), (0, 0))
"""How many blocks are read ahead, and how many updates wait to be written: the fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizontalPlan:
    """What a hooked module follows."""

    placement: Placement
    memory: HostMemory
    sum_bytes: int
    """The part of `memory` for fp32 sums of all blocks, where gradients of several rounds are added up."""
    num_spilled: int
    """Segments whose held gradients go to the drives."""
    spilled_bytes: int
    traffic: Traffic
    """Traffic of a step of one forward and one backward."""


def plan_horizontal(
    spec: ModelSpec,
    *,
    holds_gradients: bool,
    has_sums: bool,
    process_bytes: int,
    limit_bytes: int,
    num_drives: int,
    num_threads: int,
) -> HorizontalPlan:
    """The fastest that fits. `process_bytes`: what the process has before. Raises DoesNotFit."""
    outside = spec.embedding
    blocks = [segment for segment in spec.segments if segment is not outside]
    sum_bytes = sum(segment.sum_bytes for segment in blocks) if has_sums else 0
    # Autograd has the gradients of what is outside until backward is over.
    always_bytes = process_bytes + sum_bytes + outside.made_bytes + (outside.sum_bytes if has_sums else 0)
    step = PlannedStep(spec=spec, own=spec, holds_gradients=holds_gradients)
    steps = StepMemory(step, process_bytes=always_bytes)
    failure: DoesNotFit | None = None
    for placement in _placements(num_drives, num_threads):
        try:
            memory, num_spilled = steps.fit(placement, NOTHING_OFFLOADED, limit_bytes=limit_bytes)
        except DoesNotFit as error:
            failure = error
            continue
        spilled = [segment.gradient_bytes for segment in spec.segments[:num_spilled]]
        traffic = traffic_of(PlacedStep(step, placement), NOTHING_OFFLOADED, spilled_segments=num_spilled)
        return HorizontalPlan(
            placement=placement,
            memory=memory,
            sum_bytes=sum_bytes,
            num_spilled=num_spilled,
            spilled_bytes=sum(spilled) if holds_gradients else 0,
            traffic=traffic,
        )
    assert failure is not None
    hint = "raise the limit, name smaller blocks, or let blocks have what is outside of them"
    if has_sums:
        hint = f"accumulation takes {format_bytes(sum_bytes)} of that; use larger batches, or raise the limit"
    raise DoesNotFit(failure.message, hint, shortfall_bytes=failure.shortfall_bytes)


def _placements(num_drives: int, num_threads: int) -> Iterator[Placement]:
    least = Placement(resident_weights=frozenset([0]), adamw_threads=num_threads, groups=shape_for(num_drives))
    for prefetch_blocks, pending_updates in _PREFETCH:
        yield replace(least, prefetch_blocks=prefetch_blocks, pending_updates=pending_updates)
    yield replace(least, groups=GroupShape())
