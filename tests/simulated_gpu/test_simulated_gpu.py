"""The simulated GPU catches code that relies on more than a GPU promises."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter

import pytest
import torch

from ratel_cli.engine.device.gpu import GpuDevice
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.io.buffers import BufferPool, Lease, address_of
from ratel_cli.io.pinning import GpuPinning
from ratel_cli.io.views import view
from tests.simulated_gpu import (
    gpu_of_this_process,
    install_if_asked,
    is_simulated,
    num_stops,
    pinning,
    set_eagerness,
)

install_if_asked()
GPU = gpu_of_this_process()
pytestmark = pytest.mark.skipif(not is_simulated(), reason="without the simulated GPU")

LABEL = SpanLabel(text="bytes", block=1, stage="backward")


@pytest.fixture(autouse=True)
def _always_late() -> None:
    set_eagerness(0.0)


@pytest.fixture
def device() -> Iterator[GpuDevice]:
    with GpuDevice(GPU, Timeline()) as device:
        yield device


@pytest.fixture
def lease() -> Iterator[Lease]:
    with BufferPool(None, pin=GpuPinning(GPU, pytest.fail)) as pool, pool.lease(4096, "test") as lease:
        lease.memory[:] = bytes(4096)
        yield lease


def test_it_catches_host_memory_that_changes_too_early(device: GpuDevice, lease: Lease) -> None:
    upload = device.upload(lease.memory, device.reserve(4096), LABEL)
    lease.memory[0] = 1
    found = upload.open().clone()
    lease.memory[0] = 2  # too early: the GPU may be far behind
    with pytest.raises(RuntimeError, match="host memory changed"):
        upload.wait()
    assert int(found[0]) == 1


def test_it_catches_host_memory_changed_while_it_is_read_in_place(device: GpuDevice, lease: Lease) -> None:
    values = device.mapped(lease.memory)
    assert values is not None and values.device == device.torch_device
    assert values.data_ptr() == view(lease.memory, torch.uint8).data_ptr()
    doubled = values * 2
    read = device.mark()
    lease.memory[0] = 2  # too early: the GPU may be far behind
    with pytest.raises(RuntimeError, match="host memory changed"):
        read()
    assert int(doubled[0]) == 0
    later = values * 2
    device.mark()()
    lease.memory[0] = 3
    assert int(later[0]) == 4 and int((values * 2)[0]) == 6


def test_only_registered_memory_is_read_in_place(device: GpuDevice, lease: Lease) -> None:
    assert device.mapped(memoryview(bytearray(16))) is None
    empty = device.mapped(lease.memory[:0])
    assert empty is not None and (empty.device, empty.numel()) == (device.torch_device, 0)


def test_it_catches_a_read_before_open(device: GpuDevice, lease: Lease) -> None:
    upload = device.upload(lease.memory, device.reserve(4096), LABEL)
    assert int(upload._values[0]) != 0
    assert int(upload.open()[0]) == 0


def test_it_catches_a_read_before_the_download_ended(device: GpuDevice, lease: Lease) -> None:
    download = device.download([(torch.full((4096,), 7, dtype=torch.uint8, device=GPU), lease.memory)], LABEL)
    assert not download.done
    assert lease.memory[0] == 0
    download.wait()
    assert lease.memory[0] == 7


def test_it_catches_a_tensor_overwritten_during_its_download(device: GpuDevice, lease: Lease) -> None:
    leaving = torch.full((4096,), 7, dtype=torch.uint8, device=GPU)
    download = device.download([(leaving, lease.memory)], LABEL)
    leaving.fill_(8)
    download.wait()
    assert lease.memory[0] == 8


def test_it_catches_a_tensor_freed_during_its_download(device: GpuDevice, lease: Lease) -> None:
    download = device.download([(torch.full((4096,), 7, dtype=torch.uint8, device=GPU), lease.memory)], LABEL)
    device._downloading.clear()
    download.wait()
    assert lease.memory[0] != 7


def test_it_catches_gpu_memory_used_as_host_memory(device: GpuDevice) -> None:
    there, here = torch.zeros(3, device=device.torch_device), torch.zeros(3)
    with pytest.raises(RuntimeError, match="same device"):
        there @ here
    with pytest.raises(TypeError, match="convert simulated"):
        there.numpy()


def test_at_full_eagerness_all_work_is_done_at_once(device: GpuDevice, lease: Lease) -> None:
    set_eagerness(1.0)
    download = device.download([(torch.full((4096,), 7, dtype=torch.uint8, device=GPU), lease.memory)], LABEL)
    assert download.done
    assert bool((view(lease.memory, torch.uint8) == 7).all())


STOPPING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda values: values[0].item(),
    "nonzero": lambda values: values.nonzero(),
    "mask": lambda values: values[values > 1],
    "mask on the left": lambda values: values.__setitem__(values > 1, torch.ones(2, device=GPU)),
    "masked_select": lambda values: values.masked_select(values > 1),
    "unique": lambda values: values.unique(),
    "equal": lambda values: values.equal(values.clone()),
    "repeat_interleave": lambda values: values.repeat_interleave(torch.ones(4, dtype=torch.int64, device=GPU)),
}
ADDING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "index_put_": lambda values, numbers: values.index_put_((numbers,), values.clone(), accumulate=True),
    "index_put": lambda values, numbers: values.index_put((numbers,), values),
    "index_copy_": lambda values, numbers: values.index_copy_(0, numbers, values.clone()),
    "index_add_": lambda values, numbers: values.index_add_(0, numbers, values.clone()),
}
RUNNING_ON: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "index_select": lambda values, numbers: values.index_select(0, numbers),
    "numbers": lambda values, numbers: values[numbers],
    "where": lambda values, numbers: values.where(numbers > 1, 0.0),
    "masked_fill": lambda values, numbers: values.masked_fill(numbers > 1, 0.0),
    "sort": lambda values, numbers: values.sort(),
}


def stops(work: Callable[[], object]) -> int:
    before = num_stops()
    work()
    return num_stops() - before


def test_the_host_stops_where_the_size_of_a_result_depends_on_values() -> None:
    values = torch.arange(4.0, device=GPU)
    assert {name: stops(partial(work, values.clone())) for name, work in STOPPING.items()} == dict.fromkeys(STOPPING, 1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_host_stops_for_indices_that_are_added_in_a_fixed_order(deterministic: bool) -> None:
    values, numbers = torch.arange(4.0, device=GPU), torch.arange(4, device=GPU)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = {name: stops(partial(work, values.clone(), numbers)) for name, work in ADDING.items()}
        others = {name: stops(partial(work, values.clone(), numbers)) for name, work in RUNNING_ON.items()}
    finally:
        torch.use_deterministic_algorithms(before)
    assert found == dict.fromkeys(ADDING, int(deterministic))
    assert others == dict.fromkeys(RUNNING_ON, 0)


def test_it_has_a_generator_of_its_own() -> None:
    """Whoever seeds the CPU's alone has not seeded it, and its draws leave the CPU's as they were."""

    def drawn() -> tuple[list[float], list[float]]:
        return torch.rand(3, device=GPU).tolist(), torch.rand(3).tolist()

    torch.manual_seed(7)
    gpu, cpu = drawn()
    assert torch.rand(3, device=GPU).tolist() != gpu
    torch.default_generator.manual_seed(7)
    other_gpu, same_cpu = drawn()
    assert same_cpu == cpu and other_gpu != gpu
    torch.get_device_module(GPU).manual_seed_all(7)
    assert drawn()[0] == gpu
    torch.manual_seed(7)
    assert drawn() == (gpu, cpu)


def test_its_generators_state_can_be_taken_and_set() -> None:
    generator = torch.get_device_module(GPU).default_generators[torch.accelerator.current_device_index()]
    state = generator.get_state()
    dropped = torch.nn.functional.dropout(torch.ones(64, device=GPU), 0.5)
    generator.set_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device=GPU), 0.5), dropped)


def test_it_catches_a_thread_that_would_use_another_gpu(device: GpuDevice, lease: Lease) -> None:
    """Each thread begins with the first GPU as its current device. This one is the second."""
    upload = device.upload(lease.memory, device.reserve(4096), LABEL)
    event = torch.Event(GPU)
    event.record()
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(RuntimeError, match="another GPU"):
            thread.submit(event.synchronize).result()
        with pytest.raises(RuntimeError, match="another GPU"):
            thread.submit(torch.empty, 3, device=GPU.type).result()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(upload.wait).result()
        thread.submit(event.synchronize).result()


def test_any_thread_can_wait_for_copies_and_pin(device: GpuDevice, lease: Lease) -> None:
    def in_a_new_thread(work: Callable[[], object]) -> object:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()

    download = device.download([(torch.full((4096,), 7, dtype=torch.uint8, device=GPU), lease.memory)], LABEL)
    assert not in_a_new_thread(lambda: download.done)
    in_a_new_thread(download.wait)
    assert lease.memory[0] == 7
    pool = BufferPool(None, pin=GpuPinning(GPU, pytest.fail))
    in_a_new_thread(lambda: pool.lease(4096, "test").release())
    in_a_new_thread(pool.close)


def test_registered_memory_takes_its_time_and_nothing_else_is_done_meanwhile(device: GpuDevice) -> None:
    with pinning(seconds_per_byte=0.5 / 4096), ThreadPoolExecutor(1) as thread, BufferPool(None) as pool:
        lease, event, begun = pool.lease(4096, "test"), torch.Event(GPU), threading.Event()
        event.record()
        pin = GpuPinning(GPU, pytest.fail)

        def register() -> Callable[[], None] | None:
            begun.set()
            return pin(address_of(lease.memory), 4096)

        start = perf_counter()
        registered = thread.submit(register)
        begun.wait(60)
        while not registered.done():
            event.query()
        assert perf_counter() - start >= 0.5
        undo = registered.result()
        assert undo is not None
        undo()


def test_a_copy_across_two_registered_ranges_is_refused(device: GpuDevice, lease: Lease) -> None:
    with BufferPool(None) as pool, pool.lease(8192, "two ranges") as other:
        register, address = GpuPinning(GPU, pytest.fail), address_of(other.memory)
        undo = [register(address, 4096), register(address + 4096, 4096)]
        with pytest.raises(RuntimeError, match="beyond the memory that was registered"):
            device.upload(other.memory, device.reserve(8192), LABEL)
        for each in undo:
            assert each is not None
            each()


def test_it_needs_no_cuda() -> None:
    """It takes no part of torch that a build for CUDA has taken: neither CUDA's dispatch key nor its Python."""
    sources = [path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h", ".py")]
    assert len(sources) >= 6
    words = ("DispatchKey::CUDA", "DeviceType::CUDA", "kCUDA", "CUDAHooks", "is_built", "setattr(torch")
    found = [(path.name, word) for path in sources for word in words if word in path.read_text()]
    assert found == [(Path(__file__).name, word) for word in words]


_OF_A_BUILD_FOR_CUDA = """
import sys, torch, pytest
torch.backends.cuda.is_built = lambda: True
torch.version.cuda = "13.0"
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.full
def test_it_runs_where_torch_was_built_for_cuda() -> None:
    """A stand-in: torch reports CUDA, and finds no GPU."""
    named = "tests/gpu/test_device.py::test_an_upload_has_arrived_when_it_is_opened"
    ended = subprocess.run(
        [sys.executable, "-c", _OF_A_BUILD_FOR_CUDA, named, "-q", "-p", "no:cacheprovider"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RATEL_SIMULATED_GPU": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "1 passed" in ended.stdout and ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.full
def test_it_is_not_there_unless_asked_for() -> None:
    program = "from tests.simulated_gpu import *; install_if_asked(); print(has_gpu(), is_simulated())"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RATEL_SIMULATED_GPU": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ended.stdout.split() == ["False", "False"]
