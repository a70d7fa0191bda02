"""Measures, in about a second, what this machine does with the very code that training uses.

`cli.training_run` calls it before the opening statement: matrix products in the run's dtype, the run's
own I/O queue on an unlinked file in every store directory, the native AdamW kernel. Each is repeated
for a fifth of a second and the best run counts: on a busy machine that is nearest to what it can do.
Where the directories are on several drives, each drive is measured alone first, in a fifth of a second
for all of them, and the files then share the stripes as the run's will.

Invariant: nothing stays behind: no file, no buffer, and no number drawn from torch's generators.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ratel_cli import _native
from ratel_cli.hardware.host import available_bytes, memory_bytes, processor_name
from ratel_cli.hardware.spec import ComputeDevice, HardwareProfile, Host, Nvme
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.extents import weights_for
from ratel_cli.movement.queue import IoQueue
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.tickets import join
from ratel_cli.units import MIB

_SPAN_BYTES = 128 * MIB
"""For each drive."""
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
    if nvme_rates is None:
        weights, (read, write, mixed) = _measure_drives(paths, queue, pool)
    else:
        read, write = nvme_rates
        weights, mixed = (1,) * len(paths), 2 / (1 / read + 1 / write)
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
            mixed_bytes_per_second=mixed,
            weights=weights,
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


def _measure_drives(
    paths: Sequence[Path], queue: IoQueue, pool: BufferPool
) -> tuple[tuple[int, ...], tuple[float, float, float]]:
    """The weight of each path; bytes per second read, written, and both at once, of all together."""
    weights = _weights(paths, queue, pool)
    shares = dict.fromkeys((path.resolve() for path in paths), 0)
    for path, weight in zip(paths, weights, strict=True):
        shares[path.resolve()] += weight
    num_bytes = _SPAN_BYTES * len(_drives(paths))
    with _open_probe(list(shares), list(shares.values()), num_bytes, queue, pool) as probe:
        # The first write to reserved space changes the file's map too, so it only warms up: a run's steps
        # write where creating the store has written.
        write, read, mixed = (
            num_bytes / _best_seconds(work) for work in (probe.write, probe.read, probe.read_and_write)
        )
    return weights, (read, write, mixed)


def _weights(paths: Sequence[Path], queue: IoQueue, pool: BufferPool) -> tuple[int, ...]:
    """By each drive's rate alone, reading and writing at once as a step does; directories on a drive share it."""
    drives = _drives(paths)
    if len(drives) == 1:
        return (1,) * len(paths)
    rates: dict[Path, float] = {}
    for here in drives.values():
        with _open_probe(here[:1], None, _SPAN_BYTES // 2, queue, pool) as probe:
            probe.write()
            seconds = _best_seconds(probe.read_and_write, _SECONDS / len(drives))
        rates |= dict.fromkeys(here, 1 / (seconds * len(here)))
    return weights_for([rates[path] for path in paths])


def _drives(paths: Sequence[Path]) -> dict[int, list[Path]]:
    """The paths on each device. One path may be there several times."""
    drives: dict[int, list[Path]] = {}
    for path in paths:
        drives.setdefault(path.stat().st_dev, []).append(path)
    return drives


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Space on drives, and a buffer from which and to which all of it is moved."""

    scratch: Scratch
    memory: memoryview

    def write(self) -> None:
        join([self.scratch.write(offset, self.memory) for offset in self._offsets()]).wait()

    def read(self) -> None:
        join([self.scratch.read(offset, self.memory) for offset in self._offsets()]).wait()

    def read_and_write(self) -> None:
        """Half of the space each."""
        half_bytes = _BUFFER_BYTES // 2
        into, out_of = self.memory[:half_bytes], self.memory[half_bytes:]
        reads = [self.scratch.read(offset, into) for offset in self._offsets()]
        writes = [self.scratch.write(offset + half_bytes, out_of) for offset in self._offsets()]
        join([*reads, *writes]).wait()

    def _offsets(self) -> range:
        return range(0, self.scratch.num_bytes, _BUFFER_BYTES)


@contextmanager
def _open_probe(
    paths: Sequence[Path], weights: Sequence[int] | None, num_bytes: int, queue: IoQueue, pool: BufferPool
) -> Iterator[_Probe]:
    with (
        Scratch(paths, num_bytes, queue, weights=weights) as scratch,
        pool.lease(_BUFFER_BYTES, "measuring the drives") as lease,
    ):
        yield _Probe(scratch=scratch, memory=lease.memory)
    pool.trim()


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


def _best_seconds(work: Callable[[], object], at_least_seconds: float = _SECONDS) -> float:
    """Least seconds of the runs that fit in the time. The first one warms up, and counts only if it is the last."""
    times: list[float] = []
    while sum(times) < at_least_seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:] or times)


def _device_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()
