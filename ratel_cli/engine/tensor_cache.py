"""The tensor cache (SSDTrain, section III): what autograd saves goes to the drives, and comes back for backward.

It knows no model. Autograd hands over each tensor that it saves, and asks for it in backward:

    1. save       a tensor's storage is downloaded into a buffer, once for all tensors that share it, and written
    2. forward    ends a pass; what the last scope saved, small tensors and weights stay where they are
    3. restore    backward asks for a tensor. What is still in its buffer is taken from there and never read. When the
                  first tensor of a scope is asked for, the reads of this scope and of the one before it are started

A pass is one forward, a scope is what one block of it saves. Several passes may wait for their backwards.

How much goes: of each pass the first tensors, up to `most_bytes`. Those of the first scopes have most time, since their
backward comes last. Where that amount is found (`finds_most`), the first pass shows at which rate the drives write, and
later ones offload what is written while forward computes; what does not find a free buffer stays.

Identity is a storage and its version, so that views of one storage are one write, and a storage that was changed in
place is another one. The paper's key, the first element's address and the shape, takes views for one another.

Invariant: what backward gets are the bytes that autograd saved, or an error.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ratel_cli.closing import Closing
from ratel_cli.engine.backward_task import running_backward
from ratel_cli.engine.device.device import Device, Download
from ratel_cli.engine.telemetry import SpanLabel
from ratel_cli.errors import BadInput, RatelError
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import GrowingScratch, ScratchPlace
from ratel_cli.io.tickets import Ticket

_LABEL = SpanLabel(text="saved tensors", block=0, stage="forward")
_MOST_OF_VIEW = 8
"""Storages that are more than this many times as large as what is saved of them stay."""


@dataclass(slots=True)
class CacheCounts:
    """Bytes since the cache was opened."""

    stayed: int = 0
    """Saved, and left where they were."""
    written: int = 0
    read: int = 0
    forwarded: int = 0
    """Restored from a buffer, before or while they were written."""


@dataclass(slots=True, eq=False)
class _Scope:
    """What one block of one pass saves."""

    before: _Scope | None
    entries: list[_Entry] = field(default_factory=list)
    is_fetched: bool = False


@dataclass(slots=True, eq=False)
class _Pass:
    """One forward, and what is known of it."""

    began: float
    scope: _Scope
    saved_bytes: int = 0
    """What went to the drives."""
    seconds: float | None = None
    """What its forward took."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When its writes began and ended."""


@dataclass(slots=True, eq=False)
class _Entry:
    """The storage of saved tensors."""

    known: StorageWeakRef
    """As long as it is there, no other storage has the same address."""
    version: int
    num_bytes: int
    scope: _Scope
    of_pass: _Pass
    tensor: torch.Tensor | None
    """One that has the storage, while it is in its place or is back."""
    lease: Lease | None
    download: Download | None
    place: ScratchPlace
    write: Ticket | None = None
    read: Ticket | None = None
    num_users: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.known.cdata, self.version


class _Saved:
    """What autograd has of a tensor in the cache."""

    def __init__(self, cache: TensorCache, entry: _Entry, tensor: torch.Tensor) -> None:
        self.cache, self.entry = cache, entry
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()
        entry.num_users += 1

    def __del__(self) -> None:
        self.cache.given_up.append(self.entry)  # at any moment: the next call of the cache looks at it


class _Staying:
    """What autograd has of a tensor that stays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version


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
    ) -> None:
        """`stays`: whether a tensor never leaves, such as a weight. `least_bytes`: of a storage that leaves.
        `buffer_bytes`: of host memory for what is being written. `most_bytes`: of a pass; None: all."""
        self._pool, self._space, self._device = pool, space, device
        self._stays = stays
        self._least_bytes = least_bytes
        self._buffer_bytes = buffer_bytes
        self._most_bytes, self._finds_most = most_bytes, finds_most
        self._entries: dict[tuple[int, int], _Entry] = {}
        """By storage and version: those whose storage may be saved again."""
        self._storing: deque[_Entry] = deque()
        """Those with a buffer that is downloaded to or written, the oldest first."""
        self._ended: list[_Entry] = []
        """Those that nobody needs, and whose transfers may be in flight."""
        self._pass: _Pass | None = None
        self._keeps = False
        self._measured: deque[_Pass] = deque()
        """Passes whose writes have not all ended."""
        self._live: set[_Entry] = set()
        """All that have a buffer or a place."""
        self.given_up: deque[_Entry] = deque()
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
        self._pass = _Pass(perf_counter(), _Scope(None))
        self._keeps = False

    def begin_scope(self, *, is_last: bool) -> None:
        """A block of the forward begins. What the last one saves stays: its backward comes at once."""
        self._advance()
        if self._pass is not None:
            self._pass.scope = _Scope(self._pass.scope)
            self._keeps = is_last

    def end_pass(self) -> None:
        """The forward has ended."""
        ended, self._pass = self._pass, None
        if ended is not None:
            ended.seconds = perf_counter() - ended.began
            if self._finds_most and self._most_bytes is None:
                self._measured.append(ended)

    def close(self) -> None:
        """Wait for transfers in flight. What is saved cannot be restored any more. Idempotent."""
        self._is_closed = True
        for entry in self._live:
            with contextlib.suppress(RatelError):  # nobody needs these bytes any more
                self._end_transfers(entry)
        self._live.clear()
        self._storing.clear()
        self._ended.clear()
        self._entries.clear()

    # What autograd calls.

    def _save(self, tensor: torch.Tensor) -> _Saved | _Staying:
        if self._is_closed or self._pass is None or self._is_left_out(tensor):
            return _Staying(tensor)
        self._advance()
        storage = tensor.untyped_storage()
        known = self._entries.get((storage._cdata, tensor._version))
        if known is not None:
            return _Saved(self, known, tensor)
        num_bytes = storage.nbytes()
        # A large storage that a small tensor is a view of is the caller's, and stays where it is anyway.
        is_moved = self._least_bytes <= num_bytes <= _MOST_OF_VIEW * tensor.nbytes
        if self._keeps or not is_moved or not self._has_room(self._pass, num_bytes):
            self.counts.stayed += num_bytes
            return _Staying(tensor)
        place = self._space.take(num_bytes)
        lease = self._pool.lease(place.num_bytes, "saved tensors")
        entry = _Entry(
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
        self._pass.scope.entries.append(entry)
        self._entries[entry.key] = entry
        self._live.add(entry)
        self._storing.append(entry)
        self._advance()
        return _Saved(self, entry, tensor)

    def _restore(self, saved: _Saved | _Staying) -> torch.Tensor:
        if isinstance(saved, _Staying):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation"
                )
            return saved.tensor
        if self._is_closed:
            raise BadInput(
                "a backward comes after its offload_activations has ended", "let it run inside of that context"
            )
        entry = saved.entry
        self._fetch(entry.scope)
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

    def _has_room(self, of_pass: _Pass, num_bytes: int) -> bool:
        """Whether a storage goes to the drives: it is among the first of its pass, and finds a free buffer."""
        if self._most_bytes is not None and of_pass.saved_bytes + num_bytes > self._most_bytes:
            return False
        if self._finds_most and num_bytes > self._buffer_bytes:
            return False
        while self._storing and self._leased_bytes + num_bytes > self._buffer_bytes:
            if self._finds_most:
                return False
            self._end_storing(self._storing.popleft())
        return True

    @property
    def _leased_bytes(self) -> int:
        return sum(entry.place.num_bytes for entry in self._storing)

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

    def _start_write(self, entry: _Entry) -> None:
        assert entry.lease is not None
        self._check_unchanged(entry)
        entry.tensor = entry.download = None
        entry.write = entry.place.scratch.write_sealed(entry.place.offset, entry.lease.memory)
        self.counts.written += entry.num_bytes

    def _check_unchanged(self, entry: _Entry) -> None:
        """Raise RuntimeError, as torch does, if a tensor was changed while it was downloaded from a GPU."""
        if entry.tensor is not None and entry.tensor._version != entry.version and not self._device.is_host:
            raise RuntimeError("a saved tensor was modified by an inplace operation while it was downloaded")

    def _end_storing(self, entry: _Entry) -> None:
        """Return when an entry is written; its buffer is free then."""
        if entry.write is None:
            assert entry.download is not None
            entry.download.wait()
            self._start_write(entry)
        write, entry.write = entry.write, None
        assert write is not None
        write.wait()
        entry.of_pass.spans.append(write.span)
        lease, entry.lease = entry.lease, None
        if lease is not None:
            lease.release()

    def _end_transfers(self, entry: _Entry) -> None:
        """Wait for what is in flight, and give back buffer and place."""
        download, entry.download = entry.download, None
        if download is not None:
            download.wait()
        for ticket in (entry.write, entry.read):
            if ticket is not None:
                ticket.wait()
        entry.write = entry.read = None
        lease, entry.lease = entry.lease, None
        if lease is not None:
            lease.release()
        self._space.give_back(entry.place)

    # Restoring.

    def _fetch(self, scope: _Scope) -> None:
        """Start the reads of a scope and of the one before it, whose backward comes next."""
        self._advance()
        for each in (scope, scope.before):
            if each is not None and not each.is_fetched:
                each.is_fetched = True
                for entry in reversed(each.entries):
                    if entry.num_users and entry.tensor is None and entry.lease is None:
                        self._start_read(entry)

    def _start_read(self, entry: _Entry) -> None:
        entry.lease = self._pool.lease(entry.place.num_bytes, "saved tensors")
        entry.read = entry.place.scratch.read_sealed(entry.place.offset, entry.lease.memory, "a saved tensor")
        self.counts.read += entry.num_bytes

    def _restored(self, entry: _Entry) -> torch.Tensor:
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
            read.wait()
        else:
            self.counts.forwarded += entry.num_bytes
        buffer = self._device.reserve(entry.num_bytes)
        upload = self._device.upload(entry.lease.memory[: entry.num_bytes], buffer, _LABEL, lane="activations")
        opened = upload.open()
        entry.tensor = opened.clone() if self._device.is_host else opened
        upload.wait()
        if read is not None:  # what is being written has its buffer until then
            lease, entry.lease = entry.lease, None
            lease.release()
        return entry.tensor

    # How much is offloaded.

    def _find_most(self) -> None:
        """Find what is written while forward computes, from the first pass that shows it."""
        while self._finds_most and self._most_bytes is None and self._measured:
            first = self._measured[0]
            if any(entry.of_pass is first for entry in self._storing):
                return
            self._measured.popleft()
            if first.spans and first.seconds:
                began = min(span[0] for span in first.spans)
                rate = first.saved_bytes / max(1e-9, max(span[1] for span in first.spans) - began)
                self._most_bytes = int(rate * first.seconds)
        if self._most_bytes is not None:
            self._measured.clear()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, flat uint8 `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
