"""Measures, in about a second, what this machine does with the very code that training uses.

`cli.training_run` calls it before the opening statement: matrix products in the run's dtype, the run's
own I/O queue on an unlinked file in every store directory, the native AdamW kernel. Each is repeated
for a fifth of a second and the best run counts: on a busy machine that is nearest to what it can do.

Invariant: nothing stays behind: no file, no buffer, and no number drawn from torch's generators.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ratel_cli import _native
from ratel_cli.hardware.host import available_bytes, memory_bytes, processor_name
from ratel_cli.hardware.spec import ComputeDevice, HardwareProfile, Host, Nvme
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.queue import IoQueue
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.tickets import join
from ratel_cli.units import MIB

_SPAN_BYTES = 128 * MIB
_BUFFER_BYTES = 32 * MIB
_ADAM_PARAMETERS = 1 << 21
"""As many as the optimizer's group, and more than caches hold."""
_SECONDS = 0.2


def measure(
    paths: Sequence[Path],
    queue: IoQueue,
    pool: BufferPool,
    *,
    dtype: torch.dtype,
    device: torch.device,
    nvme_rates: tuple[float, float] | None = None,
) -> HardwareProfile:
    """Profile this machine. Raises EnvironmentFailure where the directories cannot be written.

    `paths` are existing directories; several may be one, where a store's own are yet to be made.
    `nvme_rates` (bytes per second read, written) are taken as they are, and no file is made.
    """
    read, write = nvme_rates or _nvme(list(dict.fromkeys(path.resolve() for path in paths)), queue, pool)
    return HardwareProfile(
        gpu=ComputeDevice(
            name=torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
            memory_bytes=_device_memory_bytes(device),
            flops_per_second=_matmul_flops(dtype, device),
        ),
        nvme=Nvme(
            paths=tuple(str(path) for path in paths),
            read_bytes_per_second=read,
            write_bytes_per_second=write,
            free_bytes=free_bytes(paths),
        ),
        host=Host(
            memory_bytes=memory_bytes(),
            available_bytes=available_bytes(),
            adam_parameters_per_second=_adam_rate(),
        ),
    )


def free_bytes(paths: Sequence[Path]) -> int:
    """Space for files in these directories together; a drive that several of them share counts once."""
    drives = {path.stat().st_dev: os.statvfs(path) for path in paths}
    return sum(drive.f_bavail * drive.f_frsize for drive in drives.values())


def _matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    # Large enough to fill the device, small enough to be done at once: 4 ms on 2 cores, 2 ms on a fast GPU.
    size = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size**3 / _best_seconds(multiply)


def _nvme(paths: Sequence[Path], queue: IoQueue, pool: BufferPool) -> tuple[float, float]:
    """Bytes per second (read, written) of all directories together."""
    offsets = range(0, _SPAN_BYTES, _BUFFER_BYTES)
    with Scratch(paths, _SPAN_BYTES, queue) as scratch, pool.lease(_BUFFER_BYTES, "measuring the drives") as lease:
        memory = lease.memory
        # The first write to reserved space changes the file's map too, so it only warms up: a run's steps
        # write where creating the store has written.
        write_seconds = _best_seconds(lambda: join([scratch.write(offset, memory) for offset in offsets]).wait())
        read_seconds = _best_seconds(lambda: join([scratch.read(offset, memory) for offset in offsets]).wait())
    pool.trim()
    return _SPAN_BYTES / read_seconds, _SPAN_BYTES / write_seconds


def _adam_rate() -> float:
    """Parameters per second of the bf16 update on one thread."""
    weights = torch.zeros(_ADAM_PARAMETERS, dtype=torch.bfloat16)
    low = torch.zeros(_ADAM_PARAMETERS, dtype=torch.int16)
    m, v = torch.zeros(_ADAM_PARAMETERS), torch.zeros(_ADAM_PARAMETERS)
    gradient = torch.ones(_ADAM_PARAMETERS, dtype=torch.bfloat16)

    def update() -> None:
        _native.adamw_bfloat16(
            weights,
            low,
            m,
            v,
            gradient,
            decay_factor=1.0,
            one_minus_beta1=0.1,
            beta2=0.999,
            one_minus_beta2=0.001,
            step_size=1e-5,
            bias_correction2_sqrt=1.0,
            epsilon=1e-8,
            gradient_scale=1.0,
        )

    return _ADAM_PARAMETERS / _best_seconds(update)


def _best_seconds(work: Callable[[], object]) -> float:
    """Least seconds of the runs that fit in the time. The first one warms up, and counts only if it is the last."""
    times: list[float] = []
    while sum(times) < _SECONDS:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:] or times)


def _device_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()
