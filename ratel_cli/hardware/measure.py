"""Measures this machine with the code that training uses, and gives a complete HardwareProfile.

A run measures briefly before its opening statement; `ratel profile` measures thoroughly. `drives` and `gpu` measure
drives and the device that computes; main memory and AdamW are measured here.

Invariant: nothing remains afterwards, neither a file nor a buffer, and no number is drawn from torch's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ratel_cli import _native
from ratel_cli.hardware.budget import BRIEF, MeasurementBudget, best_seconds
from ratel_cli.hardware.drives import measure_drives
from ratel_cli.hardware.gpu import measure_device, measure_link
from ratel_cli.hardware.host import available_bytes, free_bytes, memory_bytes, num_cores
from ratel_cli.hardware.spec import HardwareProfile, Host, Nvme, alternating_bytes_per_second
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.sizes import CHUNK_ELEMENTS

_ADAM_PARAMETERS = 1 << 21
"""Parameters of one measured update: a group of the optimizer, more than caches hold."""


def measure(
    paths: Sequence[Path],
    queue: IoQueue,
    pool: BufferPool,
    *,
    dtype: torch.dtype,
    device: torch.device,
    nvme_rates: tuple[float, float] | None = None,
    budget: MeasurementBudget = BRIEF,
    progress: Callable[[str], None] = lambda what: None,
) -> HardwareProfile:
    """Profile this machine. Raises EnvironmentFailure if a directory cannot be written.

    `paths` are existing directories. One may occur several times, for store directories that do not exist yet.
    `nvme_rates` are bytes per second read and written; if given, they are used and the drives are not measured.
    `progress` is called with what is measured next.
    """
    if nvme_rates is None:
        nvme = measure_drives(paths, queue, pool, budget=budget, progress=progress)
    else:
        nvme = _assume(paths, *nvme_rates)
    progress("matrix products")
    gpu = measure_device(dtype, device, budget.seconds)
    link = None
    if device.type == "cuda":
        progress("the link to the GPU")
        link = measure_link(device, budget.seconds)
    progress("RAM and AdamW")
    host = Host(
        memory_bytes=memory_bytes(),
        available_bytes=available_bytes(),
        adam_parameters_per_second=_adam_rate(budget.seconds),
        memory_bytes_per_second=_memory_rate(pool, budget.memory_bytes, budget.seconds)
        if budget.memory_bytes
        else None,
        num_cores=num_cores(),
    )
    return HardwareProfile(gpu=gpu, link=link, nvme=nvme, host=host)


def _assume(paths: Sequence[Path], read_bytes_per_second: float, write_bytes_per_second: float) -> Nvme:
    return Nvme(
        paths=tuple(map(str, paths)),
        num_devices=len({path.stat().st_dev for path in paths}),
        read_bytes_per_second=read_bytes_per_second,
        write_bytes_per_second=write_bytes_per_second,
        mixed_bytes_per_second=alternating_bytes_per_second(read_bytes_per_second, write_bytes_per_second),
        weights=(1,) * len(paths),
        free_bytes=free_bytes(paths),
    )


def _memory_rate(pool: BufferPool, num_bytes: int, seconds: float) -> float:
    """Bytes per second, read and written, of a pass over a buffer like those of a run, on all of torch's threads.

    The pass works in place, as the optimizer does. A copy to another buffer would also read that buffer before it
    writes it, which is not counted: a copy reached 16 GB/s, this pass 52, and AdamW alone 30 (2-core Xeon, 2026-11).
    """
    with pool.lease(num_bytes, "measuring RAM") as lease:
        values = torch.frombuffer(lease.memory, dtype=torch.float32)
        best = best_seconds(values.neg_, seconds)
    pool.trim()
    return 2 * num_bytes / best


def _adam_rate(seconds: float) -> float:
    """Parameters per second of the bf16 update on one thread, checksums included as in training."""
    weights = torch.zeros(_ADAM_PARAMETERS, dtype=torch.bfloat16)
    low = torch.zeros(_ADAM_PARAMETERS, dtype=torch.int16)
    m, v = torch.zeros(_ADAM_PARAMETERS), torch.zeros(_ADAM_PARAMETERS)
    gradient = torch.ones(_ADAM_PARAMETERS, dtype=torch.bfloat16)
    num_chunks = _ADAM_PARAMETERS // CHUNK_ELEMENTS
    scalars = _native.AdamWScalars(
        decay_factor=1.0,
        one_minus_beta1=0.1,
        beta2=0.999,
        one_minus_beta2=0.001,
        step_size=1e-5,
        bias_correction2_sqrt=1.0,
        epsilon=1e-8,
        gradient_scale=1.0,
    )

    def update() -> None:
        _native.update_bfloat16(
            weights,
            low,
            m,
            v,
            gradient,
            scalars=scalars,
            segments=[(0, _ADAM_PARAMETERS, True)],
            chunk_elements=CHUNK_ELEMENTS,
            seeds_before=num_chunks * [None, 1, 1, 1],
            seeds_after=num_chunks * [1, 1, 1, 1],
        )

    return _ADAM_PARAMETERS / best_seconds(update, seconds)
