"""The gradient of an embedding that is also the head, added up in exactly the order of plain PyTorch.

In PyTorch each micro-batch gives one gradient, head part plus embedding part, and these are summed. Here the head
parts of all micro-batches come first. But the embedding part is zero except in the rows of the step's distinct tokens,
so only those rows of the head parts are saved, once for each micro-batch (`planning/memory/capacity.py` counts them).

A GPU that has no memory to spare has host memory hold all of it from the head to the embedding. The rows of each
micro-batch then leave as soon as they are made, and come back one micro-batch ahead of their use. A GPU that has no
memory for the sum either has it added up in host memory (engine/optimizer/host_sums.py): the same additions in the same
order, of a chunk's gradient at a time, and then of the rows of the embedding's part.

Invariant: where host memory holds it, at most two micro-batches' rows are on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download, Upload
from ratel_cli.engine.measure.telemetry import SpanLabel
from ratel_cli.engine.optimizer.accumulators import DeviceSums
from ratel_cli.engine.optimizer.gradients import GradientSum
from ratel_cli.engine.optimizer.host_sums import StayingSums
from ratel_cli.io.buffers import BufferPool, Lease

_LABEL = SpanLabel(text="gradient of the tied head", block=0, stage="backward")


class LookupSum(Closing):
    """The sum of one step."""

    def __init__(
        self,
        total: GradientSum,
        rows: torch.Tensor,
        *,
        device: Device,
        pool: BufferPool,
        is_held: bool,
        most_rows: int | None,
    ) -> None:
        """`total` is the sum of the embedding's block, on `device` or in host memory, where it stays; `rows` are the
        step's distinct tokens `[rows]`, there as well. `is_held`: all of it stays there; otherwise it is on the device,
        and host memory from `pool` holds it. `most_rows`: the most that any step has, as planned; None: not known."""
        assert isinstance(total.sums, DeviceSums | StayingSums)
        self.total = total
        self._sums = total.sums
        self._rows = rows
        self._most_rows = most_rows
        self._part: torch.Tensor | None = None
        self._dtype = torch.float32
        self._device = device
        self._pool = pool
        self._is_held = is_held
        self._head_rows: list[torch.Tensor] = []
        self._offloaded_rows: list[_Offloaded] = []
        self._ahead: Upload | None = None
        """The rows of the next micro-batch, on their way back."""
        self._offloaded_total: _Offloaded | None = None
        self._leases: list[Lease] = []
        self._waits: list[Callable[[], None]] = []
        """Called before the leases are given back."""
        self._started = False

    def add_head(self, gradient: torch.Tensor) -> None:
        """Add the head's part `[vocab, hidden]` of one chunk of the current micro-batch."""
        if self._part is None:
            self._part, self._dtype = self._sums.here(gradient), gradient.dtype
        else:
            self._part = self._sums.add_chunks(self._part, gradient)

    def end_micro_batch(self) -> None:
        """End the current micro-batch: the sum of its chunks is rounded, as a single gradient is."""
        rows = self._sums.add_rounded(self._taken_part(), self._dtype, self._rows, most_rows=self._most_rows)
        if self._is_held:
            self._head_rows.append(rows)
        else:
            at_most_bytes = None if self._most_rows is None else self._most_rows * rows.shape[1] * rows.itemsize
            self._offloaded_rows.append(self._offload(rows, "rows of the tied head's gradient", at_most_bytes))

    def end_head(self) -> None:
        """After the head: the sum leaves the device, too, unless it is held there."""
        self._sums.end_chunks()
        if not self._is_held:
            values = self._sums.take(0)
            assert values is not None
            self._offloaded_total = self._offload(values, "gradient of the tied head", values.nbytes)

    def fetch(self) -> None:
        """Before the embedding's backward: bring back the sum if it has left, and the first rows."""
        if self._offloaded_total is not None:
            assert isinstance(self._sums, DeviceSums)
            total, self._offloaded_total = self._upload(self._offloaded_total), None
            self._sums.put(0, total.open().view(torch.float32))
        self._fetch_ahead()

    def add_embedding(self, *gradients: torch.Tensor) -> None:
        """Add the rows `[rows, hidden]` of the embedding's part of the next micro-batch, in the same order of
        micro-batches: one for each time that tokens were looked up, in the order of backward."""
        part = self._next_rows(gradients[0])
        for gradient in gradients:
            own = self._sums.here(gradient)
            values = self._sums.values(0).view(-1, part.shape[1])  # what was brought here is there now
            part = part + own
        contribution = part.to(values)
        if self._started:
            contribution = values[self._rows] + contribution
        self._started = True
        values[self._rows] = contribution

    def close(self) -> None:
        """Give host memory back, that of the total too. Idempotent."""
        self._ahead = None
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()
        self.total.close()

    def _taken_part(self) -> torch.Tensor:
        """The sum of the current micro-batch, which has no other user then."""
        part, self._part = self._part, None
        assert part is not None
        return part

    def _next_rows(self, like: torch.Tensor) -> torch.Tensor:
        """The head's rows `[rows, hidden]` of the next micro-batch, in the data type of `like` `[rows, hidden]`."""
        if self._is_held:
            return self._head_rows.pop(0)
        assert self._ahead is not None
        upload, self._ahead = self._ahead, None
        self._fetch_ahead()
        return upload.open().view(like.dtype).view(-1, like.shape[1])

    def _fetch_ahead(self) -> None:
        if self._offloaded_rows:
            self._ahead = self._upload(self._offloaded_rows.pop(0))

    def _offload(self, values: torch.Tensor, purpose: str, at_most_bytes: int | None) -> _Offloaded:
        lease = self._pool.lease(values.nbytes, purpose, at_most_bytes=at_most_bytes)
        self._leases.append(lease)
        download = self._device.download([(values.view(-1).view(torch.uint8), lease.memory)], _LABEL)
        self._waits.append(download.wait)
        return _Offloaded(lease.memory, download)

    def _upload(self, offloaded: _Offloaded) -> Upload:
        buffer = self._device.reserve(len(offloaded.memory))
        upload = self._device.upload(offloaded.memory, buffer, _LABEL, after=offloaded.download)
        self._waits.append(upload.give_up().wait)
        return upload


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """A tensor in host memory."""

    memory: memoryview
    download: Download
