"""The device that computes, a GPU or the CPU: which one, how much memory, how fast, and how fast the link to it is.

Invariant: no number is drawn from torch's own generators, and all GPU memory that measuring takes is returned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.budget import best_seconds
from ratel_cli.hardware.host import memory_bytes, processor_name
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES, ComputeDevice, Link, margin_bytes, plannable_gpu_bytes
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.pinning import GpuPinning, copy_in_pieces
from ratel_cli.io.views import view
from ratel_cli.units import MIB

_LINK_BYTES = 256 * MIB
"""A transfer long enough that its start-up time does not matter: 10 ms at 25 GB/s."""
_MATMUL_SIZES = {"cpu": 1024, "gpu": 8192}
"""By kind of device. Large enough to use it fully, small enough to be quick: 4 ms on 2 cores, 2 ms on a fast GPU. A CPU
without instructions for 16 bit takes 2 s for it, and gets a smaller one."""
_SMALL_MATMUL = 128
_ADDED_ELEMENTS = 64 * MIB
"""384 MiB of a GPU's memory, far more than its caches hold."""
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""A variable and its value. Without it, cuBLAS may use another algorithm at each call, and torch raises an error in
deterministic mode."""
_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Where torch's allocator looks for its settings; the old name is the last."""
_ALLOCATOR_SETTINGS = "expandable_segments:True"
"""Blocks differ in size. Without it, free memory is fragmented, and a plan that fits runs out of memory."""
_FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"
"""Where transformers looks up whether the backward of flash attention must be deterministic: 1 if so."""
_UNTRIED = ("mps", "mtia", "xpu")
"""Types of accelerators that are not used: Ratel has never run on them, and some have no streams."""


def compute_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means on this machine. A GPU is initialised and ready for use.

    Call it before anything is computed on a GPU. Raises EnvironmentFailure if there is no GPU for `cuda`.
    """
    gpu = _gpu()
    if name == "cpu" or (name == "auto" and gpu is None):
        return torch.device("cpu")
    if gpu is None or (name == "cuda" and gpu.type != "cuda"):
        raise EnvironmentFailure(
            "device: cuda, but PyTorch finds no CUDA device", "set device: cpu, or leave it at auto"
        )
    os.environ.setdefault(*_WORKSPACE)
    _set_up_allocator()
    torch.zeros(1, device=gpu)  # now the GPU is initialised, and its context has taken its host memory
    return torch.device(gpu.type, torch.accelerator.current_device_index())


def _set_up_allocator() -> None:
    """Give torch's allocator our settings, unless the user has set some.

    Torch reads the environment once, and not at the same time in every version. So its own setter is called, where
    there is one.
    """
    if any(name in os.environ for name in _ALLOCATOR):
        return
    set_directly = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_directly is None:
        os.environ[_ALLOCATOR[0]] = _ALLOCATOR_SETTINGS
    else:
        set_directly(_ALLOCATOR_SETTINGS)


def peak_gpu_bytes() -> int:
    """The most that torch has allocated on the GPU in this process; 0 without a GPU."""
    return int(torch.accelerator.max_memory_allocated()) if _gpu() is not None else 0


def num_alloc_retries() -> int | None:
    """How often in this process torch found no GPU memory in one piece, gave its cache back and tried again; None
    without a GPU. Each time the GPU stops until everything that it was asked for is done."""
    return int(torch.accelerator.memory_stats().get("num_alloc_retries", 0)) if _gpu() is not None else None


def _gpu() -> torch.device | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _UNTRIED else found


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimit:
    """GPU memory that a run may take."""

    plannable_bytes: int
    """What its plan may use."""
    reserve_bytes: int
    """What torch's allocator may take in addition."""


def gpu_limit(device: torch.device, wanted_bytes: int | None) -> GpuLimit:
    """At most `wanted_bytes` of what is available or, if None, all of it; the plan leaves 4 % or a margin free."""
    free_bytes, total_bytes = map(int, torch.get_device_module(device).mem_get_info(device))
    # What this process holds already is available too: the context, and what torch has reserved but no tensor takes.
    accelerator = torch.accelerator
    own_bytes = accelerator.memory_reserved(device) - accelerator.memory_allocated(device) + GPU_CONTEXT_BYTES
    available_bytes = min(total_bytes, free_bytes + own_bytes)
    if wanted_bytes is None:
        plannable_bytes = max(0, available_bytes - margin_bytes(total_bytes))
        reserve_bytes = min(available_bytes - plannable_bytes, available_bytes - plannable_gpu_bytes(available_bytes))
    else:
        limit_bytes = min(wanted_bytes, available_bytes)
        plannable_bytes = plannable_gpu_bytes(limit_bytes)
        reserve_bytes = limit_bytes - plannable_bytes
    return GpuLimit(plannable_bytes=plannable_bytes, reserve_bytes=reserve_bytes)


def is_limited(device: torch.device, wanted_bytes: int | None) -> bool:
    """Whether the user's limit is below what the GPU has, so that torch's allocator must be held to it.

    Otherwise the GPU's own end is the limit. Torch counts a request in full against a limit of its own, also where it
    could take most of it from memory that it has: near the limit it gives its whole cache back and begins anew.
    """
    if device.type == "cpu" or wanted_bytes is None:
        return False
    return wanted_bytes < int(torch.get_device_module(device).get_device_properties(device).total_memory)


@contextmanager
def determinism(required: bool, device: torch.device, *, notice: Callable[[str], None]) -> Iterator[None]:
    """Require inside the `with` statement that operators give the same bits every time, or do not require it.

    An operator that cannot raises an error on a GPU, because attention is deterministic there only in this mode. On the
    CPU it warns. `notice` gets the message if the user's environment asks for something else.
    """
    filling = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills_memory = filling.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(required, warn_only=device.type == "cpu")
    # Otherwise torch fills every placeholder of the tape with NaN, which touches all of its memory.
    filling.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with _deterministic_flash_attention(notice) if required else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = fills_memory  # type: ignore[attr-defined]


@contextmanager
def _deterministic_flash_attention(notice: Callable[[str], None]) -> Iterator[None]:
    """Let transformers ask packages of flash attention for a deterministic backward, which torch's switch does not
    reach. It reads the environment whenever attention is called."""
    own = os.environ.get(_FLASH_ATTENTION)
    if own not in (None, "1"):
        notice(f"{_FLASH_ATTENTION} is {own!r} in the environment; this run takes 1, since it has deterministic: true")
    os.environ[_FLASH_ATTENTION] = "1"
    try:
        yield
    finally:
        if own is None:
            os.environ.pop(_FLASH_ATTENTION, None)
        else:
            os.environ[_FLASH_ATTENTION] = own


def measure_device(dtype: torch.dtype, device: torch.device, seconds: float) -> ComputeDevice:
    """The device's name, its memory, its rate of large matrix products in `dtype`, and a GPU's rate of its memory."""
    flops_per_second = _matmul_flops(dtype, device, seconds)
    if device.type == "cpu":
        return ComputeDevice(name=processor_name(), memory_bytes=memory_bytes(), flops_per_second=flops_per_second)
    memory_bytes_per_second = _adding_rate(device, seconds)
    torch.accelerator.empty_cache()
    module = torch.get_device_module(device)
    return ComputeDevice(
        name=module.get_device_name(device),
        memory_bytes=int(module.get_device_properties(device).total_memory),
        flops_per_second=flops_per_second,
        memory_bytes_per_second=memory_bytes_per_second,
    )


def measure_link(device: torch.device, seconds: float) -> Link:
    """The rates of uploads, of downloads, and of both at once, on two streams and in pinned memory as in a run."""
    with (
        BufferPool(None, pin=GpuPinning(device, lambda message: None)) as pool,
        pool.lease(_LINK_BYTES, "copies from the GPU") as into,
        pool.lease(_LINK_BYTES, "copies to the GPU") as out_of,
    ):
        link = _copy_rates(device, view(into.memory, torch.uint8), view(out_of.memory, torch.uint8), seconds)
    torch.accelerator.empty_cache()
    return link


def _copy_rates(device: torch.device, in_host: torch.Tensor, out_of_host: torch.Tensor, seconds: float) -> Link:
    on_gpu, off_gpu = (torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    module = torch.get_device_module(device)
    up, down = module.Stream(device), module.Stream(device)
    for stream in (up, down):
        stream.wait_stream(module.current_stream(device))  # earlier work may still use this memory

    def rate(up_bytes: int, down_bytes: int) -> float:
        def work() -> None:
            with module.stream(up):
                copy_in_pieces(on_gpu[:up_bytes], out_of_host[:up_bytes])
            with module.stream(down):
                copy_in_pieces(in_host[:down_bytes], off_gpu[:down_bytes])
            torch.accelerator.synchronize(device)

        return (up_bytes + down_bytes) / best_seconds(work, seconds)

    up_rate, down_rate = rate(_LINK_BYTES, 0), rate(0, _LINK_BYTES)
    # In proportion to their rates, so that both directions are busy from beginning to end.
    up_bytes, down_bytes = (int(_LINK_BYTES * each / max(up_rate, down_rate)) for each in (up_rate, down_rate))
    return Link(
        to_gpu_bytes_per_second=up_rate,
        from_gpu_bytes_per_second=down_rate,
        both_bytes_per_second=rate(up_bytes, down_bytes),
    )


def _matmul_flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    size = _MATMUL_SIZES["cpu" if device.type == "cpu" else "gpu"]
    if device.type == "cpu" and size > _SMALL_MATMUL:
        rate = _rate_of_products(_SMALL_MATMUL, dtype, device, 0.0)
        while size > _SMALL_MATMUL and 2 * size**3 / rate > seconds:
            size //= 2
    return _rate_of_products(size, dtype, device, seconds)


def _rate_of_products(size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """FLOP/s of products of square matrices, measured for about as many seconds, at least once."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(left, right)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return 2 * size**3 / best_seconds(multiply, max(seconds, 1e-6))


def _adding_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second that adding a gradient in bf16 to a sum in fp32 reads and writes in a GPU's memory."""
    total = torch.zeros(_ADDED_ELEMENTS, dtype=torch.float32, device=device)
    gradient = torch.zeros(_ADDED_ELEMENTS, dtype=torch.bfloat16, device=device)

    def add() -> None:
        total.add_(gradient)
        torch.accelerator.synchronize(device)

    return (2 * total.nbytes + gradient.nbytes) / best_seconds(add, seconds)
