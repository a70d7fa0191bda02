"""What Python costs per group on the optimizer thread: everything but the kernel and the transfers.

Regime: groups of real size, a queue whose requests end at once and move nothing, zeros that an update leaves as they
are. Times are CPU time of the thread, so that a loaded machine does not count, medians over rounds:

    read      leases buffers and submits the reads
    update    calls the kernel: the group's views, scalars, segments, and where its checksums stand; without the kernel
    write     submits the writes, and gives the buffers back
    kernel    AdamW and the checksums, without the GIL; and what the call itself takes (7 us, kernels/README.md)
    lanes     not on the optimizer thread: CPU time of the I/O threads for a group that is really read and written. The
              kernel's part of a submit is in it, which runs without the GIL

The ceiling is the time in which many drives move a group (`--gb-per-second`): Python must stay far below it, since it
holds the GIL, which the compute thread needs, too. The last line is JSON.

    python -m scripts.bench.group_python [--drives N] [--rounds N] [--elements N] [--gb-per-second N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.optimizer.group_update import GroupUpdater
from ratel_cli.engine.optimizer.groups import BlockUpdate, Group, GroupWork
from ratel_cli.engine.optimizer.settings import UpdateNumbers, adamw_settings, kernel_of
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import DEFAULT_REQUEST_BYTES, Extent, IoQueue, LanedQueue, depth_for, open_queue
from ratel_cli.io.requests import Lane, Request
from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.search.choose import shape_for
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.schedule.rules import ADAMW
from ratel_cli.store.layout import Geometry
from ratel_cli.store.store import Store
from scripts.bench.ratel_run import NO_IDENTITY, progress_at

RECORD_BYTES = 12
"""Of a parameter in bf16."""


_NUM_MOVED = 4
"""Groups that are really read and written. The first does not count: the kernel finds memory for it."""


def _io_seconds() -> float:
    """CPU time of all I/O threads so far."""
    threads = [each.ident for each in threading.enumerate() if each.name.startswith("ratel-io-")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in threads if each is not None)


class _DoneAtOnce(Lane):
    """A lane whose requests end when they are submitted; what that takes is the drives' thread's, and is counted."""

    def __init__(self) -> None:
        super().__init__(depth=1, timeout_seconds=1.0)
        self.num_requests = 0
        self.seconds = 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        start = time.thread_time()
        for request in requests:
            request.ticket.begin_part()
            request.finish()
        self.num_requests += len(requests)
        self.seconds += time.thread_time() - start

    def close(self) -> None:
        """Do nothing: nothing is in flight."""

    def _wake(self, num_requests: int) -> None:
        raise AssertionError(f"{num_requests} requests wait, which end at once")


class _Idle(IoQueue):
    """A real queue until `rest`; from then on requests are made and end at once.

    `_NUM_MOVED` groups are really moved before, to see what the I/O threads take.
    """

    def __init__(self, queue: IoQueue) -> None:
        self.engine, self.checksums, self._queue = queue.engine, queue.checksums, queue
        self.lane = _DoneAtOnce()

    @property
    def read_bytes(self) -> int:
        return self._queue.read_bytes

    @property
    def written_bytes(self) -> int:
        return self._queue.written_bytes

    def rest(self) -> None:
        """Move nothing any more."""
        self._queue = LanedQueue("threads", lambda _: self.lane, request_bytes=DEFAULT_REQUEST_BYTES)

    def read(self, extents: Sequence[Extent]) -> Ticket:
        return self._queue.read(extents)

    def write(self, extents: Sequence[Extent]) -> Ticket:
        return self._queue.write(extents)

    def close(self) -> None:
        """Close the queue that rests; the real one belongs to whoever opened it."""
        self._queue.close()


class _TimedUpdater(GroupUpdater):
    """Counts the kernel's CPU time."""

    def __init__(self) -> None:
        super().__init__(adamw_settings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01), seed=0)
        self.kernel_seconds = 0.0
        kernel = kernel_of(ADAMW, "bfloat16")

        def timed(*arrays: torch.Tensor, **others: object) -> list[tuple[int, int]]:
            start = time.thread_time()
            found = kernel(*arrays, **others)
            self.kernel_seconds += time.thread_time() - start
            return found

        self._kernel_of = lambda rule, dtype: timed


def measure(directory: Path, *, num_drives: int, elements: int, rounds: int) -> dict[str, float]:
    """Median seconds by part, and the number of requests of a group."""
    seconds: dict[str, list[float]] = {"read": [], "update": [], "write": [], "kernel": []}
    with ExitStack() as resources:
        pool = resources.enter_context(BufferPool(None))
        queue = resources.enter_context(
            _Idle(resources.enter_context(open_queue("auto", notice=print, depth=depth_for(num_drives))))
        )
        block = lay_out_block(dtype="bfloat16", index=0, name="block", parameters=[("w", (elements,), True)])
        geometry = Geometry(blocks=(block.stored,), num_slots=2, shares=(1,) * num_drives)
        paths = [directory / f"drive{number}" for number in range(num_drives)]
        store = resources.enter_context(Store.create(paths, geometry, identity=NO_IDENTITY, queue=queue))
        store.commit_import(progress_at(0))
        store.begin_step()
        adamw = resources.enter_context(_TimedUpdater())
        work = GroupWork(adamw, store, pool, timeline=Timeline())
        total = gradient_sum(block, pool, HostDevice(Timeline()), single=True)
        total.add([torch.zeros(elements, dtype=torch.bfloat16)])
        numbers = UpdateNumbers(number=1, learning_rate=1e-5, gradient_scale=1.0)
        update = BlockUpdate(gradient=total.finish(), weights=None, numbers=numbers)
        lanes = []
        for _ in range(_NUM_MOVED):
            before = _io_seconds()
            group = Group(block=block, number=0, start=0, stop=elements, with_weights=True)
            work.read(group)
            work.compute(group, update)
            work.write(group)
            work.finish(group)
            lanes.append(_io_seconds() - before)
        queue.rest()
        lane = queue.lane
        for _ in range(rounds + 1):
            adamw.kernel_seconds = lane.seconds = lane.num_requests = 0
            group = Group(block=block, number=0, start=0, stop=elements, with_weights=True)
            start = time.thread_time()
            work.read(group)
            read, read_lane = time.thread_time() - start, lane.seconds
            start = time.thread_time()
            work.compute(group, update)
            computed = time.thread_time() - start
            start = time.thread_time()
            work.write(group)
            work.finish(group)
            written = time.thread_time() - start
            seconds["read"].append(read - read_lane)
            seconds["update"].append(computed - adamw.kernel_seconds)
            seconds["write"].append(written - (lane.seconds - read_lane))
            seconds["kernel"].append(adamw.kernel_seconds)
        update.release()
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    return medians | {"lanes": statistics.median(lanes[1:]), "requests": lane.num_requests}


def main() -> None:
    """Parse the arguments, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--drives", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--elements", type=int, help="default: what a plan chooses for this number of drives")
    parser.add_argument("--gb-per-second", type=float, default=28.0)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the store")
    arguments = parser.parse_args()
    elements = arguments.elements or shape_for(arguments.drives).elements
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        found = measure(Path(directory), num_drives=arguments.drives, elements=elements, rounds=arguments.rounds)
    moving = 2 * RECORD_BYTES * elements / arguments.gb_per_second / 1e9
    python = found["read"] + found["update"] + found["write"]
    print(f"a group of {elements} parameters, {found['requests']:.0f} requests to {arguments.drives} drives")
    for name in ("read", "update", "write", "kernel", "lanes"):
        print(f"{name:<8}{1e3 * found[name]:>9.3f} ms")
    print(f"Python  {1e3 * python:>9.3f} ms, {python / moving:.3f} of the time that the drives take")
    print(json.dumps({"benchmark": "group_python", "elements": elements, "drives": arguments.drives, **found}))


if __name__ == "__main__":
    main()
