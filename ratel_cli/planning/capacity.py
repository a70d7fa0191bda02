"""Host memory: what a step takes at its peak, and which held gradients fit. Pure.

This is an estimate from shapes, made before anything is written. The engine leases its buffers within the same limit,
so an estimate that is too low ends in a clear error and never in a killed process.

Offloaded activations (planning/activations.py) count as if they were there all the time. Where a GPU computes,
activations and sums of gradients are in its memory (planning/gpu_memory.py); here only what is uploaded or downloaded
counts. A step is followed through its moments: forward, block by block, overlapped with deferred updates; then in the
order in which gradients arrive: head, layers downwards, embedding; then the updates that are left. Each moment needs
memory of its own, in addition to what stays all the time and to the gradients held so far.

Invariant: the split of held gradients between memory and NVMe keeps the most of them in memory that the limit allows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ratel_cli.errors import DoesNotFit
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import (
    OffloadedActivations,
    head_chunk_tokens,
    logits_bytes,
    lookup_chunk_bytes,
    lookup_rows_bytes,
    lookup_sum_bytes,
    partial_sums_bytes,
    passing_bytes,
    segment_activation_bytes,
)
from ratel_cli.planning.gpu_gradients import largest_elements
from ratel_cli.planning.gpu_memory import GpuMemory
from ratel_cli.planning.placement import (
    Overlap,
    Placement,
    Stage,
    Workload,
    gradient_bytes,
    looked_up,
    step_schedule,
    window_bytes,
)
from ratel_cli.planning.recorded import RECORDED_MICRO_BATCHES
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import CHECKSUM_BYTES, CHUNK_ELEMENTS
from ratel_cli.units import KIB, MIB, format_bytes

RUNTIME_BYTES = 128 * MIB
"""What torch takes at its first step, above all kernels' code (11 to 17 MiB for a model of next to nothing), what
imports leave in the heap (up to 30 MiB), what the trial of the layers keeps (18 MiB), and the gaps between what it
frees. With 135M parameters in bf16 and a plan that fills a limit of 1.1 GiB it was 109 MiB (2-core EPYC, 2026-11)."""

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
    """The host memory that the steps of one model take, for any placement. `gpu` is None where the CPU computes.

    `holds_gradients`: no block is updated before the last gradient is there. `has_sums`: where a GPU computes, the sums
    of a layer's gradients over several micro-batches are in host memory, or may be.
    """

    def __init__(
        self,
        spec: ModelSpec,
        workload: Workload,
        *,
        holds_gradients: bool,
        process_bytes: int,
        overlap: Overlap = "optimized",
        gpu: GpuMemory | None = None,
        has_sums: bool = True,
    ) -> None:
        self._spec = spec
        self._holds_gradients = holds_gradients
        self._overlap: Overlap = overlap
        self._process_bytes = process_bytes + notes_bytes(spec.segments, workload, num_layers=spec.num_layers)
        self._gpu = gpu
        self._segments = _SegmentMemory(spec, workload, on_gpu=gpu is not None, has_sums=has_sums)
        self._known_moments: dict[object, _Moments] = {}
        self._hidden_bytes = 0
        if gpu is None:
            self._hidden_bytes = passing_bytes(spec, tokens=workload.tokens, sequence_len=workload.sequence_len)

    def fit(self, placement: Placement, offloaded: OffloadedActivations, *, limit_bytes: int) -> tuple[HostMemory, int]:
        """What a step needs, and how many blocks' held gradients must go to NVMe. Raises DoesNotFit.

        Those blocks are the first ones, whose gradients come last. Gradients go to NVMe only where all are held: the
        few that `placement.deferred` holds stay in memory.
        """
        spec = self._spec
        known = self._known(placement)
        resident_bytes = _resident_bytes(spec, placement)
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

        num_segments = len(spec.segments)
        fewest = 0 if self._holds_gradients or self._overlap == "separate" else num_segments
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
        updates = [
            placement.update_stage(segment.index, holds_gradients=self._holds_gradients, overlap=self._overlap)
            for segment in self._spec.segments
        ]
        arriving = [
            0 if stage == "backward" else num_bytes
            for num_bytes, stage in zip(
                reversed(gradient_bytes(self._spec, placement.gpu_embedding_rows)), reversed(updates), strict=True
            )
        ]
        moments = _PlacedStep(self._segments, placement, updates).moments()
        most_by_held: dict[int, int] = {}
        for moment in moments:
            most_by_held[moment.num_held] = max(most_by_held.get(moment.num_held, 0), moment.taken)
        return _Moments(moments, most_by_held, list(accumulate(arriving, initial=0)))

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


class _SegmentMemory:
    """Memory of the segments that does not depend on the placement, computed once."""

    def __init__(self, spec: ModelSpec, workload: Workload, *, on_gpu: bool, has_sums: bool) -> None:
        tokens = workload.micro_batch_tokens
        self.spec = spec
        self.workload = workload
        self.on_gpu = on_gpu
        self.schedule = step_schedule(spec)
        self.activations = [
            0 if on_gpu else segment_activation_bytes(spec, segment, tokens=tokens) for segment in spec.segments
        ]
        self.logits = 0 if on_gpu else logits_bytes(spec, head_chunk_tokens(spec, workload))
        self.lookup_sum = lookup_sum_bytes(spec, workload)
        """The head's gradient of a matrix that it borrows, until the embedding's is there. Counted even if a GPU holds
        it, since whether it does depends on what is offloaded."""
        self.lookup_chunk = lookup_chunk_bytes(spec, workload)
        self.partials = [partial_sums_bytes(spec, workload, segment) for segment in spec.segments]
        """Of each segment: the gradients of shared blocks that all micro-batches have so far."""
        self.is_summed = workload.num_micro_batches > 1
        self.has_sums = has_sums

    def gradient(self, segment: Segment, gradient_bytes: int, computing: int, *, is_summed: bool) -> int:
        """The most that it takes to make a segment's gradients (`computing`), or the sums, their rounding and one norm.

        On a GPU: the gradient that is downloaded (`gradient_bytes`), the sums that are here, and what is added to
        them.
        """
        if self.on_gpu:
            is_summed = self.spec.is_layer(segment) and self.is_summed and self.has_sums
            return gradient_bytes + (segment.sum_bytes + segment.updated_bytes if is_summed else 0)
        rounded_bytes = sum(block.gradient_bytes for block in segment.trained if block.gradient_dtype_bytes < 4)
        summed_bytes = segment.sum_bytes + rounded_bytes if is_summed else segment.gradient_bytes
        norm_bytes = 4 * max(map(largest_elements, segment.trained), default=0)
        return max(computing, summed_bytes + norm_bytes)


class _PlacedStep:
    """The moments of one step under one placement."""

    def __init__(self, memory: _SegmentMemory, placement: Placement, updates: Sequence[Stage]) -> None:
        spec = memory.spec
        self._memory = memory
        self._segments = spec.segments
        self._placement = placement
        self._updates = updates
        self._groups = placement.groups.buffer_bytes(spec.blocks)
        self._gradients = gradient_bytes(spec, placement.gpu_embedding_rows)
        self._rows_bytes = 0
        """Rows of the embedding's matrix that are gathered here for a GPU."""
        if placement.gpu_embedding_rows is not None:
            self._rows_bytes = sum(
                block.parameters[0].num_elements * block.dtype_bytes
                for block in looked_up(spec, placement.gpu_embedding_rows).blocks
                if block.is_looked_up
            )
        self._head_bytes = self._lookup_bytes = 0
        """Sums of the head's gradients that a GPU has no memory for, and the gradient that is added to them: in the
        head; and of a matrix that it borrows, beyond `lookup_sum_bytes`, from then on."""
        if memory.on_gpu and not placement.gpu_holds_head:
            if spec.tied:
                self._lookup_bytes = spec.lent.updated_bytes + lookup_rows_bytes(spec, memory.workload)
                self._head_bytes = self._lookup_bytes + memory.lookup_chunk
            else:
                self._head_bytes = spec.head.sum_bytes + spec.head.updated_bytes
        embedding = spec.lookup_block
        if embedding is not None and self._gradients[0] != spec.embedding.gradient_bytes:
            # The rows of one group's gradient are spread out.
            self._groups += min(placement.groups.elements, embedding.num_elements) * embedding.gradient_dtype_bytes

    def moments(self) -> list[_Moment]:
        number = len(self._segments)
        moments = [self._forward(position) for position in range(number - 1)]
        moments.append(self._head())
        moments.extend(self._backward(num_arrived) for num_arrived in range(1, number))
        if self._updates[0] == "update":
            moments.extend(map(self._separate_update, self._segments))
        else:
            moments.append(self._turn())
        if set(self._updates) == {"forward"}:
            moments.extend(self._speculating(position) for position in range(number))
        return moments

    def _forward(self, position: int) -> _Moment:
        """One segment, those that are read ahead, and the deferred updates of all of them."""
        is_deferred = "forward" in self._updates
        coming = self._segments[position : position + 1 + self._placement.prefetch_blocks]
        in_hand = sum(self._gradients[each.index] for each in coming if self._updates[each.index] == "forward")
        groups_bytes = self._groups if is_deferred else 0
        return _Moment(
            num_held=max(0, len(self._segments) - position - len(coming)) if is_deferred else 0,
            block=self._window(position) + (0 if position else self._rows_bytes) + in_hand + groups_bytes,
            working_set=RUNTIME_BYTES + self._memory.activations[position],
        )

    def _head(self) -> _Moment:
        memory, head = self._memory, self._memory.spec.head
        computing = head.made_bytes + head.sum_bytes + memory.lookup_chunk + Segment(head.unfinished).sum_bytes
        return _Moment(
            num_held=0,
            block=self._window(head.index)
            + memory.lookup_sum
            + memory.partials[head.index]
            + self._head_bytes
            + memory.gradient(head, self._gradients[head.index], computing, is_summed=True)
            + self._groups_in_backward(),
            working_set=RUNTIME_BYTES + memory.logits + 2 * memory.activations[head.index],
        )

    def _backward(self, num_arrived: int) -> _Moment:
        """One segment, those that are read ahead, and the updates of earlier ones that are not written yet."""
        memory, segment = self._memory, self._segments[-1 - num_arrived]
        arrived = self._segments[segment.index + 1 :]
        pending = arrived[: self._placement.pending_updates]
        is_embedding = segment is memory.spec.embedding
        is_summed = memory.is_summed or (memory.spec.tied and is_embedding)
        computing = segment.made_bytes + (segment.sum_bytes if is_summed else segment.gradient_bytes)
        return _Moment(
            num_held=num_arrived - len(pending),
            block=self._window(len(memory.schedule) - len(self._segments) + num_arrived)
            + (0 if is_embedding and not memory.on_gpu else memory.lookup_sum)
            + self._lookup_bytes
            + memory.partials[segment.index]
            + (self._rows_bytes if segment.index < 2 else 0)
            + memory.gradient(segment, self._gradients[segment.index], computing, is_summed=is_summed)
            + self._pending(pending)
            + self._groups_in_backward(),
            working_set=RUNTIME_BYTES + 2 * memory.activations[segment.index],
        )

    def _turn(self) -> _Moment:
        """Backward is over: the last updates end while the next forward's weights are read."""
        pending = self._segments[: self._placement.pending_updates]
        return _Moment(
            num_held=len(self._segments) - len(pending),
            block=self._window(0) + self._pending(pending) + self._groups,
            working_set=RUNTIME_BYTES,
        )

    def _speculating(self, position: int) -> _Moment:
        """Forward, and the opening of the head, after a speculative step that was not clipped.

        All gradients of that step are still held.
        """
        memory, segment = self._memory, self._segments[position]
        is_head = segment is memory.spec.head
        return _Moment(
            num_held=len(self._segments),
            block=self._window(position)
            + (0 if position else self._rows_bytes)
            + (segment.sum_bytes + memory.lookup_sum if is_head and not memory.on_gpu else 0),
            working_set=RUNTIME_BYTES + memory.activations[segment.index],
        )

    def _separate_update(self, segment: Segment) -> _Moment:
        """Groups bring the weights with them; a gradient comes back whole."""
        return _Moment(
            num_held=len(self._segments) - 1 - segment.index,
            block=self._gradients[segment.index] + self._groups,
            working_set=RUNTIME_BYTES,
        )

    def _window(self, position: int) -> int:
        return window_bytes(self._memory.schedule, position, self._placement)

    def _pending(self, segments: Sequence[Segment]) -> int:
        """Gradients of these segments, and their weights, which are updated and written where they lie."""
        resident = self._placement.resident_weights
        weights = sum(each.updated_bytes for each in segments if each.index not in resident)
        return weights + sum(self._gradients[each.index] for each in segments)

    def _groups_in_backward(self) -> int:
        """Where all gradients are held, the engine may still speculate that nothing will be clipped."""
        return 0 if self._updates[0] == "update" else self._groups


def notes_bytes(segments: Sequence[Segment], workload: Workload, *, num_layers: int) -> int:
    """What a step keeps of these segments, of which `num_layers` have units, apart from their values: checksums, and
    notes on each unit. Nothing else grows with the number of layers where everything that can be is on NVMe."""
    blocks = [block for segment in segments for block in segment.blocks]
    num_chunks = sum(len(block.record.fields) * -(-block.num_elements // CHUNK_ELEMENTS) for block in blocks)
    num_recorded = min(workload.num_micro_batches, RECORDED_MICRO_BATCHES)
    layer_bytes = workload.num_micro_batches * _UNIT_BYTES + num_recorded * _RECORDED_BYTES
    return num_chunks * _CHUNK_BYTES + layer_bytes * num_layers


def _resident_bytes(spec: ModelSpec, placement: Placement) -> int:
    weights = sum(spec.segments[index].own_bytes for index in placement.resident_weights)
    return weights + sum(spec.segments[index].state_bytes for index in placement.resident_states)


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
