"""Where the sums of a block's gradients lie until they leave: on the compute device, or in the host memory of a GPU
(engine/optimizer/host_sums.py).

Invariant: contributions are added in fp32 (one alone stays as it is), in the order in which they come.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ratel_cli.closing import Closing
from ratel_cli.io.buffers import Lease
from ratel_cli.io.views import view
from ratel_cli.schedule.blocks import BlockSpec


class Accumulator(Closing):
    """The sums of one block's gradients, by the number of the parameter."""

    @abstractmethod
    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a contribution, in the parameter's shape, on the compute device."""

    def end_contribution(self) -> None:
        """All parameters have the contribution that comes at once. The next one may be made in its place."""

    def expect_last(self) -> None:
        """The last micro-batch comes: what is elsewhere begins to return to the compute device."""

    @abstractmethod
    def __contains__(self, index: int) -> bool:
        """Whether the parameter at `index` has a sum."""

    @abstractmethod
    def take(self, index: int) -> torch.Tensor | None:
        """End the sum of the parameter at `index`. Returns it, flat `[elements]`; None if there is none."""

    def reuse(self) -> None:
        """What `take` gave is gone: its memory is free."""


class DeviceSums(Accumulator):
    """On the compute device: each parameter takes memory of its own from its first contribution on, or has its place in
    one buffer."""

    def __init__(self, block: BlockSpec, *, dtype: torch.dtype, single: bool, lease: Lease | None = None) -> None:
        """`single`: each parameter gets one contribution, in `dtype`, and needs no fp32 sum. `lease`: where the CPU
        computes, a buffer of as many elements as the block has, of `dtype` or, without `single`, of fp32, which may be
        that of the result."""
        self._block = block
        self._lease = lease
        self._dtype = dtype if single else torch.float32
        self._single = single
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """The first contribution is the sum: itself if it is the only one, or a copy."""
        values = self._sums.get(index)
        if values is not None:
            assert not self._single, "a parameter got two gradients from a single micro-batch"
            values.add_(gradient.reshape(values.shape))
        elif self._lease is None:
            self._sums[index] = gradient.to(self._dtype, copy=not self._single).reshape(-1)
        else:
            place = self._block.parameters[index]
            values = view(self._lease.memory, self._dtype)[place.start : place.stop]
            self._sums[index] = values.copy_(gradient.reshape(values.shape))

    def __contains__(self, index: int) -> bool:
        return index in self._sums

    def take(self, index: int) -> torch.Tensor | None:
        """It is on the device."""
        return self._sums.pop(index, None)

    def put(self, index: int, values: torch.Tensor) -> None:
        """Bring back what `take` removed."""
        self._sums[index] = values

    def values(self, index: int) -> torch.Tensor:
        """The sum so far, flat `[elements]`, which stays."""
        return self._sums[index]

    def here(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the parameter at 0, or rows of one, where the sums are; it is there once `values` returns."""
        return gradient

    def add_chunks(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The fp32 sum of two chunks' gradients, of which `first` was brought `here` or is such a sum. It is spent."""
        return first.float().add_(second)

    def add_rounded(
        self,
        part: torch.Tensor,
        dtype: torch.dtype,
        rows: torch.Tensor,
        *,
        most_rows: int | None,  # noqa: ARG002 - they take what they need
    ) -> torch.Tensor:
        """Round the sum `[rows, width]` of a micro-batch's chunks, and add it to the parameter at 0. Returns these
        `rows` of it; `most_rows`: the most of them that any step has, as it is planned."""
        part = part.to(dtype)  # the sum itself takes no memory from here on
        saved = part[rows]
        self.add(0, part)
        return saved

    def end_chunks(self) -> None:
        """No more chunks come."""

    def clear(self) -> None:
        """Forget all contributions."""
        self._sums.clear()

    def close(self) -> None:
        """Give the memory back, which ends with its last user. Idempotent."""
        self._sums.clear()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
