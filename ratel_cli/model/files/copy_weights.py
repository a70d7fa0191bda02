"""Copies the master weights of a generation to a new store, where the optimizer begins anew.

Memory is one group of elements, whatever the model's size. Invariant: the masters are the source's, bit for bit; the
moments are zero.
"""

from __future__ import annotations

from collections.abc import Callable

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import join
from ratel_cli.model.files.import_weights import WEIGHT_GROUP_ELEMENTS
from ratel_cli.model.values.records import RecordBuffers, decode_weights, encode_record, fields_for
from ratel_cli.schedule.rules import W32
from ratel_cli.store.joined import Readable
from ratel_cli.store.shadow import Shadow


def copy_weights(
    source: Readable,
    target: Shadow,
    pool: BufferPool,
    *,
    progress: Callable[[int], None],
    group_elements: int = WEIGHT_GROUP_ELEMENTS,
) -> None:
    """Write every record of `target` with the weights of `source`. `progress` is called with the bytes of each group.

    The caller commits the copy. Raises IntegrityFailure if bytes of the source are damaged, DoesNotFit if the pool has
    no memory for a group.
    """
    assert source.blocks == target.generation.blocks
    group_elements = max(1, min(group_elements, max(block.num_elements for block in source.blocks)))
    fields = [W32, *(field for block in source.blocks for field in block.record.fields)]
    with RecordBuffers(pool, fields, group_elements, "copied weights") as buffers:
        for index, block in enumerate(source.blocks):
            read = fields_for(block.record, "float32")
            for start in range(0, block.num_elements, group_elements):
                stop = min(start + group_elements, block.num_elements)
                tensors = buffers.tensors((W32, *block.record.fields), stop - start)
                parts = {field: buffers.memory(field, stop - start) for field in block.record.fields}
                join([source.read(index, field.name, start, stop, parts[field]) for field in read]).wait()
                tensors[W32.name].copy_(decode_weights(read, tensors, "float32"))
                encode_record(block.record, tensors)
                buffers.clear_ends(block.record.fields, stop - start)
                join([target.write(index, field.name, start, stop, part) for field, part in parts.items()]).wait()
                progress(sum(map(len, parts.values())))
