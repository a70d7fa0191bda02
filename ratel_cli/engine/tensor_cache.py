"""The tensor cache (SSDTrain, section III): what autograd saves goes to the drives, and comes back for backward.

It knows no model. Autograd hands over each tensor that it saves, and asks for it in backward:

    1. save       a tensor's storage is downloaded into a buffer, once for all tensors that share it, and written
    2. forward    ends a pass; what the last scope saved, small tensors and weights stay where they are
    3. restore    backward asks for a tensor. What is still in its buffer is taken from there and never read. When the
                  first tensor of a scope is asked for, the reads of this scope and of the one before it are started,
                  and those of more scopes while there are buffers

A pass is one forward, a scope is what one block of it saves. Several passes may wait for their backwards. A schedule
(engine/pass_schedule.py) says which backward comes next: its last scopes are read while the unit before it runs.

Host memory comes first, if there is some for that (engine/resident_buffers.py): what it holds is not written.

How much goes: of each pass the first tensors, up to `most_bytes`. Those of the first scopes have most time, since their
backward comes last. Where that amount is found (engine/cache_amount.py), it is of the drives alone: what they write
while forward computes, and less where backward waits for reads; what does not find a free buffer stays.

Identity is a storage and its version, so that views of one storage are one write, and a storage that was changed in
place is another one. The paper's key, the first element's address and the shape, takes views for one another.

Invariant: what backward gets are the bytes that autograd saved, or an error.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ratel_cli.closing import Closing
from ratel_cli.engine.backward_task import running_backward
from ratel_cli.engine.cache_amount import FoundAmount
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.pass_schedule import PassSchedule
from ratel_cli.engine.resident_buffers import ResidentBuffers
from ratel_cli.engine.saved_tensors import CacheCounts, SavedPass, SavedScope, SavedStorage, SavedView, StayingTensor
from ratel_cli.engine.telemetry import SpanLabel
from ratel_cli.errors import BadInput, RatelError
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import GrowingScratch, ScratchPlace

_LABEL = SpanLabel(text="saved tensors", block=0, stage="forward")
_MOST_OF_VIEW = 8
"""Storages that are more than this many times as large as what is saved of them stay."""


class TensorCache(Closing):
    """Saves tensors to the drives. All methods are for threads that wait for one another."""

    def __init__(
        self,
        pool: BufferPool,
        space: GrowingScratch,
        device: Device,
        *,
        stays: Callable[[torch.Tensor], bool],
        least_bytes: int,
        buffer_bytes: int,
        most_bytes: int | None,
        finds_most: bool,
        resident: ResidentBuffers | None = None,
        schedule: PassSchedule | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`stays`: whether a tensor never leaves, such as a weight. `least_bytes`: of a storage that leaves.
        `buffer_bytes`: of host memory for what is being written, and as much for what is read ahead. `most_bytes`: of a
        pass; None: all. `finds_most`: it is found instead. `resident`: host memory for tensors that are not written.
        `clock`: that of the tickets' spans."""
        self._pool, self._space, self._device = pool, space, device
        self._stays = stays
        self._least_bytes = least_bytes
        self._buffer_bytes = buffer_bytes
        self._most_bytes = most_bytes
        self._found = FoundAmount() if finds_most else None
        self._resident = resident
        self._schedule = schedule
        self._clock = clock
        self._entries: dict[tuple[int, int], SavedStorage] = {}
        """By storage and version: those whose storage may be saved again."""
        self._storing: deque[SavedStorage] = deque()
        """Those with a buffer that is downloaded to or written, the oldest first."""
        self._arriving: deque[SavedStorage] = deque()
        """Those that are downloaded to host memory and stay there, the oldest first."""
        self._ended: list[SavedStorage] = []
        """Those that nobody needs, and whose transfers may be in flight."""
        self._pass: SavedPass | None = None
        self._keeps = False
        self._scheduled: dict[int, SavedPass] = {}
        """Passes that wait for their backwards, by their numbers in the schedule."""
        self._measured: list[SavedPass] = []
        """Passes whose writes have not all ended, or whose backward has not."""
        self._reading_bytes = 0
        """Buffers of what is read and was not asked for yet."""
        self._live: set[SavedStorage] = set()
        """All that have a buffer or a place."""
        self.given_up: deque[SavedStorage] = deque()
        """One for each user that an entry has no more."""
        self._is_closed = False
        self.counts = CacheCounts()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which autograd saves to the cache."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, self._restore):
            yield

    def begin_pass(self) -> None:
        """A forward begins."""
        self._advance()
        self._find_most()
        if self._resident is not None and self._resident.num_bytes and not self._resident.is_in_use:
            self._resident.settle()
        self._pass = SavedPass(self._clock(), SavedScope(None))
        self._keeps = False
        if self._schedule is not None:
            self._pass.number = self._schedule.begin_forward()
            self._scheduled[self._pass.number] = self._pass
            self._fetch_next()

    def begin_scope(self, *, is_last: bool) -> None:
        """A block of the forward begins. What the last one saves stays: its backward comes at once."""
        self._advance()
        if self._pass is not None:
            self._pass.scope = SavedScope(self._pass.scope)
            self._keeps = is_last

    def end_pass(self) -> None:
        """The forward has ended."""
        ended, self._pass = self._pass, None
        if ended is not None:
            ended.seconds = self._clock() - ended.began
            if self._found is not None and ended.drive_bytes:
                self._measured.append(ended)

    def close(self) -> None:
        """Wait for transfers in flight. What is saved cannot be restored any more. Idempotent."""
        self._is_closed = True
        for entry in self._live:
            with contextlib.suppress(RatelError):  # nobody needs these bytes any more
                self._end_transfers(entry)
        self._live.clear()
        self._storing.clear()
        self._arriving.clear()
        self._scheduled.clear()
        self._ended.clear()
        self._entries.clear()

    # What autograd calls.

    def _save(self, tensor: torch.Tensor) -> SavedView | StayingTensor:
        if self._is_closed or self._pass is None or self._is_left_out(tensor):
            return StayingTensor(tensor)
        self._advance()
        storage = tensor.untyped_storage()
        known = self._entries.get((storage._cdata, tensor._version))
        if known is not None:
            return SavedView(known, tensor, self.given_up)
        num_bytes = storage.nbytes()
        # A large storage that a small tensor is a view of is the caller's, and stays where it is anyway.
        is_moved = self._least_bytes <= num_bytes <= _MOST_OF_VIEW * tensor.nbytes
        buffer = None if self._keeps or not is_moved else self._buffer_for(self._pass, num_bytes)
        if buffer is None:
            self.counts.stayed += num_bytes
            return StayingTensor(tensor, self._pass.scope)
        lease, place = buffer
        entry = SavedStorage(
            known=StorageWeakRef(storage),
            version=tensor._version,
            num_bytes=num_bytes,
            scope=self._pass.scope,
            of_pass=self._pass,
            tensor=tensor.detach(),
            lease=lease,
            download=self._device.download(
                [(_bytes_of(tensor), lease.memory[:num_bytes])], _LABEL, beside_bytes=self._buffer_bytes
            ),
            place=place,
        )
        self._pass.saved_bytes += num_bytes
        if place is None:
            self.counts.resident += num_bytes
            self._arriving.append(entry)
        else:
            self._pass.drive_bytes += num_bytes
            self._storing.append(entry)
        self._pass.scope.entries.append(entry)
        self._entries[entry.key] = entry
        self._live.add(entry)
        self._advance()
        return SavedView(entry, tensor, self.given_up)

    def _restore(self, saved: SavedView | StayingTensor) -> torch.Tensor:
        if isinstance(saved, StayingTensor):
            if saved.scope is not None and not self._is_closed:
                self._fetch(saved.scope)
            return saved.unchanged()
        if self._is_closed:
            raise BadInput(
                "a backward comes after its offload_activations has ended", "let it run inside of that context"
            )
        entry = saved.entry
        self._fetch(entry.scope)
        self._follow_schedule(entry)
        base = self._restored(entry)
        values = torch.empty(0, dtype=saved.dtype, device=base.device)
        return values.set_(base.untyped_storage(), saved.offset, saved.shape, saved.stride)

    # Saving.

    def _is_left_out(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is not one of the forward's activations, or not one that can be moved."""
        return (
            running_backward() is not None
            or type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.device != self._device.torch_device
            or self._stays(tensor)
        )

    def _buffer_for(self, of_pass: SavedPass, num_bytes: int) -> tuple[Lease, ScratchPlace | None] | None:
        """A buffer in which a storage stays, else one from which it goes to that place on the drives; None if it does
        not go."""
        if self._most_bytes is not None and of_pass.saved_bytes + num_bytes > self._most_bytes:
            return None
        lease = None if self._resident is None else self._resident.take(num_bytes)
        if lease is not None:
            return lease, None
        if not self._has_room(of_pass, num_bytes):
            return None
        place = self._space.take(num_bytes)
        return self._pool.lease(place.num_bytes, "saved tensors"), place

    def _has_room(self, of_pass: SavedPass, num_bytes: int) -> bool:
        """Whether a storage goes to the drives: what is written of its pass is little enough, and a buffer is free."""
        if self._found is not None:
            most_bytes = self._found.most_bytes
            if num_bytes > self._buffer_bytes:
                return False
            if most_bytes is not None and of_pass.drive_bytes + num_bytes > most_bytes:
                return False
        while self._storing and self._leased_bytes + num_bytes > self._buffer_bytes:
            if self._found is not None:
                return False
            self._end_storing(self._storing.popleft())
        return True

    @property
    def _leased_bytes(self) -> int:
        return sum(entry.lease.num_bytes for entry in self._storing if entry.lease is not None)

    def _advance(self) -> None:
        """Start the writes of what has been downloaded, and give back the buffers of what has been written or is not
        needed any more."""
        while self.given_up:
            entry = self.given_up.popleft()
            entry.num_users -= 1
            if not entry.num_users:
                entry.tensor = None
                self._entries.pop(entry.key, None)
                self._ended.append(entry)
        while self._arriving and (self._arriving[0].download is None or self._arriving[0].download.done):
            arrived = self._arriving.popleft()
            if arrived.download is not None:
                self._check_unchanged(arrived)
                arrived.tensor = arrived.download = None
        for entry in self._storing:
            if entry.write is None and entry.download is not None and entry.download.done:
                self._start_write(entry)
        while self._storing and self._storing[0].write is not None and self._storing[0].write.done:
            self._end_storing(self._storing.popleft())
        ended, self._ended = self._ended, []
        for entry in ended:
            is_done = (entry.download is None or entry.download.done) and all(
                ticket is None or ticket.done for ticket in (entry.write, entry.read)
            )
            if is_done and entry not in self._storing:
                self._end_transfers(entry)
                self._live.discard(entry)
            else:
                self._ended.append(entry)

    def _start_write(self, entry: SavedStorage) -> None:
        assert entry.lease is not None and entry.place is not None
        self._check_unchanged(entry)
        entry.tensor = entry.download = None
        entry.write = entry.place.scratch.write_sealed(entry.place.offset, entry.lease.memory)
        self.counts.written += entry.num_bytes

    def _check_unchanged(self, entry: SavedStorage) -> None:
        """Raise RuntimeError, as torch does, if a tensor was changed while it was downloaded from a GPU."""
        if entry.tensor is not None and entry.tensor._version != entry.version and not self._device.is_host:
            raise RuntimeError("a saved tensor was modified by an inplace operation while it was downloaded")

    def _end_storing(self, entry: SavedStorage) -> None:
        """Return when an entry is written; its buffer is free then."""
        if entry.write is None:
            assert entry.download is not None
            entry.download.wait()
            self._start_write(entry)
        write, entry.write = entry.write, None
        assert write is not None
        write.wait()
        entry.of_pass.spans.append(write.span)
        self._free_buffer(entry)

    def _end_transfers(self, entry: SavedStorage) -> None:
        """Wait for what is in flight, and give back buffer and place."""
        download, entry.download = entry.download, None
        if download is not None:
            download.wait()
        for ticket in (entry.write, entry.read):
            if ticket is not None:
                ticket.wait()
        if entry.read is not None:
            self._reading_bytes -= entry.num_bytes
        entry.write = entry.read = None
        self._free_buffer(entry)
        if entry.place is not None:
            self._space.give_back(entry.place)

    def _free_buffer(self, entry: SavedStorage) -> None:
        lease, entry.lease = entry.lease, None
        if lease is None:
            return
        if entry.place is None and self._resident is not None:
            self._resident.give_back(lease)
        else:
            lease.release()

    # Restoring.

    def _fetch(self, scope: SavedScope) -> None:
        """Start the reads of a scope, of the one before it, whose backward comes next, and of more in free buffers."""
        self._advance()
        each: SavedScope | None = scope
        must_come = 2
        while each is not None:
            if not each.is_fetched:
                waiting = [entry for entry in reversed(each.entries) if self._is_on_drives(entry)]
                ahead_bytes = self._reading_bytes + sum(entry.num_bytes for entry in waiting)
                if must_come <= 0 and ahead_bytes > self._buffer_bytes:
                    return
                each.is_fetched = True
                for entry in waiting:
                    self._start_read(entry)
            each, must_come = each.before, must_come - 1

    def _is_on_drives(self, entry: SavedStorage) -> bool:
        return entry.num_users > 0 and entry.tensor is None and entry.lease is None

    def _follow_schedule(self, entry: SavedStorage) -> None:
        """Backward asks for a tensor of this entry. Where its first block is reached, the next backward comes soon."""
        if self._schedule is None:
            return
        number = entry.of_pass.number
        if self._scheduled.get(number) is entry.of_pass:
            del self._scheduled[number]
            self._schedule.begin_backward(number)
        before = entry.scope.before
        if before is None or before.before is None:
            self._fetch_next()

    def _fetch_next(self) -> None:
        """Start the reads that the next unit of the schedule begins with, if that is a backward whose forward has
        ended."""
        assert self._schedule is not None
        number = self._schedule.next_backward
        following = None if number is None else self._scheduled.get(number)
        if following is not None and following is not self._pass:
            self._fetch(following.scope)

    def _start_read(self, entry: SavedStorage) -> None:
        assert entry.place is not None
        entry.lease = self._pool.lease(entry.place.num_bytes, "saved tensors")
        entry.read = entry.place.scratch.read_sealed(entry.place.offset, entry.lease.memory, "a saved tensor")
        self.counts.read += entry.num_bytes
        self._reading_bytes += entry.num_bytes

    def _restored(self, entry: SavedStorage) -> torch.Tensor:
        """A tensor with the entry's storage: what was saved, or a copy of it."""
        if entry.tensor is not None:
            if entry.download is not None:  # it is the first one
                self._check_unchanged(entry)
            return entry.tensor
        if entry.lease is None:
            self._start_read(entry)
        assert entry.lease is not None
        read, entry.read = entry.read, None
        if read is not None:
            began = self._clock()
            read.wait()
            entry.of_pass.stalled_seconds += self._clock() - began
            self._reading_bytes -= entry.num_bytes
        elif entry.place is not None:
            self.counts.forwarded += entry.num_bytes
        buffer = self._device.reserve(entry.num_bytes)
        upload = self._device.upload(entry.lease.memory[: entry.num_bytes], buffer, _LABEL, lane="activations")
        opened = upload.open()
        entry.tensor = opened.clone() if self._device.is_host else opened
        upload.wait()
        if read is not None or entry.place is None:  # what is being written has its buffer until then
            self._free_buffer(entry)
        return entry.tensor

    def _find_most(self) -> None:
        """Find how much of a pass is written, from those before whose writes, or whose backwards, have ended."""
        if self._found is None or not self._measured:
            return
        storing = {id(entry.of_pass) for entry in self._storing}
        in_use = {id(entry.of_pass) for entry in self._live if entry.num_users}
        for each in list(self._measured):
            if id(each) in storing:
                continue
            seconds = each.seconds or 0.0
            self._found.find(each.drive_bytes, each.spans, forward_seconds=seconds)
            if id(each) not in in_use:
                self._found.adapt(each.stalled_seconds, forward_seconds=seconds)
                self._measured.remove(each)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, flat uint8 `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
