"""Host memory for transfers: page-aligned, on huge pages where the kernel gives them, within one limit.

Everything that reads or writes the store leases its buffers here and reuses them. O_DIRECT needs page alignment. Huge
pages are worth more than any I/O engine (reads 2.3 -> 3.8 GB/s at a seventh of the CPU time) and need three things that
Python does not do by itself: a *private* anonymous mapping, madvise before the first touch, and 2 MiB alignment.

Where a GPU computes, the mappings whose bytes cross the link to it are pinned as they are made (io/pinning.py), and are
reused for those purposes alone. Others, such as those of optimizer states, are not: pinning takes as long as filling.
What is pinned has the width of a step's rows, which may differ from step to step. So a pinned buffer serves any lease
of its purpose that is not larger. One that a purpose outgrows gives way to a larger one, whose size is rounded up: to a
power of two, but to no more than the lease says that any step needs, or, if it does not say, to an eighth of a power of
two. So a purpose has no more buffers than it needed at once, and they are made again only a few times in a run.

Pinning takes a tenth of a second per GB, so a buffer is made without the pool's lock, once its bytes are reserved; and
`pin_ahead` makes the buffers that a plan needs before the first step. A buffer that could not be pinned is leased all
the same, and tried again when it has been leased once more, then twice more, then four times more.

Invariants: leased plus idle bytes never pass the limit, and a lease counts with the whole size of its buffer; without a
GPU, sizes are exact; memory that anything still refers to is never unmapped (mappings are dropped by reference, so a
tensor made from a lease cannot dangle); a buffer belongs to one lease, or is idle, so that no two threads pin it.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from ratel_cli import _native
from ratel_cli.closing import Closing
from ratel_cli.errors import DoesNotFit, EnvironmentFailure
from ratel_cli.sizes import HUGE_PAGE_BYTES, PAGE_BYTES
from ratel_cli.units import align_up, format_bytes

PinMemory = Callable[[int, int], Callable[[], None] | None]
"""Pins memory, given its address and size, so that a GPU can copy from it directly. Returns what unpins it, or None if
it could not be pinned."""

_Kind = tuple[int, bool]
"""Size of a buffer, and whether it is pinned."""
_Name = TypeVar("_Name")


class PinnedBuffers(NamedTuple):
    """Buffers that cross the link and are needed at the same time."""

    purpose: str
    num_bytes: int
    """Bytes of each buffer."""
    number: int


class Lease:
    """A buffer borrowed from a pool, with one or more users. The last user's `release` gives it back."""

    def __init__(self, pool: BufferPool, region: _Region, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        """Length of `memory`."""
        self._pool = pool
        self.num_users = 1
        """Changed under the pool's lock."""
        self._region: _Region | None = region
        self._memory: memoryview | None = region.memory[:num_bytes]

    @property
    def memory(self) -> memoryview:
        """The buffer, writable and exactly `num_bytes` long, format ``B``. Views of it are valid until `release`."""
        assert self._memory is not None, "a lease was used after its release"
        return self._memory

    def share(self) -> Self:
        """Add a user, who calls `release` too. Returns the lease itself."""
        with self._pool._lock:
            assert self.num_users > 0, "a lease was shared after its release"
            self.num_users += 1
        return self

    def release(self) -> None:
        """Remove a user. The last one gives the buffer back, and no transfer may still be using it then."""
        with self._pool._lock:
            assert self.num_users > 0, "a lease was released more often than it was taken"
            self.num_users -= 1
            if self.num_users > 0:
                return
            region, self._region, self._memory = self._region, None, None
        assert region is not None
        self._pool._take_back(region)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BufferPool(Closing):
    """Leases buffers, and reuses returned ones of exactly the same size. Safe to use from any thread.

    Pinned and other buffers are reused apart. Where the limit asks for the memory of idle buffers, pinned ones are
    given back last: making them again takes longest.
    """

    def __init__(self, limit_bytes: int | None, *, pin: PinMemory | None = None) -> None:
        """`limit_bytes` None: there is no limit. `pin` is called for every new mapping that crosses the link."""
        assert limit_bytes is None or limit_bytes >= 0
        self.limit_bytes = limit_bytes
        self.idle_limit_bytes: int | None = None
        """Idle buffers are given back where the pool would pass this, too. What is leased may."""
        self._pin = pin
        self._lock = Lock()
        self.leased_bytes = 0
        """Bytes leased now, in whole pages."""
        self.peak_bytes = 0
        """The most bytes that this pool held at once, idle buffers included."""
        self._idle_bytes = 0
        self._next_key = 0
        self._idle: dict[int, _Region] = {}  # oldest return first
        self._idle_keys: dict[_Kind, list[int]] = {}  # -> keys into _idle, newest last
        self._pinned_keys: dict[str, list[int]] = {}  # purpose -> keys into _idle of pinned buffers, newest last
        self._closed = False

    def lease(
        self, num_bytes: int, purpose: str, *, crosses_link: bool = True, at_most_bytes: int | None = None
    ) -> Lease:
        """Lease a buffer of `num_bytes`. It holds the bytes of an earlier lease, or zeros.

        `crosses_link`: False if these bytes are never copied to or from a GPU. `at_most_bytes`: where sizes vary, the
        most that this lease has in any step, as the plan counts it; None if it is not known.

        Raises DoesNotFit if it would pass the limit, and EnvironmentFailure if the system has no memory. `purpose`
        names the buffer in these messages.
        """
        assert num_bytes >= 0
        size_bytes = align_up(num_bytes, PAGE_BYTES)
        pin = self._pin if crosses_link else None
        with self._lock:
            assert not self._closed, "a buffer was leased from a closed pool"
            region = self._take_own(size_bytes, purpose) if pin is not None else None
            if region is None and purpose in self._pinned_keys and pin is not None:  # it has outgrown what it has
                self._drop_largest(purpose)
                size_bytes = self._rounded_up(size_bytes, at_most_bytes)
            elif region is None:
                region = self._take_idle(size_bytes, is_pinned=pin is not None)
            if region is None and pin is None and not self._has_bytes_for(size_bytes):
                region = self._take_idle(size_bytes, is_pinned=True)  # rather than to give up a pinned one for it
            if region is None:
                self._free_bytes_for(size_bytes, purpose)
            else:
                size_bytes = region.size_bytes
            self._reserve(size_bytes)
        if region is None:
            region = self._made(size_bytes, purpose, pin)
        elif pin is not None:
            region.try_again(pin)
        region.purpose = purpose
        return Lease(self, region, num_bytes)

    def pin_ahead(
        self, buffers: Iterable[PinnedBuffers], most_bytes: int, *, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Make the idle pinned buffers that are missing of these, while all buffers take no more than `most_bytes`.

        Without a GPU there are none. Where memory cannot be pinned it stops: leases try again. `progress` is called
        with the bytes of each buffer that was made, or was there; what it raises stops the work. Raises as `lease`.
        """
        if self._pin is None:
            return
        for purpose, num_bytes, number in buffers:
            size_bytes = align_up(num_bytes, PAGE_BYTES)
            with self._lock:
                own = [self._idle[key] for key in self._pinned_keys.get(purpose, ())]
                num_there = sum(region.size_bytes >= size_bytes for region in own)
            for position in range(number):
                if position >= num_there and not self._make_idle(size_bytes, purpose, most_bytes):
                    return
                progress(num_bytes)

    def _make_idle(self, size_bytes: int, purpose: str, most_bytes: int) -> bool:
        """Make an idle pinned buffer. False if there is no memory for it, or if it could not be pinned."""
        with self._lock:
            if self.leased_bytes + self._idle_bytes + size_bytes > most_bytes or not self._has_bytes_for(size_bytes):
                return False
            self._reserve(size_bytes)
        region = self._made(size_bytes, purpose, self._pin)
        self._take_back(region)
        return region.was_pinned

    def _has_bytes_for(self, size_bytes: int) -> bool:
        """Whether a new buffer passes no limit while all idle ones stay."""
        limits = (each for each in (self.limit_bytes, self.idle_limit_bytes) if each is not None)
        return all(self.leased_bytes + self._idle_bytes + size_bytes <= limit for limit in limits)

    def _reserve(self, size_bytes: int) -> None:
        self.leased_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.leased_bytes + self._idle_bytes)

    def _made(self, size_bytes: int, purpose: str, pin: PinMemory | None) -> _Region:
        """A new buffer, whose bytes are reserved. Not under the lock: other leases must not wait for it."""
        try:
            return _Region(size_bytes, purpose, pin)
        except BaseException:
            with self._lock:
                self.leased_bytes -= size_bytes
            raise

    def trim(self, *, keep_bytes: int = 0) -> None:
        """Give idle buffers back to the system, but for `keep_bytes`: at the end of a phase whose buffers serve no
        other one before long."""
        with self._lock:
            self._drop_idle(self._idle_bytes - keep_bytes)

    def close(self) -> None:
        """Give idle buffers back to the system. Leased buffers follow as they are released. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop_idle(self._idle_bytes)

    def _take_back(self, region: _Region) -> None:
        with self._lock:
            self.leased_bytes -= region.size_bytes
            if self._closed or region.size_bytes == 0:
                return
            key = self._next_key
            self._next_key += 1
            self._idle[key] = region
            self._idle_keys.setdefault(region.kind, []).append(key)
            if region.is_pinned:
                self._pinned_keys.setdefault(region.purpose, []).append(key)
            self._idle_bytes += region.size_bytes

    def _take_idle(self, size_bytes: int, *, is_pinned: bool) -> _Region | None:
        keys = self._idle_keys.get((size_bytes, is_pinned))
        return self._take(keys[-1]) if keys else None

    def _take_own(self, size_bytes: int, purpose: str) -> _Region | None:
        """The smallest idle buffer of this purpose that is large enough; of equals, the one returned last."""
        large_enough = [
            key for key in reversed(self._pinned_keys.get(purpose, ())) if self._idle[key].size_bytes >= size_bytes
        ]
        return self._take(min(large_enough, key=lambda key: self._idle[key].size_bytes)) if large_enough else None

    def _drop_largest(self, purpose: str) -> None:
        self._take(max(self._pinned_keys[purpose], key=lambda key: self._idle[key].size_bytes))

    def _rounded_up(self, size_bytes: int, at_most_bytes: int | None) -> int:
        """The size of a buffer that is made because those before it were too small."""
        power_of_two = 1 << (size_bytes - 1).bit_length()
        if at_most_bytes is not None:  # nothing is lost up to there: the plan has that memory for it
            rounded_bytes = max(size_bytes, min(power_of_two, align_up(at_most_bytes, PAGE_BYTES)))
        else:
            rounded_bytes = align_up(size_bytes, max(PAGE_BYTES, power_of_two // 16))
        fits = self.limit_bytes is None or self.leased_bytes + rounded_bytes <= self.limit_bytes
        return rounded_bytes if fits else size_bytes

    def _take(self, key: int) -> _Region:
        """Remove an idle buffer from all lists."""
        region = self._idle.pop(key)
        _remove(self._idle_keys, region.kind, key)
        if region.is_pinned:
            _remove(self._pinned_keys, region.purpose, key)
        self._idle_bytes -= region.size_bytes
        return region

    def _free_bytes_for(self, size_bytes: int, purpose: str) -> None:
        in_use_bytes = self.leased_bytes + size_bytes
        if self.limit_bytes is not None and in_use_bytes > self.limit_bytes:
            shortfall_bytes = in_use_bytes - self.limit_bytes
            raise DoesNotFit(
                f"{purpose}: needs {format_bytes(size_bytes)} of RAM, but {format_bytes(self.leased_bytes)} "
                f"of {format_bytes(self.limit_bytes)} are in use (short by {format_bytes(shortfall_bytes)})",
                "raise limits.host_memory",
                shortfall_bytes=shortfall_bytes,
            )
        for limit_bytes in (self.limit_bytes, self.idle_limit_bytes):
            if limit_bytes is not None:
                self._drop_idle(in_use_bytes + self._idle_bytes - limit_bytes)

    def _drop_idle(self, num_bytes: int) -> None:
        """Drop buffers until `num_bytes` are freed: those that are not pinned first, the longest idle first."""
        for key in sorted(self._idle, key=lambda key: self._idle[key].is_pinned):  # sorting keeps the order of equals
            if num_bytes <= 0:
                return
            num_bytes -= self._take(key).size_bytes


class _Region:
    """One mapping. It has no close(): it is unpinned when the pool drops it, and unmapped with its last view."""

    @property
    def kind(self) -> _Kind:
        """Leases of this kind may reuse it."""
        return self.size_bytes, self.is_pinned

    def __init__(self, size_bytes: int, purpose: str, pin: PinMemory | None) -> None:
        self.size_bytes = size_bytes
        self.purpose = purpose
        """Purpose of its lease, or of the last one."""
        self.is_pinned = pin is not None
        """Whether it is pinned, or should have been: the device may have refused."""
        self.was_pinned = False
        """Whether the device accepted it."""
        self._num_waited = 0
        """Leases since it was refused last."""
        self._num_to_wait = 1
        """Leases before it is tried again."""
        if size_bytes == 0:
            self.memory = memoryview(bytearray())
            return
        huge = size_bytes >= HUGE_PAGE_BYTES
        # The extra bytes for alignment cost addresses only: a page that is never touched takes no memory.
        try:
            mapping = mmap.mmap(
                -1, size_bytes + (HUGE_PAGE_BYTES if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as exc:
            raise EnvironmentFailure(
                f"{purpose}: the system could not allocate {format_bytes(size_bytes)} of RAM: {exc}",
                "lower limits.host_memory, or raise the limit on address space (ulimit -v)",
            ) from exc
        start = -address_of(memoryview(mapping)) % HUGE_PAGE_BYTES if huge else 0
        if huge:
            # Whole huge pages only: one that reaches past the end would take up to 2 MiB that no limit counts.
            _advise_huge_pages(mapping, start, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        self.memory = memoryview(mapping)[start : start + size_bytes]
        if pin is not None:
            self._pin(pin)

    def try_again(self, pin: PinMemory) -> None:
        """Pin what was refused, if that is due. Only for the owner of the buffer."""
        if self.was_pinned or self.size_bytes == 0:
            return
        self._num_waited += 1
        if self._num_waited >= self._num_to_wait:
            self._num_waited, self._num_to_wait = 0, 2 * self._num_to_wait
            self._pin(pin)

    def _pin(self, pin: PinMemory) -> None:
        unpin = pin(address_of(self.memory), self.size_bytes)
        if unpin is not None:
            self.was_pinned = True
            # Called when the pool drops the region. No transfer uses it then, though a view of it may live on.
            weakref.finalize(self, unpin).atexit = False


def _remove(lists: dict[_Name, list[int]], name: _Name, key: int) -> None:
    keys = lists[name]
    keys.remove(key)
    if not keys:
        del lists[name]


def address_of(memory: memoryview) -> int:
    """The address of the first byte of a non-empty, writable memoryview."""
    return _native.address_of(memory)


def _advise_huge_pages(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, num_bytes)
    except (AttributeError, OSError):
        return  # no huge pages in this kernel or on this system: slower, and as correct
