"""Host memory for transfers: page-aligned, on huge pages where the kernel gives them, within one limit.

Everything that reads or writes the store leases its buffers here, once, and reuses them. O_DIRECT
needs page alignment; huge pages are worth more than any engine (reads 2.3 -> 3.8 GB/s at a seventh
of the CPU time, architecture.md section 6) and need three things that Python does not do by itself:
a *private* anonymous mapping, madvise before the first touch, and 2 MiB alignment.

Where a GPU computes, every mapping is pinned for it as it is made (io/pinning.py).

Invariants: leased plus idle bytes never pass the limit; a memory that anything still refers to is
never unmapped (mappings are dropped by reference, so a tensor made from a lease cannot dangle).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Self

from ratel_cli.closing import Closing
from ratel_cli.errors import DoesNotFit, EnvironmentFailure
from ratel_cli.sizes import HUGE_PAGE_BYTES, PAGE_BYTES
from ratel_cli.units import align_up, format_bytes

PinMemory = Callable[[int, int], Callable[[], None] | None]
"""Pins memory, given its address and size, so that a GPU can copy from it directly. Returns what unpins it, or None if
it could not be pinned."""


class Lease:
    """A buffer borrowed from a pool. ``memory`` is writable and exactly ``num_bytes`` long.

    It may be shared among threads: everyone who called ``share`` calls ``release``, like the borrower.
    """

    def __init__(self, pool: BufferPool, region: _Region, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._pool = pool
        self._num_users = 1  # changed under the pool's lock
        self._region: _Region | None = region
        self._memory: memoryview | None = region.memory[:num_bytes]

    @property
    def memory(self) -> memoryview:
        """The bytes, format ``B``. Views made of it are only good until ``release``."""
        assert self._memory is not None, "a lease was used after its release"
        return self._memory

    def share(self) -> Self:
        """Count one more user."""
        with self._pool._lock:
            assert self._num_users > 0, "a lease was shared after its release"
            self._num_users += 1
        return self

    def release(self) -> None:
        """Count one user less; the last one gives the buffer back. No transfer may still be using it."""
        with self._pool._lock:
            assert self._num_users > 0, "a lease was released more often than it was taken"
            self._num_users -= 1
            if self._num_users > 0:
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
    """Leases buffers and keeps the returned ones for reuse, by exact size. Safe to use from any thread."""

    def __init__(self, limit_bytes: int | None, *, pin: PinMemory | None = None) -> None:
        assert limit_bytes is None or limit_bytes >= 0
        self.limit_bytes = limit_bytes
        self._pin = pin
        self._lock = Lock()
        self._leased_bytes = 0
        self._idle_bytes = 0
        self._peak_bytes = 0
        self._next_key = 0
        self._idle: OrderedDict[int, _Region] = OrderedDict()  # oldest return first
        self._idle_keys: dict[int, list[int]] = {}  # size -> keys into _idle, newest last
        self._closed = False

    @property
    def leased_bytes(self) -> int:
        """Bytes lent out now, in whole pages."""
        return self._leased_bytes

    @property
    def peak_bytes(self) -> int:
        """The most this pool ever held, idle buffers included."""
        return self._peak_bytes

    def lease(self, num_bytes: int, purpose: str) -> Lease:
        """Lend ``num_bytes``. Contents are those of an earlier lease, or zero. ``purpose`` is for messages."""
        assert num_bytes >= 0
        size_bytes = align_up(num_bytes, PAGE_BYTES)
        with self._lock:
            assert not self._closed, "a lease was asked of a closed pool"
            region = self._take_idle(size_bytes)
            if region is None:
                self._make_room(size_bytes, purpose)
                region = _Region(size_bytes, purpose, self._pin)
            self._leased_bytes += size_bytes
            self._peak_bytes = max(self._peak_bytes, self._leased_bytes + self._idle_bytes)
        return Lease(self, region, num_bytes)

    def trim(self) -> None:
        """Give idle buffers back to the system, as after a phase whose sizes will not return."""
        with self._lock:
            self._drop_idle(self._idle_bytes)

    def close(self) -> None:
        """Drop the idle buffers. Those still lent out are dropped as they are released."""
        with self._lock:
            self._closed = True
            self._drop_idle(self._idle_bytes)

    def _take_back(self, region: _Region) -> None:
        with self._lock:
            self._leased_bytes -= region.size_bytes
            if self._closed or region.size_bytes == 0:
                return
            key = self._next_key
            self._next_key += 1
            self._idle[key] = region
            self._idle_keys.setdefault(region.size_bytes, []).append(key)
            self._idle_bytes += region.size_bytes

    def _take_idle(self, size_bytes: int) -> _Region | None:
        keys = self._idle_keys.get(size_bytes)
        if not keys:
            return None
        region = self._idle.pop(keys.pop())
        if not keys:
            del self._idle_keys[size_bytes]
        self._idle_bytes -= size_bytes
        return region

    def _make_room(self, size_bytes: int, purpose: str) -> None:
        if self.limit_bytes is None:
            return
        shortfall_bytes = self._leased_bytes + size_bytes - self.limit_bytes
        if shortfall_bytes > 0:
            raise DoesNotFit(
                f"{purpose}: {format_bytes(size_bytes)} more host memory does not fit in "
                f"{format_bytes(self.limit_bytes)}, of which {format_bytes(self._leased_bytes)} are in use: "
                f"{shortfall_bytes} bytes too few",
                "raise limits.host_memory",
                shortfall_bytes=shortfall_bytes,
            )
        self._drop_idle(shortfall_bytes + self._idle_bytes)

    def _drop_idle(self, num_bytes: int) -> None:
        """Forget the longest idle buffers until ``num_bytes`` are freed."""
        while num_bytes > 0 and self._idle:
            key, region = self._idle.popitem(last=False)
            keys = self._idle_keys[region.size_bytes]
            keys.remove(key)
            if not keys:
                del self._idle_keys[region.size_bytes]
            self._idle_bytes -= region.size_bytes
            num_bytes -= region.size_bytes


class _Region:
    """One mapping. It has no close(): the last view of it unmaps it. Before that it is unpinned."""

    def __init__(self, size_bytes: int, purpose: str, pin: PinMemory | None) -> None:
        self.size_bytes = size_bytes
        if size_bytes == 0:
            self.memory = memoryview(bytearray())
            return
        huge = size_bytes >= HUGE_PAGE_BYTES
        # The room to align costs addresses only: what is never touched is never backed.
        try:
            mapping = mmap.mmap(
                -1, size_bytes + (HUGE_PAGE_BYTES if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as exc:
            raise EnvironmentFailure(
                f"{purpose}: the system refused {format_bytes(size_bytes)} of host memory: {exc}",
                "lower limits.host_memory, or raise the limit on address space (ulimit -v)",
            ) from exc
        start = -address_of(memoryview(mapping)) % HUGE_PAGE_BYTES if huge else 0
        if huge:
            # Whole huge pages only: one that reaches beyond the end would cost up to 2 MiB that no limit counts.
            _advise_huge_pages(mapping, start, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        self.memory = memoryview(mapping)[start : start + size_bytes]
        unpin = pin(address_of(self.memory), size_bytes) if pin is not None else None
        if unpin is not None:
            # Called when the pool lets go of the region: no transfer uses it any more, though a view of it may live on.
            weakref.finalize(self, unpin).atexit = False


def address_of(memory: memoryview) -> int:
    """Where a non-empty, writable memory starts."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _advise_huge_pages(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, num_bytes)
    except (AttributeError, OSError):
        return  # no huge pages in this kernel or on this system: slower, and as correct
