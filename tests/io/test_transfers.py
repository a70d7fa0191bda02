"""What a transfer is cut into (kernels/bindings/transfers.cpp): slices of the same memory, in order, whole pages."""

from __future__ import annotations

import random
import weakref

import pytest

from ratel_cli import _native
from ratel_cli.io.buffers import BufferPool, address_of
from ratel_cli.io.queue import Extent
from ratel_cli.io.striped_files import native_stripes
from ratel_cli.io.striping import StripeMap
from ratel_cli.sizes import PAGE_BYTES

FDS = (30, 10, 20)


class _Buffer(bytearray):
    """A bytearray that can be weakly referred to."""


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (3, 1, 2)])
@pytest.mark.parametrize("sizes", [(), (0,), (1,), (8, 8), (5, 0, 17, 1), (64, 3)])
def test_extents_are_the_ranges_of_the_addresses_and_slices_of_the_memories(
    weights: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    stripes = native_stripes(StripeMap(shares=weights, stripe_bytes=8, header_bytes=3))
    choice, fds = random.Random(len(sizes)), FDS[: len(weights)]
    parts = [(choice.randrange(40), memoryview(bytearray(choice.randbytes(size)))) for size in sizes]
    found = stripes.extents(parts, fds, Extent)
    assert all(type(extent) is Extent for extent in found)
    places = [each for address, memory in parts for each in stripes.ranges(address, len(memory))]
    assert [(extent.fd, extent.offset, len(extent.memory)) for extent in found] == [
        (fds[file_index], offset, num_bytes) for file_index, offset, num_bytes in places
    ]
    assert b"".join(extent.memory for extent in found) == b"".join(memory for _, memory in parts)
    expected = [address_of(memory) + at for _, memory in parts for at in range(len(memory))]
    assert [address_of(extent.memory) + at for extent in found for at in range(len(extent.memory))] == expected


@pytest.mark.parametrize("num_pages", [0, 1, 3, 4, 5, 8, 9])
def test_extents_are_cut_into_pieces_of_the_same_memory(num_pages: int) -> None:
    with BufferPool(None) as pool:
        memory = pool.lease((num_pages + 1) * PAGE_BYTES, "test").memory
        extents = [Extent(7, PAGE_BYTES, memory[: num_pages * PAGE_BYTES]), Extent(8, 0, memory[:PAGE_BYTES])]
        pieces = _native.cut_extents(extents, 4 * PAGE_BYTES, PAGE_BYTES)
        starts = range(0, num_pages, 4)
        assert [(fd, offset, address_of(part) - address_of(memory), len(part)) for fd, offset, part in pieces] == [
            *(
                (7, (1 + start) * PAGE_BYTES, start * PAGE_BYTES, min(4, num_pages - start) * PAGE_BYTES)
                for start in starts
            ),
            (8, 0, 0, PAGE_BYTES),
        ]


def test_pieces_keep_their_memory_alive() -> None:
    buffer = _Buffer(8 * PAGE_BYTES)
    alive = weakref.ref(buffer)
    stripes = native_stripes(StripeMap(shares=(1, 1), stripe_bytes=4 * PAGE_BYTES, header_bytes=0))
    [first, second] = stripes.extents([(0, memoryview(buffer))], (1, 2), Extent)
    start = -address_of(second.memory) % PAGE_BYTES
    aligned = Extent(1, 0, second.memory[start : start + 3 * PAGE_BYTES])
    del buffer, first, second
    pieces = _native.cut_extents([aligned], PAGE_BYTES, PAGE_BYTES)
    del aligned, pieces[1:]
    assert alive() is not None
    del pieces
    assert alive() is None


def test_what_is_no_memory_of_bytes_is_rejected() -> None:
    stripes = native_stripes(StripeMap(shares=(1, 1), stripe_bytes=8, header_bytes=0))
    for memory in (memoryview(bytearray(64))[::2], memoryview(bytearray(64)).cast("I")):
        with pytest.raises(ValueError, match="contiguous bytes"):
            stripes.extents([(0, memory)], (1, 2), Extent)
        with pytest.raises(ValueError, match="contiguous bytes"):
            _native.cut_extents([Extent(1, 0, memory)], PAGE_BYTES, PAGE_BYTES)
    with pytest.raises(TypeError, match="memoryview"):
        stripes.extents([(0, b"12345678")], (1, 2), Extent)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="memoryview"):
        _native.cut_extents([(1, 0, b"")], PAGE_BYTES, PAGE_BYTES)  # type: ignore[list-item]


def test_other_arguments_that_do_not_go_together_are_rejected() -> None:
    stripes = native_stripes(StripeMap(shares=(1, 1), stripe_bytes=8, header_bytes=0))
    parts = [(0, memoryview(bytearray(8)))]
    for fds in ((), (1,), (1, 2, 3)):
        with pytest.raises(ValueError, match="one for each weight"):
            stripes.extents(parts, fds, Extent)
    with pytest.raises(TypeError, match="type of tuples"):
        stripes.extents(parts, (1, 2), int)  # type: ignore[type-var]
    for most_bytes in (0, PAGE_BYTES - 1, PAGE_BYTES + 1):
        with pytest.raises(ValueError, match="most_bytes: must be whole pages"):
            _native.cut_extents([], most_bytes, PAGE_BYTES)
    for turns, stripe_bytes in (([], 8), ([(0, 0)], 0)):
        with pytest.raises(ValueError, match="at least one in a cycle"):
            _native.Stripes(turns=turns, weights=[1], stripe_bytes=stripe_bytes, header_bytes=0)
    for turn in ((1, 0), (0, 1)):
        with pytest.raises(ValueError, match="files that have weights"):
            _native.Stripes(turns=[turn], weights=[1], stripe_bytes=8, header_bytes=0)
