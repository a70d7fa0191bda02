"""Measures this machine with the code that training uses, and gives a complete HardwareProfile.

A run measures briefly before its opening statement; `ratel profile` measures thoroughly. `drives` and `gpu` measure
drives and the device that computes; main memory and AdamW are measured here.

Invariant: nothing remains afterwards, neither a file nor a buffer, and no number is drawn from torch's generators.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ratel_cli import _native
from ratel_cli.hardware.budget import BRIEF, MeasurementBudget, best_seconds
from ratel_cli.hardware.drives import measure_drives
from ratel_cli.hardware.gpu import measure_device, measure_link
from ratel_cli.hardware.host import available_bytes, free_bytes, memory_bytes, num_cores, resident_bytes
from ratel_cli.hardware.spec import HardwareProfile, Host, Nvme, alternating_bytes_per_second
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.sizes import CHUNK_ELEMENTS

ADAMW_BYTES = 14
"""Per parameter: gradient and states."""


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
        read_rate, write_rate = nvme_rates
        nvme = Nvme(
            paths=tuple(map(str, paths)),
            num_devices=len({path.stat().st_dev for path in paths}),
            read_bytes_per_second=read_rate,
            write_bytes_per_second=write_rate,
            mixed_bytes_per_second=alternating_bytes_per_second(read_rate, write_rate),
            shares=(1,) * len(paths),
            free_bytes=free_bytes(paths),
        )
    progress("matrix products")
    gpu = measure_device(dtype, device, budget.seconds)
    link = None
    if device.type != "cpu":
        progress("the link to the GPU")
        link = measure_link(device, budget.seconds)
    progress("RAM and AdamW")
    host = Host(
        memory_bytes=memory_bytes(),
        available_bytes=available_bytes(),
        adam_parameters_per_second=_adam_rate(spare_bytes(pool, budget.adamw_bytes), budget.seconds),
        memory_bytes_per_second=_memory_rate(pool, budget.memory_bytes, budget.seconds)
        if budget.memory_bytes
        else None,
        num_cores=num_cores(),
    )
    return HardwareProfile(gpu=gpu, link=link, nvme=nvme, host=host)


def _memory_rate(pool: BufferPool, num_bytes: int, seconds: float) -> float:
    """Bytes per second, read and written, of a pass over a buffer like those of a run, on all of torch's threads.

    The pass works in place, as the optimizer does. A copy to another buffer would also read that buffer before it
    writes it, which is not counted: a copy reached 16 GB/s, this pass 52, and AdamW alone 30 (2-core Xeon, 2026-11).
    """
    with pool.lease(num_bytes, "measuring RAM", crosses_link=False) as lease:
        values = torch.frombuffer(lease.memory, dtype=torch.float32)
        best = best_seconds(values.neg_, seconds)
    pool.trim()
    return 2 * num_bytes / best


def spare_bytes(pool: BufferPool, wanted_bytes: int) -> int:
    """At most half of what the run's limit leaves next to the process, so that a low limit holds meanwhile."""
    if pool.limit_bytes is None:
        return wanted_bytes
    return min(wanted_bytes, max(0, pool.limit_bytes - max(pool.leased_bytes, resident_bytes())) // 2)


def _adam_rate(num_bytes: int, seconds: float) -> float:
    """Parameters per second of the bf16 update on one thread, checksums included as in training.

    A run's states come from the drives through main memory, so the measured ones must not fit into a cache: 512 MiB are
    more than a server's L3 (29 MB were not). Where there is less memory, at least one chunk is updated.
    """
    number = max(1, num_bytes // (ADAMW_BYTES * CHUNK_ELEMENTS)) * CHUNK_ELEMENTS
    return number / best_seconds(adamw_update(number), seconds)


def adamw_update(number: int) -> Callable[[], None]:
    """One bf16 update of this many parameters on one thread, with checksums; they are a multiple of a chunk's."""
    num_chunks = number // CHUNK_ELEMENTS
    # Written once, because pages that were only read are all the same page of zeros.
    weights = torch.ones(number, dtype=torch.bfloat16)
    low = torch.ones(number, dtype=torch.int16)
    m, v = torch.ones(number), torch.ones(number)
    gradient = torch.ones(number, dtype=torch.bfloat16)
    table, is_set = array("Q", [0]) * (4 * num_chunks), bytearray(b"\1") * (4 * num_chunks)

    def checksums(*, of_weights: bool) -> _native.ChunkChecksums:
        entries = [0 if of_weights else None, *range(num_chunks, 4 * num_chunks, num_chunks)]
        return _native.ChunkChecksums(table=table, is_set=is_set, store_id=bytes(16), step=0, block=0, entries=entries)

    scalars = _native.AdamWScalars(
        decay_factor=1.0,
        beta1=0.9,
        one_minus_beta1=0.1,
        beta2=0.999,
        one_minus_beta2=0.001,
        step_size=1e-5,
        bias_correction2_sqrt=1.0,
        epsilon=1e-8,
        gradient_scale=1.0,
    )

    def update() -> None:
        _native.update_adamw_bfloat16(
            weights,
            low,
            m,
            v,
            gradient,
            scalars=scalars,
            segments=[(0, number, True)],
            chunk_elements=CHUNK_ELEMENTS,
            before=checksums(of_weights=False),
            after=checksums(of_weights=True),
        )

    return update
