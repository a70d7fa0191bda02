"""The import: every field of the store's records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratel_cli import _native
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.files.import_weights import imported_weights, overlaps
from ratel_cli.model.values.records import RecordBuffers, encode_record
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from ratel_cli.schedule.rules import ADAMW
from ratel_cli.sizes import DtypeName
from ratel_cli.store.fill import fill
from ratel_cli.store.layout import Field
from ratel_cli.store.store import Store
from tests.fakes import values_of
from tests.model.tiny import imported_store

SIZES = [1, 31, 32, 33, 2047, 2048, 2049, 9000]


class CountingSource:
    """Weights with random bit patterns, in the range of the dtype. Every third is a tie of bfloat16."""

    def __init__(self, spec: ModelSpec) -> None:
        self.values: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(1)
        for parameter in (parameter for block in spec.blocks for parameter in block.parameters):
            bits = torch.randint(-(2**31), 2**31, (parameter.num_elements,), generator=generator, dtype=torch.int64)
            bits[::3] = bits[::3] // 2**16 * 2**16 + 0x8000
            bits[bits // 2**23 % 256 == 255] -= 2**23
            values = bits.to(torch.int32).view(torch.float32)
            self.values[parameter.name] = values.clamp(-65504, 65504) if spec.dtype == "float16" else values

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.values[name][start:stop].clone()


def made_up_spec(dtype: DtypeName = "bfloat16") -> ModelSpec:
    blocks = (
        lay_out_block(dtype=dtype, index=0, name="embedding", parameters=[("e", (7, 3), True)]),
        lay_out_block(dtype=dtype, index=1, name="layer 0", parameters=[(f"p{n}", (n,), True) for n in SIZES]),
        lay_out_block(dtype=dtype, index=2, name="head", parameters=[("h", (2048,), True)]),
    )
    return ModelSpec(
        name="x",
        architecture="X",
        blocks=blocks,
        segment_names=("embedding", "layer 0", "head"),
        dtype=dtype,
        hidden_size=1,
        vocab_size=1,
    )


def read_field(store: Store, pool: BufferPool, block: BlockSpec, name: str) -> torch.Tensor:
    field = store.blocks[block.index].record.field(name)
    lease = pool.lease(field.num_bytes(block.num_elements), "test")
    store.current().read(block.index, name, 0, block.num_elements, lease.memory).wait()
    return values_of(lease.memory, field)


def flat(block: BlockSpec, source: CountingSource) -> torch.Tensor:
    whole = torch.zeros(block.num_elements)
    for parameter in block.parameters:
        whole[parameter.start : parameter.stop] = source.values[parameter.name]
    return whole


@pytest.mark.parametrize("group_elements", [2048, 4096, 1 << 23])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_field(tmp_path: Path, dtype: DtypeName, group_elements: int) -> None:
    spec = made_up_spec(dtype)
    source = CountingSource(spec)
    with imported_store(tmp_path, spec, source, group_elements=group_elements) as (store, pool):
        for block in spec.blocks:
            fields = {field.name: read_field(store, pool, block, field.name) for field in block.record.fields}
            master = flat(block, source)
            assert not fields["m32"].any() and torch.equal(fields["v32"].abs(), torch.zeros(block.num_elements))
            if dtype == "bfloat16":
                bits = master.view(torch.int32)
                assert torch.equal(fields["hi16"].view(torch.int16), master.to(torch.bfloat16).view(torch.int16))
                assert torch.equal(fields["lo16"].to(torch.int32) & 0xFFFF, bits & 0xFFFF)
                rounded_up = fields["hi16"].view(torch.int16).to(torch.int32) & 0xFFFF != bits >> 16 & 0xFFFF
                is_tie = bits & 0xFFFF == 0x8000
                assert is_tie.any() and torch.equal(fields["v32"].signbit()[is_tie], rounded_up[is_tie])
            else:
                assert torch.equal(fields["w32"].view(torch.int32), master.view(torch.int32))
            if dtype == "float16":
                assert torch.equal(fields["w16"].view(torch.int16), master.to(torch.float16).view(torch.int16))


def test_memory_is_one_group_and_progress_adds_up(tmp_path: Path) -> None:
    spec = made_up_spec()
    source = CountingSource(spec)
    counts: list[int] = []
    # hi16, lo16, m32, v32 and the fp32 master: exactly 16 bytes for each element of a group.
    with imported_store(tmp_path, spec, source) as (store, _), BufferPool(16 * 4096) as pool:
        fill(store, imported_weights(spec, source, store.progress, group_elements=4096), pool, progress=counts.append)
        assert pool.peak_bytes == 16 * 4096 and pool.leased_bytes == 0
    assert sum(counts) == spec.record_bytes and len(counts) == 1 + 4 + 1


def test_overlaps() -> None:
    block = made_up_spec().blocks[1]
    assert [p.name for p, _, _ in overlaps(block, 0, 1)] == ["p1"]
    assert overlaps(block, 1, 32) == []
    found = overlaps(block, 2048, 4096)
    assert all(2048 <= first < last <= 4096 for _, first, last in found)
    whole = overlaps(block, 0, block.num_elements)
    assert [(first, last) for _, first, last in whole] == [(p.start, p.stop) for p in block.parameters]


def test_what_is_no_number_stays_none() -> None:
    """Rounded as other bits are, 0x7fffffff and its like would be zero, and training would compute with that."""
    words = torch.tensor([0x7FFFFFFF, 0x7FFF8000, 0x7F800001, -1, -0x8000, 0x7F800000, 0x7F7FFFFF, 0x3F800000])
    master = words.to(torch.int32).view(torch.float32)
    halves = {name: torch.empty(8, dtype=torch.int16) for name in ("hi16", "lo16")}
    fields = {name: torch.empty(8) for name in ("m32", "v32")} | {
        "w32": master.clone(),
        "hi16": halves["hi16"].view(torch.bfloat16),
        "lo16": halves["lo16"],
    }
    encode_record(ADAMW.record("bfloat16"), fields)
    assert torch.equal(fields["hi16"].isnan(), master.isnan())
    joined = torch.empty(8)
    _native.join_bfloat16(fields["hi16"], fields["lo16"], fields["v32"], joined)
    assert torch.equal(joined.isnan(), master.isnan())
    assert torch.equal(joined[5:], master[5:])


def test_fields_of_one_name_in_two_dtypes_have_memory_of_their_own() -> None:
    """As those of frozen blocks in fp32 and in 16 bit."""
    narrow, wide = Field("frozen", "bfloat16"), Field("frozen", "float32")
    with BufferPool(None) as pool, RecordBuffers(pool, [narrow, wide], 8, "test") as buffers:
        one, other = (buffers.tensors([field], 8)["frozen"] for field in (narrow, wide))
        assert (one.dtype, other.dtype) == (torch.bfloat16, torch.float32)
        one.zero_()
        other.fill_(1.0)
        assert not one.any()
