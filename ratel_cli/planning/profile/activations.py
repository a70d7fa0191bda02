"""The bytes that forward leaves for backward: layers' inputs, and the operator outputs that are swapped. Pure.

A unit is what one layer offloads for one micro-batch. The first units of a step are spilled to NVMe, in whole pages.
Those that are still in a buffer when forward ends are not read back (engine/cache/activations.py).

Invariant: for full micro-batches, `offload` counts what the engine moves, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS, Workload, num_looked_up
from ratel_cli.schedule.blocks import ParameterSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import EXPANDING_BYTES, LOGITS_CHUNK_BYTES, PACKED_ALIGNMENT, PAGE_BYTES
from ratel_cli.units import align_up

_ACTIVE_EXPERTS = 8
"""Experts of a stack that a token visits: the most that models in use choose."""
_WIDTHS_OF_VECTORS = 12
"""Norms, residuals, rotations and attention, in hidden sizes per token."""
_LOGITS_COPIES = 3
"""The logarithms of the softmax in fp32, and gradients by them and by the logits (engine/replay/loss.py)."""


class SpilledUnits(NamedTuple):
    """A number of units on NVMe that all have one size."""

    number: int
    unit_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.number * self.unit_bytes


class LargestUnit(NamedTuple):
    """What a GPU needs to know of the units of a step. All layers count."""

    num_bytes: int
    """The most that one layer offloads for one micro-batch."""
    unsaved_bytes: int
    """The most of a unit that autograd does not save: what `LayerProfile.replay_held_bytes` leaves out."""
    unheld_bytes: int
    """The most of a unit that `LayerProfile.forward_held_bytes` leaves out."""


class ExposedUnits(NamedTuple):
    """Bytes of units that move over the link while nothing computes."""

    down_bytes: int
    up_bytes: int


NOT_EXPOSED = ExposedUnits(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedActivations:
    """What all units of one step take, and where."""

    total_bytes: int
    """All units, layers' inputs included."""
    host_bytes: int
    """Units that stay in host memory."""
    window_bytes: int
    """Buffers for the units that are spilled."""
    num_units: int
    """Units of the step, wherever they go."""
    written_units: tuple[SpilledUnits, ...]
    """Written to NVMe in forward."""
    read_units: tuple[SpilledUnits, ...]
    """Read from NVMe in backward."""
    largest_unit: LargestUnit
    gpu_bytes: int = 0
    """Units that stay in the GPU's memory."""
    exposed: ExposedUnits = NOT_EXPOSED
    """What of them moves while nothing computes, because the GPU has no memory for it earlier."""
    unit_bytes: tuple[int, ...] = ()
    """The size of a unit of each layer; empty where any byte may go anywhere."""

    @property
    def written_bytes(self) -> int:
        """Bytes written to NVMe in forward."""
        return sum(units.num_bytes for units in self.written_units)

    @property
    def read_bytes(self) -> int:
        """Bytes read from NVMe in backward."""
        return sum(units.num_bytes for units in self.read_units)

    @property
    def linked_bytes(self) -> int:
        """Bytes that the GPU sends to host memory, and gets back."""
        return self.total_bytes - self.gpu_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory."""
        return self.host_bytes + self.window_bytes

    def moved(self, share: float) -> OffloadedActivations:
        """What moves if micro-batches have this share of their tokens."""

        def part(units: Iterable[SpilledUnits]) -> tuple[SpilledUnits, ...]:
            return tuple(SpilledUnits(each.number, round(share * each.unit_bytes)) for each in units)

        return replace(
            self,
            total_bytes=round(share * self.total_bytes),
            gpu_bytes=round(share * self.gpu_bytes),
            written_units=part(self.written_units),
            read_units=part(self.read_units),
            exposed=ExposedUnits(*(round(share * each) for each in self.exposed)),
        )


NOTHING_OFFLOADED = OffloadedActivations(
    total_bytes=0,
    host_bytes=0,
    window_bytes=0,
    num_units=1,
    written_units=(),
    read_units=(),
    largest_unit=LargestUnit(0, 0, 0),
)
"""A step that offloads nothing. It counts one empty unit, because costs are divided by the number of units."""


def offload(
    unit_bytes: list[int],
    *,
    num_micro_batches: int,
    spilled_units: int,
    largest_unit: LargestUnit | None = None,
    gpu_units_from: int | None = None,
    exposed: ExposedUnits = NOT_EXPOSED,
) -> OffloadedActivations:
    """What one step offloads. `unit_bytes` has the size of a unit for each layer. `largest_unit`: what is known of the
    largest; None: its size. `exposed` as in `OffloadedActivations`.

    Units go layer by layer, and within a layer micro-batch by micro-batch. The first `spilled_units` go to NVMe; those
    from `gpu_units_from` on stay on the GPU.
    """
    num_units = num_micro_batches * len(unit_bytes)
    assert gpu_units_from is None or spilled_units <= gpu_units_from <= num_units
    full_layers, rest = divmod(spilled_units, num_micro_batches)
    spilled = [num_micro_batches] * full_layers + ([rest] if rest else [])
    raw_bytes = sum(number * size for number, size in zip(spilled, unit_bytes, strict=False))
    page_bytes = [align_up(size, PAGE_BYTES) for size in unit_bytes[: len(spilled)]]
    written = [SpilledUnits(number, size) for number, size in zip(spilled, page_bytes, strict=True)]
    total_bytes = num_micro_batches * sum(unit_bytes)
    largest_bytes = max(unit_bytes, default=0)
    gpu_bytes = 0
    if gpu_units_from is not None:
        layer, before = divmod(gpu_units_from, num_micro_batches)
        gpu_bytes = num_micro_batches * sum(unit_bytes[layer:]) - before * sum(unit_bytes[layer : layer + 1])
    return OffloadedActivations(
        total_bytes=total_bytes,
        host_bytes=total_bytes - raw_bytes - gpu_bytes,
        window_bytes=min(SPILL_WINDOW_UNITS, spilled_units) * max(page_bytes, default=0),
        num_units=num_units,
        written_units=tuple(written),
        read_units=tuple(_without_newest(written, SPILL_WINDOW_UNITS)),
        largest_unit=largest_unit or LargestUnit(largest_bytes, largest_bytes, largest_bytes),
        gpu_bytes=gpu_bytes,
        exposed=exposed,
        unit_bytes=tuple(unit_bytes),
    )


def offload_bytes(num_bytes: int, *, spilled_bytes: int, gpu_bytes: int = 0) -> OffloadedActivations:
    """What a step offloads if any byte may be spilled or stay on the GPU, as in cost models without units."""
    spilled = (SpilledUnits(spilled_bytes, 1),)
    return OffloadedActivations(
        total_bytes=num_bytes,
        host_bytes=num_bytes - spilled_bytes - gpu_bytes,
        window_bytes=0,
        num_units=max(1, num_bytes),
        written_units=spilled,
        read_units=spilled,
        largest_unit=LargestUnit(0, 0, 0),
        gpu_bytes=gpu_bytes,
    )


def fewest_spilled_units(
    unit_bytes: list[int], *, num_micro_batches: int, available_bytes: int, most_units: int | None = None
) -> int:
    """The fewest units to spill so that the others and the buffers fit into `available_bytes` of host memory.

    If they cannot fit, the number that takes the least memory. At most `most_units` are spilled, and never those of the
    last layer. Within a layer each spilled unit frees its bytes; from layer to layer, a larger unit makes the buffers
    larger. Where memory does not suffice for spilling nothing, it does not suffice for spilling less than a window's
    worth of units either.
    """
    spillable = num_micro_batches * (len(unit_bytes) - 1)
    most_units = spillable if most_units is None else min(most_units, spillable)
    choices = _memory_by_spilled_units(tuple(unit_bytes), num_micro_batches, most_units)
    layer, fitting = next(
        ((layer, each) for layer, each in enumerate(choices, start=-1) if each.memory_bytes <= available_bytes),
        (-1, min(choices, key=lambda each: each.memory_bytes)),
    )
    if layer < 0:
        return fitting.spilled_units
    return fitting.spilled_units - (available_bytes - fitting.memory_bytes) // unit_bytes[layer]


def input_bytes(spec: ModelSpec, *, tokens: int) -> int:
    """The input of a layer as it is offloaded: [tokens, hidden_size] in the compute dtype, padded as it is packed."""
    return align_up(tokens * spec.hidden_size * spec.dtype_bytes, PACKED_ALIGNMENT)


def segment_activation_bytes(spec: ModelSpec, segment: Segment, *, tokens: int) -> int:
    """Activations of one segment: one output of every matrix for each token, and vectors of the hidden size.

    For the papers' GPT that is 48 bytes per token and hidden size in 16 bit, where they count 34: what runs has some
    vectors in fp32. A Llama layer was measured to save 43 to 46 (46 to 49 by this estimate).
    """
    width = sum(map(output_width, segment.parameters)) if spec.is_layer(segment) else 0
    return tokens * (width + _WIDTHS_OF_VECTORS * spec.hidden_size) * spec.dtype_bytes


def expanded_bytes(spec: ModelSpec, segment: Segment) -> int:
    """The most that is made of a segment's weights while it computes, whatever the tokens: of quantised matrices, of
    what DoRA scales, and of stacks of experts with adapters."""
    return _quantised_bytes(spec, segment) + _scaled_bytes(segment) + _adapted_stack_bytes(spec, segment)


def _quantised_bytes(spec: ModelSpec, segment: Segment) -> int:
    """A quantised matrix, fp32 magnitudes with their codes, and what a group of elements takes on the way. One exists
    at a time, or all stacks of experts."""
    quantised = [each for each in segment.parameters if each.quantised_shape is not None]
    largest = max((each.num_computed for each in quantised), default=0)
    stacked = sum(each.num_computed for each in quantised if len(each.computed_shape) > 2)
    return max(largest, stacked) * spec.dtype_bytes + -(-largest // 8) + min(8 * largest, EXPANDING_BYTES)


def _scaled_bytes(segment: Segment) -> int:
    """What PEFT's DoRA makes of one matrix in forward: the product of its adapter in fp32, by an identity matrix of its
    inputs, then in the model's dtype, scaled, added to the matrix, and what its norm takes. One exists at a time."""
    shapes = {each.name: each.computed_shape for each in segment.parameters}
    most = 0
    for name in shapes:
        path, is_magnitude, _ = name.partition(".lora_magnitude_vector.")
        if is_magnitude:
            inputs, outputs = shapes[f"{path}.lora_A.default.weight"][1], shapes[name][0]
            most = max(most, 4 * inputs**2 + 4 * 4 * inputs * outputs)
    return most


def _adapted_stack_bytes(spec: ModelSpec, segment: Segment) -> int:
    """Stacks of experts with their adapters added, which autograd keeps from forward to backward, and the gradient of
    one of them."""
    stacks = [
        each.num_elements for each in segment.parameters if ".base_layer." in each.name and len(each.computed_shape) > 2
    ]
    return spec.dtype_bytes * (sum(stacks) + max(stacks, default=0))


def tokens_per_chunk(vocab_size: int, chunk_bytes: int = LOGITS_CHUNK_BYTES) -> int:
    """Number of tokens whose fp32 logits take `chunk_bytes`; at least 16."""
    return max(16, chunk_bytes // (4 * vocab_size))


def head_chunk_tokens(spec: ModelSpec, workload: Workload) -> int:
    """Tokens of a micro-batch whose logits exist at once."""
    return min(workload.chunk_tokens or tokens_per_chunk(spec.vocab_size), workload.micro_batch_tokens)


def logits_bytes(spec: ModelSpec, tokens: int) -> int:
    """The logits of this many tokens, with everything that is made of them."""
    return tokens * (spec.loss_bytes or _LOGITS_COPIES * 4 * spec.vocab_size)


def lookup_sum_bytes(spec: ModelSpec, workload: Workload) -> int:
    """Bytes that are held for the gradient of a matrix that the head borrows of the embedding; 0 if it borrows none.

    That is the head's part of the gradient in fp32, and in the compute dtype its rows of the step's distinct tokens,
    once for each micro-batch.
    """
    return spec.lent.sum_bytes + workload.num_micro_batches * lookup_rows_bytes(spec, workload)


def lookup_rows_bytes(spec: ModelSpec, workload: Workload) -> int:
    """One micro-batch's part of `lookup_sum_bytes`: the rows that the step may look up."""
    num_rows = min(num_looked_up(spec, workload.tokens), spec.num_rows) if spec.tied else 0
    return num_rows * spec.embedding_width * spec.dtype_bytes


def lookup_chunk_bytes(spec: ModelSpec, workload: Workload) -> int:
    """The fp32 sum of that gradient over the chunks of the head; 0 where there is one chunk."""
    return spec.lent.sum_bytes if head_chunk_tokens(spec, workload) < workload.micro_batch_tokens else 0


def passing_bytes(spec: ModelSpec, *, tokens: int, sequence_len: int) -> int:
    """Hidden states between two layers, what else later layers get, the gradients of both, of all micro-batches, and a
    mask for every row."""
    return 2 * tokens * spec.passed_bytes + tokens * sequence_len


def _without_newest(written: Sequence[SpilledUnits], num_newest: int) -> Iterator[SpilledUnits]:
    """All but the last `num_newest` units."""
    left = sum(units.number for units in written) - num_newest
    for units in written:
        if left > 0:
            yield SpilledUnits(min(left, units.number), units.unit_bytes)
            left -= units.number


class _SpillChoice(NamedTuple):
    spilled_units: int
    memory_bytes: int


@lru_cache(maxsize=1024)
def _memory_by_spilled_units(
    unit_bytes: tuple[int, ...], num_micro_batches: int, most_units: int
) -> list[_SpillChoice]:
    """Host memory when no layer is spilled, the first one, the first two, and so on up to `most_units`.

    A search asks for the same prefix at every level, hence the cache.
    """
    host_bytes, largest_bytes, spilled_units = num_micro_batches * sum(unit_bytes), 0, 0
    choices = [_SpillChoice(0, host_bytes)]
    for size in unit_bytes:
        number = min(num_micro_batches, most_units - spilled_units)
        if number <= 0:
            break
        spilled_units += number
        host_bytes -= number * size
        largest_bytes = max(largest_bytes, align_up(size, PAGE_BYTES))
        buffer_bytes = min(SPILL_WINDOW_UNITS, spilled_units) * largest_bytes
        choices.append(_SpillChoice(spilled_units, host_bytes + buffer_bytes))
    return choices


def output_width(parameter: ParameterSpec) -> int:
    """Elements of a token's output of this matrix; a stack of experts counts as often as a token visits one."""
    shape = parameter.computed_shape
    *stacked, rows, columns = (1, 0, 0, *shape) if len(shape) < 2 else (1, *shape)
    return min(math.prod(stacked), _ACTIVE_EXPERTS) * max(rows, columns)
