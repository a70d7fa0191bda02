"""The simulated GPU catches code that relies on more than a GPU promises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.device.gpu import GpuDevice
from ratel_cli.engine.telemetry import SpanLabel, Timeline
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.pinning import GpuPinning
from ratel_cli.io.views import view
from tests.simulated_gpu import gpu_of_this_process, install_if_asked, is_simulated, set_eagerness

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
