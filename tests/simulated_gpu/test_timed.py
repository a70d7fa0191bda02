"""On the simulated GPU with a clock, work lasts as long as its rates say, and waits for what it must wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import pytest
import torch

from ratel_cli.engine.device.gpu import GpuDevice
from ratel_cli.engine.measure.telemetry import Span, SpanLabel, Timeline
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.pinning import GpuPinning
from tests.real_time import in_real_time
from tests.simulated_gpu import gpu_of_this_process, install_if_asked, is_simulated
from tests.simulated_gpu.timed import Rates, timed, work_so_far

install_if_asked()
GPU = gpu_of_this_process()
pytestmark = [in_real_time, pytest.mark.skipif(not is_simulated(), reason="without the simulated GPU")]

SIZE = 64
FLOPS = 2 * SIZE**3
KIB = 1 << 10
UNIT = 0.5
"""Seconds that a product takes, and 64 KiB up; down they take twice as long."""
RATES = Rates(
    flops_per_second=FLOPS / UNIT,
    up_bytes_per_second=64 * KIB / UNIT,
    down_bytes_per_second=64 * KIB / (2 * UNIT),
)
SLACK = 0.3
"""Seconds that a loaded machine takes for anything else."""


def label(text: str) -> SpanLabel:
    return SpanLabel(text=text, block=1, stage="backward")


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def device(timeline: Timeline) -> Iterator[GpuDevice]:
    with timed(RATES), GpuDevice(GPU, timeline) as device:
        yield device


@pytest.fixture
def lease() -> Iterator[Lease]:
    with BufferPool(None, pin=GpuPinning(GPU, pytest.fail)) as pool, pool.lease(128 * KIB, "test") as lease:
        lease.memory[:] = bytes(128 * KIB)
        yield lease


def product() -> torch.Tensor:
    return torch.ones(SIZE, SIZE, device=GPU) @ torch.ones(SIZE, SIZE, device=GPU)


def spans_of(device: GpuDevice, timeline: Timeline) -> dict[str, Span]:
    torch.accelerator.synchronize()
    device.collect()
    return {span.label.text: span for span in timeline.take().spans}


def seconds(span: Span) -> float:
    return span.end - span.start


def test_the_host_runs_ahead_of_computing_and_waits_for_its_result(device: GpuDevice) -> None:
    start = perf_counter()
    result = product() + product()
    event = device.mark()
    assert perf_counter() - start < UNIT
    assert float(result[0, 0]) == 2 * SIZE
    assert 2 * UNIT <= perf_counter() - start < 2 * UNIT + SLACK
    assert event() - start == pytest.approx(2 * UNIT, abs=SLACK)


def test_copies_last_and_both_directions_run_next_to_computing(
    device: GpuDevice, timeline: Timeline, lease: Lease
) -> None:
    down, up = lease.memory[: 64 * KIB], lease.memory[64 * KIB :]
    leaving, buffer = torch.zeros(64 * KIB, dtype=torch.uint8, device=GPU), device.reserve(64 * KIB)
    start = perf_counter()
    device.download([(leaving, down)], label("down"))
    upload = device.upload(up, buffer, label("up"))
    with device.computing(label("compute")):
        for _ in range(3):
            product()
    upload.wait()
    assert UNIT <= perf_counter() - start < UNIT + SLACK
    spans = spans_of(device, timeline)
    assert perf_counter() - start < 3 * UNIT + SLACK
    for name, num_units in (("up", 1), ("down", 2), ("compute", 3)):
        assert seconds(spans[name]) == pytest.approx(num_units * UNIT, abs=SLACK), name


def test_an_upload_waits_for_its_memory_and_computing_for_the_upload(
    device: GpuDevice, timeline: Timeline, lease: Lease
) -> None:
    start = perf_counter()
    product()
    upload = device.upload(lease.memory[: 64 * KIB], device.reserve(64 * KIB), label("up"))
    upload.open()
    with device.computing(label("after")):
        product()
    upload.wait()
    torch.accelerator.synchronize()
    device.collect()
    times = timeline.take()
    spans = {span.label.text: span for span in times.spans}
    assert spans["up"].start - start == pytest.approx(UNIT, abs=SLACK)
    assert spans["after"].start >= spans["up"].end - 1e-3
    assert times.stalled["up"] == pytest.approx(UNIT, abs=SLACK)


def test_two_streams_share_the_line_and_the_one_that_is_ready_goes_first(
    device: GpuDevice, timeline: Timeline, lease: Lease
) -> None:
    one, other = lease.memory[: 64 * KIB], lease.memory[64 * KIB :]
    early = device.reserve(64 * KIB)
    product()
    late = device.upload(one, device.reserve(64 * KIB), label("late"))  # waits for the product
    first = device.upload(other, early, label("first"), lane="activations")
    second = device.upload(other, early, label("second"), lane="activations")
    for upload in (first, second, late):
        upload.wait()
    spans = spans_of(device, timeline)
    assert seconds(spans["first"]) == pytest.approx(UNIT, abs=SLACK)
    # Both of the others are ready then: one goes after the other.
    assert max(spans["late"].end, spans["second"].end) - spans["first"].start == pytest.approx(3 * UNIT, abs=SLACK)


def test_an_event_is_over_when_its_time_has_come(device: GpuDevice, lease: Lease) -> None:
    leaving = torch.full((64 * KIB,), 7, dtype=torch.uint8, device=GPU)
    start = perf_counter()
    download = device.download([(leaving, lease.memory[: 64 * KIB])], label("down"))
    assert not download.done
    while not download.done:
        assert perf_counter() - start < 60
    assert perf_counter() - start == pytest.approx(2 * UNIT, abs=SLACK)
    assert lease.memory[0] == 7


def test_work_is_counted_by_products_and_copied_bytes(lease: Lease) -> None:
    before = work_so_far()
    with GpuDevice(GPU, Timeline()) as device:
        product()
        torch.ones(2, 3, 4, device=GPU) @ torch.ones(2, 4, 5, device=GPU)
        torch.addmm(torch.ones(5, device=GPU), torch.ones(3, 4, device=GPU), torch.ones(4, 5, device=GPU))
        device.upload(lease.memory, device.reserve(128 * KIB), label("up")).wait()
        device.download([(torch.zeros(KIB, dtype=torch.uint8, device=GPU), lease.memory[:KIB])], label("down")).wait()
    work = work_so_far() - before
    assert (work.flops, work.up_bytes, work.down_bytes) == (FLOPS + 2 * 2 * 3 * 4 * 5 + 2 * 3 * 4 * 5, 128 * KIB, KIB)


def test_operators_last_by_their_launch_and_by_what_takes_longer_flops_or_bytes() -> None:
    """Counted, so that no clock is read."""
    rates = Rates(
        flops_per_second=1e9,
        memory_bytes_per_second=1e8,
        up_bytes_per_second=1e12,
        down_bytes_per_second=1e12,
        launch_seconds=1e-3,
    )
    left, right, vector = (torch.ones(*size, device=GPU) for size in ((64, 32), (32, 16), (1000,)))

    def seconds_of(work: Callable[[], object]) -> float:
        before = work_so_far()
        work()
        return (work_so_far() - before).computing_seconds

    with timed(rates):
        found = [
            seconds_of(lambda: left @ right),
            seconds_of(lambda: left[:1] @ right),
            seconds_of(lambda: vector + vector),
            seconds_of(lambda: vector.add_(vector)),
            seconds_of(lambda: vector.to(torch.bfloat16)),
            seconds_of(left.t),
            seconds_of(lambda: vector.view(10, 100)[3:]),
        ]
    product_bytes = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert found == pytest.approx(
        [
            1e-3 + max(2 * 64 * 32 * 16 / 1e9, product_bytes / 1e8),
            1e-3 + max(2 * 32 * 16 / 1e9, 4 * (32 + 32 * 16 + 16) / 1e8),
            1e-3 + 3 * 4000 / 1e8,
            1e-3 + 3 * 4000 / 1e8,
            1e-3 + (4000 + 2000) / 1e8,
            0.0,
            0.0,
        ]
    )


def test_without_rates_nothing_lasts() -> None:
    with timed(RATES):
        pass
    start = perf_counter()
    for _ in range(10):
        product()
    torch.accelerator.synchronize()
    assert perf_counter() - start < 1
