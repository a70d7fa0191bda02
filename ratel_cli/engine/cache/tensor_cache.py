"""The tensor cache (SSDTrain, section III): what autograd saves goes to the drives, and comes back for backward.

It knows no model. Autograd hands over each tensor that it saves, and asks for it in backward:

    1. save       a tensor's storage leaves (engine/cache/saved_transfers.py), once for all tensors that share it
    2. forward    ends a pass; what the last scope saved, small tensors and weights stay where they are
    3. restore    backward asks for a tensor. When the first one of a scope is asked for, the reads of this scope and of
                  the one before it are started, and those of more scopes while there are buffers; on a GPU uploads are,
                  too, which are then overlapped with this scope's backward

A pass is one forward, a scope is what one block of it saves. Several passes may wait for their backwards. A schedule
(engine/reading/pass_schedule.py) says which backward comes next: its last scopes are read while the unit before it
runs.

Host memory comes first, if there is some for that (engine/reading/resident_buffers.py): what it holds is not written.

How much goes: of each pass the first tensors, up to `most_bytes`. Those of the first scopes have most time, since their
backward comes last. Where that amount is found (engine/cache/cache_amount.py), it is what the drives write and the link
moves while forward computes, and less where backward waits for it; what does not find a free buffer, or the link free,
stays. A GPU is behind the host that queues its work, so there the host queues one scope of a forward ahead, and waits.

Identity is a storage and its version, so that views of one storage are one write, and a storage that was changed in
place is another one. The paper's key, the first element's address and the shape, takes views for one another.

Invariant: what backward gets are the bytes that autograd saved, or an error; and a tensor that was changed after it was
saved is one, wherever it went, as it is in torch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.cache.backward_task import running_backward
from ratel_cli.engine.cache.cache_amount import FoundAmount
from ratel_cli.engine.cache.saved_tensors import (
    CacheCounts,
    SavedPass,
    SavedScope,
    SavedStorage,
    SavedTensor,
    SavedView,
)
from ratel_cli.engine.cache.saved_transfers import SavedTransfers
from ratel_cli.engine.device.device import Moment
from ratel_cli.engine.reading.pass_schedule import PassSchedule
from ratel_cli.errors import BadInput
from ratel_cli.io.buffers import Lease
from ratel_cli.io.scratch import ScratchPlace

_MOST_OF_VIEW = 8
"""Storages that are more than this many times as large as what is saved of them stay."""


class TensorCache(Closing):
    """Saves tensors to the drives. All methods are for threads that wait for one another."""

    def __init__(
        self,
        transfers: SavedTransfers,
        *,
        stays: Callable[[torch.Tensor], bool],
        least_bytes: int,
        most_bytes: int | None,
        finds_most: bool,
        most_buffer_bytes: int = 0,
        schedule: PassSchedule | None = None,
    ) -> None:
        """The cache closes `transfers`. `stays`: whether a tensor never leaves, such as a weight. `least_bytes`: of a
        storage that leaves. `most_bytes`: of a pass; None: all. `finds_most`: it is found instead. `most_buffer_bytes`:
        the buffers of `transfers` grow up to this, to what a scope of the first pass that saves anything does."""
        self._transfers = transfers
        self._device = transfers.device
        self._stays = stays
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._finds_most = finds_most
        self._found_in_memory, self._found_on_drives = FoundAmount(), FoundAmount()
        self._most_buffer_bytes = most_buffer_bytes
        self._schedule = schedule
        self._entries: dict[tuple[int, int], SavedStorage] = {}
        """By storage and version: those whose storage may be saved again."""
        self._pass: SavedPass | None = None
        self._keeps = False
        self._scope_began: Moment | None = None
        self._scheduled: dict[int, SavedPass] = {}
        """Passes that wait for their backwards, by their numbers in the schedule."""
        self._measured: list[SavedPass] = []
        """Passes whose writes have not all ended, or whose backward has not."""
        self.given_up: deque[SavedStorage] = deque()
        """One for each user that an entry has no more."""
        self._is_closed = False

    @property
    def counts(self) -> CacheCounts:
        """Bytes since the cache was opened."""
        return self._transfers.counts

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which autograd saves to the cache."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, self._restore):
            yield

    def begin_pass(self) -> None:
        """A forward begins."""
        self._advance()
        self._find_most()
        self._transfers.settle()
        self._pass = SavedPass(self._device.mark(), SavedScope(None))
        self._keeps, self._scope_began = False, None
        if self._schedule is not None:
            self._pass.number = self._schedule.begin_forward()
            self._scheduled[self._pass.number] = self._pass
            self._read_next()

    def begin_scope(self, *, is_last: bool) -> None:
        """A block of the forward begins. What the last one saves stays: its backward comes at once."""
        if self._finds_most and self._pass is not None and torch.is_grad_enabled():
            before, self._scope_began = self._scope_began, self._device.mark()
            if before is not None:
                before()
        self._advance()
        if self._pass is not None:
            self._grow_buffers(self._pass.scope.num_bytes)
            self._pass.scope = SavedScope(self._pass.scope)
            self._keeps = is_last

    def end_pass(self) -> None:
        """The forward has ended."""
        ended, self._pass = self._pass, None
        if ended is not None:
            ended.ended = self._device.mark()
            if ended.saved_bytes:
                self._most_buffer_bytes = 0
                if self._finds_most:
                    self._measured.append(ended)

    def close(self) -> None:
        """Wait for transfers in flight. What is saved cannot be restored any more. Idempotent."""
        self._is_closed = True
        self._transfers.close()
        self._scheduled.clear()
        self._entries.clear()

    # What autograd calls.

    def _save(self, tensor: torch.Tensor) -> SavedTensor:
        if self._is_closed or self.is_of_parent or self._pass is None or self._is_left_out(tensor):
            return SavedTensor(tensor)
        self._advance()
        storage = tensor.untyped_storage()
        known = self._entries.get((storage._cdata, tensor._version))
        if known is not None:
            return SavedView(known, tensor, self.given_up)
        num_bytes = storage.nbytes()
        # A large storage that a small tensor is a view of is the caller's, and stays where it is anyway.
        may_leave = self._least_bytes <= num_bytes <= _MOST_OF_VIEW * tensor.nbytes
        if may_leave:
            self._pass.scope.num_bytes += num_bytes
            self._pass.saved_bytes += num_bytes
        buffer = self._buffer_for(self._pass, num_bytes) if may_leave and not self._keeps else None
        if buffer is None:
            self.counts.stayed += num_bytes
            return SavedTensor(tensor, self._pass.scope)
        entry = self._transfers.leave(tensor, *buffer, self._pass.scope, self._pass)
        entry.moved.num_bytes += num_bytes
        self._pass.scope.entries.append(entry)
        self._entries[entry.key] = entry
        self._advance()
        return SavedView(entry, tensor, self.given_up)

    def _restore(self, saved: SavedTensor) -> torch.Tensor:
        tensor = saved.unchanged()
        if saved.scope is not None and not self._is_closed:
            self._reach(saved.scope)
        if not isinstance(saved, SavedView):
            return tensor
        if self._is_closed:
            raise BadInput(
                "a backward comes after its offload_activations has ended", "let it run inside of that context"
            )
        self._follow_schedule(saved.entry)
        return saved.layout.tensor_in(self._transfers.restored(saved.entry))

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
        if self._most_bytes is not None and of_pass.num_bytes + num_bytes > self._most_bytes:
            return None
        if self._found_in_memory.allows(of_pass.in_memory.num_bytes + num_bytes):
            lease = self._transfers.buffer_in_memory(num_bytes, must_not_stall=self._finds_most)
            if lease is not None:
                return lease, None
        if not self._found_on_drives.allows(of_pass.on_drives.num_bytes + num_bytes):
            return None
        return self._transfers.buffer_and_place(num_bytes, must_not_stall=self._finds_most)

    def _grow_buffers(self, scope_bytes: int) -> None:
        """A scope of the first pass has saved `scope_bytes`. Where the host queues one ahead of the GPU, four have
        buffers: one that is queued, one that is computed, one that is downloaded, and one that is written."""
        num_scopes = 4 if self._finds_most and not self._device.is_host else 1
        buffer_bytes = min(num_scopes * scope_bytes, self._most_buffer_bytes)
        self._transfers.buffer_bytes = max(self._transfers.buffer_bytes, buffer_bytes)

    def _advance(self) -> None:
        """Look at what has ended: users, downloads, writes, uploads."""
        while self.given_up:
            entry = self.given_up.popleft()
            entry.num_users -= 1
            if not entry.num_users:
                self._entries.pop(entry.key, None)
                self._transfers.end(entry)
        self._transfers.advance()

    # Restoring.

    def _reach(self, scope: SavedScope) -> None:
        """Backward asks for a tensor of this scope."""
        self._advance()
        self._read_ahead(scope)
        for each, must_come in _backwards(scope):
            if not self._transfers.upload_ahead(reversed(each.entries), must_come=must_come):
                return

    def _read_ahead(self, scope: SavedScope) -> None:
        """Start the reads of a scope, of the one before it, whose backward comes next, and of more in free buffers."""
        for each, must_come in _backwards(scope):
            if not each.is_read_ahead:
                each.is_read_ahead = self._transfers.read_ahead(reversed(each.entries), must_come=must_come)
                if not each.is_read_ahead:
                    return

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
            self._read_next()

    def _read_next(self) -> None:
        """Start the reads that the next unit of the schedule begins with, if that is a backward whose forward has
        ended."""
        assert self._schedule is not None
        number = self._schedule.next_backward
        following = None if number is None else self._scheduled.get(number)
        if following is not None and following is not self._pass:
            self._read_ahead(following.scope)

    def _find_most(self) -> None:
        """Find how much of a pass goes, from those before whose writes, or whose backwards, have ended."""
        for each in list(self._measured):
            if self._transfers.is_storing(each):
                continue
            if each.spans and self._found_on_drives.most_bytes is None:
                self._found_on_drives.find(each.on_drives.num_bytes, each.spans, forward_seconds=each.forward_seconds)
            if not self._transfers.is_needed(each):
                for found, moved in (
                    (self._found_in_memory, each.in_memory),
                    (self._found_on_drives, each.on_drives),
                ):
                    found.adapt(moved.num_bytes, moved.stalled_seconds, forward_seconds=each.forward_seconds)
                self._measured.remove(each)


def _backwards(scope: SavedScope) -> Iterator[tuple[SavedScope, bool]]:
    """A scope and those before it, and whether each must come now: the first one, and the next one of backward."""
    each: SavedScope | None = scope
    number = 0
    while each is not None:
        yield each, number < 2
        each, number = each.before, number + 1
