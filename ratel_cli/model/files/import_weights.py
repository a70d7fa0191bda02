"""Fills a store with master weights, of a source or of another store, one group of elements at a time.

An import runs between `Store.create` and `Store.commit_import`. Invariant: the fp32 master weights in the store equal
the source bit for bit, and weights without a master the source rounded to the nearest; moments and the gaps between
parameters are zero. A weight beyond the range of a block's float16 is refused. Memory is one group, whatever the size
of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import join
from ratel_cli.model.values.adapter_settings import base_name
from ratel_cli.model.values.finite import rounded
from ratel_cli.model.values.records import RecordBuffers, decode_weights, encode_record, fields_for
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec
from ratel_cli.schedule.rules import W32
from ratel_cli.store.joined import Readable
from ratel_cli.store.shadow import Shadow

WEIGHT_GROUP_ELEMENTS = 1 << 23
"""32 MiB in fp32: large enough for the drives' full speed, small enough for any memory limit."""


class WeightSource(Protocol):
    """Where initial weights come from: a checkpoint, or the model's own initialiser."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened parameter: shape `[stop - start]`, fp32."""


def import_weights(
    spec: ModelSpec,
    source: WeightSource,
    target: Shadow,
    pool: BufferPool,
    *,
    progress: Callable[[int], None],
    group_elements: int = WEIGHT_GROUP_ELEMENTS,
) -> None:
    """Write every block's record. `progress` is called with the number of parameters of each group that was written.

    The caller commits afterwards. Until then the store has no valid manifest, so nothing can mistake an unfinished
    import for a model. Raises what `source.read` and the store raise, BadInput for a weight that its block cannot hold,
    and DoesNotFit if the pool has no memory for a group.
    """

    def read(index: int, start: int, stop: int, buffers: RecordBuffers) -> int:
        masters = buffers.tensors((W32,), stop - start)[W32.name]
        return _read_group(spec.blocks[index], source, start, stop, masters)

    _fill(target, pool, read, purpose="import", progress=progress, group_elements=group_elements)


def copy_weights(
    source: Readable,
    target: Shadow,
    pool: BufferPool,
    *,
    progress: Callable[[int], None],
    group_elements: int = WEIGHT_GROUP_ELEMENTS,
) -> None:
    """Write every record of `target` with the master weights of `source`, bit for bit, and moments of zero: the
    optimizer begins anew. `progress` is called with the bytes of each group.

    The caller commits the copy. Raises IntegrityFailure if bytes of the source are damaged, DoesNotFit if the pool has
    no memory for a group.
    """
    assert source.blocks == target.generation.blocks

    def read(index: int, start: int, stop: int, buffers: RecordBuffers) -> int:
        record = source.blocks[index].record
        fields = fields_for(record, "float32")
        buffers.read(source, index, fields, start, stop)
        tensors = buffers.tensors((W32, *record.fields), stop - start)
        tensors[W32.name].copy_(decode_weights(fields, tensors, "float32"))
        return sum(field.num_bytes(stop - start, start) for field in record.fields)

    _fill(target, pool, read, purpose="copied weights", progress=progress, group_elements=group_elements)


def _fill(
    target: Shadow,
    pool: BufferPool,
    read: Callable[[int, int, int, RecordBuffers], int],
    *,
    purpose: str,
    progress: Callable[[int], None],
    group_elements: int,
) -> None:
    """Write every record of `target` from master weights, a group of elements at a time. `read` fills the masters of
    elements of a block, and returns how far that is, for `progress`."""
    blocks = target.generation.blocks
    group_elements = max(1, min(group_elements, max(block.num_elements for block in blocks)))
    fields = [W32, *(field for block in blocks for field in block.record.fields)]
    with RecordBuffers(pool, fields, group_elements, purpose) as buffers:
        for index, block in enumerate(blocks):
            for start in range(0, block.num_elements, group_elements):
                stop = min(start + group_elements, block.num_elements)
                amount = read(index, start, stop, buffers)
                encode_record(block.record, buffers.tensors((W32, *block.record.fields), stop - start))
                buffers.clear_ends(block.record.fields, stop - start)
                parts = {field: buffers.memory(field, stop - start, start) for field in block.record.fields}
                join([target.write(index, field.name, start, stop, part) for field, part in parts.items()]).wait()
                progress(amount)


def overlaps(block: BlockSpec, start: int, stop: int) -> list[tuple[ParameterSpec, int, int]]:
    """(parameter, first, last) for each parameter with elements in a range of the block's flat array.

    The parameter's elements inside the range are `first` to `last` of the flat array.
    """
    return [
        (parameter, max(parameter.start, start), min(parameter.stop, stop))
        for parameter in block.parameters
        if parameter.start < stop and start < parameter.stop
    ]


def _read_group(block: BlockSpec, source: WeightSource, start: int, stop: int, master: torch.Tensor) -> int:
    """Fill `master` with elements `start` to `stop` of the block, zero in gaps. Returns how many are parameters."""
    master.zero_()
    num_parameters = 0
    for parameter, first, last in overlaps(block, start, stop):
        offset = parameter.first - parameter.start
        values = source.read(parameter.name, first + offset, last + offset)
        if block.dtype == "float16":
            rounded(base_name(parameter.name), values, torch.float16)
        master[first - start : last - start] = values
        num_parameters += last - first
    return num_parameters
