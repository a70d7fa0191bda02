"""Copies the fp32 master weights of a generation to a new store, where the optimizer begins anew.

Memory is one group of elements, whatever the model's size. Invariant: the masters are the source's, bit for bit; the
moments are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import join
from ratel_cli.io.views import view_field
from ratel_cli.model.import_weights import WEIGHT_GROUP_ELEMENTS, encode_record
from ratel_cli.model.stored_weights import decode_weights, fields_for
from ratel_cli.store.generation import Generation
from ratel_cli.store.shadow import Shadow


def copy_weights(
    source: Generation,
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
    layout = source.layout
    assert (layout, source.block_elements) == (target.generation.layout, target.generation.block_elements)
    group_elements = min(group_elements, max(source.block_elements))
    field_bytes = {field.name: field.bytes_per_element for field in layout.fields}
    read = fields_for(layout.dtype, "float32")
    with ExitStack() as resources:
        memories = {
            name: resources.enter_context(
                pool.lease(group_elements * num_bytes, f"copied weights, {name}", crosses_link=False)
            ).memory
            for name, num_bytes in (field_bytes | {"w32": 4}).items()
        }
        for block, num_elements in enumerate(source.block_elements):
            for start in range(0, num_elements, group_elements):
                stop = min(start + group_elements, num_elements)
                parts = {name: memories[name][: (stop - start) * size] for name, size in field_bytes.items()}
                join([source.read(block, name, start, stop, parts[name]) for name in read]).wait()
                fields = {name: view_field(memory, name, stop - start) for name, memory in memories.items()}
                decode_weights({name: fields[name] for name in {*read, "w32"}}, "float32")
                encode_record(layout.dtype, fields)
                join([target.write(block, name, start, stop, part) for name, part in parts.items()]).wait()
                progress(sum(map(len, parts.values())))
