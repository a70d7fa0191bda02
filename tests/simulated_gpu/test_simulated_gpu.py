"""The simulated GPU catches code that relies on more than CUDA promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ratel_cli.engine.device.cuda import CudaDevice
from ratel_cli.engine.telemetry import SpanLabel, Timeline
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.pinning import CudaPinning
from ratel_cli.io.views import view
from tests.simulated_gpu import install_if_asked, is_simulated, set_eagerness

install_if_asked()
pytestmark = pytest.mark.skipif(not is_simulated(), reason="without the simulated GPU")

LABEL = SpanLabel(text="bytes", block=1, stage="backward")


@pytest.fixture(autouse=True)
def _always_late() -> None:
    set_eagerness(0.0)


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with CudaDevice(torch.device("cuda"), Timeline()) as device:
        yield device


@pytest.fixture
def lease() -> Iterator[Lease]:
    with BufferPool(None, pin=CudaPinning(pytest.fail)) as pool, pool.lease(4096, "test") as lease:
        lease.memory[:] = bytes(4096)
        yield lease


def test_it_catches_host_memory_that_changes_too_early(device: CudaDevice, lease: Lease) -> None:
    upload = device.upload(lease.memory, device.reserve(4096), LABEL)
    lease.memory[0] = 1
    found = upload.open().clone()
    lease.memory[0] = 2  # too early: the GPU may be far behind
    with pytest.raises(RuntimeError, match="host memory changed"):
        upload.wait()
    assert int(found[0]) == 1


def test_it_catches_a_read_before_open(device: CudaDevice, lease: Lease) -> None:
    upload = device.upload(lease.memory, device.reserve(4096), LABEL)
    assert int(upload._values[0]) != 0
    assert int(upload.open()[0]) == 0


def test_it_catches_a_read_before_the_download_ended(device: CudaDevice, lease: Lease) -> None:
    download = device.download([(torch.full((4096,), 7, dtype=torch.uint8, device="cuda"), lease.memory)], LABEL)
    assert not download.done
    assert lease.memory[0] == 0
    download.wait()
    assert lease.memory[0] == 7


def test_it_catches_a_tensor_overwritten_during_its_download(device: CudaDevice, lease: Lease) -> None:
    leaving = torch.full((4096,), 7, dtype=torch.uint8, device="cuda")
    download = device.download([(leaving, lease.memory)], LABEL)
    leaving.fill_(8)
    download.wait()
    assert lease.memory[0] == 8


def test_it_catches_a_tensor_freed_during_its_download(device: CudaDevice, lease: Lease) -> None:
    download = device.download([(torch.full((4096,), 7, dtype=torch.uint8, device="cuda"), lease.memory)], LABEL)
    device._downloading.clear()
    download.wait()
    assert lease.memory[0] != 7


def test_it_catches_gpu_memory_used_as_host_memory(device: CudaDevice) -> None:
    there, here = torch.zeros(3, device=device.torch_device), torch.zeros(3)
    with pytest.raises(RuntimeError, match="same device"):
        there @ here
    with pytest.raises(TypeError, match="convert cuda"):
        there.numpy()


def test_at_full_eagerness_all_work_is_done_at_once(device: CudaDevice, lease: Lease) -> None:
    set_eagerness(1.0)
    download = device.download([(torch.full((4096,), 7, dtype=torch.uint8, device="cuda"), lease.memory)], LABEL)
    assert download.done
    assert bool((view(lease.memory, torch.uint8) == 7).all())
