"""The transfers of saved tensors: to host memory, to the drives, and back (SSDTrain, section III).

    1. leave    a storage is downloaded into a buffer. Its memory is free as soon as what is computed next begins after
                the copy, which on a GPU is long before the host knows that the copy has ended
    2. write    what does not stay in its buffer is written; then the buffer is free
    3. read     into a buffer, ahead of its use
    4. upload   on a GPU ahead of its use, too, overlapped with computing

What is asked for while its bytes are in a buffer is taken from there and never read. Buffers of what is being written
take no more than `buffer_bytes`; what is computed next waits for downloads that take more than that of a GPU's memory.

Invariant: what comes back are the bytes that left, or an error.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ratel_cli.closing import Closing
from ratel_cli.engine.cache.saved_tensors import CacheCounts, SavedPass, SavedScope, SavedStorage
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import SpanLabel
from ratel_cli.engine.reading.resident_buffers import ResidentBuffers
from ratel_cli.errors import DoesNotFit, RatelError
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import GrowingScratch, ScratchPlace

_LABEL = SpanLabel(text="saved tensors", block=0, stage="forward")


class SavedTransfers(Closing):
    """Moves the storages of saved tensors. All methods are for threads that wait for one another."""

    def __init__(
        self,
        pool: BufferPool,
        space: GrowingScratch,
        device: Device,
        *,
        buffer_bytes: int,
        resident: ResidentBuffers | None = None,
    ) -> None:
        """`buffer_bytes`: of host memory for what is being written, and as much for what is read ahead; also of a GPU's
        memory for what is being downloaded, or is uploaded ahead. `resident`: host memory for what is not written."""
        self.device = device
        self.buffer_bytes = buffer_bytes
        self.counts = CacheCounts()
        self._pool, self._space = pool, space
        self._resident = resident
        self._storing: deque[SavedStorage] = deque()
        """Storages with a buffer that is downloaded to or written, the oldest first."""
        self._leaving: deque[SavedStorage] = deque()
        """Storages that stay in host memory and whose tensors have not left yet, the oldest first."""
        self._uploading: deque[SavedStorage] = deque()
        """Storages whose uploads may be in flight, the oldest first."""
        self._ended: list[SavedStorage] = []
        """Storages that nobody needs, and whose transfers may be in flight."""
        self._live: set[SavedStorage] = set()
        """All storages that have a buffer or a place."""

    def buffer_in_memory(self, num_bytes: int, *, must_not_stall: bool) -> Lease | None:
        """A buffer in which a storage stays; None if host memory has none. `must_not_stall`: nor if computing would
        wait for what leaves."""
        if self._resident is None or (must_not_stall and not self._leaves_without_stall(num_bytes)):
            return None
        return self._resident.take(num_bytes)

    def buffer_and_place(self, num_bytes: int, *, must_not_stall: bool) -> tuple[Lease, ScratchPlace] | None:
        """A buffer from which a storage goes to the place on the drives. Waits for writes; `must_not_stall`: None
        instead, and if computing would wait for what leaves."""
        if must_not_stall and (num_bytes > self.buffer_bytes or not self._leaves_without_stall(num_bytes)):
            return None
        while self._storing and self._stored_bytes + num_bytes > self.buffer_bytes:
            if must_not_stall:
                return None
            self._end_storing(self._storing.popleft())
        place = self._space.take(num_bytes)
        try:
            return self._pool.lease(place.num_bytes, "saved tensors"), place
        except DoesNotFit:
            self._space.give_back(place)
            if must_not_stall:
                return None
            raise

    def leave(
        self, tensor: torch.Tensor, lease: Lease, place: ScratchPlace | None, scope: SavedScope, of_pass: SavedPass
    ) -> SavedStorage:
        """Start the download of the tensor's storage. `place`: where it goes then; None: it stays in the buffer."""
        num_bytes = tensor.untyped_storage().nbytes()
        entry = SavedStorage(
            known=StorageWeakRef(tensor.untyped_storage()),
            version=tensor._version,
            num_bytes=num_bytes,
            scope=scope,
            of_pass=of_pass,
            tensor=tensor.detach(),
            lease=lease,
            download=self.device.download(
                [(_bytes_of(tensor), lease.memory[:num_bytes])], _LABEL, beside_bytes=self.buffer_bytes
            ),
            place=place,
        )
        if place is None:
            self.counts.resident += num_bytes
        (self._leaving if place is None else self._storing).append(entry)
        self._live.add(entry)
        return entry

    def advance(self) -> None:
        """Drop what has left, start the writes of what has been downloaded, and give back the buffers of what has been
        written or uploaded, or is not needed any more."""
        while self._leaving and self._has_left(self._leaving[0]):
            self._leaving.popleft()
        for entry in self._storing:
            if self._has_left(entry) and entry.write is None and (entry.download is None or entry.download.done):
                self._start_write(entry)
        while self._storing and self._storing[0].write is not None and self._storing[0].write.done:
            self._end_storing(self._storing.popleft())
        while self._uploading and self._uploading[0].is_not_uploading:
            self._end_upload(self._uploading.popleft())
        ended, self._ended = self._ended, []
        for entry in ended:
            if all(each.done for each in entry.transfers) and entry not in self._storing:
                self._end_transfers(entry)
                self._live.discard(entry)
            else:
                self._ended.append(entry)

    def read_ahead(self, entries: Iterable[SavedStorage], *, must_come: bool) -> bool:
        """Start the reads of those that only the drives have. Returns False, and starts none, if there are no free
        buffers for them, unless they `must_come`."""
        waiting = [entry for entry in entries if entry.num_users and entry.is_on_drives]
        ahead_bytes = self._reading_bytes + sum(entry.num_bytes for entry in waiting)
        if ahead_bytes > self.buffer_bytes and not must_come:
            return False
        for entry in waiting:
            self._start_read(entry)
        return True

    def upload_ahead(self, entries: Iterable[SavedStorage], *, must_come: bool) -> bool:
        """Take memory on the GPU for those that are away, and start the uploads of those that host memory has. Returns
        False, and stops, where one would take too much memory, unless they `must_come`. Nothing if the host computes.

        What is computed from now on does not use that memory: uploads that begin later are overlapped with it."""
        if self.device.is_host:
            return False
        for entry in entries:
            if not entry.num_users or not entry.is_away or entry.upload is not None:
                continue
            if entry.buffer is None:
                if not must_come and self._ahead_bytes + entry.num_bytes > self.buffer_bytes:
                    return False
                entry.buffer = self.device.reserve(entry.num_bytes)
            if entry.is_in_memory:
                self._start_upload(entry)
        return True

    def restored(self, entry: SavedStorage) -> torch.Tensor:
        """A tensor with the entry's storage: what was saved, or a copy of it."""
        if entry.tensor is not None:
            self._check_unchanged(entry)
            return entry.tensor
        if entry.restored is None:
            computed = self.device.mark()
            if entry.is_on_drives:
                self._start_read(entry)
            is_there = self._is_there(entry)
            if entry.upload is None:
                self._start_upload(entry)
            upload, entry.upload = entry.upload, None
            assert upload is not None
            opened = upload.open()
            if not is_there:
                entry.moved.waits.append((computed, self.device.mark()))
            if self.device.is_host:
                entry.restored = opened.clone()
                self._end_upload(entry)
            else:  # memory that backward has done with is free before the host knows that the upload is over
                entry.restored, entry.uploaded = opened, upload.give_up()
        return entry.restored

    def end(self, entry: SavedStorage) -> None:
        """Nobody needs it any more."""
        entry.tensor = entry.restored = entry.buffer = None
        self._ended.append(entry)

    def close(self) -> None:
        """Wait for transfers in flight. Nothing can be restored any more. Idempotent."""
        for entry in self._live:
            entry.tensor = entry.restored = None
            self._end_transfers(entry)
        for group in (self._live, self._storing, self._leaving, self._uploading, self._ended):
            group.clear()

    def settle(self) -> None:
        """A pass begins: once the first step has ended, no more host memory is taken. Idempotent."""
        if self._resident is not None and self._resident.num_bytes and not self._resident.is_in_use:
            self._resident.settle()

    def is_storing(self, of_pass: SavedPass) -> bool:
        """Whether something of the pass is not written yet."""
        return any(entry.of_pass is of_pass for entry in self._storing)

    def is_needed(self, of_pass: SavedPass) -> bool:
        """Whether something of the pass may be restored."""
        return any(entry.of_pass is of_pass and entry.num_users for entry in self._live)

    @property
    def _stored_bytes(self) -> int:
        return sum(entry.lease.num_bytes for entry in self._storing if entry.lease is not None)

    @property
    def _reading_bytes(self) -> int:
        """Bytes of storages that are being read, or were read and are being uploaded."""
        return sum(entry.num_bytes for entry in self._live if entry.is_read)

    @property
    def _ahead_bytes(self) -> int:
        """Bytes of GPU memory taken for storages that backward has not asked for yet."""
        return sum(entry.num_bytes for entry in self._live if entry.buffer is not None or entry.upload is not None)

    def _is_there(self, entry: SavedStorage) -> bool:
        """Whether computing need not wait for it."""
        if self.device.is_host:
            return entry.is_in_memory
        return entry.upload is not None and entry.upload.done

    def _leaves_without_stall(self, num_bytes: int) -> bool:
        """Whether another `num_bytes` may leave while what is computed next does not wait."""
        leaving = sum(entry.num_bytes for entry in (*self._leaving, *self._storing) if entry.tensor is not None)
        return not leaving or leaving + num_bytes <= self.buffer_bytes

    def _has_left(self, entry: SavedStorage) -> bool:
        """Whether the tensor's memory is not read for its download any more. It is dropped then."""
        if entry.tensor is None:
            return True
        assert entry.download is not None
        if not entry.download.has_left:
            return False
        self._check_unchanged(entry)
        entry.tensor = None
        return True

    def _check_unchanged(self, entry: SavedStorage) -> None:
        """Raise RuntimeError, as torch does, if a tensor was changed while it was downloaded from a GPU."""
        if entry.tensor is not None and entry.tensor._version != entry.version and not self.device.is_host:
            raise RuntimeError("a saved tensor was modified by an inplace operation while it was downloaded")

    def _start_write(self, entry: SavedStorage) -> None:
        assert entry.lease is not None and entry.place is not None
        entry.download = None
        entry.write = entry.place.scratch.write_sealed(entry.place.offset, entry.lease.memory)
        self.counts.written += entry.num_bytes

    def _end_storing(self, entry: SavedStorage) -> None:
        """Return when an entry is written; its buffer is free then."""
        if entry.write is None:
            assert entry.download is not None
            entry.download.wait()
            self._has_left(entry)
            self._start_write(entry)
        write, entry.write = entry.write, None
        assert write is not None
        write.wait()
        entry.of_pass.spans.append(write.span)
        entry.is_written = True
        if entry.is_not_uploading:
            self._free_buffer(entry)

    def _start_read(self, entry: SavedStorage) -> None:
        assert entry.place is not None
        lease = self._pool.lease(entry.place.num_bytes, "saved tensors")
        try:
            entry.read = entry.place.scratch.read_sealed(entry.place.offset, lease.memory, "a saved tensor")
        except BaseException:
            lease.release()
            raise
        entry.lease, entry.is_read = lease, True
        self.counts.read += entry.num_bytes

    def _start_upload(self, entry: SavedStorage) -> None:
        """Waits for the read. If that failed, only the drives have the entry again."""
        assert entry.lease is not None
        read, entry.read = entry.read, None
        if read is not None:
            try:
                read.wait()
            except BaseException:
                self._free_buffer(entry)
                raise
        elif entry.place is not None:
            self.counts.forwarded += entry.num_bytes
        buffer, entry.buffer = entry.buffer or self.device.reserve(entry.num_bytes), None
        memory = entry.lease.memory[: entry.num_bytes]
        entry.upload = self.device.upload(memory, buffer, _LABEL, lane="activations", after=entry.download)
        if not self.device.is_host:
            self._uploading.append(entry)

    def _end_upload(self, entry: SavedStorage) -> None:
        """The upload is over. What is not written yet has its buffer until then."""
        if entry.place is None or entry.is_written:
            self._free_buffer(entry)

    def _end_transfers(self, entry: SavedStorage) -> None:
        """Wait for what is in flight, and give back buffer and place. Nobody needs the bytes, so no failure matters."""
        transfers = entry.transfers
        entry.buffer = None
        entry.download = entry.write = entry.read = entry.upload = entry.uploaded = None
        for transfer in transfers:
            with contextlib.suppress(RatelError):
                transfer.wait()
        self._free_buffer(entry)
        if entry.place is not None:
            self._space.give_back(entry.place)

    def _free_buffer(self, entry: SavedStorage) -> None:
        lease, entry.lease = entry.lease, None
        entry.is_read = False
        if lease is None:
            return
        if entry.place is None and self._resident is not None:
            self._resident.give_back(lease)
        else:
            lease.release()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, flat uint8 `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
