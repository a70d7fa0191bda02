"""Sums of gradients in host memory: the bits of those on the compute device, in bounded memory on both sides."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from ratel_cli.engine.device.device import DeviceBuffer, Download, HostDevice, Transfer, Upload
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.optimizer.gradients import GpuGradientSum
from ratel_cli.engine.optimizer.host_sums import HostSums, SumThread
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.files.skeleton import NAMES_OF_DTYPES
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block

SHAPES = [("a", (3, 5)), ("b", (7,)), ("c", (700, 401)), ("d", (1,))]
SIZES = [15, 7, 700 * 401, 1]


@dataclass(eq=False)
class Room:
    num_bytes: int


class Apart(HostDevice):
    """Like a GPU: it has a copy of what is uploaded, and knows how many uploads exist."""

    is_host = False

    def __init__(self) -> None:
        super().__init__(Timeline())
        self.uploaded: list[torch.Tensor] = []
        self.most_bytes = 0
        """Of the uploaded sums that existed at once."""
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.fails = False

    def reserve(self, num_bytes: int) -> DeviceBuffer:
        return Room(num_bytes)

    def upload(
        self, memory: memoryview, buffer: DeviceBuffer, label: SpanLabel, *, after: Download | None = None
    ) -> Upload:
        assert isinstance(buffer, Room) and buffer.num_bytes == len(memory)
        self.uploaded.append(torch.frombuffer(memory, dtype=torch.float32).clone())
        copied = Copied(memory)
        self._storages.append(copied.storage)
        alive = [storage for each in self._storages if (storage := each()) is not None]
        self.most_bytes = max(self.most_bytes, sum(storage.nbytes() for storage in alive))
        return copied

    def download(
        self, pieces: Sequence[tuple[torch.Tensor, memoryview]], label: SpanLabel, *, beside_bytes: int = 0
    ) -> Download:
        done = super().download(pieces, label)
        return Broken() if self.fails else done


class Copied:
    """An upload that nothing but its owner and the opened bytes keep."""

    def __init__(self, memory: memoryview) -> None:
        self._values = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
        self.storage = weakref.ref(self._values.untyped_storage())

    done = True

    def open(self) -> torch.Tensor:
        return self._values

    def wait(self) -> None:
        return

    def give_up(self) -> Transfer:
        return Arrived()


class Arrived:
    """A transfer that has ended."""

    done = True

    def wait(self) -> None:
        return


class Broken:
    """A download that fails."""

    done = has_left = True

    def wait(self) -> None:
        raise RuntimeError("the link is down")


@pytest.fixture
def block() -> BlockSpec:
    return lay_out_block(
        dtype="bfloat16",
        index=1,
        name="layer 0",
        parameters=[(name, shape, True) for name, shape in SHAPES],
    )


def gradients(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for _, shape in SHAPES]


def summed(
    block: BlockSpec,
    parts: Sequence[Sequence[torch.Tensor | None]],
    order: Sequence[int],
    *,
    dtype: torch.dtype,
    in_host: bool,
    device: HostDevice,
) -> tuple[dict[str, torch.Tensor], dict[str, float | torch.Tensor]]:
    """The gradients and their norms. `order`: that in which parameters get their contributions."""
    with BufferPool(None) as pool, SumThread(Timeline()) as thread:
        block = replace(block, gradient_dtype=NAMES_OF_DTYPES[dtype])
        total = gradient_sum(block, pool, device, single=False, scale=0.5)
        if in_host:
            sums = HostSums(block, pool, device, thread, leaving_bytes=0)
            total = GpuGradientSum(block, sums, pool, device, scale=0.5)
        with total:
            for number, part in enumerate(parts):
                is_last = number == len(parts) - 1
                if is_last:
                    total.sums.expect_last()
                for index in order:
                    contribution = part[index]
                    if contribution is not None:
                        total.add_one(index, contribution.clone(), is_last=is_last)
            gradient = total.finish()
        gradient.fetch(pool)
        found = {
            parameter.name: gradient.flat[parameter.start : parameter.stop].clone()
            for parameter, present in zip(block.parameters, gradient.present, strict=True)
            if present
        }
        norms = dict(gradient.norms)
        gradient.release()
        thread.wait_released()
        assert pool.leased_bytes == 0
    return found, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_parts", [2, 3, 6])
def test_the_bits_are_those_of_sums_on_the_device(block: BlockSpec, dtype: torch.dtype, num_parts: int) -> None:
    for compute in (torch.float32, torch.bfloat16, torch.float16):
        parts = [gradients(seed, compute) for seed in range(num_parts)]
        order = random.Random(num_parts).sample(range(4), 4)
        here, there = (
            summed(block, parts, order, dtype=dtype, in_host=in_host, device=Apart()) for in_host in (False, True)
        )
        assert here[1] == there[1]
        assert here[0].keys() == there[0].keys() == {"a", "b", "c", "d"}
        assert all(torch.equal(here[0][name], there[0][name]) for name in here[0])


def test_a_parameter_may_miss_any_micro_batch(block: BlockSpec) -> None:
    """As experts that no token visits do."""
    choice = random.Random(7)
    for _ in range(10):
        parts: list[list[torch.Tensor | None]] = [
            [part if choice.random() < 0.6 else None for part in gradients(seed, torch.bfloat16)] for seed in range(3)
        ]
        here, there = (
            summed(block, parts, [2, 0, 1, 3], dtype=torch.bfloat16, in_host=in_host, device=Apart())
            for in_host in (False, True)
        )
        assert here[1] == there[1]
        assert here[0].keys() == there[0].keys()
        assert all(torch.equal(here[0][name], there[0][name]) for name in here[0])


def test_a_sum_goes_up_once_with_the_last_micro_batch_in_the_order_of_the_gradients(block: BlockSpec) -> None:
    device = Apart()
    parts = [gradients(seed, torch.bfloat16) for seed in range(3)]
    order = [2, 0, 3, 1]
    summed(block, parts, order, dtype=torch.bfloat16, in_host=True, device=device)
    wanted = [(parts[0][index].float() + parts[1][index]).reshape(-1) for index in order]
    assert len(device.uploaded) == 4
    assert all(torch.equal(found, total) for found, total in zip(device.uploaded, wanted, strict=True))


@pytest.mark.parametrize("order", [(2, 0, 3, 1), (2, 3, 0, 1), (1, 3, 0, 2), (3, 2, 1, 0)])
def test_what_is_on_the_device_has_a_limit(block: BlockSpec, order: Sequence[int]) -> None:
    """Whatever the order in which the last gradients come. The next sums go up as soon as there is memory."""
    device = Apart()
    with BufferPool(None) as pool, SumThread(Timeline()) as thread:
        sums = HostSums(block, pool, device, thread, leaving_bytes=0)
        with GpuGradientSum(block, sums, pool, device, scale=1.0) as total:
            for index in (0, 2, 3, 1):
                total.add_one(index, torch.ones(SHAPES[index][1]))
            sums.expect_last()
            assert [len(values) for values in device.uploaded] == [SIZES[0]]
            for index in order:
                assert index in sums
                total.add_one(index, torch.ones(SHAPES[index][1]), is_last=True)
                assert index not in sums
            if order[:2] == (2, 0):
                assert [len(values) for values in device.uploaded] == [SIZES[index] for index in (0, 2, 0, 3, 1)]
            gradient = total.finish()
        gradient.fetch(pool)
        assert all(bool((gradient.flat[part.start : part.stop] == 2.0).all()) for part in block.parameters)
        gradient.release()
        thread.wait_released()
        assert pool.leased_bytes == 0
    assert device.most_bytes <= 4 * (SIZES[2] + SIZES[1] + SIZES[3])


def test_memory_is_that_of_one_block(block: BlockSpec) -> None:
    """Sums in fp32, and a gradient of each parameter in its own dtype."""
    with BufferPool(None) as pool, SumThread(Timeline()) as thread:
        for _ in range(3):
            with HostSums(block, pool, Apart(), thread, leaving_bytes=0) as sums:
                for _ in range(2):
                    sums.add(2, torch.ones(SIZES[2], dtype=torch.bfloat16))
                sums.expect_last()
                assert torch.equal(sums.take(2), torch.full((SIZES[2],), 2.0))
        thread.wait_released()
        assert pool.peak_bytes == 6 * block.num_elements


@pytest.mark.parametrize("num_added", [1, 2])
def test_what_is_given_up_gives_its_memory_back(block: BlockSpec, num_added: int) -> None:
    with BufferPool(None) as pool, SumThread(Timeline()) as thread:
        sums = HostSums(block, pool, Apart(), thread, leaving_bytes=0)
        for _ in range(num_added):
            sums.add(2, torch.ones(SIZES[2]))
        if num_added == 2:
            sums.expect_last()
        sums.close()
        sums.close()
        thread.wait_released()
        assert pool.leased_bytes == 0


def test_a_failure_of_the_thread_is_raised_where_its_sum_is_needed(block: BlockSpec) -> None:
    device = Apart()
    with BufferPool(None) as pool, SumThread(Timeline()) as thread:
        with HostSums(block, pool, device, thread, leaving_bytes=0) as sums:
            device.fails = True
            sums.add(0, torch.ones(15))
            with pytest.raises(RuntimeError, match="the link is down"):
                sums.add(0, torch.ones(15))
            with pytest.raises(RuntimeError, match="the link is down"):
                sums.expect_last()
        thread.wait_released()
        assert pool.leased_bytes == 0
