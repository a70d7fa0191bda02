"""The gradient of one block: summed over micro-batches, rounded once, held until the update takes it.

In backward a `GradientSum` adds up a block's gradients and becomes a `BlockGradient` (G16). The update takes that at
once, or after backward if the norm of the whole model decides the clipping. Sums and norms are computed on the compute
device. Each parameter's result is downloaded as soon as autograd has made it, overlapped with the computing of the next
ones (active gradient offloading, Ratel section IV-C). Held gradients are in host memory, or in the scratch file beyond
the limit on memory for them.

Invariants: contributions are added in fp32, in the order in which they come, and rounded once to the gradient dtype; a
parameter that got no gradient has none (AdamW skips it, as in torch); norms are those of
`torch.nn.utils.clip_grad_norm_` on the fp32 values of G16, tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download, Upload
from ratel_cli.engine.telemetry import SpanLabel
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Checksum, Scratch
from ratel_cli.io.views import view
from ratel_cli.model.spec import BlockSpec

_TIED_LABEL = SpanLabel(text="gradient of the tied head", block=0, stage="backward")

Norms = dict[str, float | torch.Tensor]
"""2-norms by parameter name. On a GPU they are scalar tensors, since reading one would wait for the GPU."""


class GradientSum(Closing):
    """Adds up one block's gradients, parameter by parameter.

    Each parameter goes through these phases:

        1. add     in fp32, in the order in which the contributions come
        2. leave   round to the gradient dtype, take the norm, and start the download; no contribution comes after it
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
    ) -> None:
        """The norms are those of the gradient times `scale`. `leaving_bytes`: GPU memory that gradients may take until
        their downloads have ended, at least that of one parameter."""
        self._block = block
        self._dtype = dtype
        self._pool = pool
        self._device = device
        self._single = single
        self._scale = scale
        self._leaving_bytes = leaving_bytes
        self._label = SpanLabel.of("gradient", block, "backward")
        self._sum_dtype = dtype if single else torch.float32
        self._sums: list[torch.Tensor | None] = [None] * len(block.parameters)
        """Flat `[elements]`; None before the first contribution, and on a GPU when the parameter has left."""
        self._has_left = [False] * len(block.parameters)
        self._norms: Norms = {}
        self._download: Download | None = None
        self._sum_lease: Lease | None = self._lease_for(self._sum_dtype) if device.is_host else None
        self._lease: Lease | None = self._sum_lease if self._sum_dtype == dtype else None
        """Host memory for the result."""

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one contribution: for each of the block's parameters, in their order, a gradient or None.

        A gradient has its parameter's shape, on the compute device.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.add_one(index, gradient)

    def add_one(self, index: int, gradient: torch.Tensor) -> None:
        """Add a contribution, in the parameter's shape, to the parameter at `index`."""
        assert not self._has_left[index], "a contribution comes after the last one"
        values = self._sums[index]
        if values is not None:
            assert not self._single, "a parameter got two gradients from a single micro-batch"
            values.add_(gradient.reshape(values.shape))
        elif self._sum_lease is not None:
            values = self._sums[index] = self._part_of(self._sum_lease, index, self._sum_dtype)
            values.copy_(gradient.reshape(values.shape))
        else:
            self._sums[index] = gradient.to(self._sum_dtype, copy=not self._single).reshape(-1)

    def take(self, index: int) -> torch.Tensor:
        """Remove the sum so far of the parameter at `index`, flat `[elements]`; `put` brings it back."""
        values, self._sums[index] = self.values(index), None
        return values

    def put(self, index: int, values: torch.Tensor) -> None:
        """Bring back what `take` removed."""
        self._sums[index] = values

    def values(self, index: int) -> torch.Tensor:
        """The sum so far of the parameter at `index`, flat `[elements]`, on the compute device."""
        values = self._sums[index]
        assert values is not None
        return values

    def leave(self, index: int) -> None:
        """The parameter at `index` has all its contributions: round them, and bring the result to host memory."""
        self._send(index, self._round(index))

    def close(self) -> None:
        """Give the memory back, unless `finish` has handed it on. Idempotent."""
        self._sums = []
        if self._download is not None:
            self._download.wait()
            self._download = None
        leases = {lease for lease in (self._lease, self._sum_lease) if lease is not None}  # often one for both
        self._lease = self._sum_lease = None
        for lease in leases:
            lease.release()

    def finish(self) -> BlockGradient:
        """The gradient, once all contributions have been added."""
        for index, values in enumerate(self._sums):
            if values is not None and not self._has_left[index]:
                del values
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
        return BlockGradient(self._block, lease, self._dtype, tuple(self._has_left), self._norms, download, norms_lease)

    def _round(self, index: int) -> torch.Tensor:
        """Take the norm of a parameter's gradient in the gradient dtype, and return it, flat `[elements]`."""
        values = self.values(index)
        self._has_left[index] = True
        if self._lease is None:
            self._lease = self._lease_for(self._dtype)
        rounded = values
        if values.dtype != self._dtype:
            if self._device.is_host:
                rounded = self._part_of(self._lease, index, self._dtype).copy_(values)
            else:
                rounded = values.to(self._dtype)
            values.copy_(rounded)  # the norm is that of the rounded values; the sum is not needed any more
        is_free = values is not rounded
        if values.dtype != torch.float32:
            values, is_free = values.float(), True
        if self._scale != 1.0:
            values = values.mul_(self._scale) if is_free else values * self._scale
        self._norms[self._block.parameters[index].name] = _norm(values)
        return rounded

    def _send(self, index: int, rounded: torch.Tensor) -> None:
        """On a GPU: start the download of a parameter's gradient."""
        if self._device.is_host:
            return
        self._sums[index] = None
        assert self._lease is not None
        parameter, size = self._block.parameters[index], self._dtype.itemsize
        memory = self._lease.memory[parameter.start * size : parameter.stop * size]
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
        return self._pool.lease(self._block.num_elements * dtype.itemsize, f"gradient of {self._block.name}")

    def _part_of(self, lease: Lease, index: int, dtype: torch.dtype) -> torch.Tensor:
        parameter = self._block.parameters[index]
        return view(lease.memory, dtype)[parameter.start : parameter.stop]


class TiedSum(Closing):
    """Adds up the gradient of an embedding that is also the head, in exactly the order of plain PyTorch.

    In PyTorch each micro-batch gives one gradient, head part plus embedding part, and these are summed. Here the head
    parts of all micro-batches come first. But the embedding part is zero except in the rows of the step's distinct
    tokens, so only those rows of the head parts are saved, once for each micro-batch (`planning.capacity` counts them).

    A GPU that has no memory to spare has host memory hold all that from the head to the embedding: `offload`, `fetch`.
    """

    def __init__(self, total: GradientSum, input_ids: Sequence[torch.Tensor], *, device: Device) -> None:
        """`total` is the sum of the embedding's block, on `device`; `input_ids`: one `[batch, tokens]` for each
        micro-batch."""
        self.total = total
        self._rows = torch.unique(torch.cat([ids.reshape(-1) for ids in input_ids])).to(device.torch_device)
        self._part: torch.Tensor | None = None
        self._dtype = torch.float32
        self._device = device
        self._head_rows: list[torch.Tensor] = []
        self._started = False
        self._lease: Lease | None = None
        """What is offloaded: the sum, then the rows."""
        self._parts: list[tuple[torch.Size, torch.dtype]] = []
        self._download: Download | None = None
        self._upload: Upload | None = None

    def add_head(self, gradient: torch.Tensor) -> None:
        """Add the head's part `[vocab, hidden]` of one chunk of the current micro-batch."""
        if self._part is None:
            self._part, self._dtype = gradient, gradient.dtype
        else:
            self._part = self._part.float().add_(gradient)

    def end_micro_batch(self) -> None:
        """End the current micro-batch: the sum of its chunks is rounded, as a single gradient is."""
        assert self._part is not None
        part, self._part = self._part.to(self._dtype), None
        self._head_rows.append(part[self._rows])
        self.total.add_one(0, part)

    def offload(self, pool: BufferPool) -> None:
        """After the head: move what waits for the embedding to host memory."""
        parts = [self.total.take(0), *self._head_rows]
        self._head_rows = []
        self._parts = [(part.shape, part.dtype) for part in parts]
        self._lease = pool.lease(sum(part.nbytes for part in parts), "gradient of the tied head")
        pieces, start = [], 0
        for part in parts:
            pieces.append((part.view(-1).view(torch.uint8), self._lease.memory[start : start + part.nbytes]))
            start += part.nbytes
        self._download = self._device.download(pieces, _TIED_LABEL)

    def fetch(self) -> None:
        """Before the embedding's backward: bring back what `offload` has moved, if it has."""
        if self._lease is None:
            return
        memory = self._lease.memory
        buffer = self._device.reserve(len(memory))
        self._upload = self._device.upload(memory, buffer, _TIED_LABEL, after=self._download)
        flat, start = self._upload.open(), 0
        parts = []
        for shape, dtype in self._parts:
            stop = start + shape.numel() * dtype.itemsize
            parts.append(flat[start:stop].view(dtype).view(shape))
            start = stop
        total, *self._head_rows = parts
        self.total.put(0, total)

    def close(self) -> None:
        """Give host memory back. Idempotent."""
        for transfer in (self._download, self._upload):
            if transfer is not None:
                transfer.wait()
        self._download = self._upload = None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def add_embedding(self, gradient: torch.Tensor) -> None:
        """Add the embedding's part `[vocab, hidden]` of the next micro-batch, in the same order of micro-batches."""
        values = self.total.values(0).view(gradient.shape)
        contribution = (self._head_rows.pop(0) + gradient[self._rows]).to(values)
        if self._started:
            contribution = values[self._rows] + contribution
        self._started = True
        values[self._rows] = contribution


class BlockGradient:
    """The gradient of one block in the gradient dtype (G16): in host memory, or in the scratch file."""

    def __init__(
        self,
        block: BlockSpec,
        lease: Lease,
        dtype: torch.dtype,
        present: tuple[bool, ...],
        norms: Norms,
        download: Download | None,
        norms_lease: Lease | None = None,
    ) -> None:
        self.block = block
        self.present = present
        """For each of the block's parameters: True if it has a gradient."""
        self.norms = norms
        """For each parameter with a gradient: the 2-norm of the scaled gradient, as torch computes it in fp32."""
        self._dtype = dtype
        self._lease: Lease | None = lease
        self._download = download
        """The copy that fills the host memory; None once someone has waited for it."""
        self._norms_lease = norms_lease
        """The norms in fp32 `[parameters with a gradient]`, if `norms` are on a GPU."""
        self._scratch: Scratch | None = None
        self._seal: Checksum | None = None
        self._offset_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the values in the gradient dtype."""
        return self.block.num_elements * self._dtype.itemsize

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

    @property
    def flat(self) -> torch.Tensor:
        """The gradients of all parameters, flat `[elements of the block]`; undefined for those that have none."""
        assert self._lease is not None, "the gradient is in the scratch file"
        assert self._download is None, "the download has not ended"
        return view(self._lease.memory, self._dtype)

    def spill(self, scratch: Scratch, offset_bytes: int) -> None:
        """Move the values to `scratch` at `offset_bytes` and give the host memory back."""
        self._wait_download()
        assert self._lease is not None
        write = scratch.write(offset_bytes, self._lease.memory)
        self._seal = Checksum(self._lease.memory)  # overlapped with the write
        write.wait()
        self._lease.release()
        self._lease, self._scratch, self._offset_bytes = None, scratch, offset_bytes

    def fetch(self, pool: BufferPool) -> None:
        """Bring the values to host memory. Raises IntegrityFailure if the scratch file has changed them."""
        self._wait_download()
        if self._lease is None:
            assert self._scratch is not None and self._seal is not None
            self._lease = pool.lease(self.num_bytes, f"gradient of {self.block.name}")
            self._scratch.read(self._offset_bytes, self._lease.memory).wait()
            self._seal.check(self._lease.memory, f"gradient of {self.block.name}")

    def release(self) -> None:
        """Give the memory back: the update is done, or will not happen."""
        self._wait_download()
        for lease in (self._lease, self._norms_lease):
            if lease is not None:
                lease.release()
        self._lease = self._norms_lease = None

    def _wait_download(self) -> None:
        if self._download is not None:
            self._download.wait()
            self._download = None


def _norm(values: torch.Tensor) -> float | torch.Tensor:
    """The 2-norm of fp32 values, flat `[elements]`.

    On the CPU it is a float: small tensors between a block's large buffers would keep malloc from reusing these for the
    next block, and memory would grow with the number of layers.
    """
    if values.is_cuda:
        # As torch.nn.utils.clip_grad_norm_ does on GPUs; vector_norm adds up in another order there.
        return torch._foreach_norm([values], 2.0)[0]
    return float(torch.linalg.vector_norm(values, 2.0))


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
