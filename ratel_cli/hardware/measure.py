"""Measures what this machine does with the very code that training uses: a whole HardwareProfile.

`run.finetune` calls it before the opening statement, briefly; `ratel profile` takes longer. What is measured,
and how, is in the files beside this one: `drives`, `gpu`, `memory`.

Invariant: nothing stays behind: no file, no buffer, and no number drawn from torch's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ratel_cli.hardware.budget import BRIEF, MeasurementBudget
from ratel_cli.hardware.drives import measure_drives
from ratel_cli.hardware.gpu import measure_device, measure_link
from ratel_cli.hardware.host import available_bytes, free_bytes, memory_bytes, num_cores
from ratel_cli.hardware.memory import adam_rate, memory_rate
from ratel_cli.hardware.spec import HardwareProfile, Host, Nvme, alternating_bytes_per_second
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue


def measure(
    paths: Sequence[Path],
    queue: IoQueue,
    pool: BufferPool,
    *,
    dtype: torch.dtype,
    device: torch.device,
    nvme_rates: tuple[float, float] | None = None,
    budget: MeasurementBudget = BRIEF,
    progress: Callable[[str], None] | None = None,
) -> HardwareProfile:
    """Profile this machine. Raises EnvironmentFailure where the directories cannot be written.

    `paths` are existing directories; several may be one, where a store's own are yet to be made.
    `nvme_rates` (bytes per second read, written) are taken as they are, and no file is made.
    `progress` is told what is being measured.
    """
    tell = progress or _ignore
    if nvme_rates is None:
        nvme = measure_drives(paths, queue, pool, budget=budget, progress=tell)
    else:
        nvme = _assume(paths, *nvme_rates)
    tell("matrix products")
    gpu = measure_device(dtype, device, budget.seconds)
    link = None
    if device.type == "cuda":
        tell("the link to the GPU")
        link = measure_link(device, budget.seconds)
    tell("main memory and AdamW")
    host = Host(
        memory_bytes=memory_bytes(),
        available_bytes=available_bytes(),
        adam_parameters_per_second=adam_rate(budget.seconds),
        memory_bytes_per_second=memory_rate(pool, budget.memory_bytes, budget.seconds) if budget.memory_bytes else None,
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


def _ignore(_: str) -> None:
    return
