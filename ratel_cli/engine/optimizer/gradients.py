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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download
from ratel_cli.engine.embedding_rows import EmbeddingRows
from ratel_cli.engine.optimizer.host_sums import HostSums
from ratel_cli.engine.telemetry import SpanLabel
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.views import view
from ratel_cli.model.spec import BlockSpec
from ratel_cli.sizes import DtypeName

_ELEMENTS_AT_ONCE = 4
"""Elements that a thread of torch's norm kernel loads at once (aten/src/ATen/native/cuda, `kILP`)."""

_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

Norms = dict[str, float | torch.Tensor]
"""2-norms by parameter name. On a GPU they are scalar tensors, since reading one would wait for the GPU."""


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
        rows: EmbeddingRows | None = None,
    ) -> None:
        """The norms are those of the gradient times `scale`. `leaving_bytes`: GPU memory that gradients may take until
        their downloads have ended, at least that of one parameter. `host_sums`: where sums wait for the last
        micro-batch; None: on the compute device. `rows`: what contributions have of the embedding's matrix, if that is
        not all of it."""
        self._block = block if rows is None else rows.packed
        self._rows = rows
        self._dtype = dtype
        self._pool = pool
        self._device = device
        self._single = single
        self._scale = scale
        self._leaving_bytes = leaving_bytes
        self._host_sums = host_sums
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

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one contribution: for each of the block's parameters, in their order, a gradient or None.

        A gradient has its parameter's shape, on the compute device.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.add_one(index, gradient)

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
        return self._pool.lease(self._block.num_elements * dtype.itemsize, f"gradient of {self._block.name}")

    def _part_of(self, lease: Lease, index: int, dtype: torch.dtype) -> torch.Tensor:
        parameter = self._block.parameters[index]
        return view(lease.memory, dtype)[parameter.start : parameter.stop]


@contextmanager
def adding_to(parameters: Sequence[torch.nn.Parameter], total: GradientSum, *, is_last: bool) -> Iterator[None]:
    """While a backward runs inside: add each parameter's gradient to `total` as soon as autograd has made it.

    So no more than one parameter's gradient is waiting. With `is_last`, each leaves at once.
    """

    def add(index: int, parameter: torch.Tensor) -> None:
        total.add_one(index, taken_gradient(parameter), is_last=is_last)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(add, index)) for index, parameter in enumerate(parameters)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def taken_gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a leaf, which has none afterwards."""
    gradient = leaf.grad
    assert gradient is not None
    leaf.grad = None
    return gradient


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
        self._dtype = dtype
        self._rows = rows
        self._lease: Lease | None = lease
        self._download = download
        """The copy that fills the host memory; None once someone has waited for it."""
        self._norms_lease = norms_lease
        """The norms in fp32 `[parameters with a gradient]`, if `norms` are on a GPU."""
        self._scratch: Scratch | None = None
        self._offset_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the values in the gradient dtype, as they are held."""
        held = self.block if self._rows is None else self._rows.packed
        return held.num_elements * self._dtype.itemsize

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

    @contextmanager
    def elements(self, start: int, stop: int, pool: BufferPool) -> Iterator[memoryview]:
        """The bytes of the gradients of elements `[start, stop)` of the block; undefined for parameters without one.

        They are where they came, or, if only rows came, spread out in a buffer from `pool` while this is open.
        """
        size = self._dtype.itemsize
        if self._rows is None:
            yield self.memory[start * size : stop * size]
            return
        with pool.lease((stop - start) * size, f"gradient of {self.block.name}", crosses_link=False) as lease:
            self._rows.spread(self.flat, start, view(lease.memory, self._dtype))
            yield lease.memory

    @property
    def flat(self) -> torch.Tensor:
        """The gradients of all parameters as they are held, flat `[elements of the block]` or, if only rows came,
        `[elements of the packed block]`; undefined for parameters that have none."""
        assert self._lease is not None, "the gradient is in the scratch file"
        assert self._download is None, "the download has not ended"
        return view(self._lease.memory, self._dtype)

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
            self._lease = pool.lease(self.num_bytes, f"gradient of {self.block.name}")
            self._scratch.read_sealed(self._offset_bytes, self._lease.memory, f"gradient of {self.block.name}").wait()

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
