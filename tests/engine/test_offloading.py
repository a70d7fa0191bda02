"""What is fetched is what was put: from memory, from NVMe, and as slices of a storage; damage is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.activations import ActivationOffloader, Unit
from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.scratch import Scratch
from ratel_cli.planning.placement import SPILL_WINDOW_UNITS, Placement
from ratel_cli.sizes import PAGE_BYTES
from tests.fakes import Fault, FaultyQueue

NUM_UNITS = 2 * SPILL_WINDOW_UNITS + 1
SCRATCH_BYTES = 2 * NUM_UNITS * PAGE_BYTES


def unit_of(number: int) -> Unit:
    """Two outputs share a storage, the second of them from its middle on; one is transposed."""
    values = torch.arange(600, dtype=torch.float32) + 1000 * number
    return Unit(
        leaf=values[:60].clone().view(1, 6, 10),
        offloaded={3: (values[:200].view(20, 10), values[200:600].view(40, 10)), 7: (values.clone().view(30, 20).T,)},
    )


@contextmanager
def offloader(directory: Path, queue: FaultyQueue, *, spilled_units: int) -> Iterator[ActivationOffloader]:
    timeline = Timeline()
    with BufferPool(None) as pool, queue, Scratch([directory], SCRATCH_BYTES, queue) as scratch:
        offloader = ActivationOffloader(
            pool,
            scratch,
            Placement(spilled_units=spilled_units),
            device=HostDevice(timeline),
            timeline=timeline,
        )
        try:
            yield offloader
        finally:
            offloader.reset()
            assert pool.leased_bytes == 0


def fetch_all(offloader: ActivationOffloader) -> None:
    """Backward's order: the last unit first."""
    for number in reversed(range(NUM_UNITS)):
        wanted = unit_of(number)
        with offloader.fetch(number + 1, 0) as found:
            assert found.leaf.requires_grad
            assert found.offloaded.keys() == wanted.offloaded.keys()
            assert all(torch.equal(a, b) for a, b in zip(found.tensors, wanted.tensors, strict=True))


@pytest.mark.parametrize("spilled_units", [0, 1, SPILL_WINDOW_UNITS, SPILL_WINDOW_UNITS + 1, NUM_UNITS])
def test_what_is_fetched_is_what_was_put(tmp_path: Path, spilled_units: int) -> None:
    with offloader(tmp_path, FaultyQueue(), spilled_units=spilled_units) as activations:
        for number in range(NUM_UNITS):
            activations.put(number + 1, 0, unit_of(number))
        fetch_all(activations)


def test_damage_on_the_drive_is_noticed(tmp_path: Path) -> None:
    """One bit of any unit that is written or read. The last units are still in memory, so they are never read."""
    num_read = NUM_UNITS - SPILL_WINDOW_UNITS
    num_noticed = 0
    for call in range(NUM_UNITS + num_read):
        queue = FaultyQueue({call: Fault(flipped_bit=12_345)})
        with offloader(tmp_path / f"{call}", queue, spilled_units=NUM_UNITS) as activations:
            for number in range(NUM_UNITS):
                activations.put(number + 1, 0, unit_of(number))
            try:
                fetch_all(activations)
            except IntegrityFailure as failure:
                assert "activations of block" in failure.message
                num_noticed += 1
    assert num_noticed == 2 * num_read
