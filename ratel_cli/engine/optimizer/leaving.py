"""How a block's gradients leave: each parameter's sum is rounded once, its norm is taken, and it comes to host memory.

On a GPU a download starts as soon as a parameter has all its contributions, overlapped with the computing of the next
ones (active gradient offloading, Ratel section IV-C).

Invariants: a parameter that got no gradient has none (AdamW skips it, as in torch); norms are those of
`torch.nn.utils.clip_grad_norm_` on the fp32 values of G16, tensor by tensor.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download
from ratel_cli.engine.measure.telemetry import SpanLabel
from ratel_cli.engine.optimizer.accumulators import Accumulator
from ratel_cli.engine.optimizer.block_gradient import BlockGradient, Norms
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec

_ELEMENTS_AT_ONCE = 4
"""Elements that a thread of torch's norm kernel loads at once (aten/src/ATen/native/cuda, `kILP`)."""


class Leaving(Closing):
    """One block of gradients on its way out: what has left, the norms, and host memory for the result."""

    def __init__(
        self, block: BlockSpec, pool: BufferPool, device: Device, *, scale: float, dtype: torch.dtype | None = None
    ) -> None:
        """The norms are those of the gradient times `scale`. `dtype`: in which it leaves; None: in the block's."""
        self.block = block
        """The block as it leaves: packed, if only rows of the embedding's matrix do."""
        self.label = SpanLabel.of("gradient", block, "backward")
        self.device = device
        self.has_left = [False] * len(block.parameters)
        """For each parameter."""
        self._dtype = dtype or VALUE_DTYPES[block.gradient_dtype]
        self._scale = scale
        self._pool = pool
        self._norms: Norms = {}
        self._lease: Lease | None = None

    def round(self, index: int, sums: Accumulator, last: torch.Tensor | None) -> torch.Tensor:
        """Take the sum of the parameter at `index`, add `last` and round it, and take the norm. Returns it, flat
        `[elements]`.

        `last`: a contribution in its shape that is not in the sum, and may be overwritten. Only one of both may be
        missing.
        """
        self.has_left[index] = True
        if self._lease is None:
            self._lease = self._new_lease()
        return self._round(index, sums, last)

    def send(self, index: int, rounded: torch.Tensor) -> None:
        """Start to bring to host memory what `round` has returned."""

    def finish(self) -> BlockGradient:
        """The gradient of all that has left."""
        if self._lease is None:
            self._lease = self._new_lease()
        gradient = self._result(self._lease)
        self._lease = None
        return gradient

    def close(self) -> None:
        """Give the memory back, unless `finish` has handed it on. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    @abstractmethod
    def _round(self, index: int, sums: Accumulator, last: torch.Tensor | None) -> torch.Tensor: ...

    def _result(self, lease: Lease) -> BlockGradient:
        return BlockGradient(self.block, lease, self._dtype, tuple(self.has_left), self._norms, download=None)

    def _new_lease(self) -> Lease:
        return self._pool.lease(self.block.num_elements * self._dtype.itemsize, f"gradient of {self.block.name}")

    def _memory(self, parameter: ParameterSpec) -> memoryview:
        assert self._lease is not None
        size = self._dtype.itemsize
        return self._lease.memory[parameter.start * size : parameter.stop * size]

    def _scaled(self, rounded: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The rounded gradient times the scale, in fp32. Its sum, `values`, is not needed any more."""
        is_free = values is not rounded
        if is_free:
            values.copy_(rounded)
        if values.dtype != torch.float32:
            values, is_free = values.float(), True
        if self._scale == 1.0:
            return values
        return values.mul_(self._scale) if is_free else values * self._scale


class HostLeaving(Leaving):
    """Where the CPU computes: the result lies where it is rounded, or where it was summed."""

    def __init__(
        self,
        block: BlockSpec,
        pool: BufferPool,
        device: Device,
        *,
        scale: float,
        lease: Lease | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`lease`: the buffer of the sums, if they have the dtype of the result."""
        super().__init__(block, pool, device, scale=scale, dtype=dtype)
        self._lease = lease

    def _round(self, index: int, sums: Accumulator, last: torch.Tensor | None) -> torch.Tensor:
        if last is not None:
            sums.add(index, last)
        values, parameter = sums.take(index), self.block.parameters[index]
        assert values is not None
        rounded = values
        if values.dtype != self._dtype:
            rounded = view(self._memory(parameter), self._dtype).copy_(values)
        self._norms[parameter.name] = _norm(self._scaled(rounded, values))
        return rounded


class DeviceLeaving(Leaving):
    """Where a GPU computes: the result is downloaded."""

    def __init__(
        self,
        block: BlockSpec,
        pool: BufferPool,
        device: Device,
        *,
        scale: float,
        leaving_bytes: int = 0,
        rows: EmbeddingRows | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`leaving_bytes`: GPU memory that gradients may take until their downloads have ended, at least that of one
        parameter. `rows`: what contributions have of the embedding's matrix, if that is not all of it."""
        super().__init__(block if rows is None else rows.packed, pool, device, scale=scale, dtype=dtype)
        self._most_elements = (block if rows is None else rows.largest).num_elements
        self._leaving_bytes = leaving_bytes
        self._rows = rows
        self._download: Download | None = None

    def send(self, index: int, rounded: torch.Tensor) -> None:
        """See Leaving."""
        # Of a matrix, a step has no more rows than the packed block, and often fewer.
        memory = self._memory(self.block.parameters[index])[: rounded.nbytes]
        beside_bytes = max(0, self._leaving_bytes - len(memory))
        pieces = [(rounded.view(torch.uint8), memory)]
        self._download = self.device.download(pieces, self.label, beside_bytes=beside_bytes)

    def close(self) -> None:
        """See Leaving. Downloads end first."""
        download, self._download = self._download, None
        if download is not None:
            download.wait()
        super().close()

    def _round(self, index: int, sums: Accumulator, last: torch.Tensor | None) -> torch.Tensor:
        """It takes the memory of `last` if it can, and memory is passed over once to add and to round, where two calls
        would pass over it twice. The norm is a pass of its own over the rounded values, the fewest bytes there are: the
        order of its sum is that of `clip_grad_norm_`'s kernel.
        """
        values = sums.take(index)
        if last is not None and last.dtype == self._dtype and last.is_contiguous():
            rounded = last.view(-1)
            if values is None:
                values = rounded
            else:
                torch.add(values, rounded, out=rounded)
        else:
            if last is not None:
                values = last.reshape(-1) if values is None else values.add_(last.reshape(values.shape))
            assert values is not None
            rounded = values.to(self._dtype)
        name, rows = self.block.parameters[index].name, self._rows if index == 0 else None
        if self._scale == 1.0 and rounded.device.type != "cpu":
            del values  # the matrix of the rows comes in the place of their sum
            self._norms[name] = _norm_on_gpu(rounded if rows is None else rows.whole(rounded))
            return rounded
        # That of rows is the norm of the whole matrix: zeros change no sum, but their places decide which values the
        # kernel adds together. The matrix takes GPU memory for a moment, when no layer is there.
        values = self._scaled(rounded, values)
        if rows is not None:
            values = rows.whole(values)
        self._norms[name] = _norm_anywhere(values)
        return rounded

    def _result(self, lease: Lease) -> BlockGradient:
        norms_lease = self._send_norms()
        download, self._download = self._download, None
        block = self.block if self._rows is None else self._rows.block
        present = tuple(self.has_left)
        return BlockGradient(block, lease, self._dtype, present, self._norms, download, norms_lease, rows=self._rows)

    def _send_norms(self) -> Lease | None:
        """Have the norms come to host memory after the gradients. Returns that memory."""
        on_device = [norm for norm in self._norms.values() if isinstance(norm, torch.Tensor)]
        if not on_device:
            return None
        norms = torch.stack(on_device)
        lease = self._pool.lease(norms.nbytes, f"norms of {self.block.name}")
        pieces = [(norms.view(torch.uint8), lease.memory)]
        self._download = self.device.download(pieces, self.label, beside_bytes=self._leaving_bytes)
        return lease

    def _new_lease(self) -> Lease:
        size = self._dtype.itemsize
        return self._pool.lease(
            self.block.num_elements * size,
            f"gradient of {self.block.name}",
            at_most_bytes=self._most_elements * size,
        )


class RoundedOnHost(DeviceLeaving):
    """Where a GPU's sums stay in host memory: they are rounded there, and go up for their norms alone."""

    def send(self, index: int, rounded: torch.Tensor) -> None:
        """It is in host memory."""

    def _round(self, index: int, sums: Accumulator, last: torch.Tensor | None) -> torch.Tensor:
        assert last is None, "the last contribution, too, is added in host memory"
        values, parameter = sums.take(index), self.block.parameters[index]
        assert values is not None
        memory = self._memory(parameter)
        rounded = view(memory, self._dtype).copy_(values)
        upload = self.device.upload(memory, self.device.reserve(len(memory)), self.label)
        on_device = upload.open().view(self._dtype)
        is_scaled = self._scale != 1.0
        norm = _norm_anywhere(self._scaled(on_device, on_device)) if is_scaled else _norm_on_gpu(on_device)
        self._norms[parameter.name] = norm
        del on_device
        upload.wait()
        return rounded


def _norm(values: torch.Tensor) -> float:
    """The 2-norm of fp32 values on the CPU, flat `[elements]`.

    A float: small tensors between a block's large buffers would keep malloc from reusing these for the next block, and
    memory would grow with the number of layers.
    """
    return float(torch.linalg.vector_norm(values, 2.0))


def _norm_anywhere(values: torch.Tensor) -> float | torch.Tensor:
    """The 2-norm of fp32 values, by the kernel of the device that has them."""
    return _norm(values) if values.device.type == "cpu" else _norm_on_gpu(values)


def _norm_on_gpu(values: torch.Tensor) -> torch.Tensor:
    """The 2-norm of values on a GPU, flat `[elements]`, with the bits that their fp32 copy has.

    The kernel is the one that `torch.nn.utils.clip_grad_norm_` takes there; vector_norm adds up in another order. It
    turns each value into fp32 before it squares it, and deals elements to threads by their number, not by their bytes.
    Only values that are not aligned to four are dealt in another way, so these are copied, as aligned memory.
    """
    if values.data_ptr() % (_ELEMENTS_AT_ONCE * values.itemsize):
        values = values.to(torch.float32, copy=True)
    return torch._foreach_norm([values], 2.0, dtype=torch.float32)[0]
