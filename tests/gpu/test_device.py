"""The GPU keeps the promises of `engine.device.device`: order, lifetime of memory, times; and its memory is
pinned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from time import perf_counter, sleep

import pytest
import torch

from ratel_cli.engine.device import gpu
from ratel_cli.engine.device.gpu import GpuDevice
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer.gradients import _norm_on_gpu
from ratel_cli.errors import BadInput, DoesNotFit
from ratel_cli.io.buffers import BufferPool, address_of
from ratel_cli.io.pinning import GpuPinning, _unregister
from ratel_cli.io.views import view
from ratel_cli.units import KIB, MIB, align_up
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.real_time import in_real_time
from tests.simulated_gpu import is_simulated, pinning, set_eagerness

pytestmark = NEEDS_GPU

LABEL = SpanLabel(text="bytes", block=1, stage="backward")
LARGE = (16 if is_simulated() else 256) * MIB


@pytest.fixture(autouse=True)
def _always_late() -> None:
    """A simulated GPU runs as late as it may, so that each test can catch a broken promise."""
    set_eagerness(0.0)


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(None, pin=GpuPinning(GPU, pytest.fail)) as pool:
        yield pool


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def device(timeline: Timeline) -> Iterator[GpuDevice]:
    with GpuDevice(GPU, timeline) as device:
        yield device


def keep_busy(device: GpuDevice) -> torch.Tensor:
    """Queue tens of milliseconds of work on the computing stream."""
    size = 1024 if is_simulated() else 8192
    matrix = torch.ones(size, size, device=device.torch_device)
    for _ in range(10):
        matrix = matrix @ matrix * 1e-9
    return matrix


def test_an_upload_has_arrived_when_it_is_opened(device: GpuDevice, pool: BufferPool) -> None:
    with pool.lease(LARGE, "test") as lease:
        sent = view(lease.memory, torch.uint8)
        for number in range(1, 6):
            sent.fill_(number)
            upload = device.upload(lease.memory, device.reserve(LARGE), LABEL)
            found = upload.open().clone()
            upload.wait()
            sent.fill_(0)  # from now on the host memory may change
            assert bool((found == number).all())


@pytest.mark.full
def test_a_download_has_arrived_after_wait(device: GpuDevice, pool: BufferPool) -> None:
    with pool.lease(LARGE, "one") as one, pool.lease(LARGE, "two") as two:
        for number in range(1, 6):
            keep_busy(device)
            downloads = [
                device.download(
                    [(torch.full((LARGE,), number + each, dtype=torch.uint8, device=GPU), lease.memory)], LABEL
                )
                for each, lease in enumerate((one, two))
            ]
            for download in downloads:
                download.wait()
                assert download.done
            assert bool((view(one.memory, torch.uint8) == number).all())
            assert bool((view(two.memory, torch.uint8) == number + 1).all())


def test_a_download_may_be_uploaded_again_at_once(device: GpuDevice, pool: BufferPool) -> None:
    with pool.lease(LARGE, "test") as lease:
        for number in range(1, 6):
            leaving = torch.full((LARGE,), number, dtype=torch.uint8, device=GPU)
            download = device.download([(leaving, lease.memory)], LABEL)
            del leaving
            upload = device.upload(lease.memory, device.reserve(LARGE), LABEL, after=download)
            assert bool((upload.open() == number).all())
            upload.wait()


def test_without_a_timeline_nothing_is_remembered(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of any length may use it; its moments stay in order when the clock is set again."""
    monkeypatch.setattr(gpu, "_MOST_CLOCK_SECONDS", 0.01)
    with GpuDevice(GPU, None) as device, pool.lease(LARGE, "weights") as lease:
        clock, seconds = device._clock, []
        for _ in range(5):
            began = perf_counter()
            device.upload(lease.memory, device.reserve(LARGE), LABEL).wait()
            with device.computing(LABEL):
                keep_busy(device)
            sleep(0.01)
            seconds.append(device.mark()())
            assert began <= seconds[-1] + 1e-3 and seconds[-1] <= perf_counter() + 1e-3
        assert seconds == sorted(seconds)
        assert device._measured == [] and device._clock.seconds > clock.seconds


@in_real_time
def test_an_upload_does_not_wait_for_one_in_another_lane(device: GpuDevice, pool: BufferPool) -> None:
    """Weights wait for the memory of what computes; a unit whose memory was there before goes up meanwhile."""
    with pool.lease(LARGE, "unit") as unit, pool.lease(LARGE, "weights") as weights:
        for number in range(1, 4):
            view(unit.memory, torch.uint8).fill_(number)
            before = device.reserve(LARGE)
            busy = keep_busy(device)
            waits = device.upload(weights.memory, device.reserve(LARGE), LABEL)
            upload = device.upload(unit.memory, before, LABEL, lane="activations")
            upload.wait()
            assert not waits.done, "the upload of the weights was not waited for"
            assert bool((upload.open() == number).all())
            waits.wait()
            del busy, before, waits, upload


@pytest.mark.full
def test_memory_is_reused_only_after_its_last_use(device: GpuDevice, pool: BufferPool) -> None:
    """The host reserves buffers and drops tensors far ahead of the GPU; no byte is overwritten too early."""
    with pool.lease(LARGE, "up") as up, pool.lease(LARGE, "down") as down:
        view(up.memory, torch.uint8).fill_(7)
        sums = []
        keep_busy(device)
        for _ in range(8):
            upload = device.upload(up.memory, device.reserve(LARGE), LABEL)
            values = upload.open()
            sums.append(values.sum(dtype=torch.int64))
            download = device.download([(values + 1, down.memory)], LABEL)
            del values, upload  # every upload has the same bytes
        assert [int(each) for each in sums] == [7 * LARGE] * 8
        download.wait()
        assert bool((view(down.memory, torch.uint8) == 8).all())


def test_memory_does_not_depend_on_how_far_the_gpu_is_behind(device: GpuDevice, pool: BufferPool) -> None:
    with pool.lease(LARGE, "up") as up, pool.lease(LARGE, "down") as down:
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        busy = keep_busy(device)
        torch.accelerator.reset_peak_memory_stats()
        matrices = torch.accelerator.memory_allocated() - before
        for _ in range(20):
            buffer = device.reserve(LARGE)
            upload = device.upload(up.memory, buffer, LABEL)
            device.download([(upload.open(), down.memory)], LABEL)
            del buffer, upload
        assert torch.accelerator.max_memory_allocated() - before - matrices <= 3 * LARGE
        del busy
        torch.accelerator.synchronize()


@pytest.mark.parametrize(("beside_bytes", "most"), [(0, 2), (LARGE - 1, 2), (LARGE, 3), (2 * LARGE, 4)])
def test_downloads_take_no_more_memory_than_is_allowed_beside_them(
    device: GpuDevice, pool: BufferPool, beside_bytes: int, most: int
) -> None:
    """The tensors of the downloads that are allowed, of the one that is asked for, and of the next that is computed."""
    with pool.lease(LARGE, "down") as down:
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        for number in range(8):
            leaving = torch.full((LARGE,), number, dtype=torch.uint8, device=GPU)
            device.download([(leaving, down.memory)], LABEL, beside_bytes=beside_bytes)
            del leaving
        assert torch.accelerator.max_memory_allocated() - before == most * LARGE
        torch.accelerator.synchronize()


def test_a_stall_is_not_computing(device: GpuDevice, pool: BufferPool, timeline: Timeline) -> None:
    """A second download makes computing wait for the first one; the span of computing is interrupted meanwhile."""
    label = SpanLabel(text="products", block=2, stage="backward")
    with pool.lease(LARGE, "down") as down, device.computing(label):
        for _ in range(2):
            leaving = torch.zeros(LARGE, dtype=torch.uint8, device=GPU)
            keep_busy(device)
            device.download([(leaving, down.memory)], LABEL)
    torch.accelerator.synchronize()
    device.collect()
    spans = [span for span in timeline.take().spans if span.resource == "compute"]
    assert {span.label for span in spans} == {label}
    assert len(spans) <= 2
    assert all(one.end <= other.start for one, other in itertools.pairwise(sorted(spans, key=lambda span: span.start)))


@in_real_time
def test_times_are_those_of_the_gpu(device: GpuDevice, pool: BufferPool, timeline: Timeline) -> None:
    with pool.lease(LARGE, "test") as lease:
        before = device.mark()
        with device.computing(SpanLabel(text="products", block=2, stage="forward")):
            keep_busy(device)
        middle = device.mark()
        upload = device.upload(lease.memory, device.reserve(LARGE), LABEL)
        upload.open()
        after = device.mark()
        upload.wait()
        device.collect()
    assert middle() - before() > 1e-3
    times = timeline.take()
    by_name = {span.resource: span for span in times.spans}
    compute, up = by_name["compute"], by_name["up"]
    assert compute.label == SpanLabel(text="products", block=2, stage="forward")
    assert up.label == LABEL
    assert before() - 1e-3 < compute.start < compute.end < middle() + 1e-3
    # The copy waited for the products, since its buffer was reserved after them. Computing waited for the copy.
    assert up.start > compute.end - 1e-3
    assert 0.5 * (up.end - up.start) < times.stalled["up"] < after() - compute.end + 1e-3


def test_the_memory_limit_holds_until_the_device_is_closed(timeline: Timeline) -> None:
    reserved = torch.accelerator.memory_reserved()
    with GpuDevice(GPU, timeline, limit_bytes=reserved + 64 * MIB) as device:
        with pytest.raises(DoesNotFit, match="GPU memory") as raised, device.translate_errors():
            torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
        assert raised.value.shortfall_bytes == 256 * MIB
        assert raised.value.hint is not None and "limits.gpu_memory" in raised.value.hint
    assert torch.empty(256 * MIB, dtype=torch.uint8, device=GPU).numel() == 256 * MIB


def test_a_nondeterministic_operator_is_rejected_with_the_key_to_change(device: GpuDevice) -> None:
    values = torch.ones(8, device=GPU)
    with pytest.raises(BadInput, match="not deterministic") as raised, device.translate_errors():
        values.histc(bins=1)
    assert raised.value.hint is not None and "deterministic: false" in raised.value.hint
    with pytest.raises(RuntimeError, match="size"), device.translate_errors():
        values @ torch.ones(3, device=GPU)


@pytest.mark.parametrize(
    "message",
    [
        "this operation is not deterministic because it uses CuBLAS",
        "Deterministic backward not supported for hdim 256.",
    ],
    ids=["workspace", "flash-attn-3"],
)
def test_other_messages_about_determinism_are_rejected_too(device: GpuDevice, message: str) -> None:
    """Torch's if the user has set CUBLAS_WORKSPACE_CONFIG to another value; that of a package for some heads."""
    with pytest.raises(BadInput, match="not deterministic") as raised, device.translate_errors():
        raise RuntimeError(message)
    assert raised.value.hint is not None and "deterministic: false" in raised.value.hint


def test_unpinning_memory_that_was_not_pinned_does_no_harm(device: GpuDevice, pool: BufferPool) -> None:
    with pool.lease(MIB, "test") as lease:
        _unregister(GPU, [address_of(lease.memory) + 4096])
        assert float(torch.ones(3, device=device.torch_device).sum()) == 3.0  # CUDA's last error was cleared


@in_real_time
def test_the_pool_is_pinned_and_copies_run_while_the_host_continues(device: GpuDevice, pool: BufferPool) -> None:
    with pool.lease(LARGE, "test") as lease:
        assert view(lease.memory, torch.uint8).is_pinned()
        keep_busy(device)
        download = device.download([(torch.zeros(LARGE, dtype=torch.uint8, device=GPU), lease.memory)], LABEL)
        assert not download.done, "the host waited for the copy"
        download.wait()


def test_unpinned_memory_can_be_pinned_again(pool: BufferPool) -> None:
    """If CUDA cannot, the pool's pinning fails the test."""
    for _ in range(3):
        pool.lease(LARGE, "test").release()
        pool.trim()


@pytest.mark.skipif(not is_simulated(), reason="a real GPU refuses nothing when it is asked to")
def test_a_refusal_is_one_buffers_alone_and_ends(timeline: Timeline) -> None:
    """Copies of that buffer are correct meanwhile; others are pinned, and so is that one when it is leased again."""
    notices: list[str] = []
    with (
        BufferPool(None, pin=GpuPinning(GPU, notices.append)) as pool,
        GpuDevice(GPU, timeline) as device,
        pinning(refusals=1),
    ):
        for is_pinned in (False, True):
            with pool.lease(LARGE, "pageable at first") as lease, pool.lease(MIB, "another") as other:
                assert view(lease.memory, torch.uint8).is_pinned() is is_pinned
                assert view(other.memory, torch.uint8).is_pinned()
                leaving = torch.full((LARGE,), 3, dtype=torch.uint8, device=GPU)
                device.download([(leaving, lease.memory)], LABEL).wait()
                upload = device.upload(lease.memory, device.reserve(LARGE), LABEL)
                assert bool((upload.open() == 3).all())
                upload.wait()
    assert len(notices) == 1 and "cannot pin 16.0 MiB of host memory now (error 2)" in notices[0]


def test_refusals_are_reported_once() -> None:
    notices: list[str] = []
    with BufferPool(None, pin=GpuPinning(GPU, pytest.fail)) as pool, pool.lease(MIB, "test") as lease:
        other = GpuPinning(GPU, notices.append)
        for _ in range(3):
            assert other(address_of(lease.memory), MIB) is None, "it is registered already"
    assert len(notices) == 1 and "cannot pin 1.00 MiB" in notices[0]


@pytest.mark.skipif(not is_simulated(), reason="only the simulated GPU is known to refuse copies across pieces")
@pytest.mark.parametrize("num_bytes", [4095, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 1000 * KIB + 5])
@pytest.mark.parametrize("start", [0, 4097, 64 * KIB - 1])
def test_memory_is_registered_and_copied_in_pieces(
    device: GpuDevice, num_bytes: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratel_cli.io.pinning.PIECE_BYTES", 64 * KIB)
    values = torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8)
    with (
        pinning(most_bytes=64 * KIB),
        BufferPool(None, pin=GpuPinning(GPU, pytest.fail)) as pool,
        pool.lease(start + num_bytes, "test") as lease,
    ):
        memory = lease.memory[start:]
        assert view(memory, torch.uint8).is_pinned()
        device.download([(values.to(GPU), memory)], LABEL).wait()
        assert torch.equal(view(memory, torch.uint8), values)
        upload = device.upload(memory, device.reserve(num_bytes), LABEL)
        assert torch.equal(upload.open().cpu(), values)
        upload.wait()


@pytest.mark.skipif(not is_simulated(), reason="a real GPU refuses nothing when it is asked to")
def test_of_a_buffer_all_pieces_are_pinned_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece is longer than the GPU takes; those before it are given back, so that they can be pinned later."""
    monkeypatch.setattr("ratel_cli.io.pinning.PIECE_BYTES", 64 * KIB)
    notices: list[str] = []
    with BufferPool(None) as pool, pool.lease(2 * MIB, "test") as lease:
        register = GpuPinning(GPU, notices.append)
        address = align_up(address_of(lease.memory), 64 * KIB) + 60 * KIB
        with pinning(most_bytes=32 * KIB):
            assert register(address, 40 * KIB) is None  # pieces of 4 and 36 KiB
        undo = register(address, 40 * KIB)
        assert undo is not None and len(notices) == 1
        undo()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_elements", [0, 1, 3, 4, 1000, 65536, 65537, 300_001])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_norm_has_the_bits_of_an_fp32_copys(dtype: torch.dtype, num_elements: int, offset: int) -> None:
    """Wherever the values begin: CUDA's kernel deals values to threads in another way if they are not aligned."""
    generator = torch.Generator().manual_seed(num_elements)
    values = torch.randn(offset + num_elements, generator=generator).mul_(1e-3).to(dtype).to(GPU)[offset:]
    wanted = torch._foreach_norm([values.to(torch.float32, copy=True)], 2.0)[0]
    assert torch.equal(_norm_on_gpu(values), wanted)
