"""Bytes that forward leaves behind for backward: layers' inputs, and the operator outputs that are swapped.

For `planning.traffic`, `planning.capacity`, `planning.choose`. A unit is what one layer offloads for one micro-batch.
The first units of a step are spilled to NVMe, page by page; those that are still in a buffer when forward
ends are not read (engine/activations.py). Pure.

Invariant: for full micro-batches, `offload` counts what the engine moves, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ratel_cli.model.spec import BlockSpec, ModelSpec, ParameterSpec
from ratel_cli.planning.placement import SPILL_WINDOW_UNITS, StateBytes, Workload
from ratel_cli.sizes import LOGITS_CHUNK_BYTES, PACKED_ALIGNMENT, PAGE_BYTES
from ratel_cli.units import align_up

_ACTIVE_EXPERTS = 8
"""Of a stack of experts, those that a token visits: the most that models in use choose."""
_WIDTHS_OF_VECTORS = 12
"""Norms, residuals, rotations and attention, in hidden sizes per token."""
_LOGITS_COPIES = 4
"""Logits in fp32 and in the compute dtype, their softmax and their gradient (engine.loss)."""


class Units(NamedTuple):
    """Some that lie on NVMe, all of one size."""

    number: int
    unit_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.number * self.unit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedActivations:
    """All units of one step."""

    total_bytes: int
    """Inputs included."""
    host_bytes: int
    """Those that stay in host memory."""
    window_bytes: int
    """Buffers for those that do not."""
    num_units: int
    """Wherever they go."""
    written_units: tuple[Units, ...]
    """To NVMe in forward."""
    read_units: tuple[Units, ...]
    """From NVMe in backward."""
    largest_unit_bytes: int
    """Of one layer and one micro-batch."""
    gpu_bytes: int = 0
    """Those that stay in a GPU's memory."""

    @property
    def written_bytes(self) -> int:
        return sum(units.num_bytes for units in self.written_units)

    @property
    def read_bytes(self) -> int:
        return sum(units.num_bytes for units in self.read_units)

    @property
    def linked_bytes(self) -> int:
        """What a GPU sends down, and gets back."""
        return self.total_bytes - self.gpu_bytes

    @property
    def memory_bytes(self) -> int:
        """Of host memory."""
        return self.host_bytes + self.window_bytes


def offload(
    unit_bytes: list[int], *, num_micro_batches: int, spilled_units: int, gpu_units_from: int | None = None
) -> OffloadedActivations:
    """`unit_bytes` is for each layer; units go layer by layer, and within one micro-batch by micro-batch."""
    num_units = num_micro_batches * len(unit_bytes)
    assert gpu_units_from is None or spilled_units <= gpu_units_from <= num_units, (
        spilled_units,
        gpu_units_from,
        num_units,
    )
    full_layers, rest = divmod(spilled_units, num_micro_batches)
    spilled = [num_micro_batches] * full_layers + ([rest] if rest else [])
    raw_bytes = sum(number * size for number, size in zip(spilled, unit_bytes, strict=False))
    page_bytes = [align_up(size, PAGE_BYTES) for size in unit_bytes[: len(spilled)]]
    written = [Units(number, size) for number, size in zip(spilled, page_bytes, strict=True)]
    total_bytes = num_micro_batches * sum(unit_bytes)
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
        largest_unit_bytes=max(unit_bytes, default=0),
        gpu_bytes=gpu_bytes,
    )


def fewest_spilled_units(unit_bytes: list[int], *, num_micro_batches: int, available_bytes: int) -> int:
    """So that what stays in memory, and the buffers, fit; if they cannot, so that they take the least.

    The last layer's units stay. Within a layer each unit spilled leaves its bytes in memory the less; from layer to
    layer a larger one makes the buffers larger. Where nothing spilled does not fit, no window's worth of units does.
    """
    taken_bytes = _memory_by_spilled_layers(unit_bytes, num_micro_batches)
    fitting = next((layers for layers, num_bytes in enumerate(taken_bytes) if num_bytes <= available_bytes), None)
    if fitting is None:
        return num_micro_batches * taken_bytes.index(min(taken_bytes))
    if not fitting:
        return 0
    return num_micro_batches * fitting - (available_bytes - taken_bytes[fitting]) // unit_bytes[fitting - 1]


def input_bytes(spec: ModelSpec, state: StateBytes, *, tokens: int) -> int:
    """The input of a layer as it is offloaded: [tokens, hidden_size] in the compute dtype, padded as it is packed."""
    return align_up(tokens * spec.hidden_size * state.compute, PACKED_ALIGNMENT)


def block_activation_bytes(spec: ModelSpec, block: BlockSpec, state: StateBytes, *, tokens: int) -> int:
    """Of one block: every matrix leaves one output for each token, and there are vectors of the hidden size.

    For the papers' GPT that is 48 bytes per token and hidden size in 16 bit, where they count 34: what runs keeps
    some vectors in fp32. A Llama layer was measured to keep 43 to 46 (46 to 49 by this estimate).
    """
    width = sum(_output_width(parameter) for parameter in block.parameters if block.kind == "layer")
    return tokens * (width + _WIDTHS_OF_VECTORS * spec.hidden_size) * state.compute


def head_chunk_tokens(spec: ModelSpec, *, tokens: int) -> int:
    """Of a micro-batch of so many tokens, those whose logits exist at once."""
    return min(tokens, max(16, LOGITS_CHUNK_BYTES // (4 * spec.vocab_size)))


def logits_bytes(spec: ModelSpec, *, tokens: int) -> int:
    """Of one chunk, with all that is made of it."""
    return _LOGITS_COPIES * 4 * head_chunk_tokens(spec, tokens=tokens) * spec.vocab_size


def tied_bytes(spec: ModelSpec, state: StateBytes, workload: Workload) -> int:
    """What waits for the embedding's own gradient, where it is the head's too.

    The head's part of it, in fp32; and, in the compute dtype, its rows of the step's distinct tokens, once for each
    micro-batch.
    """
    if not spec.tied:
        return 0
    rows = workload.num_micro_batches * min(workload.tokens, spec.vocab_size)
    return 4 * spec.blocks[0].num_elements + rows * spec.hidden_size * state.compute


def passing_bytes(spec: ModelSpec, state: StateBytes, *, tokens: int, sequence_len: int) -> int:
    """Of all micro-batches: the current hidden states and their gradients; a mask for every row."""
    return 2 * tokens * spec.hidden_size * state.compute + tokens * sequence_len


def _without_newest(written: Sequence[Units], num_newest: int) -> Iterator[Units]:
    """All but so many of those that come last."""
    left = sum(units.number for units in written) - num_newest
    for units in written:
        if left > 0:
            yield Units(min(left, units.number), units.unit_bytes)
            left -= units.number


def _memory_by_spilled_layers(unit_bytes: list[int], num_micro_batches: int) -> list[int]:
    """Host memory when no layer is spilled, the first one, the first two, ... all but the last."""
    host_bytes, largest_bytes = num_micro_batches * sum(unit_bytes), 0
    taken_bytes = [host_bytes]
    for number, size in enumerate(unit_bytes[:-1], start=1):
        host_bytes -= num_micro_batches * size
        largest_bytes = max(largest_bytes, align_up(size, PAGE_BYTES))
        taken_bytes.append(host_bytes + min(SPILL_WINDOW_UNITS, number * num_micro_batches) * largest_bytes)
    return taken_bytes


def _output_width(parameter: ParameterSpec) -> int:
    *stacked, rows, columns = (1, 0, 0, *parameter.shape) if len(parameter.shape) < 2 else (1, *parameter.shape)
    return min(math.prod(stacked), _ACTIVE_EXPERTS) * max(rows, columns)
