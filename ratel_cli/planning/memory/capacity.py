"""Host memory: what a step takes at its peak, and which held gradients fit. Pure.

This is an estimate from shapes, made before anything is written. The engine leases its buffers within the same limit,
so an estimate that is too low ends in a clear error and never in a killed process.

Offloaded activations (planning/profile/activations.py) count as if they were there all the time. Next to these, and to
the gradients held so far, each position of a step needs what overlaps there (planning/duties/placed.py).

Invariant: the split of held gradients between memory and NVMe keeps the most of them in memory that the limit allows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ratel_cli.errors import DoesNotFit
from ratel_cli.planning.duties import activations
from ratel_cli.planning.duties.gradients import held_by_number, updated_bytes
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.activations import OffloadedActivations
from ratel_cli.planning.profile.placement import Placement, Workload
from ratel_cli.planning.profile.recorded import RECORDED_MICRO_BATCHES
from ratel_cli.schedule.ledger import Purpose, place_of
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage
from ratel_cli.sizes import CHECKSUM_BYTES, CHUNK_ELEMENTS
from ratel_cli.store.base_files import staging_bytes
from ratel_cli.units import KIB, format_bytes

_OF_WORKING_SET: Final[tuple[Purpose, ...]] = ("activations", "runtime")
_FOR_ITSELF: Final[tuple[Purpose, ...]] = ("held", "resident", "hidden states")
"""What `HostMemory` has figures of its own for."""
_CHUNK_BYTES = 3 * CHECKSUM_BYTES + 2
"""A chunk of one field has a checksum in the table of the generation that is read, in that of the one that is written,
and in the copy that goes to NVMe; and the tables note for each whether it is set."""
_UNIT_BYTES = 6 * KIB
"""What Python and torch keep of one layer and micro-batch from forward to backward: its tape's own part, its tensors
without their values, its spans (2.0 to 4.3 KiB counted by tracemalloc, which does not see torch's own part)."""
_RECORDED_BYTES = 100 * KIB
"""What a recording keeps of one of its units until the step has ended (89 KiB counted so)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of host memory by purpose, at the moment of a step that takes most."""

    process: int
    """The process without what training moves: Python, torch, the skeleton, checksums, notes on what has run."""
    hidden_states: int
    """Hidden states between two layers, their gradients, and masks, of all micro-batches."""
    activations: int
    """Offloaded in forward for backward: layers' inputs and swapped outputs, and buffers for units that go to NVMe."""
    resident: int
    """Weights and optimizer states that stay from step to step."""
    block: int
    """Weights, gradients and optimizer states that pass through: of the block that computes and of its neighbours."""
    working_set: int
    """Activations of one layer and one micro-batch, or one chunk of logits; and torch's own memory."""
    held_gradients: int
    """All held gradients that stay in memory. `total` counts only those that are held at the peak."""
    device: int
    """The compute device at its peak. A GPU: its own memory. A CPU: weights, gradients and the working set, of this
    memory."""
    total: int


class StepMemory:
    """The host memory that a step takes, for any placement. `gpu` is None where the CPU computes."""

    def __init__(self, step: PlannedStep, *, process_bytes: int, gpu: GpuMemory | None = None) -> None:
        """`process_bytes`: what the process takes before training."""
        own = step.own
        self._step = step
        self._process_bytes = process_bytes + notes_bytes(own.segments, step.workload, num_layers=step.spec.num_layers)
        self._process_bytes += max(
            (staging_bytes(block.file_bytes or 0, block.compute_bytes) for block in own.blocks), default=0
        )
        self._gpu = gpu
        self._known_moments: dict[object, _Moments] = {}
        self._hidden_bytes = sum(row.num_bytes for row in activations.hidden(step))

    def fit(self, placement: Placement, offloaded: OffloadedActivations, *, limit_bytes: int) -> tuple[HostMemory, int]:
        """What a step needs, and how many blocks' held gradients must go to NVMe. Raises DoesNotFit.

        Those blocks are the first ones, whose gradients come last. Gradients go to NVMe only where all are held: the
        few that `placement.deferred` holds stay in memory.
        """
        known = self._known(placement)
        segments = self._step.own.segments
        resident_bytes = sum(segments[each].own_bytes for each in placement.resident_weights)
        resident_bytes += sum(segments[each].state_bytes for each in placement.resident_states)
        gpu_bytes = self._gpu_bytes(placement, offloaded)
        always = self._process_bytes + self._hidden_bytes + resident_bytes + offloaded.memory_bytes
        held_bytes = known.held_bytes

        def peak(num_in_memory: int) -> int:
            """The most that a step takes if the gradients of this many blocks are held in memory."""
            return always + max(
                taken + held_bytes[min(num_held, num_in_memory)] for num_held, taken in known.most_by_held.items()
            )

        def needed(num_in_memory: int) -> HostMemory:
            def total(moment: _Moment) -> int:
                return always + moment.taken + held_bytes[min(moment.num_held, num_in_memory)]

            at_peak = max(known.moments, key=total)
            return HostMemory(
                process=self._process_bytes,
                hidden_states=self._hidden_bytes,
                activations=offloaded.memory_bytes,
                resident=resident_bytes,
                block=at_peak.block,
                working_set=at_peak.working_set,
                held_gradients=held_bytes[num_in_memory],
                device=gpu_bytes or max(moment.taken for moment in known.moments),
                total=total(at_peak),
            )

        num_segments = len(segments)
        fewest = 0 if self._step.holds_gradients or self._step.is_separate else num_segments
        choices = range(fewest, num_segments + 1)
        num_fitting = bisect_right(choices, limit_bytes, key=peak)
        if not num_fitting:
            raise _does_not_fit(needed(fewest), limit_bytes)
        num_in_memory = choices[num_fitting - 1]
        return needed(num_in_memory), num_segments - num_in_memory

    def _known(self, placement: Placement) -> _Moments:
        """The moments of a step. A search asks for many placements that differ only in what is offloaded."""
        key = (
            placement.prefetch_blocks,
            placement.pending_updates,
            placement.groups,
            placement.gpu_embedding_rows,
            placement.gpu_holds_head,
            placement.resident_weights,
            placement.deferred,
        )
        if key not in self._known_moments:
            self._known_moments[key] = self._moments(placement)
        return self._known_moments[key]

    def _moments(self, placement: Placement) -> _Moments:
        placed = PlacedStep(self._step, placement)
        moments = [moment for way in placed.ways for moment in _moments_of(placed, way)]
        sizes = updated_bytes(self._step, placement.gpu_embedding_rows)
        most_by_held: dict[int, int] = {}
        for moment in moments:
            most_by_held[moment.num_held] = max(most_by_held.get(moment.num_held, 0), moment.taken)
        return _Moments(moments, most_by_held, held_by_number(sizes, placed.stages))

    def _gpu_bytes(self, placement: Placement, offloaded: OffloadedActivations) -> int:
        if self._gpu is None:
            return 0
        needed_bytes = self._gpu.needed_bytes(
            offloaded.largest_unit,
            holds_sums=placement.gpu_holds_sums,
            holds_head=placement.gpu_holds_head,
            window_bytes=placement.gpu_window_bytes,
            units=placement.gpu_units,
        )
        return needed_bytes + offloaded.gpu_bytes + self._gpu.resident_bytes(placement)


def check_device_memory(memory: HostMemory, limit_bytes: int | None) -> None:
    """Raise DoesNotFit if the compute device needs more than the limit; None is no limit."""
    if limit_bytes is None or memory.device <= limit_bytes:
        return
    shortfall_bytes = memory.device - limit_bytes
    raise DoesNotFit(
        f"GPU memory: one block and its working set need {format_bytes(memory.device)}, "
        f"{format_bytes(limit_bytes)} available (short by {format_bytes(shortfall_bytes)})",
        "raise limits.gpu_memory, or lower micro_batch_size or sequence_len",
        shortfall_bytes=shortfall_bytes,
        is_gpu_memory=True,
    )


@dataclass(frozen=True, slots=True)
class _Moment:
    """What one moment of a step takes by itself, and how many blocks' gradients have been held by then."""

    num_held: int
    """Held gradients, counted in the order of backward. The one that the moment works on counts in `block` instead."""
    block: int
    working_set: int

    @property
    def taken(self) -> int:
        """Bytes that it takes by itself."""
        return self.block + self.working_set


class _Moments(NamedTuple):
    """All moments of a step, by everything of a placement that they depend on."""

    moments: list[_Moment]
    most_by_held: dict[int, int]
    """The most that a moment takes by itself, by the number of blocks' gradients that have been held by then."""
    held_bytes: list[int]
    """Bytes of held gradients by the number of blocks that have them, in the order of backward."""


def _moments_of(placed: PlacedStep, way: tuple[Stage, ...]) -> list[_Moment]:
    """One for each position. Held gradients there are those of the last segments, down to the first that has one."""
    step = placed.step
    first_held = [len(step.spec.segments)] * step.cycle
    for row in placed.waiting(way):
        if row.purpose == "held":
            for position in range(place_of(row.begins)[0], place_of(row.ends)[0] + 1):
                first_held[position % step.cycle] = min(first_held[position % step.cycle], row.owner)
    block, working_set = [0] * step.cycle, [0] * step.cycle
    for purpose, taken in placed.memory(way).items():
        if purpose in _OF_WORKING_SET:
            working_set = [*map(int.__add__, working_set, taken)]
        elif purpose not in _FOR_ITSELF:
            block = [*map(int.__add__, block, taken)]
    num_held = (len(step.spec.segments) - first for first in first_held)
    return list(map(_Moment, num_held, block, working_set))


def notes_bytes(segments: Sequence[Segment], workload: Workload, *, num_layers: int) -> int:
    """What a step keeps of these segments, of which `num_layers` have units, apart from their values: checksums, and
    notes on each unit. Nothing else grows with the number of layers where everything that can be is on NVMe."""
    blocks = [block for segment in segments for block in segment.blocks]
    num_chunks = sum(len(block.record.fields) * -(-block.num_elements // CHUNK_ELEMENTS) for block in blocks)
    num_recorded = min(workload.num_micro_batches, RECORDED_MICRO_BATCHES)
    layer_bytes = workload.num_micro_batches * _UNIT_BYTES + num_recorded * _RECORDED_BYTES
    return num_chunks * _CHUNK_BYTES + layer_bytes * num_layers


def _does_not_fit(memory: HostMemory, limit_bytes: int) -> DoesNotFit:
    shortfall_bytes = memory.total - limit_bytes
    parts = {
        "process": memory.process,
        "hidden states": memory.hidden_states,
        "activations": memory.activations,
        "resident": memory.resident,
        "one block": memory.block,
        "working set": memory.working_set,
    }
    named = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
    return DoesNotFit(
        f"RAM: a step needs {format_bytes(memory.total)} ({named}), "
        f"{format_bytes(limit_bytes)} available (short by {format_bytes(shortfall_bytes)})",
        "raise limits.host_memory, or lower micro_batch_size, gradient_accumulation_steps or sequence_len",
        shortfall_bytes=shortfall_bytes,
    )
