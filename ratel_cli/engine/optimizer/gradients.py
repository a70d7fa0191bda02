"""The gradient of one block: summed over micro-batches, rounded once, held until the update takes it.

In backward a `GradientSum` adds up a block's gradients and becomes a `BlockGradient` (G16). The update takes that at
once, or after backward if the norm of the whole model decides the clipping. Sums and norms are computed on the compute
device; the download of the result is overlapped with the computing of the next block. Held gradients are in host
memory, or in the scratch file beyond the limit on memory for them.

Invariants: contributions are added in fp32, in the order in which they come, and rounded once to the gradient dtype; a
parameter that got no gradient has none (AdamW skips it, as in torch); norms are those of
`torch.nn.utils.clip_grad_norm_` on the fp32 values of G16, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download
from ratel_cli.engine.telemetry import SpanLabel
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Checksum, Scratch
from ratel_cli.io.views import view
from ratel_cli.model.spec import BlockSpec

Norms = dict[str, float | torch.Tensor]
"""2-norms by parameter name. On a GPU they are scalar tensors, since reading one would wait for the GPU."""


class GradientSum(Closing):
    """Adds up one block's gradients. With `single`, each parameter gets one contribution and needs no fp32 buffer."""

    def __init__(self, block: BlockSpec, pool: BufferPool, device: Device, *, dtype: torch.dtype, single: bool) -> None:
        self._block = block
        self._dtype = dtype
        self._pool = pool
        self._device = device
        self._present = [False] * len(block.parameters)
        self._single = single
        self._sum_dtype = dtype if single else torch.float32
        self._lease: Lease | None = self._lease_for(self._sum_dtype) if device.is_host else None
        self._flat = self._values_in(self._lease, self._sum_dtype)
        self._views = tuple(self._flat[parameter.start : parameter.stop] for parameter in block.parameters)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one contribution: for each of the block's parameters, in their order, a gradient or None.

        A gradient has its parameter's shape, on the compute device.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.add_one(index, gradient)

    def add_one(self, index: int, gradient: torch.Tensor) -> None:
        """Add a contribution, in the parameter's shape, to the parameter at `index`."""
        values = self._views[index]
        if not self._present[index]:
            self._present[index] = True
            values.copy_(gradient.reshape(values.shape))
        else:
            assert not self._single, "a parameter got two gradients from a single micro-batch"
            values.add_(gradient.reshape(values.shape))

    def values(self, index: int) -> torch.Tensor:
        """The sum so far of the parameter at `index`, flat `[elements]`, on the compute device."""
        return self._views[index]

    def close(self) -> None:
        """Give the memory back, unless `finish` has handed it on. Idempotent."""
        self._views = ()
        self._flat = torch.empty(0)
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def finish(self, scale: float = 1.0) -> BlockGradient:
        """Round to the gradient dtype and start the download. The norms are those of the gradient times `scale`."""
        label = SpanLabel.of("gradient", self._block, "backward")
        with self._device.computing(label):
            if self._sum_dtype == self._dtype:
                lease, flat, self._lease = self._lease, self._flat, None
            else:
                lease = self._lease_for(self._dtype) if self._device.is_host else None
                flat = self._values_in(lease, self._dtype).copy_(self._flat)
            self.close()
            norms = _norms(self._block, self._present, flat, scale)
        download = None
        if lease is None:
            lease = self._lease_for(self._dtype)
            download = self._device.download([(flat.view(torch.uint8), lease.memory)], label)
        return BlockGradient(self._block, lease, self._dtype, tuple(self._present), norms, download)

    def _lease_for(self, dtype: torch.dtype) -> Lease:
        return self._pool.lease(self._block.num_elements * dtype.itemsize, f"gradient of {self._block.name}")

    def _values_in(self, lease: Lease | None, dtype: torch.dtype) -> torch.Tensor:
        if lease is not None:
            return view(lease.memory, dtype)
        return torch.empty(self._block.num_elements, dtype=dtype, device=self._device.torch_device)


class TiedSum:
    """Adds up the gradient of an embedding that is also the head, in exactly the order of plain PyTorch.

    In PyTorch each micro-batch gives one gradient, head part plus embedding part, and these are summed. Here the head
    parts of all micro-batches come first. But the embedding part is zero except in the rows of the step's distinct
    tokens, so only those rows of the head parts are saved, once for each micro-batch (`planning.capacity` counts them).
    """

    def __init__(self, total: GradientSum, input_ids: Sequence[torch.Tensor]) -> None:
        """`total` is the sum of the embedding's block; `input_ids`: one `[batch, tokens]` for each micro-batch."""
        self.total = total
        rows = torch.unique(torch.cat([ids.reshape(-1) for ids in input_ids]))
        self._rows = rows.to(total.values(0).device)
        self._part: torch.Tensor | None = None
        self._dtype = torch.float32
        self._head_rows: list[torch.Tensor] = []
        self._started = False

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
        self._scratch: Scratch | None = None
        self._seal: Checksum | None = None
        self._offset_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the values in the gradient dtype."""
        return self.block.num_elements * self._dtype.itemsize

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
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _wait_download(self) -> None:
        if self._download is not None:
            self._download.wait()
            self._download = None


def _norms(block: BlockSpec, present: Sequence[bool], flat: torch.Tensor, scale: float) -> Norms:
    """The norms of the parameters that have a gradient. `flat` is `[elements of the block]`.

    On the CPU they are floats: small tensors between a block's large buffers would keep malloc from reusing these for
    the next block, and memory would grow with the number of layers.
    """
    norms: Norms = {}
    for parameter, has_gradient in zip(block.parameters, present, strict=True):
        if has_gradient:
            values = flat[parameter.start : parameter.stop].float()
            if scale != 1.0:
                values = values * scale
            norms[parameter.name] = _norm(values)
    return norms


def _norm(values: torch.Tensor) -> float | torch.Tensor:
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
