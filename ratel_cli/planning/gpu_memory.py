"""GPU memory: what a step takes at its peak, and what the rest is used for. Pure.

The hidden states of all micro-batches and their gradients stay on the GPU. A step is followed use by use of the block
schedule (planning/placement.py). Each use takes the weights of its block and a window for those of the next
(engine/weights.py), the activations of a layer, and the unit that is downloaded or uploaded meanwhile
(engine/activations.py). Backward adds the gradient of one parameter at a time, fp32 sums of a block's gradients if
there are several micro-batches, and gradients that are still being downloaded (engine/optimizer/gradients.py).

Where a layer's sums are is for the caller to decide: all of them stay on the GPU during the layer's backward, or host
memory has them, and with the last micro-batch one comes to the GPU while another one leaves
(engine/optimizer/host_sums.py). So it is with the sums of the head's gradients over chunks of tokens, which are large
where the vocabulary is: if host memory has them, a chunk's gradient leaves before the next one is made, and the rounded
sum comes back once, for its norm.

Memory that is left over serves five purposes, in this order. The window takes as much of the next block as fits: what
it does not take is uploaded while nothing computes. The gradient of a tied head stays until that of the embedding is
there, unless units save more time in its memory: with many micro-batches it is large. More gradients of a layer may be
on their way at once, so that computing does not wait for the link. Units, then weights, of the last layers stay from
forward to backward: a byte of a unit saves the link one byte down and one up, a byte of weights saves one up. All of it
counts as if it were there all the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.activations import LargestUnit, tied_bytes, tied_rows_bytes
from ratel_cli.planning.gpu_gradients import (
    largest_elements,
    least_leaving_bytes,
    others_leaving_bytes,
    returned_bytes,
    summed_elements,
)
from ratel_cli.planning.gpu_head import HeadMemory, vectors_bytes
from ratel_cli.planning.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.placement import (
    Placement,
    StateBytes,
    Workload,
    block_schedule,
    elements_ahead,
    looked_up_block,
    most_rows,
)
from ratel_cli.units import MIB

_WORKSPACE_BYTES = 256 * MIB
"""cuBLAS takes 32 MiB for each of its handles; forward, backward and products with a bias have their own."""

_IDS_BYTES = 40
"""Token, target and position of every token, which stay on the GPU; the distinct tokens, and the row of each token."""

_ROTARY_BYTES = 512
"""Tables for every token and heads of 128 elements in 16 bit, which stay too, where no parameters give positions."""

_RESIDENT_SHARE = 0.9
"""The share of the memory left over that is used. What stays for long between what comes and goes leaves gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResident:
    """What stays on the GPU from forward to backward: parts of a `Placement`."""

    units_from: int
    """The first unit that stays, in forward order; the number of all units if none stays."""
    weights: frozenset[int]
    """Layers whose compute weights stay."""
    window_bytes: int
    """Memory for weights of the next block while one computes."""
    holds_sums: bool
    """Whether the sums of a layer's gradients stay during its backward; true where there are none."""
    leaving_bytes: int
    """Memory for gradients until their downloads have ended."""
    holds_tied: bool
    """Whether a tied head's gradient stays until the embedding's is there."""


class GpuMemory:
    """The memory that the steps of one model and workload take on a GPU."""

    def __init__(self, spec: ModelSpec, state: StateBytes, workload: Workload, profile: ModelProfile) -> None:
        """`profile` is that of one micro-batch of `workload`."""
        self._spec = spec
        self._state = state
        self._workload = workload
        self._profile = profile
        self._layers_leaving_bytes = max(least_leaving_bytes(block, state.gradient) for block in spec.blocks[1:-1])
        blocks = {*spec.blocks, looked_up_block(spec, most_rows(spec, workload))}
        ends = {parameter.start for block in blocks for parameter in block.parameters}
        ends.update(block.num_elements for block in blocks)
        self._windows = sorted(state.compute * number for number in ends)
        """Bytes of all windows that differ: some or all parameters of a block."""
        self._known_uses: dict[_Held, _Uses] = {}
        self._tied_bytes = tied_bytes(spec, state, workload)

    def needed_bytes(
        self,
        largest: LargestUnit,
        *,
        holds_sums: bool = False,
        holds_head: bool = True,
        window_bytes: int = 0,
    ) -> int:
        """The most that a step takes. `holds_sums`: the sums of a layer's gradients are on the GPU; `holds_head`: those
        of the head's. `window_bytes`: what weights of the next block may take while one computes.

        Two units count: one is in use or being downloaded, one is being offloaded or uploaded. Of the one in use in
        backward, what autograd saves counts as such; but all of it is there from the beginning.
        """
        uses = self._uses(_Held(holds_sums, holds_head, window_bytes))
        return GPU_CONTEXT_BYTES + _WORKSPACE_BYTES + uses.peak_bytes(largest)

    def takes_no_more_than(self, other: GpuMemory, *, counted_bytes: int, holds_head: Sequence[bool]) -> bool:
        """True if a step takes at most what one of `other` takes, with every window and whatever is swapped. Only their
        heads differ. `counted_bytes`: the most of a unit that autograd saves, which counts as such in backward.
        `holds_head`: what `needed_bytes` may be asked about."""

        def takes_no_more(uses: _Uses, others: _Uses) -> bool:
            in_backward_bytes = uses.backward.working_bytes - counted_bytes
            return uses.head_bytes <= max(others.head_bytes, uses.forward_bytes, in_backward_bytes)

        keys = itertools.starmap(_Held, itertools.product((False, True), holds_head, self._windows))
        return all(takes_no_more(self._uses(key), other._uses(key)) for key in keys)

    def choices(
        self, unit_bytes: Sequence[int], largest: LargestUnit, *, limit_bytes: int, holds_head: bool = True
    ) -> list[GpuResident]:
        """What can stay on the GPU in `limit_bytes`: with the sums of a layer's gradients, if they fit, and without;
        and each of these without a tied head's gradient, whose memory units may need more. `unit_bytes` is for each
        layer. `holds_head` as in `needed_bytes`."""

        def resident(*, holds_sums: bool, may_hold_tied: bool = True) -> GpuResident:
            return self.resident(
                unit_bytes,
                largest,
                limit_bytes=limit_bytes,
                holds_sums=holds_sums,
                holds_head=holds_head,
                may_hold_tied=may_hold_tied,
            )

        found = []
        if self.needed_bytes(largest, holds_sums=True, holds_head=holds_head) <= limit_bytes:
            found.append(resident(holds_sums=True))
        if not found or self._workload.num_micro_batches > 1:
            found.append(resident(holds_sums=False))
        away = [resident(holds_sums=each.holds_sums, may_hold_tied=False) for each in found if each.holds_tied]
        return found + away

    def resident(
        self,
        unit_bytes: Sequence[int],
        largest: LargestUnit,
        *,
        limit_bytes: int,
        holds_sums: bool,
        holds_head: bool = True,
        may_hold_tied: bool = True,
    ) -> GpuResident:
        """What is best left on the GPU in the memory that `limit_bytes` leaves; `unit_bytes` is for each layer.

        The first unit never stays: the gradients that the step before downloads last are held until the first unit
        is downloaded (engine/device/gpu.py).
        """
        window_bytes, taken_bytes = 0, 0
        for window_bytes in reversed(self._windows):
            taken_bytes = self.needed_bytes(
                largest, holds_sums=holds_sums, holds_head=holds_head, window_bytes=window_bytes
            )
            if taken_bytes <= limit_bytes:
                break
        available_bytes = int(_RESIDENT_SHARE * max(0, limit_bytes - taken_bytes))
        holds_tied = may_hold_tied and holds_head and 0 < self._tied_bytes <= available_bytes
        available_bytes -= self._tied_bytes if holds_tied else 0
        least_bytes = self._layers_leaving_bytes
        layer_bytes = max(block.num_elements for block in self._spec.blocks[1:-1]) * self._state.gradient
        more_bytes = min(available_bytes, max(0, layer_bytes - least_bytes))
        available_bytes -= more_bytes
        num_micro_batches = self._workload.num_micro_batches
        units_from = num_micro_batches * len(unit_bytes)
        for size in reversed(unit_bytes):
            fitting = min(num_micro_batches, available_bytes // size)
            units_from -= fitting
            available_bytes -= fitting * size
            if fitting < num_micro_batches:
                break
        weights = []
        for block in reversed(self._spec.blocks[1:-1]):
            available_bytes -= block.num_elements * self._state.compute
            if available_bytes < 0:
                break
            weights.append(block.index)
        return GpuResident(
            units_from=max(1, units_from),
            weights=frozenset(weights),
            window_bytes=window_bytes,
            holds_sums=holds_sums,
            leaving_bytes=least_bytes + more_bytes,
            holds_tied=holds_tied,
        )

    def resident_bytes(self, placement: Placement) -> int:
        """What stays that `needed_bytes` never counts: weights, a tied head's gradient, gradients on their way."""
        weight_bytes = weight_bytes_of(self._spec, self._state, placement.gpu_weights)
        tied = self._tied_bytes if placement.gpu_holds_tied else 0
        return weight_bytes + tied + max(0, placement.gpu_leaving_bytes - self._layers_leaving_bytes)

    def _uses(self, key: _Held) -> _Uses:
        if key not in self._known_uses:
            self._known_uses[key] = _Uses(
                self._spec,
                self._state,
                self._workload,
                self._profile,
                self._differing_positions,
                held=key,
            )
        return self._known_uses[key]

    @cached_property
    def _differing_positions(self) -> tuple[int, ...]:
        """Positions of the block schedule without those of uses that take what an earlier one takes: between layers
        that are alike, with the same costs, all uses do."""
        kinds: dict[object, int] = {}
        kind_of = {}
        for block in self._spec.blocks:
            shapes = tuple((parameter.start, parameter.shape) for parameter in block.parameters)
            costs = self._profile.layers[block.index - 1] if block.kind == "layer" else None
            kind_of[block.index] = kinds.setdefault((block.kind, shapes, costs), len(kinds))
        schedule = block_schedule(self._spec)
        first: dict[object, int] = {}
        for position, use in enumerate(schedule):
            around = tuple(kind_of[each.block.index] for each in schedule[max(0, position - 1) : position + 2])
            first.setdefault((use.stage, min(position, 2), around), position)
        return tuple(first.values())


def weight_bytes_of(spec: ModelSpec, state: StateBytes, blocks: Collection[int]) -> int:
    """The compute weights of these blocks."""
    return sum(block.num_elements for block in spec.blocks if block.index in blocks) * state.compute


class _Held(NamedTuple):
    """What is on the GPU next to what every step has there."""

    sums: bool
    """The sums of a layer's gradients over micro-batches."""
    head: bool
    """The sums of the head's gradients over chunks."""
    window_bytes: int
    """Weights of the next block."""


class _Backward(NamedTuple):
    """What a use of backward takes, besides the units."""

    working_bytes: int
    """Backward itself, with what autograd has saved and not used yet."""
    replay_bytes: int
    """Recomputing, with what autograd saves by then."""
    replay_held_bytes: int
    """Recomputing, with all that autograd saves."""


class _Uses:
    """What each use of the block schedule takes."""

    def __init__(
        self,
        spec: ModelSpec,
        state: StateBytes,
        workload: Workload,
        profile: ModelProfile,
        positions: Sequence[int],
        *,
        held: _Held,
    ) -> None:
        """`positions` of the schedule are looked at; the other uses take no more."""
        self._positions = positions
        self._spec = spec
        self._state = state
        self._workload = workload
        self._profile = profile
        self._holds_sums = held.sums
        self._holds_head = held.head
        self._window_elements = held.window_bytes // state.compute
        self._looked_up = looked_up_block(spec, most_rows(spec, workload))
        self._schedule = [self._looked_up if use.looks_up else use.block for use in block_schedule(spec)]
        """The blocks as the GPU gets them."""
        self._gradient_block = spec.blocks[0] if spec.tied else self._looked_up
        """What the embedding's gradient has when it leaves: a tied head gives every row one."""
        self._head_position = len(spec.blocks) - 1
        self._first_of_backward = self._head_position + (2 if spec.tied else 1)
        """A tied embedding is open together with the head."""
        self._hidden_bytes = workload.tokens * spec.hidden_size * state.compute
        self._tied_elements = spec.blocks[0].num_elements if spec.tied else 0
        rows_bytes = min(2, workload.num_micro_batches) * tied_rows_bytes(spec, state, workload)
        self._waiting_bytes = rows_bytes + (4 * self._tied_elements if held.head else 0)

    def peak_bytes(self, largest: LargestUnit) -> int:
        """The most that a use takes, units included."""
        backward = self.backward
        own_bytes = max(
            max(self.forward_bytes, self.head_bytes) + largest.num_bytes,
            backward.working_bytes + largest.unsaved_bytes,
            min(backward.replay_bytes + largest.num_bytes, backward.replay_held_bytes + largest.unsaved_bytes),
        )
        return own_bytes + largest.num_bytes

    @cached_property
    def head_bytes(self) -> int:
        """What the head takes, units left out."""
        return self._batch_bytes + self._head()

    @cached_property
    def forward_bytes(self) -> int:
        """The most that a use of forward takes, units left out."""
        return self._batch_bytes + max(self._forward(each) for each in self._positions if each < self._head_position)

    @cached_property
    def backward(self) -> _Backward:
        """The most that a use of backward takes."""
        uses = [self._backward(each) for each in self._positions if each >= self._first_of_backward]
        return _Backward(*(self._batch_bytes + max(each) for each in zip(*uses, strict=True)))

    @property
    def _batch_bytes(self) -> int:
        matrices = sum(len(parameter.shape) > 1 for parameter in self._spec.blocks[0].parameters)
        bytes_per_token = self._workload.sequence_len + _IDS_BYTES + (_ROTARY_BYTES if matrices == 1 else 0)
        return self._workload.tokens * bytes_per_token

    def _window(self, position: int, *, num_open: int = 1) -> int:
        """Weights of the uses that are open, and of the next one what the window takes."""
        num_elements = sum(block.num_elements for block in self._schedule[position : position + num_open])
        for block in self._schedule[position + num_open :][:1]:
            num_elements += elements_ahead(block, self._window_elements)
        return self._state.compute * num_elements

    def _vectors_bytes(self, block: BlockSpec) -> int:
        return vectors_bytes(self._spec, block, self._state, self._workload)

    def _costs(self, block: BlockSpec) -> LayerProfile:
        return self._profile.profiles[self._profile.layers[block.index - 1]]

    def _forward(self, position: int) -> int:
        block = self._schedule[position]
        working_bytes = self._costs(block).forward_bytes if position else self._vectors_bytes(block)
        # The embedding's gradient is the last to be downloaded, and is held until the first unit is.
        leaving_bytes = least_leaving_bytes(self._gradient_block, self._state.gradient) if position < 2 else 0
        return self._window(position) + leaving_bytes + self._hidden_bytes + working_bytes

    def _head(self) -> int:
        open_bytes = (
            self._window(self._head_position, num_open=2 if self._spec.tied else 1)
            + self._hidden_bytes  # inputs of micro-batches that are left, and gradients of those before
            - self._hidden_bytes // self._workload.num_micro_batches  # of the two units that always count, none is in
            # use; each has at least an input
        )
        head = HeadMemory(self._spec, self._state, self._workload)
        return open_bytes + (head.summing_bytes(self._waiting_bytes) if self._holds_head else head.passing_bytes())

    def _gradient(self, block: BlockSpec, *, is_summed: bool) -> int:
        """One parameter's gradient as autograd makes it, and in another dtype. That of a stack of matrices is laid out
        anew. If the loss is scaled, the norm is that of an fp32 copy; a sum that is rounded serves as that copy. In a
        layer, a sum is rounded into the memory of the last micro-batch's gradient."""
        is_stack = any(len(parameter.shape) > 2 for parameter in block.parameters)
        other_bytes = self._state.gradient if self._state.gradient != self._state.compute else 0
        copy_bytes = 4 if self._state.scales_loss and not (is_summed and self._state.gradient < 4) else 0
        widths = (
            (1 + is_stack) * self._state.compute,
            self._state.compute + other_bytes,
            self._state.gradient + copy_bytes,
        )
        return largest_elements(block) * max(widths)

    def _matrix_norm_bytes(self, *, is_summed: bool) -> int:
        """The norm of an embedding's gradient that has rows only: it is laid out in the whole matrix, when the sum is
        rounded and gone. If the loss is scaled, both are in fp32, next to what was rounded."""
        embedding, rows = self._spec.blocks[0], self._gradient_block.parameters[0].num_elements
        if self._gradient_block is embedding:
            return 0
        others_bytes = 4 * (self._gradient_block.num_elements - rows) if is_summed else 0
        rounded_bytes = rows * (self._state.gradient + (4 if self._state.scales_loss else 0))
        norm_bytes = 4 if self._state.scales_loss else self._state.gradient
        return others_bytes + rounded_bytes + embedding.parameters[0].num_elements * norm_bytes

    def _backward(self, position: int) -> _Backward:
        block = self._schedule[position]
        is_embedding = position == len(self._schedule) - 1
        is_summed = self._workload.num_micro_batches > 1 or (self._spec.tied and is_embedding)
        made_bytes = self._gradient(block, is_summed=is_summed)
        replay_bytes = replay_held_bytes = 0
        if is_embedding:  # its parameters get their gradients all at once, and leave one after another
            gradients_bytes = block.num_elements * self._state.compute + self._vectors_bytes(block) // 2
            working_bytes = gradients_bytes
            if self._holds_head or not self._spec.tied:
                working_bytes = max(working_bytes, self._gradient(self._gradient_block, is_summed=is_summed))
        else:
            costs = self._costs(block)
            replay_bytes, replay_held_bytes = costs.replay_bytes, costs.replay_held_bytes
            working_bytes = max(costs.backward_bytes, costs.making_bytes + made_bytes)
        before_bytes = least_leaving_bytes(self._spec.blocks[block.index + 1], self._state.gradient)
        if position == self._first_of_backward and self._spec.tied:  # the last to leave is the tied sum
            before_bytes = 4 * self._spec.blocks[0].num_elements
        if position == self._first_of_backward and not self._holds_head:  # nothing large leaves after the last chunk
            before_bytes = self._spec.blocks[-1].num_elements * self._state.gradient if self._spec.tied else 0
        if is_embedding and self._spec.tied and not self._holds_head:
            working_bytes = max(
                gradients_bytes + self._waiting_bytes, returned_bytes(self._spec.blocks[0], self._state), working_bytes
            )
            passing_bytes = before_bytes
        elif is_embedding:
            working_bytes += self._waiting_bytes if self._spec.tied else 4 * block.num_elements if is_summed else 0
            working_bytes = max(working_bytes, self._matrix_norm_bytes(is_summed=is_summed))
            passing_bytes = max(before_bytes, others_leaving_bytes(self._gradient_block, self._state.gradient))
        elif self._holds_sums and is_summed:  # what leaves makes room for itself
            passing_bytes = 4 * block.num_elements + before_bytes
        else:
            sum_bytes = 4 * summed_elements(block) if is_summed else 0
            own_bytes = least_leaving_bytes(block, self._state.gradient)
            passing_bytes = max(before_bytes, own_bytes + sum_bytes)
        around_bytes = self._window(position) + passing_bytes + self._hidden_bytes
        return _Backward(around_bytes + working_bytes, around_bytes + replay_bytes, around_bytes + replay_held_bytes)
