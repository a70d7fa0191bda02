"""What the device that computes can do: a GPU, or the CPU in its place; and the link to it.

Called by `hardware.measure`. Invariant: no number is drawn from torch's own generators, and what was taken of a
GPU's memory is given back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratel_cli.hardware.effort import best_seconds
from ratel_cli.hardware.host import memory_bytes, processor_name
from ratel_cli.hardware.spec import ComputeDevice, Link
from ratel_cli.units import MIB

_LINK_BYTES = 256 * MIB
"""A transfer long enough that its start does not count: 10 ms at 25 GB/s."""


def measure_device(dtype: torch.dtype, device: torch.device, seconds: float) -> ComputeDevice:
    """Its name, its memory, and the rate of large matrix products in the run's dtype."""
    is_gpu = device.type == "cuda"
    flops_per_second = _matmul_flops(dtype, device, seconds)
    if is_gpu:
        torch.cuda.empty_cache()
    return ComputeDevice(
        name=torch.cuda.get_device_name(device) if is_gpu else processor_name(),
        memory_bytes=int(torch.cuda.get_device_properties(device).total_memory) if is_gpu else memory_bytes(),
        flops_per_second=flops_per_second,
    )


def measure_link(device: torch.device, seconds: float) -> Link:
    """Copies between a GPU and pinned memory: up, down, and both at once on streams of their own."""
    link = _link_rates(device, seconds)
    torch.cuda.empty_cache()
    return link


def _link_rates(device: torch.device, seconds: float) -> Link:
    in_host, out_of_host = (torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    on_gpu, off_gpu = (torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_up() -> None:
        with torch.cuda.stream(up):
            on_gpu.copy_(out_of_host, non_blocking=True)

    def copy_down() -> None:
        with torch.cuda.stream(down):
            in_host.copy_(off_gpu, non_blocking=True)

    def rate(*copies: Callable[[], None]) -> float:
        def work() -> None:
            for copy in copies:
                copy()
            torch.cuda.synchronize(device)

        return len(copies) * _LINK_BYTES / best_seconds(work, seconds)

    return Link(
        to_gpu_bytes_per_second=rate(copy_up),
        from_gpu_bytes_per_second=rate(copy_down),
        both_bytes_per_second=rate(copy_up, copy_down),
    )


def _matmul_flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    # Large enough to fill the device, small enough to be done at once: 4 ms on 2 cores, 2 ms on a fast GPU.
    size = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size**3 / best_seconds(multiply, seconds)
