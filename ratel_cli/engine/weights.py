"""Brings one block's compute weights (P16) from the store to where its modules can use them.

`engine.step` opens a `BlockWeights` around each use of a block. Invariant: the compute dtype's field
of the current generation is what gets bound, whole and unchanged, and nothing refers to it after
`close`, so the buffer can go on to the next block.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import nn

from ratel_cli.engine.telemetry import StepClock
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.spec import BlockSpec
from ratel_cli.movement.buffers import BufferPool, Lease
from ratel_cli.movement.copies import FIELD_DTYPES, to_device, view
from ratel_cli.movement.store import Store


class WeightReader:
    """Opens blocks for compute on one device."""

    def __init__(
        self, model: DecoderModel, store: Store, pool: BufferPool, *, device: torch.device, clock: StepClock
    ) -> None:
        self._model = model
        self._store = store
        self._pool = pool
        self._device = device
        self._clock = clock
        self._dtype = FIELD_DTYPES[store.layout.compute_field.name]

    def open(self, block: BlockSpec) -> BlockWeights:
        """Read the block's compute weights and bind them."""
        field = self._store.layout.compute_field
        lease = self._pool.lease(block.num_elements * field.bytes_per_element, f"weights of {block.name}")
        with self._clock.during("nvme read"):
            self._store.read(block.index, field.name, 0, block.num_elements, lease.memory).wait()
        return BlockWeights(self._model, block, lease, self._dtype, self._device)


class BlockWeights:
    """One block's weights, bound to its modules until `close`."""

    def __init__(
        self, model: DecoderModel, block: BlockSpec, lease: Lease, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block = block
        self.lease = lease
        """Host memory with the compute field of the whole block, for the update that follows backward."""
        self._model = model
        self._open = True
        on_device = to_device(view(lease.memory, dtype), device)
        self.parameters: tuple[nn.Parameter, ...] = model.bind(block, on_device)

    def unbind(self) -> None:
        """Take the weights out of the modules; the lease stays."""
        if self._open:
            self._open = False
            self._model.release(self.block)
            self.parameters = ()

    def close(self) -> None:
        """Unbind and give the host memory back."""
        self.unbind()
        self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
