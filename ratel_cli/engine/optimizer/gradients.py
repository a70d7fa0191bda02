"""The gradient of one block: summed over micro-batches, rounded once, brought to host memory.

In backward a `GradientSum` adds up a block's gradients and becomes a `BlockGradient` (G16), which the update takes
(engine/optimizer/block_gradient.py). Sums and norms are computed on the compute device. Each parameter's result is
downloaded as soon as autograd has made it, overlapped with the computing of the next ones (active gradient offloading,
Ratel section IV-C).

Invariants: contributions are added in fp32, in the order in which they come, and rounded once to the gradient dtype; a
parameter that got no gradient has none (AdamW skips it, as in torch); norms are those of
`torch.nn.utils.clip_grad_norm_` on the fp32 values of G16, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download
from ratel_cli.engine.embedding_rows import EmbeddingRows
from ratel_cli.engine.optimizer.block_gradient import BlockGradient, Norms
from ratel_cli.engine.optimizer.host_sums import HostSums
from ratel_cli.engine.telemetry import SpanLabel
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import view
from ratel_cli.schedule.blocks import BlockSpec

_ELEMENTS_AT_ONCE = 4
"""Elements that a thread of torch's norm kernel loads at once (aten/src/ATen/native/cuda, `kILP`)."""


class GradientSum(Closing):
    """Adds up one block's gradients, parameter by parameter.

    Each parameter goes through these phases:

        1. add     in fp32, in the order in which the contributions come
        2. leave   with the last contribution: round to the gradient dtype, take the norm, and start the download
        3. finish  every parameter that has not left does so now

    On a GPU a parameter takes memory from its first contribution until its download has ended. With `single`, each
    parameter gets one contribution and needs no fp32 sum.
    """

    def __init__(
        self,
        block: BlockSpec,
        pool: BufferPool,
        device: Device,
        *,
        dtype: torch.dtype,
        single: bool,
        scale: float = 1.0,
        leaving_bytes: int = 0,
        host_sums: HostSums | None = None,
        stays_on_host: bool = False,
        rows: EmbeddingRows | None = None,
    ) -> None:
        """The norms are those of the gradient times `scale`. `leaving_bytes`: GPU memory that gradients may take until
        their downloads have ended, at least that of one parameter. `host_sums`: where sums wait for the last
        micro-batch; None: on the compute device. `stays_on_host`: the last contribution, too, is added there, and the
        sum is rounded there. `rows`: what contributions have of the embedding's matrix, if that is not all of it."""
        assert host_sums is not None or not stays_on_host
        self._block = block if rows is None else rows.packed
        self._most_elements = (block if rows is None else rows.largest).num_elements
        self._rows = rows
        self._dtype = dtype
        self._pool = pool
        self._device = device
        self._single = single
        self._scale = scale
        self._leaving_bytes = leaving_bytes
        self._host_sums = host_sums
        self._stays_on_host = stays_on_host
        self._label = SpanLabel.of("gradient", block, "backward")
        self._sum_dtype = dtype if single else torch.float32
        self._sums: list[torch.Tensor | None] = [None] * len(block.parameters)
        """Flat `[elements]` on the compute device; None before the first contribution, while host memory has the sum,
        and on a GPU when the parameter has left."""
        self._has_left = [False] * len(block.parameters)
        self._norms: Norms = {}
        self._download: Download | None = None
        self._sum_lease: Lease | None = self._lease_for(self._sum_dtype) if device.is_host else None
        self._lease: Lease | None = self._sum_lease if self._sum_dtype == dtype else None
        """Host memory for the result."""

    @property
    def num_parameters(self) -> int:
        """Number of the block's parameters."""
        return len(self._has_left)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one contribution: for each of the block's parameters, in their order, a gradient or None.

        A gradient has its parameter's shape, on the compute device.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.add_one(index, gradient)
        if self._stays_on_host:  # the next contribution is made in its place
            self._device.free_downloads()

    def expect_last(self) -> None:
        """The last micro-batch comes: what `host_sums` has begins to return to the compute device."""
        if self._host_sums is not None:
            self._host_sums.begin_fetching()

    def add_one(self, index: int, gradient: torch.Tensor, *, is_last: bool = False) -> None:
        """Add a contribution, in the parameter's shape, to the parameter at `index`.

        With `is_last` it has all its contributions: round them, and bring the result to host memory. The contribution
        may be overwritten then.
        """
        assert not self._has_left[index], "a contribution comes after the last one"
        if is_last:
            self._fetch(index)
            self._send(index, self._round(index, gradient))
        elif self._host_sums is None:
            self._add(index, gradient)
        else:
            self._host_sums.add(index, gradient.reshape(-1))

    def take(self, index: int) -> torch.Tensor:
        """Remove the sum so far of the parameter at `index`, flat `[elements]`; `put` brings it back."""
        values, self._sums[index] = self.values(index), None
        return values

    def put(self, index: int, values: torch.Tensor) -> None:
        """Bring back what `take` removed."""
        self._sums[index] = values

    def clear(self) -> None:
        """Forget all contributions."""
        self._sums = [None] * len(self._sums)

    def values(self, index: int) -> torch.Tensor:
        """The sum so far of the parameter at `index`, flat `[elements]`, on the compute device."""
        values = self._sums[index]
        assert values is not None
        return values

    def close(self) -> None:
        """Give the memory back, unless `finish` has handed it on. Idempotent."""
        self._sums = []
        if self._host_sums is not None:
            self._host_sums.close()
            if self._stays_on_host:
                self._host_sums.wait_released()
        if self._download is not None:
            self._download.wait()
            self._download = None
        leases = {lease for lease in (self._lease, self._sum_lease) if lease is not None}  # often one for both
        self._lease = self._sum_lease = None
        for lease in leases:
            lease.release()

    def finish(self) -> BlockGradient:
        """The gradient, once all contributions have been added."""
        for index, has_left in enumerate(self._has_left):
            if self._stays_on_host:
                self._round_on_host(index)
                continue
            self._fetch(index)
            if self._sums[index] is not None and not has_left:
                with self._device.computing(self._label):
                    rounded = self._round(index)
                self._send(index, rounded)
                del rounded
        norms_lease = self._send_norms()
        lease, self._lease = self._lease or self._lease_for(self._dtype), None
        download, self._download = self._download, None
        if self._sum_lease is lease:
            self._sum_lease = None
        self.close()
        block = self._block if self._rows is None else self._rows.block
        return BlockGradient(
            block,
            lease,
            self._dtype,
            tuple(self._has_left),
            self._norms,
            download,
            norms_lease,
            rows=self._rows,
        )

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a contribution on the compute device."""
        values = self._sums[index]
        if values is not None:
            assert not self._single, "a parameter got two gradients from a single micro-batch"
            values.add_(gradient.reshape(values.shape))
        elif self._sum_lease is not None:
            values = self._sums[index] = self._part_of(self._sum_lease, index, self._sum_dtype)
            values.copy_(gradient.reshape(values.shape))
        else:
            self._sums[index] = gradient.to(self._sum_dtype, copy=not self._single).reshape(-1)

    def _fetch(self, index: int) -> None:
        """Bring the sum of a parameter back to the compute device, if host memory has it."""
        if self._host_sums is not None and index in self._host_sums:
            self._sums[index] = self._host_sums.fetch(index)

    def _round(self, index: int, last: torch.Tensor | None = None) -> torch.Tensor:
        """Add `last`, the last contribution, take the norm of the gradient in its dtype, and return it, flat
        `[elements]`.

        On a GPU it takes the memory of `last` if it can, and memory is passed over once to add and to round, where two
        calls would pass over it twice. The norm is a pass of its own over the rounded values, the fewest bytes there
        are: the order of its sum is that of `clip_grad_norm_`'s kernel.
        """
        self._has_left[index] = True
        if self._lease is None:
            self._lease = self._lease_for(self._dtype)
        if last is not None and last.dtype == self._dtype and last.is_contiguous() and not self._device.is_host:
            rounded, values = last.view(-1), self._sums[index]
            if values is None:
                values = rounded
            else:
                torch.add(values, rounded, out=rounded)
                self._sums[index] = None
        else:
            if last is not None:
                self._add(index, last)
            rounded = values = self.take(index)
            if self._device.is_host and values.dtype != self._dtype:
                rounded = self._part_of(self._lease, index, self._dtype).copy_(values)
            elif values.dtype != self._dtype:
                rounded = values.to(self._dtype)
        name, rows = self._block.parameters[index].name, self._rows if index == 0 else None
        if self._scale == 1.0 and rounded.device.type != "cpu":
            del values  # the matrix of the rows comes in the place of their sum
            self._norms[name] = _norm_on_gpu(rounded if rows is None else rows.whole(rounded))
        else:
            self._norms[name] = self._norm_of(rounded, values, rows)
        return rounded

    def _round_on_host(self, index: int) -> None:
        """Round the sum that host memory has of a parameter, if it has one. The result goes up for its norm alone."""
        assert self._host_sums is not None
        if index not in self._host_sums:
            return
        self._has_left[index] = True
        if self._lease is None:
            self._lease = self._lease_for(self._dtype)
        self._part_of(self._lease, index, self._dtype).copy_(self._host_sums.values(index))
        parameter = self._block.parameters[index]
        memory = self._lease.memory[parameter.start * self._dtype.itemsize : parameter.stop * self._dtype.itemsize]
        with self._device.computing(self._label):
            upload = self._device.upload(memory, self._device.reserve(len(memory)), self._label)
            rounded = upload.open().view(self._dtype)
            norm = _norm_on_gpu(rounded) if self._scale == 1.0 else self._norm_of(rounded, rounded, rows=None)
        self._norms[parameter.name] = norm
        upload.wait()

    def _norm_of(self, rounded: torch.Tensor, values: torch.Tensor, rows: EmbeddingRows | None) -> float | torch.Tensor:
        """The norm of the rounded gradient times the scale. Its sum, `values`, is not needed any more.

        That of `rows` is the norm of the whole matrix: zeros change no sum, but their places decide which values the
        kernel adds together. The matrix takes GPU memory for a moment, when no layer is there.
        """
        is_free = values is not rounded
        if is_free:
            values.copy_(rounded)
        if values.dtype != torch.float32:
            values, is_free = values.float(), True
        if self._scale != 1.0:
            values = values.mul_(self._scale) if is_free else values * self._scale
        if rows is not None:
            values = rows.whole(values)
        return _norm(values) if values.device.type == "cpu" else _norm_on_gpu(values)

    def _send(self, index: int, rounded: torch.Tensor) -> None:
        """On a GPU: drop a parameter's sum, and start the download of its gradient."""
        if self._device.is_host:
            return
        self._sums[index] = None
        if self._host_sums is not None:
            self._host_sums.fetch_ahead()
        assert self._lease is not None
        start = self._block.parameters[index].start * self._dtype.itemsize
        memory = self._lease.memory[start : start + rounded.nbytes]
        beside_bytes = max(0, self._leaving_bytes - len(memory))
        pieces = [(rounded.view(torch.uint8), memory)]
        self._download = self._device.download(pieces, self._label, beside_bytes=beside_bytes)

    def _send_norms(self) -> Lease | None:
        """On a GPU: have the norms come to host memory after the gradients. Returns that memory."""
        on_device = [norm for norm in self._norms.values() if isinstance(norm, torch.Tensor)]
        if not on_device:
            return None
        norms = torch.stack(on_device)
        lease = self._pool.lease(norms.nbytes, f"norms of {self._block.name}")
        pieces = [(norms.view(torch.uint8), lease.memory)]
        self._download = self._device.download(pieces, self._label, beside_bytes=self._leaving_bytes)
        return lease

    def _lease_for(self, dtype: torch.dtype) -> Lease:
        return self._pool.lease(
            self._block.num_elements * dtype.itemsize,
            f"gradient of {self._block.name}",
            at_most_bytes=self._most_elements * dtype.itemsize,
        )

    def _part_of(self, lease: Lease, index: int, dtype: torch.dtype) -> torch.Tensor:
        parameter = self._block.parameters[index]
        return view(lease.memory, dtype)[parameter.start : parameter.stop]


def taken_gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a leaf, which has none afterwards."""
    gradient = leaf.grad
    assert gradient is not None
    leaf.grad = None
    return gradient


def _norm(values: torch.Tensor) -> float:
    """The 2-norm of fp32 values on the CPU, flat `[elements]`.

    A float: small tensors between a block's large buffers would keep malloc from reusing these for the next block, and
    memory would grow with the number of layers.
    """
    return float(torch.linalg.vector_norm(values, 2.0))


def _norm_on_gpu(values: torch.Tensor) -> torch.Tensor:
    """The 2-norm of values on a GPU, flat `[elements]`, with the bits that their fp32 copy has.

    The kernel is the one that `torch.nn.utils.clip_grad_norm_` takes there; vector_norm adds up in another order. It
    turns each value into fp32 before it squares it, and deals elements to threads by their number, not by their bytes.
    Only values that are not aligned to four are dealt in another way, so these are copied, as aligned memory.
    """
    if values.data_ptr() % (_ELEMENTS_AT_ONCE * values.itemsize):
        values = values.to(torch.float32, copy=True)
    return torch._foreach_norm([values], 2.0, dtype=torch.float32)[0]


def total_norm(norms: Mapping[str, float | torch.Tensor], order: Sequence[str]) -> torch.Tensor:
    """The global norm from the norms by parameter name, stacked in `order` as torch does. A CPU scalar in fp32."""
    present = [norms[name] for name in order if name in norms]
    on_device = [norm for norm in present if isinstance(norm, torch.Tensor)]
    stacked = torch.stack(on_device) if on_device else torch.tensor(present, dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return norm.cpu()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """The factor that `clip_grad_norm_` applies to gradients: max_norm / (norm + 1e-6), at most 1, in fp32."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
