"""Opens the sums of a step's gradients, each where the placement has it: on the compute device or in host memory."""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.embedding_rows import EmbeddingRows
from ratel_cli.engine.optimizer.gradients import GradientSum
from ratel_cli.engine.optimizer.host_sums import HostSums, SumThread
from ratel_cli.engine.optimizer.host_tied_sum import HostTiedSum
from ratel_cli.engine.optimizer.segment_sum import SegmentSum
from ratel_cli.engine.optimizer.tied_sum import TiedSum
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.planning.gpu_gradients import least_leaving_bytes
from ratel_cli.planning.placement import Placement
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment


class GradientSums:
    """The sums of one placement's steps. `scale` is what a step's gradients are multiplied with for their norms."""

    def __init__(self, pool: BufferPool, device: Device, thread: SumThread, placement: Placement) -> None:
        self._pool = pool
        self._device = device
        self._thread = thread
        self._leaving_bytes = placement.gpu_leaving_bytes
        self._holds_sums = device.is_host or placement.gpu_holds_sums
        self._holds_tied = device.is_host or placement.gpu_holds_tied
        self._holds_head = device.is_host or placement.gpu_holds_head
        self._most_rows = placement.gpu_embedding_rows

    def of_layer(self, layer: Segment, *, single: bool, scale: float) -> SegmentSum:
        """`single`: each parameter gets one contribution."""
        if single or self._holds_sums:
            return self._on_device(layer, single=single, scale=scale)
        leaving_bytes = self._leaving_bytes_of(layer)

        def opened(block: BlockSpec) -> GradientSum:
            sums = self._host_sums(block, leaving_bytes=leaving_bytes)
            return self._open(block, single=False, scale=scale, leaving_bytes=leaving_bytes, host_sums=sums)

        return SegmentSum.of(map(opened, layer.trained))

    def of_head(self, head: Segment, *, is_tied: bool, scale: float) -> SegmentSum:
        """A tied head has no matrix of its own: what it has is small."""
        if is_tied or self._holds_head:
            return self._on_device(head, single=False, scale=scale)
        return SegmentSum.of(self._on_host(block, self._host_sums(block), scale=scale) for block in head.trained)

    def of_embedding(
        self, embedding: Segment, *, single: bool, scale: float, rows: EmbeddingRows | None = None
    ) -> SegmentSum:
        """That of an embedding which is not tied. `rows`: what contributions have of its matrix, if not all of it."""
        return self._on_device(embedding, single=single, scale=scale, rows=rows)

    def of_tied(self, embedding: Segment, tokens: torch.Tensor, *, scale: float) -> TiedSum | HostTiedSum:
        """That of a tied embedding's first block; closing it closes its total. `tokens`: the step's distinct ones
        `[rows]`, on the device."""
        pool, device, most_rows, block = self._pool, self._device, self._most_rows, embedding.blocks[0]
        if most_rows is not None:
            most_rows = min(most_rows, block.parameters[0].shape[0])
        if self._holds_head:
            leaving_bytes = self._leaving_bytes_of(embedding)
            total = self._open(block, single=False, scale=scale, leaving_bytes=leaving_bytes)
            return TiedSum(total, tokens, device=device, pool=pool, is_held=self._holds_tied, most_rows=most_rows)
        sums = self._host_sums(block)
        total = self._on_host(block, sums, scale=scale)
        return HostTiedSum(total, sums, tokens, device=device, pool=pool, most_rows=most_rows)

    def with_tied(self, embedding: Segment, tied: TiedSum | HostTiedSum, *, single: bool, scale: float) -> SegmentSum:
        """That of all of a tied embedding."""
        leaving_bytes = self._leaving_bytes_of(embedding)
        opened = partial(self._open, single=single, scale=scale, leaving_bytes=leaving_bytes)
        return SegmentSum.of(chain([tied.total], map(opened, embedding.trained[1:])))

    def _on_device(
        self, segment: Segment, *, single: bool, scale: float, rows: EmbeddingRows | None = None
    ) -> SegmentSum:
        held = segment if rows is None else Segment((rows.packed, *segment.blocks[1:]))
        leaving_bytes = self._leaving_bytes_of(held)

        def opened(block: BlockSpec) -> GradientSum:
            own = rows if rows is not None and rows.block is block else None
            return self._open(block, single=single, scale=scale, leaving_bytes=leaving_bytes, rows=own)

        return SegmentSum.of(map(opened, segment.trained))

    def _on_host(self, block: BlockSpec, sums: HostSums, *, scale: float) -> GradientSum:
        """A sum that host memory has from the first contribution to its rounding."""
        return self._open(block, single=False, scale=scale, leaving_bytes=0, host_sums=sums, stays_on_host=True)

    def _open(
        self,
        block: BlockSpec,
        *,
        single: bool,
        scale: float,
        leaving_bytes: int,
        host_sums: HostSums | None = None,
        stays_on_host: bool = False,
        rows: EmbeddingRows | None = None,
    ) -> GradientSum:
        return GradientSum(
            block,
            self._pool,
            self._device,
            dtype=VALUE_DTYPES[block.gradient_dtype],
            single=single,
            scale=scale,
            leaving_bytes=leaving_bytes,
            host_sums=host_sums,
            stays_on_host=stays_on_host,
            rows=rows,
        )

    def _host_sums(self, block: BlockSpec, *, leaving_bytes: int = 0) -> HostSums:
        return HostSums(block, self._pool, self._device, self._thread, leaving_bytes=leaving_bytes)

    def _leaving_bytes_of(self, segment: Segment) -> int:
        return max(self._leaving_bytes, least_leaving_bytes(segment))
