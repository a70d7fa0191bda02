"""Records: the fields of each rule, and addresses that fill a region without gaps or overlaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.schedule.rules import ADAMW, FROZEN
from ratel_cli.sizes import BLOCK_ALIGNMENT, PAGE_BYTES, DtypeName
from ratel_cli.store.layout import Field, Geometry, RankSlice, Record, StoredBlock

EIGHT_BIT = Record((Field("w", "bfloat16"), Field("m", "uint8"), Field("scales", "float32", 256)))
"""As rules with moments of 8 bits have: a value for each element, and one for 256 of them."""
BY_COLUMN = Record((Field("w", "float32"), Field("columns", "float32", fixed=3000)))
RECORDS = [ADAMW.record("bfloat16"), ADAMW.record("float32"), ADAMW.record("float16"), EIGHT_BIT, BY_COLUMN]


@pytest.mark.parametrize(
    ("dtype", "fields", "num_bytes"),
    [
        ("bfloat16", [("hi16", "bfloat16"), ("lo16", "int16"), ("m32", "float32"), ("v32", "float32")], 12),
        ("float32", [("w32", "float32"), ("m32", "float32"), ("v32", "float32")], 12),
        ("float16", [("w16", "float16"), ("w32", "float32"), ("m32", "float32"), ("v32", "float32")], 14),
    ],
)
def test_records_of_adamw(dtype: DtypeName, fields: list[tuple[str, str]], num_bytes: int) -> None:
    record = ADAMW.record(dtype)
    assert [(field.name, field.dtype) for field in record.fields] == fields
    assert record.compute_field.name == fields[0][0]
    assert [field.name for field in record.state_fields] == [name for name, _ in fields[1:]]
    assert record.num_bytes(4096) == 4096 * num_bytes


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("float32", 4), ("float16", 2)])
def test_a_frozen_block_has_its_weights_alone(dtype: DtypeName, num_bytes: int) -> None:
    record = FROZEN.record(dtype)
    assert record.fields == (record.compute_field,) and record.compute_field.dtype == dtype
    assert record.num_bytes(4096) == 4096 * num_bytes


BLOCKS = st.lists(
    st.builds(
        StoredBlock,
        st.integers(0, 9).map(lambda number: number * BLOCK_ALIGNMENT),
        st.sampled_from(RECORDS),
        st.booleans(),
    ),
    max_size=6,
)


@given(blocks=BLOCKS, chunk_pages=st.sampled_from([0, 128, 256]))
def test_regions_tile_the_store(blocks: list[StoredBlock], chunk_pages: int) -> None:
    """The frozen region, then slot after slot; in each block after block, field after field, then the table."""
    geometry = Geometry(blocks=tuple(blocks), num_slots=2, shares=(1,), chunk_elements=chunk_pages * BLOCK_ALIGNMENT)
    position = 0
    regions = [(geometry.frozen, 0, True), *((geometry.slot, geometry.slot_address(slot), False) for slot in range(2))]
    for region, address, is_frozen in regions:
        assert address == position
        for index, block in enumerate(blocks):
            if block.is_frozen is not is_frozen:
                continue
            for field in block.record.fields:
                assert address + region.records.address(index, field.name, 0) == position
                assert position % PAGE_BYTES == 0
                values = -(-block.num_elements // field.per)
                if field.name == "columns":
                    values = 3000 * (values > 0)
                num_bytes = values * {"uint8": 1, "float32": 4}.get(field.dtype, 2)
                position += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if region.chunks is not None:
            ranges = list(region.chunks.ranges())
            assert region.chunks.num_entries == 1 + len(ranges)
            assert all(blocks[index].is_frozen is is_frozen for index, *_ in ranges)
            position += -(-8 * (1 + len(ranges)) // PAGE_BYTES) * PAGE_BYTES
        assert position == address + region.num_bytes
    assert (geometry.frozen.num_bytes == 0) == (not any(block.is_frozen and block.num_elements for block in blocks))
    assert sum(geometry.file_bytes()) == 3 * PAGE_BYTES + position


@pytest.mark.parametrize("record", RECORDS)
def test_elements_lie_where_their_values_do(record: Record) -> None:
    unit = 128 * BLOCK_ALIGNMENT
    region = Geometry(blocks=(StoredBlock(3 * unit, record),), num_slots=1, shares=(1,)).slot
    for field in record.fields:
        begin = region.records.address(0, field.name, 0)
        for number in range(4):
            start = region.records.address(0, field.name, number * unit)
            assert start - begin == region.records.field_bytes(0, field.name, number * unit)


def test_what_begins_within_a_page_is_a_bug() -> None:
    region = Geometry(blocks=(StoredBlock(4096, ADAMW.record("bfloat16")),), num_slots=1, shares=(1,)).slot
    with pytest.raises(AssertionError):
        region.records.address(0, "hi16", 1)
    with pytest.raises(AssertionError):
        region.records.address(0, "hi16", 6144)


def test_chunks_that_are_no_pages_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="whole pages"):
        Geometry(blocks=(StoredBlock(4096, EIGHT_BIT),), num_slots=1, shares=(1,), chunk_elements=2048)


def test_unknown_fields_are_a_bug() -> None:
    with pytest.raises(ValueError, match="w32"):
        ADAMW.record("bfloat16").field("w32")


def test_one_rank_has_all() -> None:
    assert RankSlice().range_of(6144) == (0, 6144)


@given(
    size=st.integers(1, 9),
    num_elements=st.integers(0, 40).map(lambda number: number * BLOCK_ALIGNMENT),
    unit=st.sampled_from([1, 2, 5]).map(lambda number: number * BLOCK_ALIGNMENT),
)
def test_ranks_share_a_block_without_cutting_units(size: int, num_elements: int, unit: int) -> None:
    ranges = [RankSlice(rank, size).range_of(num_elements, unit=unit) for rank in range(size)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])] and ranges[-1][1] == num_elements
    assert all(start % unit == 0 or start == num_elements for start, _ in ranges)
    sizes = [-(-(stop - start) // unit) for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("rank", "size"), [(-1, 1), (1, 1), (0, 0)])
def test_a_rank_that_is_none_is_a_bug(rank: int, size: int) -> None:
    with pytest.raises(AssertionError):
        RankSlice(rank, size)
