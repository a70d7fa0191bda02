"""The weights of one generation, decoded from the store's records, parameter by parameter in any order.

Memory is one group of elements, whatever the model's size. Invariant: in the store's compute dtype the values are the
generation's, bit for bit; in any other dtype they are the fp32 master weights, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ratel_cli.closing import Closing
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.files.import_weights import WEIGHT_GROUP_ELEMENTS
from ratel_cli.model.values.records import RecordBuffers, decode_weights, fields_for
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.rules import W32
from ratel_cli.sizes import DtypeName
from ratel_cli.store.joined import Readable
from ratel_cli.units import align_down, align_up


class StoredWeights(Closing):
    """Reads the parameters of one generation, in one dtype."""

    def __init__(
        self,
        spec: ModelSpec,
        generation: Readable,
        pool: BufferPool,
        dtype: DtypeName,
        *,
        group_elements: int = WEIGHT_GROUP_ELEMENTS,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`dtype`: of the parameters in the model's own one; others have theirs (`ModelSpec.exported_dtypes`). Lease
        the memory of a group from `pool`. `progress` is called before each group is read.

        Raises DoesNotFit if the pool has no memory for a group.
        """
        self._generation, self._progress = generation, progress
        self._group_elements = max(1, min(group_elements, max(spec.block_elements)))
        self._placed = {each.name: (block, each) for block in spec.blocks for each in block.parameters}
        self._dtypes = [spec.dtype_of(block, dtype) for block in spec.blocks]
        """By block: of its values."""
        self._read_fields = list(map(fields_for, (block.record for block in generation.blocks), self._dtypes))
        self._decoded_fields = [(*fields, *([W32] if len(fields) > 1 else [])) for fields in self._read_fields]
        needed = [field for fields in self._decoded_fields for field in fields]
        self._buffers = RecordBuffers(pool, needed, self._group_elements, "stored weights")

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._buffers.close()

    def slices(self, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Elements `start` to `stop` of a flattened parameter, in slices. Each is valid until the next is requested.

        Raises IntegrityFailure if a record is damaged.
        """
        block, parameter = self._placed[name]
        assert 0 <= start <= stop <= parameter.num_elements, (name, start, stop)
        position, end = parameter.start + start, parameter.start + stop
        for first, last in groups_of(self._generation, block, position, end, self._group_elements):
            values = self._read(block.index, first, last)
            yield values[max(position, first) - first : min(end, last) - first]

    def whole(self, name: str) -> torch.Tensor:
        """A whole parameter in its own shape, in memory of its own. Raises what `slices` raises."""
        _, parameter = self._placed[name]
        return self.range(name, 0, parameter.num_elements).reshape(parameter.shape)

    def range(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a flattened parameter, `[stop - start]`, in memory of their own.

        Raises what `slices` raises.
        """
        values, position = torch.empty(stop - start, dtype=VALUE_DTYPES[self._dtypes[self._placed[name][0].index]]), 0
        for part in self.slices(name, start, stop):
            values[position : position + len(part)] = part
            position += len(part)
        return values

    def _read(self, block: int, start: int, stop: int) -> torch.Tensor:
        self._progress()
        read = self._read_fields[block]
        self._buffers.read(self._generation, block, read, start, stop)
        tensors = self._buffers.tensors(self._decoded_fields[block], stop - start)
        return decode_weights(read, tensors, self._dtypes[block])


def groups_of(
    generation: Readable, block: BlockSpec, start: int, stop: int, group_elements: int
) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of a block in groups [first, last) that a generation reads: whole chunks."""
    unit = generation.chunk_elements
    while start < stop:
        first = align_down(start, unit)
        last = min(first + group_elements, align_up(stop, unit), block.num_elements)
        yield first, last
        start = last
