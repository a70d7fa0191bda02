"""The amount that the tensor cache finds, by a clock of its own: never slower than what is best at a drive's rate.

A model of equal blocks: forward of a block takes a second, its backward two, and each saves one storage. What it would
take to keep all, to offload all but the last block's, and to recompute is known in closed form, or counted here.
"""

from __future__ import annotations

import math

import pytest
import torch

from ratel_cli.engine.cache.saved_tensors import CacheCounts
from ratel_cli.engine.cache.saved_transfers import SavedTransfers
from ratel_cli.engine.cache.tensor_cache import TensorCache
from ratel_cli.engine.device.device import HostDevice, Moment
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.reading.pass_schedule import PassSchedule, PassUnit
from ratel_cli.engine.reading.resident_buffers import ResidentBuffers
from ratel_cli.io.buffers import BufferPool
from ratel_cli.sizes import PAGE_BYTES
from tests.engine.fake_drive import FakeClock, FakeDrive

NUM_BLOCKS, STORAGE_BYTES = 24, 4 * PAGE_BYTES
KEPT_SECONDS = 3.0 * NUM_BLOCKS
RECOMPUTED_SECONDS = 4.0 * NUM_BLOCKS
RATES = [1e-9, 0.02, 0.1, 0.3, 0.7, 1.0, 1.3, 2.0, 5.0, 100.0, 1e9]
"""Storages that the drive moves in a second, from next to none to as good as all."""


class _Block(torch.autograd.Function):
    """Saves its result; each call moves the clock on."""

    clock: FakeClock

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: torch.Tensor) -> torch.Tensor:
        _Block.clock.now += 1.0
        result = hidden + 1
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        [result] = ctx.saved_tensors  # type: ignore[attr-defined]
        assert torch.equal(result, torch.full_like(result, float(result[0])))
        _Block.clock.now += 2.0
        return gradients[0]


class _TimedDevice(HostDevice):
    """The CPU, by that clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(Timeline())
        self._clock = clock

    def mark(self) -> Moment:
        now = self._clock.now
        return lambda: now


def forward(cache: TensorCache) -> torch.Tensor:
    hidden = torch.zeros(STORAGE_BYTES // 4, requires_grad=True)
    cache.begin_pass()
    for block in range(NUM_BLOCKS):
        cache.begin_scope(is_last=block == NUM_BLOCKS - 1)
        hidden = _Block.apply(hidden)  # type: ignore[no-untyped-call]
    cache.end_pass()
    return hidden.sum()


def step_seconds(
    writes: float,
    reads: float,
    *,
    most_bytes: int | None = None,
    finds_most: bool = False,
    buffers: int = 4,
    resident: int = 0,
    num_steps: int = 6,
) -> tuple[float, CacheCounts]:
    """Seconds of the last step, in which the amount has been found, and the counts of all. Rates and buffers are in
    storages."""
    clock = _Block.clock = FakeClock()
    drive = FakeDrive(clock, writes * STORAGE_BYTES, reads * STORAGE_BYTES)
    seconds = 0.0
    with (
        BufferPool(None) as pool,
        ResidentBuffers(pool, resident * STORAGE_BYTES) as buffer,
        TensorCache(
            SavedTransfers(
                pool,
                drive,
                _TimedDevice(clock),
                buffer_bytes=buffers * STORAGE_BYTES,
                resident=buffer if resident else None,
            ),
            stays=lambda _: False,
            least_bytes=1,
            most_bytes=most_bytes,
            finds_most=finds_most,
        ) as cache,
        cache.saving(),
    ):
        for _ in range(num_steps):
            began = clock.now
            forward(cache).backward()  # type: ignore[no-untyped-call]
            seconds = clock.now - began
    return seconds, cache.counts


@pytest.mark.parametrize("reads", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("rate", RATES)
def test_what_is_found_is_at_most_3_percent_slower_than_the_best(rate: float, reads: float) -> None:
    """`reads`: how much faster the drive reads than it writes."""
    kept, counts = step_seconds(rate, reads * rate, most_bytes=0)
    assert (kept, counts.written) == (KEPT_SECONDS, 0)
    offloaded, counts = step_seconds(rate, reads * rate)
    assert counts.written == 6 * (NUM_BLOCKS - 1) * STORAGE_BYTES
    found, counts = step_seconds(rate, reads * rate, finds_most=True)
    assert found <= 1.03 * min(kept, offloaded, RECOMPUTED_SECONDS)


@pytest.mark.parametrize("reads", [0.5, 1.0, 3.0])
def test_the_faster_the_drive_the_more_goes(reads: float) -> None:
    """None where it does not write, and all but the last block's where it does so at once."""
    written = [step_seconds(rate, reads * rate, finds_most=True)[1].written for rate in RATES]
    assert written == sorted(written)
    assert written[0] <= 4 * STORAGE_BYTES  # what is in the buffers, of the first pass
    assert written[-1] == 6 * (NUM_BLOCKS - 1) * STORAGE_BYTES


def test_to_offload_all_takes_as_long_as_the_drive() -> None:
    """Where it is slower than computing: forward waits for its writes, but for those that find a buffer."""
    seconds, _ = step_seconds(0.1, 100.0)
    writes = (NUM_BLOCKS - 1) / 0.1
    assert writes - 4 / 0.1 <= seconds <= writes + KEPT_SECONDS
    assert step_seconds(1e9, 1e9)[0] == pytest.approx(KEPT_SECONDS)


@pytest.mark.parametrize("resident", [0, 5, NUM_BLOCKS])
def test_host_memory_does_not_count_as_what_the_drive_can_write(resident: int) -> None:
    seconds, counts = step_seconds(0.4, 0.8, finds_most=True, resident=resident)
    assert seconds <= 1.03 * KEPT_SECONDS
    assert counts.resident == 6 * min(resident, NUM_BLOCKS - 1) * STORAGE_BYTES
    assert (counts.written > 0) == (resident < NUM_BLOCKS - 1)


@pytest.mark.parametrize("read_seconds", [0.0, 1.0, 3.0])
def test_a_schedule_hides_the_first_read(read_seconds: float) -> None:
    """Of a backward that follows another forward, as in a pipeline; without it, the last block's backward does, if that
    is long enough."""
    units: list[PassUnit] = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    seconds = {}
    for schedule in (None, PassSchedule(units)):
        clock = _Block.clock = FakeClock()
        drive = FakeDrive(clock, math.inf, STORAGE_BYTES / read_seconds if read_seconds else math.inf)
        with (
            BufferPool(None) as pool,
            TensorCache(
                SavedTransfers(pool, drive, _TimedDevice(clock), buffer_bytes=STORAGE_BYTES),
                stays=lambda _: False,
                least_bytes=1,
                most_bytes=None,
                finds_most=False,
                schedule=schedule,
            ) as cache,
            cache.saving(),
        ):
            losses = [forward(cache), forward(cache)]
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
            seconds[schedule is None] = clock.now
    if read_seconds < 2.0:
        assert seconds[False] == seconds[True] == 2 * KEPT_SECONDS
    else:
        assert 2 * KEPT_SECONDS < seconds[False] < seconds[True]
