"""The gradient of one block: summed over micro-batches, rounded once, brought to host memory.

In backward a `GradientSum` adds up a block's gradients and becomes a `BlockGradient` (G16), which the update takes
(engine/optimizer/block_gradient.py). Where its sums are says its accumulator (engine/optimizer/accumulators.py). There
are three kinds of it, by where the sums are rounded, and their norms are taken:

    CpuGradientSum    where the CPU computes
    GpuGradientSum    where a GPU computes; the result is downloaded
    HostGradientSum   in host memory, next to a GPU

On a GPU a download starts as soon as a parameter has all its contributions, overlapped with the computing of the next
ones (active gradient offloading, Ratel section IV-C).

Invariants: a parameter that got no gradient has none (AdamW skips it, as in torch); norms are those of
`torch.nn.utils.clip_grad_norm_` on the fp32 values of G16, tensor by tensor.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

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


class GradientSum(Closing):
    """Adds up one block's gradients, parameter by parameter.

    Each parameter goes through these phases:

        1. add     in fp32, in the order in which the contributions come
        2. leave   with the last contribution: round to the gradient dtype, take the norm, and start the download
        3. finish  every parameter that has not left does so now

    On a GPU a parameter takes memory from its first contribution until its download has ended.
    """

    def __init__(
        self,
        block: BlockSpec,
        sums: Accumulator,
        pool: BufferPool,
        device: Device,
        *,
        scale: float,
        dtype: torch.dtype | None = None,
        lease: Lease | None = None,
    ) -> None:
        """`block`: as it leaves, packed if only rows of the embedding's matrix do. `sums`: closed with this. The norms
        are those of the gradient times `scale`. `dtype`: in which it leaves; None: in the block's. `lease`: memory for
        the result; None: it is leased when it is needed."""
        self.sums = sums
        self._block = block
        self._pool = pool
        self._device = device
        self._label = SpanLabel.of("gradient", block, "backward")
        self._has_left = [False] * len(block.parameters)
        """For each parameter."""
        self._dtype = dtype or VALUE_DTYPES[block.gradient_dtype]
        self._scale = scale
        self._norms: Norms = {}
        self._lease = lease

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
        self.sums.end_contribution()

    def add_made(self, index: int, parameter: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradient that autograd has made of the parameter at `index`, and take it away; see `add_one`."""
        self.add_one(index, taken_gradient(parameter), is_last=is_last)

    def add_one(self, index: int, gradient: torch.Tensor, *, is_last: bool = False) -> None:
        """Add a contribution, in the parameter's shape, to the parameter at `index`.

        With `is_last` it has all its contributions: round them, and bring the result to host memory. The contribution
        may be overwritten then.
        """
        assert not self._has_left[index], "a contribution comes after the last one"
        if is_last:
            self._send(index, self._round(index, gradient))
        else:
            self.sums.add(index, gradient)

    def finish(self) -> BlockGradient:
        """The gradient, once all contributions have been added."""
        for index, has_left in enumerate(self._has_left):
            if not has_left and index in self.sums:
                with self._device.computing(self._label):
                    rounded = self._round(index, None)
                self._send(index, rounded)
                del rounded
        gradient = self._result(self._leased())
        self._lease = None
        self.close()
        return gradient

    def close(self) -> None:
        """Give the memory back, unless `finish` has handed it on. Idempotent."""
        with ExitStack() as closing:
            closing.callback(self._release)
            closing.callback(self.sums.close)

    @abstractmethod
    def _round(self, index: int, last: torch.Tensor | None) -> torch.Tensor:
        """Take the sum of the parameter at `index`, add `last` and round it, and take the norm. Returns it, flat
        `[elements]`.

        `last`: a contribution in its shape that is not in the sum, and may be overwritten. Only one of both may be
        missing.
        """

    def _send(self, index: int, rounded: torch.Tensor) -> None:
        """Start to bring to host memory what `_round` has returned."""
        self._has_left[index] = True
        self._download_from(index, rounded)

    def _download_from(self, index: int, rounded: torch.Tensor) -> None:
        """No-op where it is in host memory."""

    def _result(self, lease: Lease) -> BlockGradient:
        return BlockGradient(self._block, lease, self._dtype, tuple(self._has_left), self._norms, download=None)

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _leased(self) -> Lease:
        """Memory for the result."""
        if self._lease is None:
            self._lease = self._new_lease()
        return self._lease

    def _new_lease(self) -> Lease:
        return self._pool.lease(self._block.num_elements * self._dtype.itemsize, f"gradient of {self._block.name}")

    def _memory(self, parameter: ParameterSpec) -> memoryview:
        size = self._dtype.itemsize
        return self._leased().memory[parameter.start * size : parameter.stop * size]

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


class CpuGradientSum(GradientSum):
    """Where the CPU computes: the result lies where it is rounded, or where it was summed, if that has its dtype."""

    def _round(self, index: int, last: torch.Tensor | None) -> torch.Tensor:
        if last is not None:
            self.sums.add(index, last)
        values, parameter = self.sums.take(index), self._block.parameters[index]
        assert values is not None
        rounded = values
        if values.dtype != self._dtype:
            rounded = view(self._memory(parameter), self._dtype).copy_(values)
        self._norms[parameter.name] = _norm(self._scaled(rounded, values))
        return rounded


class GpuGradientSum(GradientSum):
    """Where a GPU computes: the result is downloaded."""

    def __init__(
        self,
        block: BlockSpec,
        sums: Accumulator,
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
        super().__init__(block if rows is None else rows.packed, sums, pool, device, scale=scale, dtype=dtype)
        self._most_elements = (block if rows is None else rows.largest).num_elements
        self._leaving_bytes = leaving_bytes
        self._rows = rows
        self._download: Download | None = None

    def _download_from(self, index: int, rounded: torch.Tensor) -> None:
        self.sums.reuse()
        # Of a matrix, a step has no more rows than the packed block, and often fewer.
        memory = self._memory(self._block.parameters[index])[: rounded.nbytes]
        beside_bytes = max(0, self._leaving_bytes - len(memory))
        pieces = [(rounded.view(torch.uint8), memory)]
        self._download = self._device.download(pieces, self._label, beside_bytes=beside_bytes)

    def _release(self) -> None:
        download, self._download = self._download, None
        if download is not None:
            download.wait()
        super()._release()

    def _round(self, index: int, last: torch.Tensor | None) -> torch.Tensor:
        """It takes the memory of `last` if it can, and memory is passed over once to add and to round, where two calls
        would pass over it twice. The norm is a pass of its own over the rounded values, the fewest bytes there are: the
        order of its sum is that of `clip_grad_norm_`'s kernel.
        """
        values = self.sums.take(index)
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
        name, rows = self._block.parameters[index].name, self._rows if index == 0 else None
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
        block = self._block if self._rows is None else self._rows.block
        known = (block, lease, self._dtype, tuple(self._has_left), self._norms)
        return BlockGradient(*known, download, norms_lease, rows=self._rows)

    def _send_norms(self) -> Lease | None:
        """Have the norms come to host memory after the gradients. Returns that memory."""
        on_device = [norm for norm in self._norms.values() if isinstance(norm, torch.Tensor)]
        if not on_device:
            return None
        norms = torch.stack(on_device)
        lease = self._pool.lease(norms.nbytes, f"norms of {self._block.name}")
        pieces = [(norms.view(torch.uint8), lease.memory)]
        self._download = self._device.download(pieces, self._label, beside_bytes=self._leaving_bytes)
        return lease

    def _new_lease(self) -> Lease:
        size = self._dtype.itemsize
        return self._pool.lease(
            self._block.num_elements * size,
            f"gradient of {self._block.name}",
            at_most_bytes=self._most_elements * size,
        )


class HostGradientSum(GpuGradientSum):
    """Where a GPU's sums stay in host memory: they are rounded there, and go up for their norms alone."""

    def _download_from(self, index: int, rounded: torch.Tensor) -> None:
        """It is in host memory."""

    def _round(self, index: int, last: torch.Tensor | None) -> torch.Tensor:
        assert last is None, "the last contribution, too, is added in host memory"
        values, parameter = self.sums.take(index), self._block.parameters[index]
        assert values is not None
        memory = self._memory(parameter)
        rounded = view(memory, self._dtype).copy_(values)
        upload = self._device.upload(memory, self._device.reserve(len(memory)), self._label)
        on_device = upload.open().view(self._dtype)
        is_scaled = self._scale != 1.0
        norm = _norm_anywhere(self._scaled(on_device, on_device)) if is_scaled else _norm_on_gpu(on_device)
        self._norms[parameter.name] = norm
        del on_device
        upload.wait()
        return rounded


@contextmanager
def gradient_of_input(leaf: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
    """A context of a backward in which a layer's input gets its gradient; it gives what takes that gradient.

    A leaf's gradient has the leaf's strides, where autograd would hand the code before the layer the strides that it
    comes with, and kernels choose by these. So of a leaf whose elements do not lie in their order, the gradient is
    taken before it becomes the leaf's. A leaf that needs no gradient gets none.
    """
    made: list[torch.Tensor] = []
    hook = leaf.register_hook(made.append) if leaf.requires_grad and not leaf.is_contiguous() else None

    def taken() -> torch.Tensor:
        gradient = taken_gradient(leaf)
        return made.pop() if made else gradient

    try:
        yield taken
    finally:
        if hook is not None:
            hook.remove()


def taken_gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a leaf, which has none afterwards."""
    gradient = leaf.grad
    assert gradient is not None
    leaf.grad = None
    return gradient


NormParts: TypeAlias = Mapping[str, Sequence[float | torch.Tensor]]
"""2-norms of gradients by parameter name: one, or of a parameter that lies in several slices one for each part."""


def one_part(norms: Norms) -> NormParts:
    """Return the norms of whole gradients as parts: one for each parameter."""
    return {name: (norm,) for name, norm in norms.items()}


def total_norm(norms: NormParts, order: Sequence[str]) -> torch.Tensor:
    """The global norm from the norms by parameter name, stacked in `order` as torch does. A CPU scalar in fp32."""
    present = [norm for name in order for norm in norms.get(name, ())]
    on_device = [norm for norm in present if isinstance(norm, torch.Tensor)]
    stacked = torch.stack(on_device) if on_device else torch.tensor(present, dtype=torch.float32, device="cpu")
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return norm.cpu()


def first_not_finite(norms: NormParts, order: Sequence[str]) -> str | None:
    """Name of the first parameter in `order` whose gradient is not finite; None if all are."""
    return next((name for name in order if not all(map(math.isfinite, norms.get(name, ())))), None)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """The factor that `clip_grad_norm_` applies to gradients: max_norm / (norm + 1e-6), at most 1, in fp32."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


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
