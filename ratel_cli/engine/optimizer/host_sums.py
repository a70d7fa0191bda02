"""The fp32 sums of a block's gradients in host memory, for a GPU that has no memory for them.

With several micro-batches each parameter of a layer goes through these phases:

    1. add     of every micro-batch but the last: download the gradient in its own dtype; a thread adds it to the sum
    2. take    with the last one: upload the sum; the last gradient is added to it on the GPU. Uploads run ahead in the
               order in which the first gradients came, and are overlapped with computing of the last ones
    3. close   the thread gives the memory back when the uploads have ended

The gradients of a head that the GPU has no memory for are all added here, chunk by chunk, and the sum is rounded where
it is (`StayingSums`). So is that of a matrix that the head borrows, of which `LookupSum` has more to add.

Invariants: the additions are those that the GPU would do, in the same order, so the bits are the same; the sums on the
GPU take no more than `summed_elements` (planning/memory/gpu_memory.py), however many parameters there are; the sums of
one layer are in host memory, never those of two; next to them only those of a matrix that the head borrows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from functools import partial

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download, Upload
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer.accumulators import Accumulator
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import view
from ratel_cli.planning.profile.gpu_gradients import summed_elements
from ratel_cli.schedule.blocks import BlockSpec

ADDED_AT_ONCE = 1 << 18
"""Elements that are added at once. Torch makes an fp32 copy of them first: 1 MiB, which stays in the cache. So one core
adds 2.6e9 bf16 elements a second, which is 26 GB/s of main memory (2-core Xeon, 2026-11)."""


class SumThread(Closing):
    """The thread that adds gradients in host memory, for one block after another."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ratel-sums")
        self._release: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` after all work that was submitted before."""
        return self._thread.submit(work)

    def wait(self, work: Future[None]) -> None:
        """Return when `work` is done. Raises what it raised."""
        if not work.done():
            with self._timeline.stalled_on("down"):
                work.result()
        work.result()

    def release_later(self, lease: Lease, copies: list[Callable[[], None]]) -> None:
        """Give memory back after all work that was submitted before, and after these copies have ended."""

        def release() -> None:
            for wait in copies:
                wait()
            lease.release()

        self._release = self.submit(release)

    def wait_released(self) -> None:
        """Return when the memory of `release_later` is free."""
        release, self._release = self._release, None
        if release is not None:
            self.wait(release)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._thread.shutdown(wait=True)


class HostSums(Accumulator):
    """In host memory. All methods are for the compute thread."""

    def __init__(
        self, block: BlockSpec, pool: BufferPool, device: Device, thread: SumThread, *, leaving_bytes: int
    ) -> None:
        """`leaving_bytes`: GPU memory that gradients may take until their downloads have ended."""
        self._block = block
        self._pool = pool
        self._device = device
        self._thread = thread
        self._leaving_bytes = leaving_bytes
        self._label = SpanLabel.of("gradient", block, "backward")
        self._sum_label = SpanLabel.of("sum", block, "backward")
        self._lease: Lease | None = None
        """The sums, and behind them the last gradient of each parameter in its own dtype."""
        self._additions: dict[int, Future[None]] = {}
        """The last addition for each parameter, in the order of the first ones."""
        self._to_fetch: list[int] = []
        """Parameters whose sums are not uploaded yet, the next one last."""
        self._ahead: dict[int, Upload] = {}
        """The uploads that run ahead of their use, by parameter."""
        self._copies: list[Callable[[], None]] = []
        """What waits for the end of each upload."""

    def __contains__(self, index: int) -> bool:
        """True if the parameter at `index` has a sum here."""
        return index in self._additions

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Download a contribution, and have it added to the sum of the parameter at `index`."""
        before = self._additions.get(index)
        values, download = self.bring(index, gradient.reshape(-1))
        work = partial(_add, self._sum(index), values, download, is_first=before is None)
        self._additions[index] = self._thread.submit(work)

    def bring(self, index: int, gradient: torch.Tensor) -> tuple[torch.Tensor, Download]:
        """Download a gradient of the parameter at `index`, flat `[elements]`, to where its last one was, which is added
        first. Returns that memory, and the download that fills it."""
        before, size = self._additions.get(index), gradient.dtype.itemsize
        if before is not None:
            self._thread.wait(before)
        if self._lease is None:
            self._thread.wait_released()
            num_bytes = self._block.num_elements * (4 + size)
            self._lease = self._pool.lease(num_bytes, f"sums of gradients of {self._block.name}")
        parameter, start = self._block.parameters[index], 4 * self._block.num_elements
        memory = self._lease.memory[start + parameter.start * size :][: gradient.nbytes]
        download = self._device.download(
            [(gradient.view(torch.uint8), memory)],
            self._label,
            beside_bytes=max(0, self._leaving_bytes - len(memory)),
        )
        return view(memory, gradient.dtype), download

    def values(self, index: int) -> torch.Tensor:
        """The sum of the parameter at `index`, fp32 and flat `[elements]`, in host memory, once all is added."""
        self._thread.wait(self._additions[index])
        return self._sum(index)

    def expect_last(self) -> None:
        """Every micro-batch but the last is added: start the first uploads."""
        self._to_fetch = list(reversed(self._additions))
        self._fetch_ahead()

    def take(self, index: int) -> torch.Tensor | None:
        """End the sum of the parameter at `index`: fp32 and flat `[elements]`, in a device buffer of its own."""
        if index not in self._additions:
            return None
        if index not in self._ahead:  # the last gradients come in another order
            self._to_fetch.extend(reversed(self._ahead))
            self._drop_ahead()
            self._ahead[index] = self._upload(index)
        del self._additions[index]
        return self._ahead.pop(index).open().view(torch.float32)

    def reuse(self) -> None:
        """The next sums go up."""
        self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Start the uploads of the next sums, as many as there is memory for. No sum that was taken may be left."""
        while self._to_fetch:
            index = self._to_fetch[-1]
            if index in self._additions:
                num_elements = sum(self._block.parameters[each].num_elements for each in (*self._ahead, index))
                if num_elements > summed_elements(self._block):
                    return
                self._ahead[index] = self._upload(index)
            self._to_fetch.pop()

    def close(self) -> None:
        """Give the memory back when nothing uses it any more. Idempotent."""
        self._additions.clear()
        self._drop_ahead()
        lease, self._lease = self._lease, None
        if lease is not None:
            self._thread.release_later(lease, self._copies)

    def _drop_ahead(self) -> None:
        for upload in self._ahead.values():
            upload.wait()
        self._ahead.clear()

    def _upload(self, index: int) -> Upload:
        memory = self._memory(index)
        buffer = self._device.reserve(len(memory))
        self._thread.wait(self._additions[index])
        upload = self._device.upload(memory, buffer, self._sum_label)
        self._copies.append(upload.give_up().wait)
        return upload

    def _sum(self, index: int) -> torch.Tensor:
        return view(self._memory(index), torch.float32)

    def _memory(self, index: int) -> memoryview:
        """The sum of the parameter at `index`."""
        assert self._lease is not None
        parameter = self._block.parameters[index]
        return self._lease.memory[4 * parameter.start : 4 * parameter.stop]


class StayingSums(HostSums):
    """Sums that do not return. A contribution has left the device when the next one is made."""

    def __init__(self, block: BlockSpec, pool: BufferPool, device: Device, thread: SumThread) -> None:
        super().__init__(block, pool, device, thread, leaving_bytes=0)
        self._chunks: torch.Tensor | None = None
        """The fp32 sum of a micro-batch's chunks, once one has had two."""
        self._while_chunks = ExitStack()
        self._rows: list[Lease] = []
        """Buffers of the rows that were saved of each micro-batch, in the compute dtype."""

    def end_contribution(self) -> None:
        """Wait for its downloads."""
        self._device.free_downloads()

    def take(self, index: int) -> torch.Tensor | None:
        """It is in host memory."""
        values = self.values(index) if index in self else None
        self._additions.pop(index, None)
        return values

    def here(self, gradient: torch.Tensor) -> torch.Tensor:
        """See `DeviceSums`. It has left the device when the next one is made."""
        values, download = self.bring(0, gradient.reshape(-1))
        self.end_contribution()
        self._add_here(lambda _: download.wait())
        return values.view(gradient.shape)

    def add_chunks(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """See `DeviceSums`. The first chunk makes room for the second."""
        if self._chunks is None:
            lease = self._pool.lease(4 * first.numel(), "gradient of the tied head", crosses_link=False)
            self._chunks = view(lease.memory, torch.float32).view(first.shape)
            self._while_chunks.callback(lease.release)
        total = self._chunks

        def begin(_: torch.Tensor) -> None:
            total.copy_(first)

        if first is not total:
            self._add_here(begin)
        values, download = self.bring(0, second.reshape(-1))
        self.end_contribution()

        def add(_: torch.Tensor) -> None:
            download.wait()
            add_in_pieces(total.view(-1), values)

        self._add_here(add)
        return total

    def add_rounded(
        self, part: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor, *, most_rows: int | None
    ) -> torch.Tensor:
        """See `DeviceSums`. It is rounded piece by piece."""
        row_bytes, is_first, flat = part.shape[1] * dtype.itemsize, not self._rows, part.view(-1)
        at_most_bytes = None if most_rows is None else most_rows * row_bytes
        lease = self._pool.lease(len(rows) * row_bytes, "rows of the tied head's gradient", at_most_bytes=at_most_bytes)
        self._rows.append(lease)
        saved = view(lease.memory, dtype).view(-1, part.shape[1])

        def add(total: torch.Tensor) -> None:
            saved.copy_(part[rows])
            for start in range(0, len(total), ADDED_AT_ONCE):
                piece = slice(start, start + ADDED_AT_ONCE)
                rounded = flat[piece].to(dtype)
                total[piece].copy_(rounded) if is_first else total[piece].add_(rounded)

        self._add_here(add)
        return saved

    def end_chunks(self) -> None:
        """See `DeviceSums`."""
        wait_for(self._additions.values())
        self._chunks = None
        self._while_chunks.close()

    def close(self) -> None:
        """Block until the memory is free. What failed is not raised."""
        self.end_chunks()
        while self._rows:
            self._rows.pop().release()
        super().close()
        self._thread.wait_released()

    def _add_here(self, work: Callable[[torch.Tensor], None]) -> None:
        """Have the thread do `work` on the sum of the parameter at 0, fp32 and flat `[elements]`, after what was added
        before. A gradient was brought before."""
        before = self._additions.get(0)
        if before is not None:
            self._thread.wait(before)
        self._additions[0] = self._thread.submit(partial(work, self._sum(0)))


def _add(total: torch.Tensor, part: torch.Tensor, download: Download, *, is_first: bool) -> None:
    """Add `part` to the fp32 `total` once it has arrived; the first one is the total. Both are flat `[elements]`."""
    download.wait()
    if is_first:
        total.copy_(part)
        return
    add_in_pieces(total, part)


def add_in_pieces(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add `part` to the fp32 `total`, a piece after another, which stays in the cache. Both are flat `[elements]`."""
    for start in range(0, len(total), ADDED_AT_ONCE):
        total[start : start + ADDED_AT_ONCE].add_(part[start : start + ADDED_AT_ONCE])
