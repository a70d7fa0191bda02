"""What a step takes of host memory, as lifetimes over its uses. Pure.

Forward is overlapped with deferred updates; then gradients arrive, those of the head, of layers downwards, of the
embedding; then come the updates that are left. While a use is open, a step takes what overlaps there. Where a GPU
computes, activations and sums of gradients are in its memory (planning/memory/gpu_memory.py); here only what is
uploaded or downloaded counts.

Invariant: while a use is open, the engine's leases for weights, for gradients and their sums, for partial sums and for
groups take no more than that, however late updates are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Literal, NamedTuple

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.memory.gpu_gradients import largest_elements
from ratel_cli.planning.profile.activations import (
    expanded_bytes,
    head_chunk_tokens,
    logits_bytes,
    lookup_chunk_bytes,
    lookup_sum_bytes,
    segment_activation_bytes,
)
from ratel_cli.planning.profile.placement import Placement, Workload, gradient_bytes, looked_up
from ratel_cli.planning.time.network import RankPart
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.lifetimes import Lifetime, overlap, partial_sum_lifetimes, weight_lifetimes
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.slices import EXCHANGED_BEHIND
from ratel_cli.schedule.uses import Stage, step_uses
from ratel_cli.units import MIB

Purpose = Literal[
    "weights", "gradients", "held", "states", "sums", "partial sums", "rows", "exchange", "activations", "runtime"
]
"""What a step takes memory for. `held`: gradients that wait for their update and have not been asked for again.
`exchange`: gradients that several ranks exchange.
`states`: buffers of groups. `sums`: of the head's gradients. `partial sums`: of shared blocks. `rows`: of a matrix that
tokens are looked up in. `runtime`: torch's own."""
RUNTIME_BYTES = 128 * MIB
"""What torch takes at its first step, above all kernels' code (11 to 17 MiB for a model of next to nothing), what
imports leave in the heap (up to 30 MiB), what the trial of the layers keeps (18 MiB), and the gaps between what it
frees. With 135M parameters in bf16 and a plan that fills a limit of 1.1 GiB it was 109 MiB (2-core EPYC, 2026-11)."""


class SegmentMemory:
    """Memory of the segments that does not depend on the placement, computed once for all placements."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: Workload,
        *,
        on_gpu: bool,
        has_sums: bool,
        part: RankPart | None = None,
    ) -> None:
        """`part`: what this one of several ranks has of the model; None: all of it."""
        tokens = workload.micro_batch_tokens
        self.spec = spec
        self.own = spec if part is None else part.own
        self.num_ranks = 1 if part is None else part.num_ranks
        self.workload = workload
        self.on_gpu = on_gpu
        self.uses = step_uses(spec.segments)
        self.activations = [
            0 if on_gpu else segment_activation_bytes(spec, segment, tokens=tokens) for segment in spec.segments
        ]
        self.expanded = [0 if on_gpu else expanded_bytes(spec, segment) for segment in spec.segments]
        """Bytes that are made of the weights of each segment while it computes."""
        self.logits = 0 if on_gpu else logits_bytes(spec, head_chunk_tokens(spec, workload))
        self.lookup_sum = lookup_sum_bytes(spec, workload)
        """The head's gradient of a matrix that it borrows, until the embedding's is there. Counted even if a GPU holds
        it, since whether it does depends on what is offloaded."""
        self.lookup_chunk = lookup_chunk_bytes(spec, workload)
        self.is_summed = workload.num_micro_batches > 1
        self.has_sums = has_sums
        self._weights: dict[int, list[Lifetime[BlockSpec]]] = {}
        """Lifetimes of weights in one step, by how far reads run ahead."""
        self._making: dict[tuple[int, int], int] = {}
        """By segment and the bytes of its gradients."""

    def weight_lifetimes(self, ahead: int) -> list[Lifetime[BlockSpec]]:
        """Return the lifetimes of weights in one step. `ahead`: how many segments reads run ahead."""
        if ahead not in self._weights:
            self._weights[ahead] = weight_lifetimes(self.uses, ahead=ahead)
        return self._weights[ahead]

    def partial_bytes(self, block: BlockSpec) -> int:
        """The gradients of a shared block that all micro-batches have so far."""
        return self.workload.num_micro_batches * block.compute_bytes

    def making_bytes(self, segment: Segment, gradient_bytes: int) -> int:
        """The most that it takes to make a segment's gradients over all micro-batches; or the sums, their rounding and
        one norm.

        Where a GPU computes: the gradient that is downloaded (`gradient_bytes`), the sums that are here, and what is
        added to them.
        """
        key = segment.index, gradient_bytes
        if key not in self._making:
            self._making[key] = self._making_bytes(segment, gradient_bytes)
        return self._making[key]

    def _making_bytes(self, segment: Segment, gradient_bytes: int) -> int:
        is_head = segment is self.spec.head
        if self.on_gpu:
            is_summed = self.spec.is_layer(segment) and self.is_summed and self.has_sums
            return gradient_bytes + (segment.sum_bytes + segment.updated_bytes if is_summed else 0)
        is_summed = is_head or self.is_summed or (self.spec.tied and segment is self.spec.embedding)
        computing_bytes = segment.made_bytes + (segment.sum_bytes if is_summed else segment.gradient_bytes)
        if is_head:
            computing_bytes += self.lookup_chunk + Segment(segment.unfinished).sum_bytes
        rounded_bytes = sum(block.gradient_bytes for block in segment.trained if block.gradient_dtype_bytes < 4)
        summed_bytes = segment.sum_bytes + rounded_bytes if is_summed else segment.gradient_bytes
        norm_bytes = 4 * max(map(largest_elements, segment.trained), default=0)
        return max(computing_bytes, summed_bytes + norm_bytes)


class Taken(NamedTuple):
    """Bytes that a step takes from one position of its uses to another, both included."""

    purpose: Purpose
    num_bytes: int
    first: int
    last: int


class StepPart(NamedTuple):
    """A part of a step."""

    positions: range
    """Positions of its uses, and of what comes behind the last one."""
    taken: list[Taken]

    def bytes_for(self, *purposes: Purpose) -> list[int]:
        """What is taken for these purposes at each position."""
        start = self.positions.start
        lifetimes = [(each[1], each[2] - start, each[3] - start) for each in self.taken if each[0] in purposes]
        return overlap(lifetimes, len(self.positions))

    def number_for(self, purpose: Purpose) -> list[int]:
        """Return the number of live buffers for this purpose, by position."""
        counted = [each._replace(num_bytes=1) for each in self.taken if each.purpose == purpose]
        return StepPart(self.positions, counted).bytes_for(purpose)


class PlacedStep:
    """What one step takes under one placement.

    Behind the last use comes the turn to the next step; where the optimizer is separate, the update of each segment.
    """

    def __init__(self, memory: SegmentMemory, placement: Placement, updates: Sequence[Stage]) -> None:
        """`updates`: the stage in which each segment is updated."""
        spec = memory.spec
        self._memory = memory
        self._segments = spec.segments
        self._placement = placement
        self._updates = updates
        self._head = spec.head.index
        self._turn = len(memory.uses)
        self._backward = range(spec.first_trained, self._head + 1)
        """The segments that backward reaches. The last one opens it, and the first one ends it."""
        self._handed_over = [segment.index for segment in reversed(spec.segments) if segment.trained]
        """The segments that are updated, in the order of their gradients."""
        read = [
            weights
            for weights in memory.weight_lifetimes(placement.prefetch_blocks)
            if weights.of.segment not in placement.resident_weights
        ]
        self._weights = [Taken("weights", each.of.compute_bytes, each.issued, each.last) for each in read]
        self._reads: dict[int, list[Lifetime[BlockSpec]]] = defaultdict(list)
        """By block."""
        for each in read:
            self._reads[each.of.index].append(each)
        self._groups_bytes = placement.groups.buffer_bytes(memory.own.blocks)
        of_group = placement.groups.elements
        self._groups_bytes += max(
            block.host_working_bytes(of_group, on_gpu=memory.on_gpu) for block in memory.own.blocks
        )
        self._gradients = gradient_bytes(spec, placement.gpu_embedding_rows)
        self._is_exchanged = memory.num_ranks > 1
        self._updated = [each.gradient_bytes for each in memory.own.segments] if self._is_exchanged else self._gradients
        """Bytes of the gradients of each segment that this rank updates with."""
        self.held_bytes = [
            0 if stage == "backward" else num_bytes for num_bytes, stage in zip(self._updated, updates, strict=True)
        ]
        """Bytes of the gradients of each segment that are held until the update."""
        embedding = spec.lookup_block
        if embedding is not None and self._updated[0] != memory.own.embedding.gradient_bytes:
            num_spread = embedding.group_elements(of_group)  # the rows of one group's gradient
            self._groups_bytes += num_spread * embedding.gradient_dtype_bytes

    def parts(self) -> list[StepPart]:
        """Forward and the rest. Where all gradients are held, forward may go in two ways: if the step before was not
        clipped, it may have been updated in its own backward."""
        ways = [self._updates]
        if set(self._updates) == {"forward"}:
            ways.append(["backward"] * len(self._updates))
        return [self.backward(), *map(self.forward, ways)]

    def forward(self, updates: Sequence[Stage]) -> StepPart:
        """What the uses of forward take. `updates`: the stage in which each segment was updated, or is now."""
        placement, last = self._placement, self._head - 1
        taken = [*self._weights, Taken("runtime", RUNTIME_BYTES, 0, last), Taken("rows", self._rows_bytes, 0, 0)]
        for each in range(self._head):
            num_bytes = self._memory.activations[each] + self._memory.expanded[each]
            taken.append(Taken("activations", num_bytes, each, each))
        is_deferred, last_written = "forward" in updates, -1
        pending = self._handed_over[::-1][: placement.pending_updates] if "backward" in updates else []
        for index, num_bytes in enumerate(self._updated):
            issued = index - placement.prefetch_blocks
            if is_deferred:
                taken.append(Taken("held", self.held_bytes[index], 0, issued - 1))
            if updates[index] == "forward":  # it is updated when it is issued, and opens when it is updated
                taken.append(Taken("gradients", num_bytes, issued, index))
                taken += self._being_written(index)
            elif index in pending:  # it is read when it is written
                taken.append(Taken("gradients", num_bytes, 0, index))
                taken.append(Taken("weights", self._updated_bytes(index), 0, issued - 1))
            if updates[index] == "forward" or (index in pending and index in placement.resident_weights):
                last_written = last  # nothing waits for the last groups before the head is open
            elif index in pending:
                last_written = max(last_written, index)
        return StepPart(range(self._head), [*taken, Taken("states", self._groups_bytes, 0, last_written)])

    def backward(self) -> StepPart:
        """What the head takes, the uses of backward, and what comes behind them."""
        memory, head, last = self._memory, self._head, self._turn - 1
        reaches_embedding = 0 in self._backward
        end = self._turn + (len(self._segments) - 1 if self._is_separate else 0)
        taken = [*self._weights, Taken("runtime", RUNTIME_BYTES, head, end)]
        deferred = (index for index in range(head) if self._updates[index] == "forward")
        taken += chain.from_iterable(map(self._being_written, deferred))
        taken.append(Taken("activations", memory.logits, head, head))
        if reaches_embedding:
            taken.append(Taken("rows", self._rows_bytes, last - 1, last))
        taken += [
            Taken("partial sums", memory.partial_bytes(sums.of), sums.first, sums.last)
            for sums in partial_sum_lifetimes(memory.uses)
        ]
        # On a CPU, the sum of a matrix that the head borrows becomes that of the embedding, which is counted as making.
        taken.append(Taken("sums", memory.lookup_sum, head, last if memory.on_gpu else last - 1))
        taken += self._head_sums()
        behind = EXCHANGED_BEHIND if self._is_exchanged else 0
        if self._is_exchanged:
            taken += self._exchanged()
        for index in self._backward:
            num_bytes, arrives = self._updated[index], self._arrival(index)
            pending = self._written_at(index) + behind
            updated = end
            if self._is_separate:  # groups bring the weights with them; a gradient comes back whole
                pending, updated = min(pending, last), self._turn + index - 1
                taken.append(Taken("gradients", num_bytes, updated + 1, updated + 1))
            computing_bytes = 2 * memory.activations[index] + memory.expanded[index]
            taken.append(Taken("activations", computing_bytes, arrives, arrives))
            made_bytes = memory.making_bytes(self._segments[index], self._gradients[index])
            taken.append(Taken("gradients", made_bytes, arrives, arrives))
            taken.append(Taken("gradients", num_bytes, arrives + 1, pending))
            taken.append(Taken("weights", self._updated_bytes(index), arrives + 1, pending))
            taken.append(Taken("held", self.held_bytes[index], pending + 1, updated))
        if not self._is_separate:  # the next step has begun to read
            taken += [each._replace(first=end, last=end) for each in self._weights if each.first <= 0]
        # Where all gradients are held, it may still be speculated that nothing will be clipped.
        taken.append(Taken("states", self._groups_bytes, self._turn if self._is_separate else head, end))
        return StepPart(range(head, end + 1), taken)

    def _exchanged(self) -> Iterator[Taken]:
        """Whole gradients in fp32, from when they are made until they are exchanged; and what comes of one block from
        all ranks, with all rows of a matrix of which only some came from a GPU."""
        spec, own, last = self._memory.spec, self._memory.own, self._turn - 1
        most_received = 0
        for segment in spec.segments[self._backward.start :]:
            arrives = self._arrival(segment.index)
            yield Taken("exchange", segment.sum_bytes, arrives + 1, arrives + EXCHANGED_BEHIND)
            for block in segment.trained:
                received = 4 * self._memory.num_ranks * own.blocks[block.index].num_elements
                most_received = max(most_received, received)
        yield Taken("exchange", most_received, self._head, last + 1)
        if self._gradients[0] != spec.embedding.gradient_bytes:
            yield Taken("exchange", spec.embedding.sum_bytes, last, last + EXCHANGED_BEHIND)

    def _arrival(self, index: int) -> int:
        """The position at which backward is in a segment, which makes its gradients."""
        return 2 * self._head - index

    def _written_at(self, index: int) -> int:
        """The position from which a segment's update is not pending any more: by then `pending_updates` others have
        been handed over after it. One without an update counts as held no sooner than those before it in backward, for
        gradients are held in that order."""
        if index not in self._handed_over:
            before = [each for each in self._handed_over if each > index]
            return max([self._arrival(index), *map(self._written_at, before[-1:])])
        number = self._handed_over.index(index) + self._placement.pending_updates
        excess = number - len(self._handed_over)
        return self._turn + excess if excess >= 0 else self._arrival(self._handed_over[number])

    def _head_sums(self) -> Iterator[Taken]:
        """Sums of the head's gradients that a GPU has no memory for, and the gradient that is added to them: in the
        head; and of a matrix that it borrows, beyond `lookup_sum_bytes`, from then on."""
        memory, spec, head = self._memory, self._memory.spec, self._head
        if not memory.on_gpu or self._placement.gpu_holds_head:
            return
        if spec.tied:
            yield Taken("sums", spec.lent.updated_bytes, head, self._turn - 1)
            yield Taken("sums", memory.lookup_chunk, head, head)
        else:
            yield Taken("sums", spec.head.sum_bytes + spec.head.updated_bytes, head, head)

    def _being_written(self, index: int) -> Iterator[Taken]:
        """The weights of a segment whose update was deferred, when they are not in use any more: until a segment opens
        behind which as many groups have been updated as are written at once."""
        left, last = self._placement.groups.in_flight, index + 1
        for segment in self._segments[index + 1 : self._head]:
            left -= sum(-(-block.num_elements // self._placement.groups.elements) for block in segment.trained)
            if left < 0:
                break
            last = segment.index + 1
        for block in self._segments[index].trained:
            for closed, again in pairwise(self._reads[block.index][:2]):
                yield Taken("weights", block.compute_bytes, closed.last + 1, min(last, again.issued - 1))

    def _updated_bytes(self, index: int) -> int:
        """Weights that are updated, and written, where they lie."""
        return 0 if index in self._placement.resident_weights else self._segments[index].updated_bytes

    @property
    def _rows_bytes(self) -> int:
        """Rows of the embedding's matrix that are gathered here for a GPU that does not read them in place."""
        num_rows = self._placement.gpu_embedding_rows
        if num_rows is None:
            return 0
        blocks = looked_up(self._memory.spec, num_rows).blocks
        return sum(block.parameters[0].num_elements * block.dtype_bytes for block in blocks if block.is_looked_up)

    @property
    def _is_separate(self) -> bool:
        return self._updates[0] == "update"
