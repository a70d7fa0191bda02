"""A copy with a fresh optimizer: every field is that of an import of the same weights, whatever the moments were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.model.files.import_weights import copied_weights
from ratel_cli.sizes import DtypeName
from ratel_cli.store.fill import fill
from ratel_cli.store.layout import Geometry
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Progress, Store
from tests.fakes import values_of
from tests.model.test_import_weights import CountingSource, made_up_spec, read_field
from tests.model.tiny import imported_store

DONE = Progress(step=1, updates=4, loss_scale=1.0, good_steps=0, tokens=9)
SIGN = -(2**31)


def add_moments(store: Store, pool: BufferPool) -> None:
    """A step that changes the moments only; the sign of v is a part of the master in bfloat16."""
    store.begin_step()
    generator = torch.Generator().manual_seed(2)
    for block, num_elements in enumerate(each.num_elements for each in store.blocks):
        for field in store.blocks[block].record.fields:
            with pool.lease(field.num_bytes(num_elements), "test") as lease:
                store.current().read(block, field.name, 0, num_elements, lease.memory).wait()
                values = values_of(lease.memory, field)
                if field.name == "m32":
                    values.copy_(torch.randn(num_elements, generator=generator))
                if field.name == "v32":
                    noise = torch.rand(num_elements, generator=generator).view(torch.int32)
                    values.view(torch.int32).copy_(values.view(torch.int32) & SIGN | noise)
                store.shadow().write(block, field.name, 0, num_elements, lease.memory).wait()
    store.commit(DONE)


@pytest.mark.parametrize("group_elements", [2048, 6144, 1 << 23])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_field_is_that_of_an_import(tmp_path: Path, dtype: DtypeName, group_elements: int) -> None:
    spec = made_up_spec(dtype)
    geometry = Geometry(blocks=spec.stored_blocks, num_slots=2, shares=(1,), chunk_elements=2048)
    with (
        imported_store(tmp_path / "a", spec, CountingSource(spec)) as (source, pool),
        open_queue("threads", notice=lambda message: None) as queue,
        Store.create([tmp_path / "b"], geometry, identity=source.identity, queue=queue) as target,
    ):
        places = [(block, field.name) for block in spec.blocks for field in block.record.fields]
        imported = [read_field(source, pool, *place).clone() for place in places]
        add_moments(source, pool)
        counts: list[int] = []
        weights = copied_weights(source.current(), DONE, group_elements=group_elements)
        fill(target, weights, pool, progress=counts.append)
        for (block, name), expected in zip(places, imported, strict=True):
            found = read_field(target, pool, block, name)
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (block.name, name)
        assert sum(counts) == sum(block.record_bytes for block in spec.blocks)


def test_a_damaged_weight_is_not_copied(tmp_path: Path) -> None:
    spec, weights = made_up_spec("float32"), CountingSource(made_up_spec("float32"))
    geometry = Geometry(blocks=spec.stored_blocks, num_slots=2, shares=(1,), chunk_elements=2048)
    with (
        imported_store(tmp_path / "a", spec, weights) as (source, pool),
        open_queue("threads", notice=lambda message: None) as queue,
        Store.create([tmp_path / "b"], geometry, identity=source.identity, queue=queue) as target,
    ):
        path = tmp_path / "a" / DATA_FILE_NAME
        data = bytearray(path.read_bytes())
        data[data.index(weights.values["p9000"].numpy().tobytes()[:64])] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityFailure):
            fill(target, copied_weights(source.current(), DONE), pool, progress=lambda num_bytes: None)
    assert not Store.exists([tmp_path / "b"])
