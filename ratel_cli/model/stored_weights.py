"""The weights of one generation, decoded from the store's records, parameter by parameter in any order.

Memory is one group of elements, whatever the model's size. Invariant: in the store's compute dtype the values are the
generation's, bit for bit; in any other dtype they are the fp32 master weights, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import torch

from ratel_cli import _native
from ratel_cli.closing import Closing
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import join
from ratel_cli.io.views import view_field
from ratel_cli.model.import_weights import WEIGHT_GROUP_ELEMENTS
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.generation import Generation
from ratel_cli.units import align_down, align_up


class StoredWeights(Closing):
    """Reads the parameters of one generation, in one dtype."""

    def __init__(
        self,
        spec: ModelSpec,
        generation: Generation,
        pool: BufferPool,
        dtype: DtypeName,
        *,
        group_elements: int = WEIGHT_GROUP_ELEMENTS,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Lease the memory of a group from `pool`. `progress` is called before each group is read.

        Raises DoesNotFit if the pool has no memory for a group.
        """
        stored = generation.layout.dtype
        self.dtype = DTYPES[dtype]
        """The dtype of the values."""
        self._generation, self._dtype, self._progress = generation, dtype, progress
        self._group_elements = min(group_elements, max(spec.block_elements))
        self._placed = {each.name: (block, each) for block in spec.blocks for each in block.parameters}
        self._sizes = {name: generation.layout.field(name).bytes_per_element for name in fields_for(stored, dtype)}
        self._resources = ExitStack()
        with ExitStack() as leased:
            self._memories = {
                name: leased.enter_context(
                    pool.lease(self._group_elements * num_bytes, f"stored weights, {name}", crosses_link=False)
                ).memory
                for name, num_bytes in (self._sizes | {"w32": 4} if len(self._sizes) > 1 else self._sizes).items()
            }
            self._resources = leased.pop_all()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._memories = {}
        self._resources.close()

    def slices(self, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Elements `start` to `stop` of a flattened parameter, in slices. Each is valid until the next is requested.

        Raises IntegrityFailure if a record is damaged.
        """
        block, parameter = self._placed[name]
        assert 0 <= start <= stop <= parameter.num_elements, (name, start, stop)
        position, end = parameter.start + start, parameter.start + stop
        unit = self._generation.chunk_elements
        while position < end:
            first = align_down(position, unit)
            last = min(first + self._group_elements, align_up(end, unit), block.num_elements)
            values = self._read(block.index, first, last)
            yield values[position - first : min(end, last) - first]
            position = last

    def whole(self, name: str) -> torch.Tensor:
        """A whole parameter in its own shape, in memory of its own. Raises what `slices` raises."""
        _, parameter = self._placed[name]
        return self.range(name, 0, parameter.num_elements).reshape(parameter.shape)

    def range(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a flattened parameter, `[stop - start]`, in memory of their own.

        Raises what `slices` raises.
        """
        values, position = torch.empty(stop - start, dtype=self.dtype), 0
        for part in self.slices(name, start, stop):
            values[position : position + len(part)] = part
            position += len(part)
        return values

    def _read(self, block: int, start: int, stop: int) -> torch.Tensor:
        self._progress()
        tickets = [
            self._generation.read(block, name, start, stop, self._memories[name][: (stop - start) * num_bytes])
            for name, num_bytes in self._sizes.items()
        ]
        join(tickets).wait()
        fields = {name: view_field(memory, name, stop - start) for name, memory in self._memories.items()}
        return decode_weights(fields, self._dtype)


def fields_for(stored: DtypeName, dtype: DtypeName) -> tuple[str, ...]:
    """The fields to read for weights in `dtype`: the compute weights if they have it, else the master weights."""
    match stored:
        case "bfloat16":
            return ("hi16",) if dtype == "bfloat16" else ("hi16", "lo16", "v32")
        case "float16":
            return ("w16",) if dtype == "float16" else ("w32",)
        case "float32":
            return ("w32",)


def decode_weights(fields: Mapping[str, torch.Tensor], dtype: DtypeName) -> torch.Tensor:
    """The weights in `dtype`, shape `[elements]`, from the fields that `fields_for` names.

    Several fields are decoded into the field `w32`.
    """
    if len(fields) == 1:
        return next(iter(fields.values())).to(DTYPES[dtype])
    _native.join_bfloat16(fields["hi16"], fields["lo16"], fields["v32"], fields["w32"])
    return fields["w32"].to(DTYPES[dtype])
