"""The CPU as a device: nothing is uploaded, and all work is done when a call returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.steps.build import open_device
from ratel_cli.io.buffers import BufferPool, Lease

LABEL = SpanLabel(text="bytes", block=3, stage="backward")


@pytest.fixture
def lease() -> Iterator[Lease]:
    with BufferPool(None) as pool, pool.lease(8, "test") as lease:
        lease.memory[:] = bytes(range(8))
        yield lease


def test_the_host_copies_nothing(lease: Lease) -> None:
    timeline = Timeline()
    with open_device(torch.device("cpu"), timeline) as device:
        upload = device.upload(lease.memory, device.reserve(8), LABEL)
        values = upload.open()
        upload.wait()
        lease.memory[0] = 42
        assert values.tolist() == [42, 1, 2, 3, 4, 5, 6, 7]
        device.collect()
    assert timeline.take().spans == ()


def test_the_hosts_work_is_done_when_a_call_returns(lease: Lease) -> None:
    timeline = Timeline()
    device = HostDevice(timeline)
    download = device.download([(torch.tensor([9, 8], dtype=torch.uint8), lease.memory[2:4])], LABEL)
    assert download.done
    download.wait()
    before = device.mark()
    with device.translate_errors(), device.computing(LABEL):
        pass
    after = device.mark()
    assert lease.memory.tolist() == [0, 1, 9, 8, 4, 5, 6, 7]
    down, compute = timeline.take().spans
    assert (down.resource, compute.resource) == ("down", "compute")
    assert {span.label for span in (down, compute)} == {LABEL}
    assert before() <= compute.start <= compute.end <= after()
