"""Import: from a source of weights into the store, a group of elements at a time.

`run.store` calls `import_weights` between `Store.create` and `Store.commit_import`. Invariant: the
fp32 master in the store equals the source bit for bit, moments are zero, gaps between parameters are
zero; and memory is bounded by the group, whatever the size of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Protocol

import torch

from ratel_cli import _native
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import join
from ratel_cli.io.views import view_field
from ratel_cli.model.spec import BlockSpec, ModelSpec, ParameterSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.layout import RecordLayout
from ratel_cli.store.store import Store

PIECE_ELEMENTS = 1 << 23
"""32 MiB of fp32: long enough for full disk speed, short enough to be forgotten in any memory budget."""


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or an initialiser."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of a parameter, flattened, in fp32."""
        ...


def import_weights(
    spec: ModelSpec,
    source: WeightSource,
    store: Store,
    pool: BufferPool,
    *,
    progress: Callable[[int], None],
    group_elements: int = PIECE_ELEMENTS,
) -> None:
    """Write every block's record. `progress` hears the number of parameters that each group added.

    The caller commits: until then the store has no valid manifest, so an import that was cut short is
    not mistaken for a model.
    """
    group_elements = min(group_elements, max(block.num_elements for block in spec.blocks))
    with ExitStack() as resources:
        memories = {
            name: resources.enter_context(pool.lease(group_elements * num_bytes, f"import, {name}")).memory
            for name, num_bytes in _field_bytes(store.layout).items()
        }
        for block in spec.blocks:
            for start in range(0, block.num_elements, group_elements):
                stop = min(start + group_elements, block.num_elements)
                fields = {name: view_field(memory, name, stop - start) for name, memory in memories.items()}
                num_parameters = _read_group(block, source, start, stop, fields["w32"])
                _encode(store.layout.dtype, fields)
                tickets = [
                    store.write(
                        block.index,
                        field.name,
                        start,
                        stop,
                        memories[field.name][: (stop - start) * field.bytes_per_element],
                    )
                    for field in store.layout.fields
                ]
                join(tickets).wait()
                progress(num_parameters)


def overlaps(block: BlockSpec, start: int, stop: int) -> list[tuple[ParameterSpec, int, int]]:
    """Parameters that have elements in a range of the block's flat array, and where these begin and end in it."""
    return [
        (parameter, max(parameter.start, start), min(parameter.stop, stop))
        for parameter in block.parameters
        if parameter.start < stop and start < parameter.stop
    ]


def _field_bytes(layout: RecordLayout) -> dict[str, int]:
    """Bytes per element of what a group needs: the record's fields, and the fp32 master they are made from."""
    return {field.name: field.bytes_per_element for field in layout.fields} | {"w32": 4}


def _read_group(block: BlockSpec, source: WeightSource, start: int, stop: int, master: torch.Tensor) -> int:
    """Fill `master` with the block's elements from `start` on, zero in the gaps. Returns how many are no gap."""
    master.zero_()
    num_parameters = 0
    for parameter, first, last in overlaps(block, start, stop):
        values = source.read(parameter.name, first - parameter.start, last - parameter.start)
        master[first - start : last - start] = values
        num_parameters += last - first
    return num_parameters


def _encode(dtype: DtypeName, fields: Mapping[str, torch.Tensor]) -> None:
    """Fill the other fields of the layout from the master in ``w32``. Moments begin at zero."""
    fields["m32"].zero_()
    fields["v32"].zero_()
    match dtype:
        case "bfloat16":
            _native.split_bfloat16(fields["w32"], fields["hi16"], fields["lo16"], fields["v32"])
        case "float16":
            fields["w16"].copy_(fields["w32"])
        case "float32":
            pass
