"""The gradient of one block: summed over micro-batches, rounded once, held until the update takes it.

`engine.step` opens a `GradientSum` per block in backward and turns it into a `BlockGradient` (G16),
which `engine.optimizer.adamw` consumes: at once, or, when the norm of the whole model decides the clipping,
after backward. Sums and norms are made on the device that computes; the result goes down to host memory beneath the
computing of the next block. Held gradients lie in host memory, or in the scratch file when the limit says so.

Invariants: contributions are added in fp32 in the order in which they come, and rounded once to the
gradient dtype; a parameter that got no gradient has none (AdamW skips it, as in torch); norms are
those of `torch.nn.utils.clip_grad_norm_` on the fp32 values of G16, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from ratel_cli.engine.device.device import Device, Download, SpanLabel
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Checksum, Scratch
from ratel_cli.io.views import view
from ratel_cli.model.spec import BlockSpec

Norms = dict[str, float | torch.Tensor]
"""By name. Floats in host memory; on a GPU, tensors with one element, since to read one is to wait for it."""


class GradientSum:
    """Adds up one block's gradients. With a single contribution it costs no fp32 buffer."""

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
        """Add one contribution: a gradient or None for each of the block's parameters, in their order."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.add_one(index, gradient)

    def add_one(self, index: int, gradient: torch.Tensor) -> None:
        """Add a contribution to the parameter at `index` alone."""
        values = self._views[index]
        if not self._present[index]:
            self._present[index] = True
            values.copy_(gradient.reshape(values.shape))
        else:
            assert not self._single, "a gradient that was to come once came twice"
            values.add_(gradient.reshape(values.shape))

    def values(self, index: int) -> torch.Tensor:
        """The flat fp32 sum of the parameter at `index` so far."""
        return self._views[index]

    def close(self) -> None:
        """Give the memory back, unless `finish` has passed it on. Idempotent."""
        self._views = ()
        self._flat = torch.empty(0)
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def finish(self, scale: float = 1.0) -> BlockGradient:
        """Round to the gradient dtype, and send it down. The norms are those of the gradient times `scale`."""
        about = SpanLabel(label=f"gradient of {self._block.name}", block=self._block.index, stage="backward")
        with self._device.computing(about):
            if self._sum_dtype == self._dtype:
                lease, flat, self._lease = self._lease, self._flat, None
            else:
                lease = self._lease_for(self._dtype) if self._device.is_host else None
                flat = self._values_in(lease, self._dtype).copy_(self._flat)
            self.close()
            norms = _norms(self._block, self._present, flat, scale)
        departure = None
        if lease is None:
            lease = self._lease_for(self._dtype)
            departure = self._device.download([(flat.view(torch.uint8), lease.memory)], about)
        return BlockGradient(self._block, lease, self._dtype, tuple(self._present), norms, departure)

    def _lease_for(self, dtype: torch.dtype) -> Lease:
        return self._pool.lease(self._block.num_elements * dtype.itemsize, f"gradient of {self._block.name}")

    def _values_in(self, lease: Lease | None, dtype: torch.dtype) -> torch.Tensor:
        if lease is not None:
            return view(lease.memory, dtype)
        return torch.empty(self._block.num_elements, dtype=dtype, device=self._device.torch_device)


class TiedSum:
    """Adds up the gradient of an embedding that is also the head, in exactly the order of plain PyTorch.

    There, each micro-batch gives one gradient, head part plus embedding part, and these are summed.
    Here the head parts of all micro-batches come first. But the embedding part is zero except in the
    rows of the step's distinct tokens, so only of those rows the head parts must wait, once for each
    micro-batch (`planning.capacity` counts them).
    """

    def __init__(self, total: GradientSum, input_ids: Sequence[torch.Tensor]) -> None:
        self._total = total
        rows = torch.unique(torch.cat([ids.reshape(-1) for ids in input_ids]))
        self._rows = rows.to(total.values(0).device)
        self._part: torch.Tensor | None = None
        self._dtype = torch.float32
        self._waiting: list[torch.Tensor] = []
        self._started = False

    def add_head(self, gradient: torch.Tensor) -> None:
        """The head's part [vocab, hidden] of one chunk of the current micro-batch."""
        if self._part is None:
            self._part, self._dtype = gradient, gradient.dtype
        else:
            self._part = self._part.float().add_(gradient)

    def end_micro_batch(self) -> None:
        """All chunks of the current micro-batch are in; their sum is rounded as a single gradient is."""
        assert self._part is not None
        part, self._part = self._part.to(self._dtype), None
        self._waiting.append(part[self._rows])
        self._total.add_one(0, part)

    def add_embedding(self, gradient: torch.Tensor) -> None:
        """The embedding's part [vocab, hidden] of the next micro-batch, in the same order."""
        values = self._total.values(0).view(gradient.shape)
        contribution = (self._waiting.pop(0) + gradient[self._rows]).to(values)
        if self._started:
            contribution = values[self._rows] + contribution
        self._started = True
        values[self._rows] = contribution


class BlockGradient:
    """G16 of one block."""

    def __init__(
        self,
        block: BlockSpec,
        lease: Lease,
        dtype: torch.dtype,
        present: tuple[bool, ...],
        norms: Norms,
        departure: Download | None,
    ) -> None:
        self.block = block
        self.present = present
        """For each parameter, whether it has a gradient."""
        self.norms = norms
        """The 2-norm of each present parameter's gradient, scaled, as torch computes it in fp32."""
        self._dtype = dtype
        self._lease: Lease | None = lease
        self._departure = departure
        """What fills the host memory, as long as nobody has waited for it."""
        self._scratch: Scratch | None = None
        self._seal: Checksum | None = None
        self._offset_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self.block.num_elements * self._dtype.itemsize

    @property
    def flat(self) -> torch.Tensor:
        """The values of all parameters [block.num_elements]; only where `present` are they defined."""
        assert self._lease is not None, "the gradient is on disk"
        assert self._departure is None, "the gradient is on its way down"
        return view(self._lease.memory, self._dtype)

    def spill(self, scratch: Scratch, offset_bytes: int) -> None:
        """Move the values to `scratch` at `offset_bytes` and give the host memory back."""
        self._arrive()
        assert self._lease is not None
        write = scratch.write(offset_bytes, self._lease.memory)
        self._seal = Checksum(self._lease.memory)  # while the drive works
        write.wait()
        self._lease.release()
        self._lease, self._scratch, self._offset_bytes = None, scratch, offset_bytes

    def fetch(self, pool: BufferPool) -> None:
        """Bring the values to host memory, from wherever they are."""
        self._arrive()
        if self._lease is None:
            assert self._scratch is not None and self._seal is not None
            self._lease = pool.lease(self.num_bytes, f"gradient of {self.block.name}")
            self._scratch.read(self._offset_bytes, self._lease.memory).wait()
            self._seal.check(self._lease.memory, f"gradient of {self.block.name}")

    def release(self) -> None:
        """The update is done, or will not happen."""
        self._arrive()
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _arrive(self) -> None:
        if self._departure is not None:
            self._departure.wait()
            self._departure = None


def _norms(block: BlockSpec, present: Sequence[bool], flat: torch.Tensor, scale: float) -> Norms:
    """Of the parameters that have a gradient.

    Floats where they can be: a few bytes kept between the large buffers of a block would keep malloc
    from using these again for the next, and memory would grow with the number of layers.
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
        # As torch.nn.utils.clip_grad_norm_ does on GPUs: vector_norm adds up in another order there.
        return torch._foreach_norm([values], 2.0)[0]
    return float(torch.linalg.vector_norm(values, 2.0))


def total_norm(norms: Mapping[str, float | torch.Tensor], order: Sequence[str]) -> torch.Tensor:
    """The global norm (fp32 scalar, in host memory) from the norms by parameter, stacked in `order` as torch does."""
    present = [norms[name] for name in order if name in norms]
    on_device = [norm for norm in present if isinstance(norm, torch.Tensor)]
    stacked = torch.stack(on_device) if on_device else torch.tensor(present, dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return norm.cpu()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """What `clip_grad_norm_` multiplies gradients with: max_norm / (norm + 1e-6), at most 1, in fp32."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
