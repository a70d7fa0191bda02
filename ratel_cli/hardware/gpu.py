"""The device that computes, a GPU or the CPU: which one, how much memory, how fast, and how fast the link to it is.

Invariant: no number is drawn from torch's own generators, and all GPU memory that measuring takes is returned.
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
"""A transfer long enough that its start-up time does not matter: 10 ms at 25 GB/s."""
_MATMUL_SIZES = {"cpu": 1024, "cuda": 8192}
"""By device. Large enough to use it fully, small enough to be quick: 4 ms on 2 cores, 2 ms on a fast GPU."""
_GPU_ENVIRONMENT = (
    # Without it, cuBLAS may use another algorithm at each call, and torch raises an error in deterministic mode.
    (("CUBLAS_WORKSPACE_CONFIG",), ":4096:8"),
    # Blocks differ in size. Without it, free memory is fragmented, and a plan that fits runs out of memory.
    (("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"),
)
"""The names of a variable, its old name last, and the value that it gets if the user set neither."""


def compute_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means on this machine. A GPU is initialised and ready for use.

    Call it before anything is computed on a GPU. Raises EnvironmentFailure if there is no GPU for `cuda`.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFailure(
            "device: cuda, but PyTorch finds no CUDA device", "set device: cpu, or leave it at auto"
        )
    for names, value in _GPU_ENVIRONMENT:
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)  # now the context has taken its host memory
    return device


def gpu_limit_bytes(device: torch.device, wanted_bytes: int | None) -> int:
    """GPU memory that a run may use: at most `wanted_bytes` of what is available or, if None, all of it less a
    margin."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # The memory that this process holds already is available too: what torch has reserved, and the context.
    own_bytes = torch.cuda.memory_reserved(device) + GPU_CONTEXT_BYTES
    available_bytes = min(total_bytes, free_bytes + own_bytes)
    if wanted_bytes is not None:
        return min(wanted_bytes, available_bytes)
    return max(0, available_bytes - margin_bytes(total_bytes))


def set_determinism(deterministic: bool, device: torch.device) -> None:
    """Require that operators give the same bits every time, or do not require it.

    An operator that cannot raises an error on a GPU, because attention is deterministic there only in this mode. On the
    CPU it warns.
    """
    torch.use_deterministic_algorithms(deterministic, warn_only=device.type == "cpu")
    # Otherwise torch fills every placeholder of the tape with NaN, which touches all of its memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def measure_device(dtype: torch.dtype, device: torch.device, seconds: float) -> ComputeDevice:
    """The device's name, its memory, and its rate of large matrix products in `dtype`."""
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
    """The rates of uploads, of downloads, and of both at once, on two streams and in pinned memory as in a run."""
    with (
        BufferPool(None, pin=CudaPinning(lambda message: None)) as pool,
        pool.lease(_LINK_BYTES, "copies from the GPU") as into,
        pool.lease(_LINK_BYTES, "copies to the GPU") as out_of,
    ):
        link = _copy_rates(device, view(into.memory, torch.uint8), view(out_of.memory, torch.uint8), seconds)
    torch.cuda.empty_cache()
    return link


def _copy_rates(device: torch.device, in_host: torch.Tensor, out_of_host: torch.Tensor, seconds: float) -> Link:
    on_gpu, off_gpu = (torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
    for stream in (up, down):
        stream.wait_stream(torch.cuda.current_stream(device))  # earlier work may still use this memory

    def upload() -> None:
        with torch.cuda.stream(up):
            on_gpu.copy_(out_of_host, non_blocking=True)

    def download() -> None:
        with torch.cuda.stream(down):
            in_host.copy_(off_gpu, non_blocking=True)

    def rate(*copies: Callable[[], None]) -> float:
        def work() -> None:
            for copy in copies:
                copy()
            torch.cuda.synchronize(device)

        return len(copies) * _LINK_BYTES / best_seconds(work, seconds)

    return Link(
        to_gpu_bytes_per_second=rate(upload),
        from_gpu_bytes_per_second=rate(download),
        both_bytes_per_second=rate(upload, download),
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
