"""Which GPU a run takes, and what measuring one finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.gpu import compute_device, gpu_limit, peak_gpu_bytes
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.units import GIB, MIB
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.hardware.test_measure import SMALL
from tests.simulated_gpu import is_simulated

pytestmark = NEEDS_GPU


def test_auto_means_the_gpu() -> None:
    assert compute_device("auto") == torch.device(GPU.type, torch.accelerator.current_device_index())
    assert compute_device("cpu") == torch.device("cpu")


def test_cuda_means_no_other_gpu() -> None:
    if not is_simulated():
        assert compute_device("cuda").type == "cuda"
        return
    with pytest.raises(EnvironmentFailure, match="PyTorch finds no CUDA device"):
        compute_device("cuda")


def test_a_limit_is_no_more_than_the_gpu_has() -> None:
    """The plan leaves 4 % of what the user sets, 5 % of what is there; of that, torch's allocator may take 4 %."""
    total_bytes = torch.get_device_module(GPU).mem_get_info(GPU)[1]
    auto, most = gpu_limit(GPU, None), gpu_limit(GPU, 1 << 60)
    available_bytes = most.plannable_bytes + most.reserve_bytes
    assert available_bytes <= total_bytes
    assert auto.plannable_bytes == available_bytes - max(GIB, total_bytes // 20)
    assert auto.reserve_bytes == most.reserve_bytes == available_bytes // 25
    set_by_user = gpu_limit(GPU, 100 * MIB)
    assert (set_by_user.plannable_bytes, set_by_user.reserve_bytes) == (96 * MIB, 4 * MIB)


def test_the_peak_counts_what_was_freed() -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = peak_gpu_bytes()
    torch.empty(8 * MIB, dtype=torch.uint8, device=GPU)
    assert peak_gpu_bytes() == before + 8 * MIB


@pytest.mark.full
def test_a_gpu_and_the_link_to_it(tmp_path: Path) -> None:
    budget = replace(SMALL, memory_bytes=0)
    with BufferPool(None) as pool, open_queue("threads", notice=pytest.fail) as queue:
        profile = measure([tmp_path], queue, pool, dtype=torch.bfloat16, device=GPU, budget=budget)
    module = torch.get_device_module(GPU)
    assert profile.gpu.name == module.get_device_name(GPU)
    assert profile.gpu.memory_bytes == module.get_device_properties(GPU).total_memory > GIB
    link, memory_rate = profile.link, profile.gpu.memory_bytes_per_second
    assert link is not None and memory_rate is not None and memory_rate > 0
    assert min(link.to_gpu_bytes_per_second, link.from_gpu_bytes_per_second, link.both_bytes_per_second) > 0
    if is_simulated():
        return  # its speed is that of the host's memory
    assert profile.gpu.flops_per_second > 1e12
    assert memory_rate > 5e10
    slower = min(link.to_gpu_bytes_per_second, link.from_gpu_bytes_per_second)
    assert slower > 1e9
    assert (
        0.9 * slower
        < link.both_bytes_per_second
        < 2.2 * max(link.to_gpu_bytes_per_second, link.from_gpu_bytes_per_second)
    )


def test_tensors_of_the_caller_are_not_available() -> None:
    before = gpu_limit(GPU, None).plannable_bytes
    taken = torch.empty(GPU_CONTEXT_BYTES + 64 * MIB, dtype=torch.uint8, device=GPU)
    assert before - gpu_limit(GPU, None).plannable_bytes >= 64 * MIB  # the context's bytes are counted as free
    del taken
    assert gpu_limit(GPU, None).plannable_bytes >= before - MIB
