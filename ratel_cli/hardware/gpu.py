"""What the device that computes can do: a GPU, or the CPU in its place; and the link to it.

Called by `hardware.measure`; the commands ask which device to compute on, and how much of it they may take.

Invariant: no number is drawn from torch's own generators, and what was taken of a GPU's memory is given back.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.budget import best_seconds
from ratel_cli.hardware.host import memory_bytes, processor_name
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES, ComputeDevice, Link, margin_bytes
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.pinning import CudaPinning
from ratel_cli.io.views import view
from ratel_cli.units import MIB

_LINK_BYTES = 256 * MIB
"""A transfer long enough that its start does not count: 10 ms at 25 GB/s."""
_MATMUL_SIZES = {"cpu": 1024, "cuda": 8192}
"""By device. Large enough to fill it, small enough to be done at once: 4 ms on 2 cores, 2 ms on a fast GPU."""
_GPU_ENVIRONMENT = (
    # Without it cuBLAS may take another way at each call, and torch refuses to be deterministic.
    (("CUBLAS_WORKSPACE_CONFIG",), ":4096:8"),
    # Blocks differ in size: without it, what is free lies in pieces that fit nothing, and a plan that fits runs out.
    (("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"),
)
"""Names of a variable, the old ones last, and its value where the user has set none of them."""


def compute_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here; a GPU is ready for use. Raises EnvironmentFailure.

    To be called before anything is computed on a GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFailure("device: cuda, but there is no CUDA device here", "set device: cpu")
    for names, value in _GPU_ENVIRONMENT:
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)  # what the context takes of host memory is taken from now on
    return device


def gpu_limit_bytes(device: torch.device, wanted_bytes: int | None) -> int:
    """What a run may take of a GPU's memory: what the user wants of what is free, or that less a margin."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # Of what this process has taken, torch can give out again what nothing lies in; the rest is the context.
    taken_bytes = torch.cuda.memory_reserved(device) + GPU_CONTEXT_BYTES
    have_bytes = min(total_bytes, free_bytes + taken_bytes)
    return max(0, have_bytes - margin_bytes(total_bytes)) if wanted_bytes is None else min(wanted_bytes, have_bytes)


def set_determinism(deterministic: bool, device: torch.device) -> None:
    """Whether operators must give the same bits each time.

    On a GPU those that cannot raise, since attention there is deterministic only if they do; on the CPU they warn.
    """
    torch.use_deterministic_algorithms(deterministic, warn_only=device.type == "cpu")
    # It would fill every placeholder of the tape with NaN, and touch its memory for it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
    """Copies between a GPU and memory such as the run's: up, down, and both at once on streams of their own."""
    link = _link_rates(device, seconds)
    torch.cuda.empty_cache()
    return link


def _link_rates(device: torch.device, seconds: float) -> Link:
    with (
        BufferPool(None, pin=CudaPinning(lambda refusal: None)) as pool,
        pool.lease(_LINK_BYTES, "copies from the GPU") as into,
        pool.lease(_LINK_BYTES, "copies to the GPU") as out_of,
    ):
        return _copy_rates(device, view(into.memory, torch.uint8), view(out_of.memory, torch.uint8), seconds)


def _copy_rates(device: torch.device, in_host: torch.Tensor, out_of_host: torch.Tensor, seconds: float) -> Link:
    on_gpu, off_gpu = (torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
    for stream in (up, down):
        stream.wait_stream(torch.cuda.current_stream(device))  # for what used this memory before

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
    size = _MATMUL_SIZES[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size**3 / best_seconds(multiply, seconds)
