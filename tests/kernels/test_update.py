"""AdamW on chunks has the bits of the plain kernels on each segment, and the checksums of the xxhash library."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import xxhash

from ratel_cli import _native
from ratel_cli.sizes import DtypeName
from tests.kernels.native_rules import kernel
from tests.kernels.oracle import ISAS, scalars
from tests.kernels.rules import Layout, fields_of
from tests.tiers import thinned

NAMES: tuple[Layout, ...] = ("bfloat16", "float32", "float16")
LAYOUTS = {name: [field.dtype for field in fields_of("adamw", name)] for name in NAMES}
PLAIN = {name: kernel("adamw", name) for name in NAMES}
UPDATE = {name: kernel("adamw", name, prefix="update_") for name in NAMES}
LARGEST = 2**64 - 1
ONE = _native.AdamWScalars(**scalars(1))
Segments = list[tuple[int, int, bool]]


def arrays_of(layout: Layout, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The record's fields, then a gradient. One gradient is infinite."""
    found = []
    for dtype in (*LAYOUTS[layout], random.Random(count).choice([torch.bfloat16, torch.float32])):
        if dtype is torch.int16:
            found.append(torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=dtype))
        else:
            found.append(torch.randn(count, generator=generator).abs().to(dtype))
    if count > 5:
        found[-1][5] = torch.inf
    return found


def segments_of(choice: random.Random, count: int) -> Segments:
    """Random segments: some are adjacent, some are empty, some elements are in none."""
    edges = sorted(choice.randint(0, count) for _ in range(2 * choice.randint(0, 5)))
    found = [(first, last, choice.random() < 0.5) for first, last in zip(edges[::2], edges[1::2], strict=True)]
    return found or [(0, count, True)]


@dataclass(frozen=True)
class Place:
    """Which chunks of which block, and which entry of a table is for the first chunk of a field."""

    table: array[int]
    is_set: bytearray
    store_id: bytes
    step: int
    block: int
    first_chunk: int
    entries: tuple[int | None, ...]

    @property
    def checksums(self) -> _native.ChunkChecksums:
        """`first_chunk` is for the kernel's call."""
        return _native.ChunkChecksums(**{name: each for name, each in vars(self).items() if name != "first_chunk"})

    @classmethod
    def by_chance(cls, choice: random.Random, *, num_fields: int, first_chunk: int, num_chunks: int) -> Place:
        """Some fields are not wanted. The table is full of other numbers, and has more entries than needed."""
        starts = choice.sample(range(num_fields), num_fields)
        num_entries = num_fields * (first_chunk + num_chunks) + 3
        return cls(
            table=array("Q", [choice.randint(0, LARGEST)]) * num_entries,
            is_set=bytearray(b"\1") * num_entries,
            store_id=choice.randbytes(16),
            step=choice.choice([0, 1, LARGEST]),
            block=choice.choice([0, 1, LARGEST >> 32]),
            first_chunk=first_chunk,
            entries=tuple(choice.choice([None, 2 + start * (first_chunk + num_chunks)]) for start in starts),
        )

    def expected(self, fields: Sequence[torch.Tensor], chunk_elements: int) -> dict[int, int]:
        """By entry: the checksum by the library of a field's chunk, with the seed by the library."""
        found = {}
        for number, (field, entry) in enumerate(zip(fields, self.entries, strict=True)):
            for chunk, first in enumerate(range(0, len(field), chunk_elements)):
                if entry is not None:
                    place = struct.pack(
                        "<16sQIII", self.store_id, self.step, self.block, number, self.first_chunk + chunk
                    )
                    octets = field[first : first + chunk_elements].contiguous().view(torch.uint8).numpy()
                    found[entry + self.first_chunk + chunk] = xxhash.xxh3_64_intdigest(
                        octets, seed=xxhash.xxh3_64_intdigest(place)
                    )
        return found

    def with_checksums(self, found: dict[int, int]) -> Place:
        """The same place in a table that has these."""
        table = array("Q", self.table)
        for entry, checksum in found.items():
            table[entry] = checksum
        return replace(self, table=table)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", thinned(range(25), every=3, full_every=4))
def test_it_is_the_plain_kernel_on_each_segment_and_the_library_s_checksums(
    layout: Layout, isa: str, seed: int
) -> None:
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = 512 * choice.choice([1, 2, 3, 4, 5, 8, 9, 64, 65, choice.randint(1, 300)])
    chunk_elements = 512 * choice.choice([1, 2, 3, 4, 64, 1000])
    found = arrays_of(layout, count, generator)
    expected = [array.clone() for array in found]
    segments, numbers = segments_of(choice, count), scalars(3, weight_decay=0.1)
    first_chunk = choice.choice([0, 1, 1 << 17])
    before, after = (
        Place.by_chance(
            choice, num_fields=len(LAYOUTS[layout]), first_chunk=first_chunk, num_chunks=-(-count // chunk_elements)
        )
        for _ in range(2)
    )
    after.is_set[:] = bytes(len(after.is_set))
    before = before.with_checksums(before.expected(expected[:-1], chunk_elements))
    for first, last, decays in segments:
        plain = _native.AdamWScalars(**{**numbers, "decay_factor": numbers["decay_factor"] if decays else 1.0})
        PLAIN[layout](*(array[first:last] for array in expected), isa=isa, scalars=plain)
    entered = after.expected(expected[:-1], chunk_elements)
    wanted = after.with_checksums(entered)
    mismatches = UPDATE[layout](
        *found,
        segments=segments,
        chunk_elements=chunk_elements,
        first_chunk=first_chunk,
        before=before.checksums,
        after=after.checksums,
        isa=isa,
        scalars=_native.AdamWScalars(**numbers),
    )
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert mismatches == []
    assert after.table == wanted.table
    assert [entry for entry, is_set in enumerate(after.is_set) if is_set] == sorted(entered)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 511, 513, 2049, 5000])
def test_without_checksums_arrays_may_have_any_length(layout: Layout, count: int) -> None:
    found = arrays_of(layout, count, torch.Generator().manual_seed(count))
    expected = [array.clone() for array in found]
    PLAIN[layout](*expected, scalars=ONE)
    assert UPDATE[layout](*found, segments=[(0, count, False)], chunk_elements=512, scalars=ONE) == []
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_flipped_bit_is_a_mismatch_of_its_field_and_chunk(layout: Layout) -> None:
    choice, num_fields = random.Random(1), len(LAYOUTS[layout])
    for _ in range(50):
        arrays = arrays_of(layout, 2048, torch.Generator().manual_seed(2))
        place = Place.by_chance(choice, num_fields=num_fields, first_chunk=0, num_chunks=4)
        place = replace(place, entries=tuple(range(0, 4 * num_fields, 4)))
        place = place.with_checksums(place.expected(arrays[:-1], 512))
        damaged = choice.randrange(num_fields)
        octets = arrays[damaged].view(torch.uint8)
        at = choice.randrange(len(octets))
        octets[at] ^= 1 << choice.randrange(8)
        found = UPDATE[layout](
            *arrays, segments=[(0, 2048, True)], chunk_elements=512, before=place.checksums, scalars=ONE
        )
        assert found == [(damaged, 4 * at // len(octets))]


@pytest.mark.parametrize(
    ("count", "segments", "chunk_elements", "entries", "message"),
    [
        (1024, [(0, 1025, True)], 512, None, "segments: must lie in order within the arrays"),
        (1024, [(5, 4, True)], 512, None, "segments: must lie in order"),
        (1024, [(0, 10, True), (9, 20, True)], 512, None, r"segments: must lie in order .*\[9, 20\) does not"),
        (1024, [(0, 1024, True)], 0, None, "chunk_elements: must be a multiple of 512, is 0"),
        (1024, [(0, 1024, True)], 100, None, "chunk_elements: must be a multiple of 512, is 100"),
        (1024, [(0, 1024, True)], 512, (0, 2, 4), "{when}: must have one entry for each field, 4, has 3"),
        (1024, [(0, 1024, True)], 512, (0, 2, 4, 6), "{when}: entries must lie in the table, which has 8"),
        (1024, [(0, 1024, True)], 512, (0, 2, 4, 9), "{when}: entries must lie in the table, which has 8"),
        (1000, [(0, 1000, True)], 512, (0, 2, 4, 5), "{when}: arrays .* multiple of 512 elements, have 1000"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_invalid_arguments_are_rejected_and_change_nothing(
    count: int, segments: Segments, chunk_elements: int, entries: tuple[int, ...] | None, message: str, when: str
) -> None:
    arrays = arrays_of("bfloat16", count, torch.Generator().manual_seed(3))
    originals = [each.clone() for each in arrays]
    table, is_set = array("Q", [1]) * 8, bytearray(b"\1") * 8
    place = None
    if entries is not None:
        place = Place(table, is_set, bytes(16), step=1, block=2, first_chunk=1, entries=entries).checksums
    with pytest.raises(ValueError, match=message.format(when=when)):
        _native.update_adamw_bfloat16(
            *arrays,
            segments=segments,
            chunk_elements=chunk_elements,
            first_chunk=1,
            before=place if when == "before" else None,
            after=place if when == "after" else None,
            scalars=ONE,
        )
    assert all(same(a, b) for a, b in zip(arrays, originals, strict=True))
    assert table == array("Q", [1]) * 8


def test_a_store_id_of_another_length_is_rejected() -> None:
    for store_id in (b"", bytes(15), bytes(17)):
        with pytest.raises(ValueError, match=f"store_id: must have 16 bytes, has {len(store_id)}"):
            _ = Place(array("Q", [0]), bytearray(1), store_id, step=0, block=0, first_chunk=0, entries=()).checksums


def test_another_number_of_set_marks_than_of_entries_is_rejected() -> None:
    for num_marks in (0, 2):
        with pytest.raises(ValueError, match=f"is_set: must be as long as the table, 1, has {num_marks}"):
            _ = Place(
                array("Q", [0]), bytearray(num_marks), bytes(16), step=0, block=0, first_chunk=0, entries=()
            ).checksums


@pytest.mark.parametrize("missing", [1, 2, 5, 6])
def test_bytes_are_not_compared_with_a_checksum_that_is_not_set(missing: int) -> None:
    """Chunks 1 and 2 of two fields, whose first chunks have the entries 0 and 4."""
    arrays = arrays_of("bfloat16", 1024, torch.Generator().manual_seed(3))
    originals = [each.clone() for each in arrays]
    is_set = bytearray(b"\1") * 7
    place = Place(array("Q", [1]) * 7, is_set, bytes(16), step=1, block=2, first_chunk=1, entries=(0, None, 4, None))

    def update() -> list[tuple[int, int]]:
        return _native.update_adamw_bfloat16(
            *arrays, segments=[], chunk_elements=512, first_chunk=1, before=place.checksums, scalars=ONE
        )

    is_set[0] = is_set[3] = is_set[4] = 0  # those of chunk 0, and of another field
    assert update() == [(0, 0), (2, 0), (0, 1), (2, 1)]
    is_set[missing] = 0
    with pytest.raises(ValueError, match="before: a chunk has no checksum yet"):
        update()
    assert all(same(a, b) for a, b in zip(arrays, originals, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 2049])
def test_fields_may_come_as_their_bytes(layout: Layout, count: int) -> None:
    found = arrays_of(layout, count, torch.Generator().manual_seed(count))
    expected = [array.clone() for array in found]
    UPDATE[layout](*expected, segments=[(0, count, True)], chunk_elements=512, scalars=ONE)
    octets = [memoryview(each.view(torch.uint8).numpy()) for each in found[:-1]]
    UPDATE[layout](*octets, found[-1], segments=[(0, count, True)], chunk_elements=512, scalars=ONE)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gradient_may_come_as_its_bytes(dtype: DtypeName) -> None:
    found = arrays_of("float32", 100, torch.Generator().manual_seed(3))[:-1]
    expected = [array.clone() for array in found]
    gradient = torch.randn(101, generator=torch.Generator().manual_seed(4)).to(getattr(torch, dtype))
    UPDATE["float32"](*expected, gradient[1:], segments=[(0, 100, True)], chunk_elements=512, scalars=ONE)
    octets = memoryview(gradient[1:].view(torch.uint8).numpy())
    for memory in (octets, octets.toreadonly()):
        fields = [array.clone() for array in found]
        UPDATE["float32"](
            *fields, memory, segments=[(0, 100, True)], chunk_elements=512, gradient_dtype=dtype, scalars=ONE
        )
        assert all(same(a, b) for a, b in zip(fields, expected, strict=True))


def test_bytes_of_a_gradient_need_its_dtype_and_length() -> None:
    arrays = arrays_of("float32", 64, torch.Generator().manual_seed(3))[:-1]
    octets = memoryview(bytearray(256))

    def update(gradient: memoryview | torch.Tensor, dtype: DtypeName | None) -> None:
        UPDATE["float32"](*arrays, gradient, segments=[], chunk_elements=512, gradient_dtype=dtype, scalars=ONE)

    update(octets, "float32")
    with pytest.raises(ValueError, match="gradient: has 256 elements"):
        update(octets, None)
    with pytest.raises(ValueError, match="gradient: has 128 elements"):
        update(octets, "bfloat16")
    with pytest.raises(ValueError, match="gradient_dtype: must be 'bfloat16', 'float16' or 'float32', is 'int8'"):
        update(octets, "int8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gradient: must be float32, is bfloat16"):
        update(torch.zeros(64, dtype=torch.bfloat16), "float32")


@pytest.mark.parametrize(("first", "last"), [(0, 2047), (2, 2050), (1, 2049), (0, 2044)])
def test_bytes_that_are_not_whole_aligned_elements_of_the_same_number_are_rejected(first: int, last: int) -> None:
    arrays = arrays_of("float32", 512, torch.Generator().manual_seed(3))
    octets = memoryview(bytearray(4096))
    start = -_native.address_of(octets) % 4
    part = octets[start + first : start + last]
    with pytest.raises(ValueError, match=r"its bytes must be whole and aligned elements of 4 bytes|has 511 elements"):
        _native.update_adamw_float32(arrays[0], part, *arrays[2:], segments=[], chunk_elements=512, scalars=ONE)


def test_read_only_bytes_are_rejected() -> None:
    arrays = arrays_of("float32", 512, torch.Generator().manual_seed(3))
    for memory in (memoryview(bytes(2048)), memoryview(bytearray(2048))[::2]):
        with pytest.raises((TypeError, ValueError), match="m32"):
            _native.update_adamw_float32(arrays[0], memory, *arrays[2:], segments=[], chunk_elements=512, scalars=ONE)


def test_the_address_of_memory_is_that_of_its_first_byte() -> None:
    values = torch.zeros(10, dtype=torch.uint8)
    assert _native.address_of(memoryview(values.numpy())[3:]) == values.data_ptr() + 3
    with pytest.raises(BufferError):
        _native.address_of(memoryview(bytes(1)))
