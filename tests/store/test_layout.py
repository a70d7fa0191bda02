"""Records: the fields of each dtype, and addresses that fill a slot without gaps or overlaps."""

from __future__ import annotations

import pytest

from ratel_cli.sizes import BLOCK_ALIGNMENT, PAGE_BYTES, DtypeName
from ratel_cli.store.layout import RecordMap, record_layout

DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float32", "float16")


@pytest.mark.parametrize(
    ("dtype", "fields", "num_bytes"),
    [
        ("bfloat16", [("hi16", 2), ("lo16", 2), ("m32", 4), ("v32", 4)], 12),
        ("float32", [("w32", 4), ("m32", 4), ("v32", 4)], 12),
        ("float16", [("w16", 2), ("w32", 4), ("m32", 4), ("v32", 4)], 14),
    ],
)
def test_layouts(dtype: DtypeName, fields: list[tuple[str, int]], num_bytes: int) -> None:
    layout = record_layout(dtype)
    assert [(field.name, field.bytes_per_element) for field in layout.fields] == fields
    assert layout.compute_field.name == fields[0][0]
    assert [field.name for field in layout.state_fields] == [name for name, _ in fields[1:]]
    assert layout.bytes_per_parameter == num_bytes
    assert layout.record_bytes(4096) == 4096 * num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_elements", [(), (0,), (2048,), (2048, 0, 6144, 2048)])
def test_addresses_tile_the_slots(dtype: DtypeName, block_elements: tuple[int, ...]) -> None:
    layout = record_layout(dtype)
    records = RecordMap(layout, block_elements)
    position = 0
    for slot in range(3):
        for block, num_elements in enumerate(block_elements):
            for field in layout.fields:
                for start in range(0, num_elements, BLOCK_ALIGNMENT):
                    address = records.address(slot, block, field.name, start)
                    assert address == position
                    assert address % PAGE_BYTES == 0
                    position += BLOCK_ALIGNMENT * field.bytes_per_element
        assert position == (slot + 1) * records.slot_bytes
    assert records.slot_bytes == sum(block_elements) * layout.bytes_per_parameter


def test_unaligned_elements_are_a_bug() -> None:
    records = RecordMap(record_layout("bfloat16"), (4096,))
    with pytest.raises(AssertionError):
        records.address(0, 0, "hi16", 1)
    with pytest.raises(AssertionError):
        records.address(0, 0, "hi16", 6144)
    with pytest.raises(AssertionError):
        record_layout("bfloat16").record_bytes(2047)


def test_unknown_fields_are_a_bug() -> None:
    with pytest.raises(ValueError, match="w32"):
        record_layout("bfloat16").field("w32")
