"""When the tensor cache moves saved tensors: to host memory, to the drives, and back (SSDTrain, section III).

Which backward comes next is not known, nor whether one does. So each phase of the offloader (engine/cache/offloader.py)
follows what has ended, whenever the cache is called:

    1. leave    a storage is downloaded into a buffer. Its memory is free as soon as what is computed next begins after
                the copy, which on a GPU is long before the host knows that the copy has ended
    2. write    what does not stay in its buffer is written; then the buffer is free
    3. read     into a buffer, ahead of its use
    4. upload   on a GPU ahead of its use, too, overlapped with computing

What is asked for while its bytes are in a buffer is taken from there and never read. Buffers of what is being written
take no more than `buffer_bytes`; what is computed next waits for downloads that take more than that of a GPU's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ratel_cli.closing import Closing
from ratel_cli.engine.cache.offloader import Offloader, bytes_of
from ratel_cli.engine.cache.saved_tensors import CacheCounts, SavedPass, SavedScope, SavedStorage
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.reading.resident_buffers import ResidentBuffers
from ratel_cli.errors import DoesNotFit
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import GrowingScratch, ScratchPlace


class SavedTransfers(Closing):
    """Moves the storages that the tensor cache hands over. All methods are for threads that wait for one another."""

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
        self._offloader = Offloader(device)
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
        storage = tensor.untyped_storage()
        entry = SavedStorage(
            what="a saved tensor",
            block=0,
            sizes=[storage.nbytes()],
            place=place,
            known=StorageWeakRef(storage),
            version=tensor._version,
            scope=scope,
            of_pass=of_pass,
            tensor=tensor.detach(),
        )
        self._offloader.leave(entry, [tensor], lease, beside_bytes=self.buffer_bytes)
        if place is None:
            self.counts.resident += entry.num_bytes
        (self._leaving if place is None else self._storing).append(entry)
        self._live.add(entry)
        return entry

    def advance(self) -> None:
        """Drop what has left, start the writes of what has been downloaded, and give back the buffers of what has been
        written or uploaded, or is not needed any more."""
        while self._leaving and self._has_left(self._leaving[0]):
            self._leaving.popleft()
        for entry in self._storing:
            if self._has_left(entry) and entry.download is not None and entry.download.done:
                self._start_write(entry)
        while self._storing and self._storing[0].write is not None and self._storing[0].write.done:
            self._end_storing(self._storing.popleft())
        while self._uploading and self._uploading[0].is_not_uploading:
            self._end_upload(self._uploading.popleft())
        ended, self._ended = self._ended, []
        for entry in ended:
            if all(each.done for each in entry.transfers) and entry not in self._storing:
                self._drop(entry)
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
            if not entry.num_users or not entry.is_away or entry.uploads:
                continue
            if not entry.buffers:
                if not must_come and self._ahead_bytes + entry.num_bytes > self.buffer_bytes:
                    return False
                self._offloader.reserve(entry)
            if entry.is_in_memory:
                self._start_upload(entry)
        return True

    def restored(self, entry: SavedStorage) -> torch.Tensor:
        """The entry's storage, or a copy of it, flat uint8 `[bytes]`."""
        if entry.tensor is not None:
            return bytes_of(entry.tensor)
        if entry.restored is None:
            computed = self.device.mark()
            if entry.is_on_drives:
                self._start_read(entry)
            is_there = self._is_there(entry)
            if not entry.uploads:
                self._start_upload(entry)
            [opened] = self._offloader.open(entry)
            if not is_there:
                entry.moved.waits.append((computed, self.device.mark()))
            entry.restored = opened.clone() if self.device.is_host else opened
            self._end_upload(entry)
        return entry.restored

    def end(self, entry: SavedStorage) -> None:
        """Nobody needs it any more."""
        entry.tensor = entry.restored = None
        entry.buffers = {}
        self._ended.append(entry)

    def close(self) -> None:
        """Wait for transfers in flight. Nothing can be restored any more. Idempotent."""
        for entry in self._live:
            entry.tensor = entry.restored = None
            self._drop(entry)
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
        return sum(entry.num_bytes for entry in self._live if entry.buffers or entry.uploads)

    def _is_there(self, entry: SavedStorage) -> bool:
        """Whether computing need not wait for it."""
        if self.device.is_host:
            return entry.is_in_memory
        return bool(entry.uploads) and entry.is_not_uploading

    def _leaves_without_stall(self, num_bytes: int) -> bool:
        """Whether another `num_bytes` may leave while what is computed next does not wait."""
        leaving = sum(entry.num_bytes for entry in (*self._leaving, *self._storing) if entry.tensor is not None)
        return not leaving or leaving + num_bytes <= self.buffer_bytes

    def _has_left(self, entry: SavedStorage) -> bool:
        """Whether the tensor's memory is not read for its download any more. It is dropped then."""
        if entry.download is None or entry.download.has_left:
            entry.tensor = None
        return entry.tensor is None

    def _start_write(self, entry: SavedStorage) -> None:
        """Waits for the download."""
        self._offloader.write(entry)
        self.counts.written += entry.num_bytes

    def _end_storing(self, entry: SavedStorage) -> None:
        """Return when an entry is written; its buffer is free then."""
        if entry.write is None:
            self._start_write(entry)
            entry.tensor = None
        self._offloader.end_write(entry)
        assert entry.written is not None
        entry.of_pass.spans.append(entry.written)
        self._end_upload(entry)

    def _start_read(self, entry: SavedStorage) -> None:
        self._offloader.read(entry, self._pool.lease(entry.buffer_bytes, "saved tensors"))
        self.counts.read += entry.num_bytes

    def _start_upload(self, entry: SavedStorage) -> None:
        """Waits for the read."""
        if entry.place is not None and not entry.is_read:
            self.counts.forwarded += entry.num_bytes
        self._offloader.reserve(entry)
        self._offloader.upload(entry)
        if not self.device.is_host:
            self._uploading.append(entry)

    def _end_upload(self, entry: SavedStorage) -> None:
        """Release the buffer, unless it is still written or uploaded."""
        if (entry.place is None or entry.written is not None) and entry.is_not_uploading:
            self._offloader.release(entry)

    def _drop(self, entry: SavedStorage) -> None:
        """Wait for what is in flight, and give back buffer and place."""
        self._offloader.drop(entry)
        if entry.place is not None:
            self._space.give_back(entry.place)
