"""Buffers: exact sizes, alignment, one limit, reuse, and huge pages as the kernel itself reports them."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratel_cli.errors import DoesNotFit, EnvironmentFailure
from ratel_cli.io.buffers import BufferPool, PinnedBuffers, address_of
from ratel_cli.io.pinning import pieces
from ratel_cli.sizes import HUGE_PAGE_BYTES, PAGE_BYTES
from ratel_cli.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """One mapping in /proc/self/smaps."""

    start: int
    stop: int
    permissions: str
    is_file: bool
    resident_bytes: int
    huge_bytes: int


def mappings_of(start: int, num_bytes: int) -> list[Mapping]:
    """The mappings that overlap a range of this process's addresses."""
    found: list[Mapping] = []
    blocks: list[list[str]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].endswith(":"):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    for block in blocks:
        addresses, permissions, _, _, inode = block[0].split()[:5]
        first, last = (int(part, 16) for part in addresses.split("-"))
        values = {line.split()[0]: line.split()[1] for line in block[1:]}
        if first < start + num_bytes and start < last:
            found.append(
                Mapping(
                    start=first,
                    stop=last,
                    permissions=permissions,
                    is_file=inode != "0",
                    resident_bytes=int(values["Rss:"]) * 1024,
                    huge_bytes=int(values["AnonHugePages:"]) * 1024,
                )
            )
    return found


def touch(memory: memoryview) -> None:
    for position in range(0, len(memory), PAGE_BYTES):
        memory[position] = 1


@pytest.mark.parametrize(
    "num_bytes",
    [0, 1, 4095, 4096, 4097, 3 * MIB + 5, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * MIB],
)
def test_memory_is_exact_aligned_writable_and_private(num_bytes: int) -> None:
    with BufferPool(None) as pool, pool.lease(num_bytes, "test") as lease:
        assert lease.num_bytes == len(lease.memory) == num_bytes
        assert lease.memory.format == "B" and not lease.memory.readonly and lease.memory.contiguous
        assert pool.leased_bytes == -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if num_bytes:
            alignment = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
            assert address_of(lease.memory) % alignment == 0
            lease.memory[:] = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
            assert lease.memory[num_bytes - 1] == (0 if num_bytes % 256 else 255)
            mappings = mappings_of(address_of(lease.memory), num_bytes)
            assert {mapping.permissions for mapping in mappings} == {"rw-p"}
            assert not any(mapping.is_file for mapping in mappings)


def test_memory_starts_zeroed_and_is_not_resident_before_it_is_touched() -> None:
    with BufferPool(None) as pool, pool.lease(64 * MIB, "test") as lease:
        start = address_of(lease.memory)
        inside = [mapping for mapping in mappings_of(start, 64 * MIB) if start <= mapping.start < start + 64 * MIB]
        assert inside and sum(mapping.resident_bytes for mapping in inside) == 0
        assert lease.memory[::PAGE_BYTES].tobytes() == bytes(64 * MIB // PAGE_BYTES)


def test_memory_is_on_huge_pages_and_no_byte_larger_than_asked_for() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("transparent huge pages are off in this kernel")
    num_bytes = 4 * HUGE_PAGE_BYTES + 5 * PAGE_BYTES
    with BufferPool(None) as pool, pool.lease(num_bytes, "test") as lease:
        touch(lease.memory)
        mappings = mappings_of(address_of(lease.memory), num_bytes)
        huge_bytes = sum(mapping.huge_bytes for mapping in mappings)
        if huge_bytes == 0:
            pytest.skip("this kernel has no free huge page")
        assert huge_bytes <= 4 * HUGE_PAGE_BYTES
        start = address_of(lease.memory)
        own = [mapping for mapping in mappings if start <= mapping.start]
        assert sum(mapping.resident_bytes for mapping in own if mapping.stop <= start + num_bytes) <= num_bytes
        tail = next(mapping for mapping in mappings if mapping.start <= start + num_bytes - 1 < mapping.stop)
        assert tail.huge_bytes == 0, "the last, partial huge page would cost more than was asked for"


def test_returned_buffers_are_reused_by_exact_size() -> None:
    with BufferPool(None) as pool:
        first = pool.lease(3 * MIB, "a")
        address = address_of(first.memory)
        first.release()
        assert pool.leased_bytes == 0
        other = pool.lease(3 * MIB + PAGE_BYTES, "b")
        assert address_of(other.memory) != address
        again = pool.lease(3 * MIB - 1, "c")  # the same number of pages
        assert address_of(again.memory) == address and len(again.memory) == 3 * MIB - 1
        assert pool.peak_bytes == 6 * MIB + PAGE_BYTES


def test_the_limit_is_exact_and_its_error_says_what_is_missing() -> None:
    with BufferPool(4 * PAGE_BYTES) as pool:
        held = pool.lease(3 * PAGE_BYTES, "gradients")
        with pytest.raises(DoesNotFit, match="optimizer states") as raised:
            pool.lease(2 * PAGE_BYTES, "optimizer states")
        assert raised.value.shortfall_bytes == PAGE_BYTES
        assert raised.value.hint is not None and "limits.host_memory" in raised.value.hint
        assert pool.leased_bytes == 3 * PAGE_BYTES
        last = pool.lease(1, "weights")
        assert pool.leased_bytes == 4 * PAGE_BYTES
        held.release()
        last.release()


def test_idle_buffers_are_dropped_oldest_first_to_stay_in_the_limit() -> None:
    with BufferPool(10 * PAGE_BYTES) as pool:
        leases = [pool.lease(size * PAGE_BYTES, "test") for size in (4, 2, 3)]
        addresses = [address_of(lease.memory) for lease in leases]
        for lease in leases:
            lease.release()
        big = pool.lease(5 * PAGE_BYTES, "test")  # 9 idle + 5 > 10: the oldest, of 4, must go
        assert pool.peak_bytes == 10 * PAGE_BYTES
        two, three = pool.lease(2 * PAGE_BYTES, "test"), pool.lease(3 * PAGE_BYTES, "test")
        assert [address_of(two.memory), address_of(three.memory)] == addresses[1:]
        assert pool.leased_bytes == pool.peak_bytes == 10 * PAGE_BYTES
        for lease in (big, two, three):
            lease.release()


@pytest.mark.parametrize("limit_bytes", [None, 20 * PAGE_BYTES])
def test_idle_buffers_have_a_limit_of_their_own_that_leases_may_pass(limit_bytes: int | None) -> None:
    with BufferPool(limit_bytes) as pool:
        pool.idle_limit_bytes = 10 * PAGE_BYTES
        pool.lease(4 * PAGE_BYTES, "test").release()
        with pool.lease(6 * PAGE_BYTES, "test"):
            assert pool.peak_bytes == 10 * PAGE_BYTES
            with pool.lease(5 * PAGE_BYTES, "test"):  # the 4 that are idle must go, and it is leased all the same
                assert pool.peak_bytes == pool.leased_bytes == 11 * PAGE_BYTES


def test_trim_keeps_what_it_is_asked_to_and_what_was_returned_last() -> None:
    with BufferPool(None) as pool:
        first, second = (pool.lease(number * PAGE_BYTES, "test") for number in (2, 3))
        address = address_of(first.memory)
        first.release()
        second.release()
        pool.trim(keep_bytes=5 * PAGE_BYTES)
        pool.lease(2 * PAGE_BYTES, "test").release()
        assert pool.peak_bytes == 5 * PAGE_BYTES, "both were there"
        pool.trim(keep_bytes=4 * PAGE_BYTES)  # the one of 3 has been idle for longer
        with pool.lease(3 * PAGE_BYTES, "test"), pool.lease(2 * PAGE_BYTES, "test") as again:
            assert address_of(again.memory) == address
        assert pool.peak_bytes == 5 * PAGE_BYTES


def test_trim_and_close_give_memory_back() -> None:
    pool = BufferPool(None)
    leases = [pool.lease(8 * MIB, "test") for _ in range(2)]
    addresses = [address_of(lease.memory) for lease in leases]
    for lease in leases:
        touch(lease.memory)
    leases[0].release()
    pool.trim()
    assert not mappings_of(addresses[0] + MIB, MIB)
    pool.close()
    assert mappings_of(addresses[1] + MIB, MIB)
    leases[1].memory[0] = 7  # leased: still valid
    leases[1].release()
    assert not mappings_of(addresses[1] + MIB, MIB)
    pool.close()
    with pytest.raises(AssertionError, match="closed pool"):
        pool.lease(1, "late")


def test_a_view_keeps_its_memory_mapped_after_lease_and_pool_are_gone() -> None:
    pool = BufferPool(None)
    lease = pool.lease(4 * MIB, "test")
    view = lease.memory[MIB : 2 * MIB]
    view[:3] = b"abc"
    address = address_of(view)
    lease.release()
    pool.close()
    del lease, pool
    gc.collect()
    assert view[:3].tobytes() == b"abc"
    del view
    assert not mappings_of(address, MIB)


def test_release_ends_the_lease_and_a_second_one_is_a_bug() -> None:
    with BufferPool(None) as pool:
        lease = pool.lease(PAGE_BYTES, "test")
        lease.release()
        with pytest.raises(AssertionError, match="more often than it was taken"):
            lease.release()
        with pytest.raises(AssertionError, match="shared after its release"):
            lease.share()
        with pytest.raises(AssertionError, match="used after its release"):
            _ = lease.memory
        assert pool.leased_bytes == 0
        one, two = pool.lease(PAGE_BYTES, "test"), pool.lease(PAGE_BYTES, "test")
        assert address_of(one.memory) != address_of(two.memory)  # was returned once, not twice


def test_a_shared_lease_ends_with_its_last_user() -> None:
    with BufferPool(None) as pool:
        lease = pool.lease(PAGE_BYTES, "test")
        assert lease.share() is lease
        lease.share().release()
        lease.release()
        assert pool.leased_bytes == PAGE_BYTES == len(lease.memory)
        lease.release()
        assert pool.leased_bytes == 0


def test_a_failed_mapping_is_an_environment_failure_with_its_cause() -> None:
    with BufferPool(None) as pool:
        with pytest.raises(EnvironmentFailure, match="everything") as raised:
            pool.lease(1 << 60, "everything")
        assert isinstance(raised.value.__cause__, OSError)
        assert pool.leased_bytes == 0


def test_many_threads_never_share_a_buffer_or_pass_the_limit() -> None:
    limit_bytes = 64 * PAGE_BYTES
    wrong: list[str] = []
    with BufferPool(limit_bytes) as pool:

        def work(number: int) -> None:
            for turn in range(200):
                with pool.lease((1 + (turn * 7 + number) % 8) * PAGE_BYTES, "test") as lease:
                    mark = bytes([number, turn % 256])
                    lease.memory[:2] = mark
                    lease.memory[-2:] = mark
                    if lease.memory[:2].tobytes() != mark or lease.memory[-2:].tobytes() != mark:
                        wrong.append(f"thread {number} turn {turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert pool.leased_bytes == 0 and pool.peak_bytes <= limit_bytes


class RecordingPins:
    """Records what is pinned and unpinned, and checks that memory is still mapped when it is unpinned."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails
        self.sizes: dict[int, int] = {}
        self.unpinned: list[int] = []

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        if self._fails:
            return None
        assert address % PAGE_BYTES == 0 and address not in self.sizes
        self.sizes[address] = num_bytes
        return lambda: self._unpin(address)

    def _unpin(self, address: int) -> None:
        assert mappings_of(address, PAGE_BYTES), "it was unmapped before it was unpinned"
        self.unpinned.append(self.sizes.pop(address))


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 3 * MIB + 5])
def test_exactly_the_leased_memory_is_pinned(num_bytes: int) -> None:
    pins = RecordingPins()
    with BufferPool(None, pin=pins) as pool:
        lease = pool.lease(num_bytes, "test")
        size_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        assert pins.sizes == {address_of(lease.memory): size_bytes}
        lease.release()
        pool.lease(num_bytes, "again").release()
        assert len(pins.sizes) == 1 and not pins.unpinned, "an idle buffer stays pinned"
        pool.trim()
        assert pins.unpinned == [size_bytes] and not pins.sizes


def test_nothing_is_pinned_of_an_empty_lease() -> None:
    pins = RecordingPins()
    with BufferPool(None, pin=pins) as pool, pool.lease(0, "test"):
        assert not pins.sizes


def test_memory_is_unpinned_before_it_is_unmapped() -> None:
    pins = RecordingPins()
    pool = BufferPool(2 * PAGE_BYTES, pin=pins)
    first = pool.lease(PAGE_BYTES, "a")
    view = first.memory[:3]
    first.release()
    second = pool.lease(2 * PAGE_BYTES, "b")  # the first one must be dropped
    assert pins.unpinned == [PAGE_BYTES]
    view[:] = b"abc"  # still mapped, as long as there is a view
    pool.close()
    assert pins.unpinned == [PAGE_BYTES]
    second.release()
    assert pins.unpinned == [PAGE_BYTES, 2 * PAGE_BYTES]


def test_memory_that_cannot_be_pinned_is_leased_too() -> None:
    with BufferPool(None, pin=RecordingPins(fails=True)) as pool, pool.lease(PAGE_BYTES, "test") as lease:
        lease.memory[0] = 7
        assert lease.memory[0] == 7


def test_what_does_not_cross_the_link_is_not_pinned() -> None:
    """Nor does it take a pinned buffer from those that need it."""
    pins = RecordingPins()
    with BufferPool(None, pin=pins) as pool:
        pool.lease(PAGE_BYTES, "states", crosses_link=False).release()
        assert not pins.sizes
        pinned = pool.lease(PAGE_BYTES, "weights")
        assert pins.sizes == {address_of(pinned.memory): PAGE_BYTES}
        pinned.release()
        with pool.lease(PAGE_BYTES, "states", crosses_link=False) as states:
            assert address_of(states.memory) not in pins.sizes
            with pool.lease(PAGE_BYTES, "weights") as weights:
                assert address_of(weights.memory) in pins.sizes
        assert not pins.unpinned


def test_pinned_buffers_are_given_back_last() -> None:
    """Though they were idle for longer."""
    pins = RecordingPins()
    with BufferPool(4 * PAGE_BYTES, pin=pins) as pool:
        pool.lease(PAGE_BYTES, "weights").release()
        for _ in range(3):
            pool.lease(2 * PAGE_BYTES, "states", crosses_link=False).release()
            pool.lease(3 * PAGE_BYTES, "gradient", crosses_link=False).release()
        assert len(pins.sizes) == 1 and not pins.unpinned
        pool.lease(4 * PAGE_BYTES, "all", crosses_link=False).release()
        assert pins.unpinned == [PAGE_BYTES]


def test_without_a_gpu_buffers_are_reused_whatever_they_are_for() -> None:
    with BufferPool(None) as pool:
        with pool.lease(PAGE_BYTES, "weights") as lease:
            address = address_of(lease.memory)
        with pool.lease(PAGE_BYTES, "states", crosses_link=False) as lease:
            assert address_of(lease.memory) == address


class CountingPins(RecordingPins):
    """Counts what is pinned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_pinned = 0

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        self.num_pinned += 1
        return super().__call__(address, num_bytes)


def test_a_pinned_buffer_serves_smaller_leases_of_its_purpose() -> None:
    pins = CountingPins()
    with BufferPool(None, pin=pins) as pool:
        pool.lease(9 * PAGE_BYTES, "units").release()
        with pool.lease(3 * PAGE_BYTES + 1, "units") as lease:
            assert lease.num_bytes == len(lease.memory) == 3 * PAGE_BYTES + 1
            assert pool.leased_bytes == 9 * PAGE_BYTES, "it counts with its whole size"
        with pool.lease(4 * PAGE_BYTES, "weights"):
            assert pool.leased_bytes == 4 * PAGE_BYTES, "another purpose takes its exact size"
        assert pins.num_pinned == 2 and not pins.unpinned


def test_buffers_of_varying_sizes_are_few_and_soon_are_never_pinned_again() -> None:
    """Three at a time, up to a size that the leases name. Idle ones never pile up."""
    pins, most_pages = CountingPins(), 1000
    with BufferPool(None, pin=pins) as pool:
        for step in range(200):
            sizes = [1 + (step * 389 + number * 127) % most_pages for number in range(3)]
            sizes[0] = most_pages if step == 60 else sizes[0]
            leases = [pool.lease(s * PAGE_BYTES, "units", at_most_bytes=most_pages * PAGE_BYTES) for s in sizes]
            for lease in leases:
                lease.release()
            assert len(pins.sizes) <= 3 and max(pins.sizes.values()) <= most_pages * PAGE_BYTES
            if step < 100:
                before = pins.num_pinned
        assert pins.num_pinned == before <= 3 * 10
        assert pool.peak_bytes <= 3 * most_pages * PAGE_BYTES


@pytest.mark.full
def test_a_purpose_that_grows_without_bounds_is_rounded_by_an_eighth() -> None:
    """Not the first of its buffers: most purposes have one size all the time."""
    pins = CountingPins()
    with BufferPool(None, pin=pins) as pool:
        for pages in range(100, 401):
            with pool.lease(pages * PAGE_BYTES, "rows"):
                assert pages * PAGE_BYTES <= pool.leased_bytes <= 1.125 * pages * PAGE_BYTES
                assert len(pins.sizes) == 1
        assert pins.num_pinned <= 2 * 8 + 2


def test_rounding_up_ends_at_the_limit() -> None:
    with BufferPool(210 * PAGE_BYTES, pin=CountingPins()) as pool:
        pool.lease(100 * PAGE_BYTES, "units", at_most_bytes=300 * PAGE_BYTES).release()
        with pool.lease(201 * PAGE_BYTES, "units", at_most_bytes=300 * PAGE_BYTES):
            assert pool.leased_bytes == pool.peak_bytes == 201 * PAGE_BYTES


def test_without_a_gpu_sizes_are_exact() -> None:
    with BufferPool(None) as pool:
        pool.lease(9 * PAGE_BYTES, "units").release()
        with pool.lease(3 * PAGE_BYTES, "units", at_most_bytes=99 * PAGE_BYTES):
            assert pool.leased_bytes == 3 * PAGE_BYTES
        with pool.lease(19 * PAGE_BYTES, "units", at_most_bytes=99 * PAGE_BYTES):
            assert pool.leased_bytes == 19 * PAGE_BYTES


@pytest.mark.parametrize("start", [0, 1, 4096, 1 * GIB - 1, 1 * GIB, 1 * GIB + 1, 3 * GIB - 4096])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 1 * GIB - 1, 1 * GIB, 1 * GIB + 1, 5 * GIB])
def test_pieces_cover_a_range_and_end_where_every_range_ends_them(start: int, num_bytes: int) -> None:
    """So whoever copies a part of a buffer knows where the buffer's pieces end."""
    found = list(pieces(start, num_bytes))
    assert sum(size for _, size in found) == num_bytes
    assert all(address + size == following for (address, size), (following, _) in itertools.pairwise(found))
    assert not found or found[0][0] == start
    ends = {address + size for address, size in found}
    assert ends - {start + num_bytes} == {end for end in range(0, 9 * GIB, GIB) if start < end < start + num_bytes}
    assert all(0 < size <= GIB for _, size in found)


class Refusing(RecordingPins):
    """Refuses as often as it is told to."""

    def __init__(self, num_refusals: int) -> None:
        super().__init__()
        self.left = num_refusals
        self.num_asked = 0

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        self.num_asked += 1
        if self.left:
            self.left -= 1
            return None
        return super().__call__(address, num_bytes)


def test_a_buffer_that_was_refused_is_tried_again_ever_more_rarely() -> None:
    """After 1, 2, 4, 8 and 16 more leases."""
    pins, tried = Refusing(5), []
    with BufferPool(None, pin=pins) as pool:
        for number in range(40):
            before = pins.num_asked
            with pool.lease(PAGE_BYTES, "weights") as lease:
                if pins.num_asked > before:
                    tried.append(number)
                assert (address_of(lease.memory) in pins.sizes) is (number >= 31)
    assert tried == [0, 1, 3, 7, 15, 31]
    assert pins.unpinned == [PAGE_BYTES]


def test_a_refusal_is_one_buffers_alone() -> None:
    pins = Refusing(1)
    with BufferPool(None, pin=pins) as pool, pool.lease(PAGE_BYTES, "a") as one, pool.lease(PAGE_BYTES, "b") as other:
        assert set(pins.sizes) == {address_of(other.memory)}
        assert address_of(one.memory) != address_of(other.memory)


def test_others_lease_and_release_while_memory_is_pinned() -> None:
    """The bytes of the buffer in the making count meanwhile; they are free again if it cannot be made."""
    asked, goes_on = threading.Event(), threading.Event()

    def pin(address: int, num_bytes: int) -> None:
        asked.set()
        assert goes_on.wait(60)
        raise RuntimeError("the GPU is gone")

    with BufferPool(4 * PAGE_BYTES, pin=pin) as pool, ThreadPoolExecutor() as threads:
        making = threads.submit(pool.lease, 3 * PAGE_BYTES, "weights")
        assert asked.wait(60)
        assert pool.leased_bytes == 3 * PAGE_BYTES
        with pool.lease(PAGE_BYTES, "states", crosses_link=False):
            assert pool.leased_bytes == 4 * PAGE_BYTES
            with pytest.raises(DoesNotFit):
                pool.lease(1, "more", crosses_link=False)
        assert not making.done()
        goes_on.set()
        with pytest.raises(RuntimeError, match="gone"):
            making.result()
        assert pool.leased_bytes == 0
        pool.lease(4 * PAGE_BYTES, "all", crosses_link=False).release()


def test_what_will_be_needed_is_pinned_ahead() -> None:
    pins, done = CountingPins(), []
    wanted = [PinnedBuffers("weights", 2 * PAGE_BYTES, 2), PinnedBuffers("unit", 3 * PAGE_BYTES - 1, 1)]
    with BufferPool(None, pin=pins) as pool:
        pool.pin_ahead(wanted, 100 * PAGE_BYTES, progress=done.append)
        assert sorted(pins.sizes.values()) == [2 * PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES]
        assert done == [2 * PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES - 1]
        assert pool.leased_bytes == 0
        one, two = pool.lease(2 * PAGE_BYTES, "weights"), pool.lease(2 * PAGE_BYTES, "weights of another block")
        unit = pool.lease(2 * PAGE_BYTES + 1, "unit", at_most_bytes=3 * PAGE_BYTES)
        assert pins.num_pinned == 3, "the step pins nothing"
        for lease in (one, two, unit):
            lease.release()
        pool.pin_ahead([PinnedBuffers("unit", 3 * PAGE_BYTES, 2)], 100 * PAGE_BYTES)
        assert pins.num_pinned == 4, "one was there"


@pytest.mark.parametrize(("limit", "idle_limit", "most"), [(5, None, 9), (None, 5, 9), (9, 9, 5)])
def test_pinning_ahead_ends_at_each_limit(limit: int | None, idle_limit: int | None, most: int) -> None:
    pins = CountingPins()
    with BufferPool(None if limit is None else limit * PAGE_BYTES, pin=pins) as pool:
        pool.idle_limit_bytes = None if idle_limit is None else idle_limit * PAGE_BYTES
        pool.pin_ahead([PinnedBuffers("unit", 2 * PAGE_BYTES, 4)], most * PAGE_BYTES)
        assert (pins.num_pinned, pool.peak_bytes) == (2, 4 * PAGE_BYTES)


def test_pinning_ahead_ends_where_memory_is_refused() -> None:
    """Leases try again later."""
    pins = Refusing(1)
    with BufferPool(None, pin=pins) as pool:
        pool.pin_ahead([PinnedBuffers("unit", PAGE_BYTES, 3)], 9 * PAGE_BYTES)
        assert pins.num_asked == 1
        with pool.lease(PAGE_BYTES, "unit") as lease:
            assert set(pins.sizes) == {address_of(lease.memory)}


def test_without_a_gpu_nothing_is_made_ahead() -> None:
    with BufferPool(None) as pool:
        pool.pin_ahead([PinnedBuffers("unit", PAGE_BYTES, 3)], 9 * PAGE_BYTES)
        assert pool.peak_bytes == 0


def test_where_memory_is_short_an_idle_pinned_buffer_serves_what_does_not_cross_the_link() -> None:
    """Otherwise it would be given up for that, and pinned again in the next step."""
    pins = RecordingPins()
    with BufferPool(2 * PAGE_BYTES, pin=pins) as pool:
        pool.lease(2 * PAGE_BYTES, "gradient").release()
        with pool.lease(2 * PAGE_BYTES, "gradient", crosses_link=False) as lease:
            assert set(pins.sizes) == {address_of(lease.memory)}
        with pool.lease(2 * PAGE_BYTES, "gradient") as lease:
            assert set(pins.sizes) == {address_of(lease.memory)} and not pins.unpinned
