"""The summed and rounded gradient of one block (G16), held until the update takes it.

The update takes it at once, or after backward if the norm of the whole model decides the clipping. It is in host
memory, or in the scratch file beyond the limit on memory for held gradients.

Invariant: the update gets the bytes that came down, or an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Self

import torch

from ratel_cli.engine.device.device import Download
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.views import view
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.sizes import DtypeName

_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

Norms = dict[str, float | torch.Tensor]
"""2-norms by parameter name. On a GPU they are scalar tensors, since reading one would wait for the GPU."""


class BlockGradient:
    """The gradient of one block in the gradient dtype (G16), for one or more users: in host memory, or in the scratch
    file."""

    def __init__(
        self,
        block: BlockSpec,
        lease: Lease,
        dtype: torch.dtype,
        present: tuple[bool, ...],
        norms: Norms,
        download: Download | None,
        norms_lease: Lease | None = None,
        *,
        rows: EmbeddingRows | None = None,
    ) -> None:
        """`rows`: what there is of the embedding's matrix, if that is not all of it."""
        self.block = block
        self.present = present
        """For each of the block's parameters: True if it has a gradient."""
        self.norms = norms
        """For each parameter with a gradient: the 2-norm of the scaled gradient, as torch computes it in fp32."""
        self.dtype_name = _DTYPE_NAMES[dtype]
        """The name of the gradient dtype."""
        self.dtype = dtype
        self._rows = rows
        self._lease: Lease | None = lease
        self._download = download
        """The copy that fills the host memory; None once someone has waited for it."""
        self._norms_lease = norms_lease
        """The norms in fp32 `[parameters with a gradient]`, if `norms` are on a GPU."""
        self._scratch: Scratch | None = None
        self._offset_bytes = 0
        self._lock = Lock()
        self._num_users = 1

    @property
    def num_bytes(self) -> int:
        """Size of the values in the gradient dtype, as they are held."""
        held = self.block if self._rows is None else self._rows.packed
        return held.num_elements * self.dtype.itemsize

    @property
    def is_in_host_memory(self) -> bool:
        """True if the gradient and its norms have arrived."""
        return self._download is None or self._download.done

    @property
    def squared_norm(self) -> float:
        """The square of the norm of all parameters' gradients. They must be in host memory."""
        assert self.is_in_host_memory
        if self._norms_lease is not None:
            return float(view(self._norms_lease.memory, torch.float32).double().square().sum())
        return math.fsum(float(norm) ** 2 for norm in self.norms.values())

    def elements(self, start: int, stop: int, pool: BufferPool) -> AbstractContextManager[memoryview]:
        """The bytes of the gradients of elements `[start, stop)` of the block; undefined for parameters without one.

        They are where they came, or, if only rows came, spread out in a buffer from `pool` while this is open.
        """
        size = self.dtype.itemsize
        if self._rows is None:
            return self.memory[start * size : stop * size]
        return self._spread(self._rows, start, (stop - start) * size, pool)

    @property
    def flat(self) -> torch.Tensor:
        """The gradients of all parameters as they are held, flat `[elements of the block]` or, if only rows came,
        `[elements of the packed block]`; undefined for parameters that have none."""
        return view(self.memory, self.dtype)

    @property
    def memory(self) -> memoryview:
        """The bytes of `flat`."""
        assert self._lease is not None, "the gradient is in the scratch file"
        assert self._download is None, "the download has not ended"
        return self._lease.memory

    def spill(self, scratch: Scratch, offset_bytes: int) -> None:
        """Move the values to `scratch` at `offset_bytes` and give the host memory back."""
        self._wait_download()
        assert self._lease is not None
        scratch.write_sealed(offset_bytes, self._lease.memory).wait()
        self._lease.release()
        self._lease, self._scratch, self._offset_bytes = None, scratch, offset_bytes

    def fetch(self, pool: BufferPool) -> None:
        """Bring the values to host memory. Raises IntegrityFailure if the scratch file has changed them."""
        self._wait_download()
        if self._lease is None:
            assert self._scratch is not None
            name, rows = f"gradient of {self.block.name}", self._rows
            # Only the update reads it, so it need not be pinned. But rows vary in number, and only pinned buffers serve
            # sizes that vary: theirs has the one in which they came.
            at_most_bytes = None if rows is None else rows.largest.num_elements * self.dtype.itemsize
            self._lease = pool.lease(self.num_bytes, name, crosses_link=rows is not None, at_most_bytes=at_most_bytes)
            self._scratch.read_sealed(self._offset_bytes, self._lease.memory, name).wait()

    def share(self) -> Self:
        """Add a user, who calls `release` too. Returns the gradient itself."""
        with self._lock:
            self._num_users += 1
        return self

    def release(self) -> None:
        """Remove a user. The last one gives the memory back, and may do so again."""
        with self._lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
        self._wait_download()
        for lease in (self._lease, self._norms_lease):
            if lease is not None:
                lease.release()
        self._lease = self._norms_lease = None

    @contextmanager
    def _spread(self, rows: EmbeddingRows, start: int, num_bytes: int, pool: BufferPool) -> Iterator[memoryview]:
        with pool.lease(num_bytes, f"update of {self.block.name}", crosses_link=False) as lease:
            rows.spread(self.flat, start, view(lease.memory, self.dtype))
            yield lease.memory

    def _wait_download(self) -> None:
        if self._download is not None:
            self._download.wait()
            self._download = None
