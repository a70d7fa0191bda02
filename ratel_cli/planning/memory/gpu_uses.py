"""What the uses of a step's schedule take of a GPU's memory. Pure.

Each use takes the weights of its segment and a window for those of the next (engine/steps/weights.py), the
activations of a layer, and units (engine/cache/activations.py). Backward adds the gradient of one parameter at a time,
fp32 sums of a block's gradients if there are several micro-batches, and gradients that are still being downloaded
(engine/optimizer/leaving.py). What is the same for all uses of the step is counted once: hidden states of all
micro-batches, tokens and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.memory.gpu_gradients import (
    largest_elements,
    least_leaving_bytes,
    others_leaving_bytes,
    returned_bytes,
    summed_elements,
)
from ratel_cli.planning.memory.gpu_head import HeadMemory
from ratel_cli.planning.profile.activations import (
    LargestUnit,
    expanded_bytes,
    lookup_rows_bytes,
    segment_activation_bytes,
)
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.placement import (
    AfterGradient,
    UnitsOnGpu,
    Workload,
    bytes_ahead,
    looked_up,
    most_rows,
)
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import step_uses

_ROWS_BYTES = 16
"""Bytes of the distinct ids and of the index, for one token."""


class StaysOnGpu(NamedTuple):
    """What is on the GPU next to what every step has there."""

    sums: bool
    """The sums of a layer's gradients over micro-batches."""
    head: bool
    """The sums of the head's gradients over chunks."""
    window_bytes: int
    """Weights of the next block."""


class _Forward(NamedTuple):
    """What a use of forward takes, besides the units."""

    working_bytes: int
    """Peak if swapped tensors do not stay on the GPU."""
    held_bytes: int
    """Peak with the results of all products, whether they are swapped or not."""


class _Backward(NamedTuple):
    """What a use of backward takes, besides the units."""

    working_bytes: int
    """Backward itself, with what autograd has saved and not used yet."""
    replay_bytes: int
    """Recomputing, with what autograd saves by then."""
    replay_held_bytes: int
    """Recomputing, with all that autograd saves."""


class Uses:
    """What each use of the schedule takes."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: Workload,
        profile: ModelProfile,
        positions: Sequence[int],
        *,
        stays: StaysOnGpu,
    ) -> None:
        """`positions` of the schedule are looked at; the other uses take no more."""
        self._positions = positions
        self._spec = spec
        self._workload = workload
        self._profile = profile
        self._holds_sums = stays.sums
        self._holds_head = stays.head
        self._window_bytes = stays.window_bytes
        self._looked_up = looked_up(spec, most_rows(spec, workload))
        self._schedule = [self._looked_up if use.looks_up else use.segment for use in step_uses(spec.segments)]
        """The segments as the GPU gets them."""
        self._with_gradients = spec.embedding if spec.tied else self._looked_up
        """What of the embedding gets gradients: a head that borrows its matrix gives every row one."""
        self._head_position = spec.head.index
        self._hidden_bytes = workload.tokens * (spec.passed_bytes + spec.carried_bytes)
        """Hidden states or their gradients; what is carried besides, and its gradients."""
        rows_bytes = min(2, workload.num_micro_batches) * lookup_rows_bytes(spec, workload)
        self._waiting_bytes = rows_bytes + (spec.lent.sum_bytes if stays.head else 0)
        """The gradient of a matrix that the head borrows, and rows of it."""

    def peak_bytes(self, largest: LargestUnit, units: UnitsOnGpu | None) -> int:
        """The most that a use takes, units included. `units` as in `GpuMemory.needed_bytes`."""
        ahead_bytes = largest.num_bytes if units is None else min(largest.num_bytes, units.ahead_bytes)
        return max(
            self._forward_bytes(largest, units),
            self._head_bytes + largest.num_bytes,  # the last unit, which is being downloaded
            self._backward_bytes(largest) + ahead_bytes,
        )

    def units(self, largest: LargestUnit, most_bytes: int) -> UnitsOnGpu:
        """Return the memory for as much of units as fits into `most_bytes`."""
        unit_bytes = largest.num_bytes
        forward_bytes = 2 * unit_bytes
        if self._forward_bytes(largest, None) > most_bytes:
            forward_bytes = max(unit_bytes, most_bytes - self._forward.working_bytes)
        ahead_bytes = max(0, min(unit_bytes, most_bytes - self._backward_bytes(largest)))
        moments: dict[int, tuple[AfterGradient, ...]] = {}
        for number, layer in zip(self._profile.layers, self._spec.layers, strict=True):
            if number not in moments:
                costs = self._profile.profiles[number]
                made_bytes = self._gradient(layer, is_summed=self._workload.num_micro_batches > 1)
                peak_bytes = _working_bytes(costs, made_bytes)
                moments[number] = tuple(
                    AfterGradient(rest.after, ahead_bytes + peak_bytes - rest.num_bytes - made_bytes)
                    for rest in costs.rests
                    if peak_bytes > rest.num_bytes + made_bytes
                )
        return UnitsOnGpu(
            forward_bytes=forward_bytes,
            ahead_bytes=ahead_bytes,
            moments={index: moments[kind] for index, kind in enumerate(self._profile.layers, start=1)},
        )

    def _forward_bytes(self, largest: LargestUnit, units: UnitsOnGpu | None) -> int:
        """The most that forward takes with the unit that it makes and the one before."""
        working_bytes, held_bytes = self._forward
        whole_bytes = largest.num_bytes + min(working_bytes + largest.num_bytes, held_bytes + largest.unheld_bytes)
        return (
            whole_bytes
            if units is None
            else min(whole_bytes, working_bytes + max(largest.num_bytes, units.forward_bytes))
        )

    def _backward_bytes(self, largest: LargestUnit) -> int:
        """The most that backward takes with the unit in use. It has all of that from the beginning, but nothing except
        the layer's input and what autograd saves when it has recomputed the rest."""
        working_bytes, replay_bytes, replay_held_bytes = self._backward
        return max(
            working_bytes + self._input_bytes,
            min(replay_bytes + largest.num_bytes, replay_held_bytes + largest.unsaved_bytes),
        )

    @cached_property
    def _head_bytes(self) -> int:
        return self._batch_bytes + self._of_head()

    @cached_property
    def _forward(self) -> _Forward:
        """The most that a use of forward takes."""
        uses = [self._of_forward(each) for each in self._positions if each < self._head_position]
        return _Forward(*(self._batch_bytes + max(each) for each in zip(*uses, strict=True)))

    @cached_property
    def _backward(self) -> _Backward:
        """The most that a use of backward takes."""
        uses = [self._of_backward(each) for each in self._positions if each > self._head_position]
        if not uses:  # only the head is trained
            return _Backward(0, 0, 0)
        return _Backward(*(self._batch_bytes + max(each) for each in zip(*uses, strict=True)))

    @property
    def _input_bytes(self) -> int:
        return max((self._profile.profiles[kind].input_bytes for kind in set(self._profile.layers)), default=0)

    @property
    def _batch_bytes(self) -> int:
        """A mask, what a micro-batch has itself, and rows."""
        return self._workload.tokens * (self._workload.sequence_len + self._spec.batch_bytes + _ROWS_BYTES)

    def _window(self, position: int) -> int:
        """Weights of the use that is open, with what is made of them, and of the next one what the window takes."""
        opened = self._schedule[position]
        num_bytes = opened.compute_bytes + expanded_bytes(self._spec, opened)
        for segment in self._schedule[position + 1 :][:1]:
            num_bytes += bytes_ahead(segment, self._window_bytes)
        return num_bytes

    def _vectors_bytes(self, segment: Segment) -> int:
        """What the embedding has of one micro-batch."""
        return segment_activation_bytes(self._spec, segment, tokens=self._workload.micro_batch_tokens)

    def _costs(self, layer: Segment) -> LayerProfile:
        return self._profile.profiles[self._profile.layers[layer.index - 1]]

    def _of_forward(self, position: int) -> _Forward:
        segment = self._schedule[position]
        if position:
            costs = self._costs(segment)
            working_bytes, held_bytes = costs.forward_bytes, costs.forward_held_bytes
        else:
            working_bytes = held_bytes = self._vectors_bytes(segment)
        # The embedding's gradient is the last to be downloaded, and is held until the first unit is.
        leaving_bytes = least_leaving_bytes(self._with_gradients) if position < 2 else 0
        around_bytes = self._window(position) + leaving_bytes + self._hidden_bytes
        return _Forward(around_bytes + working_bytes, around_bytes + held_bytes)

    def _of_head(self) -> int:
        """Hidden states are inputs of micro-batches that are left, and gradients of those before."""
        open_bytes = self._window(self._head_position) + self._hidden_bytes
        head = HeadMemory(self._spec, self._workload, self._profile)
        return open_bytes + (head.summing_bytes(self._waiting_bytes) if self._holds_head else head.passing_bytes())

    @property
    def _left_by_head(self) -> int:
        """Bytes of the head's gradients that are still downloading at the first layer's backward."""
        head, lent = self._spec.head, self._spec.lent
        shared_bytes = sum(block.compute_bytes for block in head.unfinished)
        if not lent.blocks:
            return shared_bytes + (least_leaving_bytes(head) if self._holds_head else 0)
        # The last to leave is the sum of a borrowed matrix, which may have left chunk by chunk.
        return shared_bytes + (lent.sum_bytes if self._holds_head else head.gradient_bytes)

    def _gradient(self, segment: Segment, *, is_summed: bool) -> int:
        """One parameter's gradient as autograd makes it, and in another dtype. That of a stack of matrices is laid out
        anew. If the loss is scaled, the norm is that of an fp32 copy; a sum that is rounded serves as that copy. In a
        layer, a sum is rounded into the memory of the last micro-batch's gradient."""
        most_bytes = 0
        for block in segment.trained:
            is_stack = any(len(parameter.shape) > 2 for parameter in block.parameters)
            compute_bytes, gradient_bytes = block.dtype_bytes, block.gradient_dtype_bytes
            other_bytes = gradient_bytes if gradient_bytes != compute_bytes else 0
            copy_bytes = 4 if segment.scales_loss and not (is_summed and gradient_bytes < 4) else 0
            widths = ((1 + is_stack) * compute_bytes, compute_bytes + other_bytes, gradient_bytes + copy_bytes)
            most_bytes = max(most_bytes, largest_elements(block) * max(widths))
        return most_bytes

    def _matrix_norm_bytes(self, *, is_summed: bool) -> int:
        """The norm of an embedding's gradient that has rows only: it is laid out in the whole matrix, when the sum is
        rounded and gone. If the loss is scaled, both are in fp32, next to what was rounded."""
        embedding = self._spec.lookup_block
        if embedding is None or self._with_gradients is self._spec.embedding:
            return 0
        rows = self._with_gradients.parameters[0].num_elements
        others_bytes = self._with_gradients.sum_bytes - 4 * rows if is_summed else 0
        rounded_bytes = rows * (embedding.gradient_dtype_bytes + (4 if embedding.scales_loss else 0))
        norm_bytes = 4 if embedding.scales_loss else embedding.gradient_dtype_bytes
        return others_bytes + rounded_bytes + embedding.parameters[0].num_elements * norm_bytes

    def _of_backward(self, position: int) -> _Backward:
        segment = self._schedule[position]
        is_embedding = segment.index == 0
        is_summed = self._workload.num_micro_batches > 1 or (self._spec.tied and is_embedding)
        made_bytes = self._gradient(segment, is_summed=is_summed)
        replay_bytes = replay_held_bytes = begun_bytes = 0
        if is_embedding:  # its parameters get their gradients all at once, and leave one after another
            gradients_bytes = segment.updated_bytes + self._vectors_bytes(segment) // 2
            working_bytes = gradients_bytes
            if self._holds_head or not self._spec.tied:
                working_bytes = max(working_bytes, self._gradient(self._with_gradients, is_summed=is_summed))
            working_bytes += _shared_bytes(segment)
            if self._workload.num_micro_batches > 1:  # the sum of a borrowed matrix waits since the head
                waits = self._spec.tied
                begun_bytes = 4 * sum(
                    each.num_elements for each in segment.trained if not (waits and each.is_looked_up)
                )
        else:
            costs = self._costs(segment)
            replay_bytes, replay_held_bytes = costs.replay_bytes, costs.replay_held_bytes
            working_bytes = _working_bytes(costs, made_bytes) + _shared_bytes(segment)
        is_first = position == self._head_position + 1
        before_bytes = self._left_by_head if is_first else least_leaving_bytes(self._spec.segments[segment.index + 1])
        if is_embedding and self._spec.tied and not self._holds_head:
            working_bytes = max(
                gradients_bytes + self._waiting_bytes + begun_bytes,
                returned_bytes(self._spec.embedding),
                working_bytes,
            )
            passing_bytes = before_bytes
        elif is_embedding:
            working_bytes += self._waiting_bytes + begun_bytes
            working_bytes = max(working_bytes, self._matrix_norm_bytes(is_summed=is_summed))
            passing_bytes = max(before_bytes, others_leaving_bytes(self._with_gradients))
        elif self._holds_sums and is_summed:  # what leaves makes room for itself
            passing_bytes = segment.sum_bytes + before_bytes
        else:
            sum_bytes = 4 * sum(map(summed_elements, segment.trained)) if is_summed else 0
            own_bytes = least_leaving_bytes(segment)
            passing_bytes = max(before_bytes, own_bytes + sum_bytes)
        around_bytes = self._window(position) + passing_bytes + self._hidden_bytes
        return _Backward(around_bytes + working_bytes, around_bytes + replay_bytes, around_bytes + replay_held_bytes)


def _shared_bytes(segment: Segment) -> int:
    """Gradients of shared blocks: those that come from segments above, with one of them that is being added to; and
    those that go on to segments below."""
    begun_bytes = sum(block.compute_bytes for block in segment.begun)
    added_bytes = max((largest_elements(block) * block.dtype_bytes for block in segment.begun), default=0)
    return begun_bytes + added_bytes + sum(block.compute_bytes for block in segment.unfinished)


def _working_bytes(costs: LayerProfile, made_bytes: int) -> int:
    """The peak of a layer's backward, next to its input. `made_bytes`: one parameter's gradient."""
    return max(costs.backward_bytes, costs.making_bytes + made_bytes)
