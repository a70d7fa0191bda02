"""The weights of one generation, decoded from the store's records, in the order of the blocks.

`model.export_weights` writes them to files; `run.verify` compares an export with them. Memory is one group of elements,
whatever the model's size. Invariant: the values are the generation's, bit for bit in the store's compute dtype, and
the fp32 master rounded once to any other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from ratel_cli import _native
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.io.views import view_field
from ratel_cli.model.import_weights import PIECE_ELEMENTS, overlaps
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.layout import RecordLayout
from ratel_cli.store.store import Progress


class StoredGeneration(Protocol):
    """What is read: a generation that `store.store` gave, or the store itself for its current one."""

    @property
    def progress(self) -> Progress: ...
    @property
    def layout(self) -> RecordLayout: ...
    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of one parameter, flattened, from `start` on. Good until the next piece is asked for."""

    name: str
    start: int
    values: torch.Tensor


def stored_weights(
    spec: ModelSpec,
    generation: StoredGeneration,
    pool: BufferPool,
    dtype: DtypeName,
    *,
    group_elements: int = PIECE_ELEMENTS,
    progress: Callable[[], None] = lambda: None,
) -> Generator[Piece, None, None]:
    """Every parameter in `dtype`, in one or more pieces; to be closed if it is not used up.

    `progress` is called for every group that is read, before it.
    """
    stored = generation.layout.dtype
    group_elements = min(group_elements, max(block.num_elements for block in spec.blocks))
    sizes = {name: generation.layout.field(name).bytes_per_element for name in _fields_for(stored, dtype)}
    with ExitStack() as resources:
        memories = {
            name: resources.enter_context(pool.lease(group_elements * num_bytes, f"stored weights, {name}")).memory
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
                values = _decode(fields, dtype)
                for parameter, first, last in overlaps(block, start, stop):
                    part = values[first - start : last - start]
                    yield Piece(name=parameter.name, start=first - parameter.start, values=part)


def _fields_for(stored: DtypeName, dtype: DtypeName) -> tuple[str, ...]:
    """What must be read to have the weights in `dtype`: the compute copy if it is that, else the master."""
    match stored:
        case "bfloat16":
            return ("hi16",) if dtype == "bfloat16" else ("hi16", "lo16", "v32")
        case "float16":
            return ("w16",) if dtype == "float16" else ("w32",)
        case "float32":
            return ("w32",)


def _decode(fields: Mapping[str, torch.Tensor], dtype: DtypeName) -> torch.Tensor:
    if len(fields) == 1:
        return next(iter(fields.values())).to(DTYPES[dtype])
    _native.join_bfloat16(fields["hi16"], fields["lo16"], fields["v32"], fields["w32"])
    return fields["w32"].to(DTYPES[dtype])
