"""What a store is filled from when a run begins with weights alone: those of a model, or of another store.

Invariant: the fp32 master weights in the store equal the source bit for bit, and weights without a master the source
rounded to the nearest; moments and the gaps between parameters are zero. A weight beyond the range of a block's float16
is refused. Memory is one group of elements, whatever the size of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.values.adapter_settings import base_name
from ratel_cli.model.values.finite import rounded
from ratel_cli.model.values.records import RecordBuffers, decode_weights, encode_record, fields_for
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec
from ratel_cli.schedule.rules import W32
from ratel_cli.store.fill import StatePart, StateSource
from ratel_cli.store.joined import Readable
from ratel_cli.store.layout import StoredBlock
from ratel_cli.store.manifest import Progress

WEIGHT_GROUP_ELEMENTS = 1 << 23
"""32 MiB in fp32: large enough for the drives' full speed, small enough for any memory limit."""


class WeightSource(Protocol):
    """Where initial weights come from: a checkpoint, or the model's own initialiser."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened parameter: shape `[stop - start]`, fp32."""


def imported_weights(
    spec: ModelSpec, source: WeightSource, progress: Progress, *, group_elements: int = WEIGHT_GROUP_ELEMENTS
) -> StateSource:
    """The weights of `source`, with moments of zero.

    Filling a store raises what `source.read` raises, and BadInput for a weight that its block cannot hold.
    """

    def read(index: int, start: int, stop: int, buffers: RecordBuffers) -> None:
        _read_group(spec.blocks[index], source, start, stop, buffers.tensors((W32,), stop - start)[W32.name])

    return _Encoded(read, progress, purpose="import", group_elements=group_elements)


def copied_weights(
    generation: Readable, progress: Progress, *, group_elements: int = WEIGHT_GROUP_ELEMENTS
) -> StateSource:
    """The master weights of another generation, bit for bit, with moments of zero: the optimizer begins anew."""

    def read(index: int, start: int, stop: int, buffers: RecordBuffers) -> None:
        record = generation.blocks[index].record
        fields = fields_for(record, "float32")
        buffers.read(generation, index, fields, start, stop)
        tensors = buffers.tensors((W32, *record.fields), stop - start)
        tensors[W32.name].copy_(decode_weights(fields, tensors, "float32"))

    return _Encoded(read, progress, purpose="copied weights", group_elements=group_elements)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Records made from master weights, a group of elements at a time."""

    read: Callable[[int, int, int, RecordBuffers], None]
    """Fills the masters of elements of a block."""
    progress: Progress
    purpose: str
    group_elements: int

    def parts(self, blocks: Sequence[tuple[int, StoredBlock]], pool: BufferPool) -> Generator[StatePart, None, None]:
        """See StateSource."""
        group_elements = max(1, min(self.group_elements, max(block.num_elements for _, block in blocks)))
        fields = [W32, *(field for _, block in blocks for field in block.record.fields)]
        with RecordBuffers(pool, fields, group_elements, self.purpose) as buffers:
            for index, block in blocks:
                for start in range(0, block.num_elements, group_elements):
                    stop = min(start + group_elements, block.num_elements)
                    self.read(index, start, stop, buffers)
                    encode_record(block.record, buffers.tensors((W32, *block.record.fields), stop - start))
                    buffers.clear_ends(block.record.fields, stop - start)
                    memories = {each.name: buffers.memory(each, stop - start, start) for each in block.record.fields}
                    yield StatePart(index, start, stop, memories)


def overlaps(block: BlockSpec, start: int, stop: int) -> list[tuple[ParameterSpec, int, int]]:
    """(parameter, first, last) for each parameter with elements in a range of the block's flat array.

    The parameter's elements inside the range are `first` to `last` of the flat array.
    """
    return [
        (parameter, max(parameter.start, start), min(parameter.stop, stop))
        for parameter in block.parameters
        if parameter.start < stop and start < parameter.stop
    ]


def _read_group(block: BlockSpec, source: WeightSource, start: int, stop: int, master: torch.Tensor) -> None:
    """Fill `master` with elements `start` to `stop` of the block, zero in gaps."""
    master.zero_()
    for parameter, first, last in overlaps(block, start, stop):
        offset = parameter.first - parameter.start
        values = source.read(parameter.name, first + offset, last + offset)
        if block.dtype == "float16":
            rounded(base_name(parameter.name), values, torch.float16)
        master[first - start : last - start] = values
