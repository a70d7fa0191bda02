"""The weights of one generation, decoded from the store's records, in the order of the blocks.

Memory is one group of elements, whatever the model's size. Invariant: in the store's compute dtype the values are the
generation's, bit for bit; in any other dtype they are the fp32 master weights, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ratel_cli import _native
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import join
from ratel_cli.io.views import view_field
from ratel_cli.model.import_weights import WEIGHT_GROUP_ELEMENTS, overlaps
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Consecutive elements of one flattened parameter. Valid only until the next slice is requested."""

    name: str
    start: int
    """The index of the first element in the flattened parameter."""
    values: torch.Tensor
    """Shape `[elements]`."""


def stored_weights(
    spec: ModelSpec,
    generation: Generation,
    pool: BufferPool,
    dtype: DtypeName,
    *,
    group_elements: int = WEIGHT_GROUP_ELEMENTS,
    progress: Callable[[], None] = lambda: None,
) -> Generator[ParameterSlice, None, None]:
    """Yield every parameter in `dtype`, in one or more slices. Close the generator if it is not exhausted.

    `progress` is called before each group is read. Raises IntegrityFailure if a record is damaged, DoesNotFit if the
    pool has no memory for a group.
    """
    stored = generation.layout.dtype
    group_elements = min(group_elements, max(spec.block_elements))
    sizes = {name: generation.layout.field(name).bytes_per_element for name in fields_for(stored, dtype)}
    with ExitStack() as resources:
        memories = {
            name: resources.enter_context(
                pool.lease(group_elements * num_bytes, f"stored weights, {name}", crosses_link=False)
            ).memory
            for name, num_bytes in (sizes | {"w32": 4} if len(sizes) > 1 else sizes).items()
        }
        for block in spec.blocks:
            for start in range(0, block.num_elements, group_elements):
                progress()
                stop = min(start + group_elements, block.num_elements)
                tickets = [
                    generation.read(block.index, name, start, stop, memories[name][: (stop - start) * num_bytes])
                    for name, num_bytes in sizes.items()
                ]
                join(tickets).wait()
                fields = {name: view_field(memory, name, stop - start) for name, memory in memories.items()}
                values = decode_weights(fields, dtype)
                for parameter, first, last in overlaps(block, start, stop):
                    part = values[first - start : last - start]
                    yield ParameterSlice(name=parameter.name, start=first - parameter.start, values=part)


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
