"""Opens the sums of a step's gradients, each where the placement has it: on the compute device or in host memory."""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.accumulators import DeviceSums
from ratel_cli.engine.optimizer.gradients import CpuGradientSum, GpuGradientSum, GradientSum, HostGradientSum
from ratel_cli.engine.optimizer.host_sums import HostSums, StayingSums, SumThread
from ratel_cli.engine.optimizer.lookup_sum import LookupSum
from ratel_cli.engine.optimizer.segment_sum import SegmentSum
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.planning.profile.gpu_gradients import least_leaving_bytes
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment


class GradientSums:
    """The sums of one placement's steps. `scale` is what a step's gradients are multiplied with for their norms."""

    def __init__(
        self,
        pool: BufferPool,
        device: Device,
        thread: SumThread,
        placement: Placement,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: in which gradients leave; None: in those of their blocks."""
        self._pool = pool
        self._device = device
        self._thread = thread
        self._leaving_bytes = placement.gpu_leaving_bytes
        self._holds_sums = device.is_host or placement.gpu_holds_sums
        self._holds_lookup = device.is_host or placement.gpu_holds_lookup
        self._holds_head = device.is_host or placement.gpu_holds_head
        self._most_rows = placement.gpu_embedding_rows
        self._dtype = dtype
        self._open = partial(gradient_sum, pool=pool, device=device, dtype=dtype)

    def of_layer(self, layer: Segment, *, single: bool, scale: float) -> SegmentSum:
        """`single`: each parameter gets one contribution."""
        if single or self._holds_sums:
            return self._on_device(layer, single=single, scale=scale)
        leaving_bytes = self._leaving_bytes_of(layer)

        def opened(block: BlockSpec) -> GradientSum:
            pool, device = self._pool, self._device
            sums = HostSums(block, pool, device, self._thread, leaving_bytes=leaving_bytes)
            return GpuGradientSum(
                block, sums, pool, device, scale=scale, leaving_bytes=leaving_bytes, dtype=self._dtype
            )

        return SegmentSum.of(map(opened, layer.trained))

    def of_head(self, head: Segment, *, scale: float) -> SegmentSum:
        """Open the sum of the head's own gradients; a head with a borrowed matrix owns only small blocks."""
        if head.borrowed_lookups or self._holds_head:
            return self._on_device(head, single=False, scale=scale)
        return SegmentSum.of(self._on_host(block, scale=scale) for block in head.trained)

    def of_embedding(
        self,
        embedding: Segment,
        lookup_sum: LookupSum | None,
        *,
        single: bool,
        scale: float,
        rows: EmbeddingRows | None,
    ) -> SegmentSum:
        """`lookup_sum` has the first block's, if the head borrows that. `rows`: what contributions have of its matrix,
        if not all of it."""
        if lookup_sum is None:
            return self._on_device(embedding, single=single, scale=scale, rows=rows)
        leaving_bytes = self._leaving_bytes_of(embedding)
        opened = partial(self._open, single=single, scale=scale, leaving_bytes=leaving_bytes)
        return SegmentSum.of(chain([lookup_sum.total], map(opened, embedding.trained[1:])))

    def of_lookup(self, block: BlockSpec, tokens: torch.Tensor, *, scale: float) -> LookupSum:
        """Open the sum for a tied matrix. Closing it closes its total. `tokens`: the step's distinct ones `[rows]`, on
        the device."""
        most_rows = self._most_rows
        if most_rows is not None:
            most_rows = min(most_rows, block.parameters[0].shape[0])
        if self._holds_head:
            leaving_bytes, is_held = self._leaving_bytes_of(Segment((block,))), self._holds_lookup
            total: GradientSum = self._open(block, single=False, scale=scale, leaving_bytes=leaving_bytes)
        else:
            total, tokens, is_held = self._on_host(block, scale=scale), tokens.cpu(), True
        return LookupSum(total, tokens, device=self._device, pool=self._pool, is_held=is_held, most_rows=most_rows)

    def wait_released(self) -> None:
        """Return when host memory of sums that have ended is free."""
        self._thread.wait_released()

    def _on_device(
        self, segment: Segment, *, single: bool, scale: float, rows: EmbeddingRows | None = None
    ) -> SegmentSum:
        held = segment if rows is None else Segment((rows.packed, *segment.blocks[1:]))
        leaving_bytes = self._leaving_bytes_of(held)
        opened = partial(self._open, single=single, scale=scale, leaving_bytes=leaving_bytes, rows=rows)
        return SegmentSum.of(map(opened, segment.trained))

    def _on_host(self, block: BlockSpec, *, scale: float) -> GradientSum:
        """A sum that host memory has from the first contribution to its rounding."""
        sums = StayingSums(block, self._pool, self._device, self._thread)
        return HostGradientSum(block, sums, self._pool, self._device, scale=scale, dtype=self._dtype)

    def _leaving_bytes_of(self, segment: Segment) -> int:
        return max(self._leaving_bytes, least_leaving_bytes(segment))


def gradient_sum(
    block: BlockSpec,
    pool: BufferPool,
    device: Device,
    *,
    single: bool,
    scale: float = 1.0,
    leaving_bytes: int = 0,
    rows: EmbeddingRows | None = None,
    dtype: torch.dtype | None = None,
) -> GradientSum:
    """A sum on the compute device. `single`: each parameter gets one contribution. `rows`: what contributions have of
    the embedding's matrix, if that is this block's. Others as in `GpuGradientSum`."""
    dtype = dtype or VALUE_DTYPES[block.gradient_dtype]
    if not device.is_host:
        sums, own = DeviceSums(block, dtype=dtype, single=single), rows if rows and rows.block is block else None
        return GpuGradientSum(
            block, sums, pool, device, scale=scale, leaving_bytes=leaving_bytes, rows=own, dtype=dtype
        )
    sum_dtype = dtype if single else torch.float32
    lease = pool.lease(block.num_elements * sum_dtype.itemsize, f"gradient of {block.name}")
    result = lease.share() if sum_dtype == dtype else None
    sums = DeviceSums(block, dtype=dtype, single=single, lease=lease)
    return CpuGradientSum(block, sums, pool, device, scale=scale, lease=result, dtype=dtype)
