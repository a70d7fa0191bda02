"""Measures how fast the store's directories can be read and written: each drive alone, and all together.

The queue that training uses moves an unlinked file in every directory, in transfers as large as those of training. If
the directories are on several drives, each drive is measured alone first; all together then share the stripes in
proportion, as in a run.

Invariant: no file and no buffer remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratel_cli.hardware.budget import MeasurementBudget, best_seconds
from ratel_cli.hardware.host import free_bytes
from ratel_cli.hardware.spec import DriveRates, Nvme
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.striping import shares_for
from ratel_cli.io.tickets import join


def measure_drives(
    paths: Sequence[Path],
    queue: IoQueue,
    pool: BufferPool,
    *,
    budget: MeasurementBudget,
    progress: Callable[[str], None],
) -> Nvme:
    """Measure the drives of all directories. Raises EnvironmentFailure if a directory cannot be written.

    Directories on one drive share its rates. A path may occur several times. `progress` is called with what is measured
    next.
    """
    drives: dict[int, list[Path]] = {}
    for path in paths:
        drives.setdefault(path.stat().st_dev, []).append(path)
    alone: dict[int, DriveRates] = {}
    if len(drives) > 1:
        for_one = replace(budget, seconds=budget.seconds / len(drives))
        for drive, here in drives.items():
            progress(f"{here[0]}, alone")
            alone[drive] = _measure(here[:1], [1], queue, pool, for_one)
    shares: tuple[int, ...] = (1,) * len(paths)
    if alone:  # in proportion to each drive's mixed rate, as a step reads and writes at once; directories share a drive
        rates = {drive: alone[drive].mixed_bytes_per_second / len(here) for drive, here in drives.items()}
        shares = shares_for([rates[path.stat().st_dev] for path in paths])
    of_files = dict.fromkeys((path.resolve() for path in paths), 0)
    for path, share in zip(paths, shares, strict=True):
        of_files[path.resolve()] += share
    progress("all directories together" if len(of_files) > 1 else str(paths[0]))
    all_drives = replace(budget, span_bytes=budget.span_bytes * len(drives))
    together = _measure(list(of_files), list(of_files.values()), queue, pool, all_drives)
    return Nvme(
        paths=tuple(map(str, paths)),
        num_devices=len(drives),
        read_bytes_per_second=together.read_bytes_per_second,
        write_bytes_per_second=together.write_bytes_per_second,
        mixed_bytes_per_second=together.mixed_bytes_per_second,
        shares=shares,
        free_bytes=free_bytes(paths),
        alone=tuple(alone.get(path.stat().st_dev, together) for path in paths),
    )


def _measure(
    paths: Sequence[Path], shares: Sequence[int], queue: IoQueue, pool: BufferPool, budget: MeasurementBudget
) -> DriveRates:
    with (
        Scratch(paths, budget.span_bytes, queue, shares=shares) as scratch,
        pool.lease(budget.buffer_bytes, "measuring the drives", crosses_link=False) as lease,
    ):
        probe = _Probe(scratch=scratch, memory=lease.memory)
        # The first write to reserved space also changes the file's map, so it must be the warm-up: the steps of a run
        # write to space that was written when the store was made.
        write, read, mixed = (
            budget.span_bytes / best_seconds(work, budget.seconds)
            for work in (probe.write, probe.read, probe.read_and_write)
        )
    pool.trim()
    return DriveRates(read_bytes_per_second=read, write_bytes_per_second=write, mixed_bytes_per_second=mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Space on the drives, and a buffer that all of it is moved to and from."""

    scratch: Scratch
    memory: memoryview

    def write(self) -> None:
        join([self.scratch.write(offset, self.memory) for offset in self._offsets()]).wait()

    def read(self) -> None:
        join([self.scratch.read(offset, self.memory) for offset in self._offsets()]).wait()

    def read_and_write(self) -> None:
        """Read one half of the space and write the other half at the same time."""
        half_bytes = len(self.memory) // 2
        into, out_of = self.memory[:half_bytes], self.memory[half_bytes:]
        reads = [self.scratch.read(offset, into) for offset in self._offsets()]
        writes = [self.scratch.write(offset + half_bytes, out_of) for offset in self._offsets()]
        join([*reads, *writes]).wait()

    def _offsets(self) -> range:
        return range(0, self.scratch.num_bytes, len(self.memory))
