"""The gradient of a tied embedding, added up in host memory where a GPU has no memory for it.

What `LookupSum` does on the GPU happens here with the same additions in the same order, so the bits are the same. The
GPU has one chunk's gradient of the head at a time, and then the rows of the embedding's part.

    1. add_head            download a chunk's gradient, and add it to the micro-batch's part
    2. end_micro_batch     round the part, as a single gradient is; save its rows of the step's distinct tokens, and add
                           all of it to the total
    3. add_embedding       add a micro-batch's embedding rows to its saved rows, and these to the total
    4. finish of `total`   round the total where it is
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download
from ratel_cli.engine.optimizer.gradients import GradientSum
from ratel_cli.engine.optimizer.host_sums import ADDED_AT_ONCE, HostSums, add_in_pieces
from ratel_cli.engine.telemetry import SpanLabel
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import view

_LABEL = SpanLabel(text="gradient of the tied head", block=0, stage="backward")


class HostLookupSum(Closing):
    """The sum of one step. The interface is that of `LookupSum`."""

    def __init__(
        self,
        total: GradientSum,
        sums: HostSums,
        rows: torch.Tensor,
        *,
        device: Device,
        pool: BufferPool,
        most_rows: int | None,
    ) -> None:
        """`total` is the sum of the embedding's block, which `sums` has in host memory; `rows` are the step's distinct
        tokens `[rows]`, on the device. `most_rows`: the most that any step has, as it is planned; None: not known."""
        self.total = total
        self._sums = sums
        self._rows = rows.cpu()
        self._most_rows = most_rows
        self._device = device
        self._pool = pool
        self._chunk: torch.Tensor | None = None
        """The only chunk so far of the current micro-batch, flat `[elements]`, in the compute dtype."""
        self._part: Lease | None = None
        """The fp32 sum of its chunks, once there are two."""
        self._has_part = False
        self._has_total = False
        self._head_rows: list[Lease] = []
        """The saved rows of each micro-batch, in the compute dtype."""
        self._dtype, self._width = torch.float32, 0
        self._has_embedding = False

    def add_head(self, gradient: torch.Tensor) -> None:
        """Add the head's part `[vocab, hidden]` of one chunk of the current micro-batch."""
        if self._chunk is not None and not self._has_part:
            first, self._chunk = self._chunk, None
            self._sums.add_here(0, _copying(first, self._lease_part(first)))
            self._has_part = True
        self._dtype, self._width = gradient.dtype, gradient.shape[1]
        values, download = self._sums.bring(0, gradient.reshape(-1))
        self._device.free_downloads()
        if self._has_part:
            self._sums.add_here(0, _adding(self._part_values(), values, download))
        else:
            self._chunk = values
            self._sums.add_here(0, lambda _: download.wait())

    def end_micro_batch(self) -> None:
        """End the current micro-batch: the sum of its chunks is rounded, as a single gradient is."""
        part = self._part_values() if self._has_part else self._chunk
        assert part is not None
        width, is_first = self._width, not self._has_total
        rows = self._lease_rows(width * self._dtype.itemsize, "rows of the tied head's gradient")
        self._head_rows.append(rows)
        saved, chosen = view(rows.memory, self._dtype).view(-1, width), self._rows

        def add(total: torch.Tensor) -> None:
            saved.copy_(part.view(-1, width)[chosen])
            for start in range(0, len(total), ADDED_AT_ONCE):
                piece = slice(start, start + ADDED_AT_ONCE)
                rounded = part[piece].to(saved.dtype)
                total[piece].copy_(rounded) if is_first else total[piece].add_(rounded)

        self._sums.add_here(0, add)
        self._chunk, self._has_part, self._has_total = None, False, True

    def end_head(self) -> None:
        """After the head: no more chunks come."""
        self._sums.values(0)
        part, self._part = self._part, None
        if part is not None:
            part.release()

    def fetch(self) -> None:
        """Nothing is fetched: the embedding's rows come here."""

    def add_embedding(self, *gradients: torch.Tensor) -> None:
        """Add the rows `[rows, hidden]` of the embedding's part of the next micro-batch, in the same order of
        micro-batches: one for each time that tokens were looked up, in the order of backward."""
        first = gradients[0]
        lease = self._lease_rows(first.shape[1] * first.itemsize, "rows of the embedding's gradient")
        head_rows = self._head_rows.pop(0)
        own, part = (view(each.memory, first.dtype).view(first.shape) for each in (lease, head_rows))
        for gradient in gradients:
            download = self._device.download([(gradient.reshape(-1).view(torch.uint8), lease.memory)], _LABEL)
            self._device.free_downloads()
            download.wait()
            part = part + own
        values = self._sums.values(0).view(-1, first.shape[1])
        contribution = part.to(values)
        if self._has_embedding:
            contribution = values[self._rows] + contribution
        self._has_embedding = True
        values[self._rows] = contribution
        lease.release()
        head_rows.release()

    def close(self) -> None:
        """Give host memory back, that of the total too. Idempotent."""
        leases = [*self._head_rows, *([self._part] if self._part is not None else [])]
        self._head_rows, self._part = [], None
        if leases:
            self._sums.wait_added()
        for lease in leases:
            lease.release()
        self.total.close()

    def _lease_rows(self, row_bytes: int, purpose: str) -> Lease:
        at_most_bytes = None if self._most_rows is None else self._most_rows * row_bytes
        return self._pool.lease(len(self._rows) * row_bytes, purpose, at_most_bytes=at_most_bytes)

    def _lease_part(self, like: torch.Tensor) -> torch.Tensor:
        if self._part is None:
            self._part = self._pool.lease(4 * len(like), "gradient of the tied head", crosses_link=False)
        return self._part_values()

    def _part_values(self) -> torch.Tensor:
        assert self._part is not None
        return view(self._part.memory, torch.float32)


def _copying(chunk: torch.Tensor, part: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def copy(_: torch.Tensor) -> None:
        part.copy_(chunk)

    return copy


def _adding(part: torch.Tensor, chunk: torch.Tensor, download: Download) -> Callable[[torch.Tensor], None]:
    def add(_: torch.Tensor) -> None:
        download.wait()
        add_in_pieces(part, chunk)

    return add
