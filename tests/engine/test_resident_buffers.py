"""Host memory of saved tensors that stay there: within its limit, and no more after the first step."""

from __future__ import annotations

import random

import pytest

from ratel_cli.engine.reading.resident_buffers import ResidentBuffers
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.sizes import PAGE_BYTES as PAGE


@pytest.mark.parametrize(
    ("limit", "sizes", "fit"),
    [
        (0, [0, 1], [True, False]),
        (1, [1], [False]),
        (PAGE - 1, [1], [False]),
        (PAGE, [1, 1], [True, False]),
        (PAGE, [PAGE, 0, 1], [True, True, False]),
        (PAGE, [PAGE + 1, PAGE], [False, True]),
        (3 * PAGE, [PAGE + 1, PAGE, 1], [True, True, False]),
    ],
)
def test_the_first_that_fit_in_whole_pages(limit: int, sizes: list[int], fit: list[bool]) -> None:
    with BufferPool(None) as pool:
        with ResidentBuffers(pool, limit) as buffers:
            taken = [buffers.take(size) for size in sizes]
            assert [lease is not None for lease in taken] == fit
            assert buffers.num_bytes == pool.leased_bytes <= limit
            for lease in filter(None, taken):
                lease.release()
        assert pool.leased_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_made_after_the_first_step(seed: int) -> None:
    draw = random.Random(seed)
    limit = draw.randrange(40) * PAGE
    with BufferPool(None) as pool, ResidentBuffers(pool, limit) as buffers:
        taken = list[Lease]()
        most = 0
        for turn in range(300):
            if turn == 100:
                buffers.settle()
                most = pool.leased_bytes
            if taken and draw.random() < 0.5:
                taken.pop(draw.randrange(len(taken))).release()
            else:
                size = draw.randrange(5 * PAGE)
                lease = buffers.take(size)
                if lease is not None:
                    assert lease.num_bytes >= size
                    taken.append(lease)
            assert len(set(map(id, taken))) == len(taken)
            assert buffers.is_in_use == bool(taken)
            assert pool.leased_bytes <= limit
        assert pool.leased_bytes == most
