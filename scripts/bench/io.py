"""How close Ratel's I/O queue comes to the rate that a plain C loop gets from the drive.

Regime: one preallocated file, each byte of which was written once. It is moved whole with O_DIRECT, from and to
huge-page buffers: `read`, `write`, and `mixed`, which reads the first half while it writes the second half, as an
optimizer step does (12 B read and 12 B written per parameter). All contestants have requests of the same size, the
same number in flight per direction, and at least 64 MiB of buffers per direction: smaller buffers stay in the CPU's
caches, which is faster (a drive of 2.1 GB/s reads 2.8 GB/s into the same 16 MiB again and again), but model state does
not. Set-up is not timed. Ceiling: the fastest of

    c loop             io_loop.c: io_uring by system calls, one thread, one ring
    c loop registered  the same, with the file and the buffers registered beforehand
    fio                where it is installed

`of best` is the time of the fastest of these, divided by the contestant's. The others:

    ratel io_uring     `io.queue` as the store uses it: transfers of 8 MiB, several in flight
    ratel liburing     the same lane on the ring of the Python package liburing, where that is installed
    ratel threads      its other engine
    deepspeed aio      where it is installed

The contestants take turns in every round, in an order that rotates. Times are medians over rounds; `of best` is the
median of the rounds' fractions. CPU seconds are user and system time of the contestant's whole process, per GB moved.
The last line is JSON.

    python -m scripts.bench.io [--directory DIR] [--span-gib N] [--rounds N] [--smoke]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import SpaceNeed, check_space, reserve, use_direct_io
from ratel_cli.io.queue import DEFAULT_DEPTH, DEFAULT_REQUEST_BYTES, EngineName, Extent, open_queue
from ratel_cli.io.tickets import Ticket
from ratel_cli.units import GIB, MIB

Mode = Literal["read", "write", "mixed"]
MODES: tuple[Mode, ...] = ("read", "write", "mixed")
LOOP_SOURCE = Path(__file__).with_name("io_loop.c")
TRANSFER_BYTES = 8 * MIB
TRANSFERS_IN_FLIGHT = 12
"""A few more than fit in the queue's depth, so that the queue never runs empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to move. The file has no name any more; `path` lets other processes open it."""

    fd: int
    path: str
    span_bytes: int
    request_bytes: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of moving the span once."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTransfer:
    """A contestant: `run` moves the span once. The others are compared with those that are a limit."""

    name: str
    is_limit: bool
    run: Callable[[Mode], Cost]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """The medians of one contestant in one mode."""

    name: str
    mode: Mode
    seconds: float
    bytes_per_second: float
    fraction_of_best: float
    cpu_seconds_per_gb: float


def make_file(directory: Path, span_bytes: int, resources: ExitStack) -> int:
    """A file without a name, so that nothing is left behind. Every byte of it is written."""
    check_space([SpaceNeed(directory=directory, num_bytes=span_bytes)])
    fd, name = tempfile.mkstemp(prefix="ratel.bench_io.", dir=directory)
    resources.callback(os.close, fd)
    os.unlink(name)
    reserve(fd, Path(name), span_bytes)
    use_direct_io([fd], [Path(name)], sys.exit)
    with open_queue("threads", notice=print) as queue, BufferPool(None) as pool:
        memories = [random_buffer(pool, resources)]
        move(lambda extent: queue.write([extent]), memories, fd, 0, span_bytes)
    os.fsync(fd)
    return fd


def random_buffer(pool: BufferPool, resources: ExitStack) -> memoryview:
    """A buffer whose contents no drive can compress."""
    lease = resources.enter_context(pool.lease(TRANSFER_BYTES, "benchmark"))
    lease.memory[:] = os.urandom(TRANSFER_BYTES)
    return lease.memory


def move(
    transfer: Callable[[Extent], Ticket], memories: Sequence[memoryview], fd: int, start: int, num_bytes: int
) -> None:
    """Move `num_bytes` in one direction, with a transfer in flight for each of the memories."""
    in_flight: deque[Ticket] = deque()
    for number, done_bytes in enumerate(range(0, num_bytes, TRANSFER_BYTES)):
        if len(in_flight) == len(memories):
            in_flight.popleft().wait()
        memory = memories[number % len(memories)][: num_bytes - done_bytes]
        in_flight.append(transfer(Extent(fd=fd, offset=start + done_bytes, memory=memory)))
    for ticket in in_flight:
        ticket.wait()


def ratel_contestant(
    engine: EngineName, work: Work, buffers: dict[str, list[memoryview]], resources: ExitStack
) -> TimedTransfer:
    """Ratel's queue, which stays open; a thread drives each direction."""
    queue = resources.enter_context(
        open_queue(engine, notice=print, request_bytes=work.request_bytes, depth=work.depth)
    )
    writer = resources.enter_context(ThreadPoolExecutor(1))

    def read(start: int, num_bytes: int) -> None:
        move(lambda extent: queue.read([extent]), buffers["read"], work.fd, start, num_bytes)

    def write(start: int, num_bytes: int) -> None:
        move(lambda extent: queue.write([extent]), buffers["write"], work.fd, start, num_bytes)

    def run(mode: Mode) -> Cost:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        if mode == "mixed":
            half_bytes = work.span_bytes // 2
            writing = writer.submit(write, half_bytes, half_bytes)
            read(0, half_bytes)
            writing.result()
        else:
            (read if mode == "read" else write)(0, work.span_bytes)
        return Cost(seconds=time.perf_counter() - begin, cpu_seconds=time.process_time() - begin_cpu)

    return TimedTransfer(name=f"ratel {engine}", is_limit=False, run=run)


def loop_contestant(variant: Literal["plain", "registered"], program: Path, work: Work) -> TimedTransfer:
    def run(mode: Mode) -> Cost:
        sizes = map(str, (work.span_bytes, work.request_bytes, work.depth))
        report = run_program([program, work.path, mode, *sizes, variant])
        return Cost(**json.loads(report))

    return TimedTransfer(name="c loop" if variant == "plain" else "c loop registered", is_limit=True, run=run)


def fio_contestant(program: str, work: Work) -> TimedTransfer:
    def job(direction: str, start: int, num_bytes: int) -> list[str]:
        return [f"--name={direction}", f"--rw={direction}", f"--offset={start}", f"--size={num_bytes}"]

    def run(mode: Mode) -> Cost:
        half_bytes = work.span_bytes // 2
        jobs = (
            [*job("read", 0, half_bytes), *job("write", half_bytes, half_bytes)]
            if mode == "mixed"
            else job(mode, 0, work.span_bytes)
        )
        common = ["--ioengine=io_uring", "--direct=1", "--thread", "--output-format=json"]
        sizes = [f"--bs={work.request_bytes}", f"--iodepth={work.depth}", f"--filename={work.path}"]
        report = json.loads(run_program([program, *common, *sizes, *jobs]))
        done = [(row["job_runtime"] / 1000, (row["usr_cpu"] + row["sys_cpu"]) / 100) for row in report["jobs"]]
        return Cost(
            seconds=max(seconds for seconds, _ in done), cpu_seconds=sum(seconds * share for seconds, share in done)
        )

    return TimedTransfer(name="fio", is_limit=True, run=run)


def deepspeed_contestant(work: Work) -> TimedTransfer:
    """DeepSpeed's asynchronous I/O: pinned buffers of its own, and a handle for each direction.

    A handle empties its queue after each buffer.
    """
    import torch

    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    operation = builder.load(verbose=False)
    reader, writer = (operation.aio_handle(work.request_bytes, work.depth, False, True, 1) for _ in range(2))
    num_bytes = TRANSFERS_IN_FLIGHT * TRANSFER_BYTES
    into, out_of = (
        handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8)).random_()
        for handle in (reader, writer)
    )

    def run(mode: Mode) -> Cost:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        part_bytes = work.span_bytes // 2 if mode == "mixed" else work.span_bytes
        for start in range(0, part_bytes, num_bytes):
            size = min(num_bytes, part_bytes - start)
            if mode != "write":
                reader.async_pread(into[:size], work.path, start)
            if mode != "read":
                writer.async_pwrite(out_of[:size], work.path, work.span_bytes - part_bytes + start)
        if mode != "write":
            reader.wait()
        if mode != "read":
            writer.wait()
        return Cost(seconds=time.perf_counter() - begin, cpu_seconds=time.process_time() - begin_cpu)

    return TimedTransfer(name="deepspeed aio", is_limit=False, run=run)


def find_contestants(work: Work, directory: Path, resources: ExitStack) -> list[TimedTransfer]:
    """All contestants that can run here. Prints a line for each that cannot. `directory` gets the compiled loop."""
    pool = resources.enter_context(BufferPool(None))
    buffers = {
        direction: [random_buffer(pool, resources) for _ in range(TRANSFERS_IN_FLIGHT)]
        for direction in ("read", "write")
    }
    candidates: list[tuple[str, Callable[[], TimedTransfer]]] = [
        ("c loop", lambda: loop_contestant("plain", build_loop(directory), work)),
        ("c loop registered", lambda: loop_contestant("registered", build_loop(directory), work)),
        ("fio", lambda: fio_contestant(find_program("fio"), work)),
        ("ratel io_uring", lambda: ratel_contestant("io_uring", work, buffers, resources)),
        ("ratel liburing", lambda: ratel_contestant("liburing", work, buffers, resources)),
        ("ratel threads", lambda: ratel_contestant("threads", work, buffers, resources)),
        ("deepspeed aio", lambda: deepspeed_contestant(work)),
    ]
    found: list[TimedTransfer] = []
    for name, make in candidates:
        try:
            contestant = make()
            contestant.run("read")
        except (EnvironmentFailure, ImportError, RuntimeError) as reason:
            print(f"{name} takes no part: {reason}")
        else:
            found.append(contestant)
    if not any(contestant.is_limit for contestant in found):
        sys.exit("neither the C loop nor fio runs here: there is nothing to compare with")
    return found


def build_loop(directory: Path) -> Path:
    program = directory / "loop"
    if not program.exists():
        run_program([find_program("cc"), "-O2", LOOP_SOURCE, "-o", program])
    return program


def find_program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise RuntimeError(f"{name} is not installed")
    return program


def run_program(command: Sequence[str | Path]) -> str:
    """The output of a program. Raises RuntimeError with the program's own message."""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip())
    return run.stdout


def measure(contestants: Sequence[TimedTransfer], num_rounds: int) -> dict[tuple[str, Mode], list[Cost]]:
    """The cost of every run. A first round does not count."""
    costs: dict[tuple[str, Mode], list[Cost]] = {(one.name, mode): [] for one in contestants for mode in MODES}
    for number in range(num_rounds + 1):
        first = number % len(contestants)
        for mode in MODES:
            for contestant in (*contestants[first:], *contestants[:first]):
                cost = contestant.run(mode)
                if number > 0:
                    costs[contestant.name, mode].append(cost)
    return costs


def summarize(
    contestants: Sequence[TimedTransfer], costs: dict[tuple[str, Mode], list[Cost]], span_bytes: int
) -> list[TransferResult]:
    """Medians. The fraction of the best is the median of the rounds' own fractions, so that drift cancels."""
    seconds = {key: [cost.seconds for cost in own] for key, own in costs.items()}
    limits = [contestant.name for contestant in contestants if contestant.is_limit]
    results: list[TransferResult] = []
    for mode in MODES:
        best = min(limits, key=lambda name: statistics.median(seconds[name, mode]))
        for contestant in contestants:
            own = seconds[contestant.name, mode]
            cpu_seconds = statistics.median(cost.cpu_seconds for cost in costs[contestant.name, mode])
            results.append(
                TransferResult(
                    name=contestant.name,
                    mode=mode,
                    seconds=statistics.median(own),
                    bytes_per_second=span_bytes / statistics.median(own),
                    fraction_of_best=statistics.median(a / b for a, b in zip(seconds[best, mode], own, strict=True)),
                    cpu_seconds_per_gb=cpu_seconds / (span_bytes / 1e9),
                )
            )
    return results


def print_table(results: Sequence[TransferResult]) -> None:
    print(f"{'mode':<7}{'contestant':<20}{'GB/s':>8}{'of best':>10}{'CPU s/GB':>11}")
    for result in results:
        print(
            f"{result.mode:<7}{result.name:<20}{result.bytes_per_second / 1e9:>8.2f}"
            f"{result.fraction_of_best:>10.3f}{result.cpu_seconds_per_gb:>11.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the drive to measure")
    parser.add_argument("--span-gib", type=float, default=2.0, help="size of the file")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each contestant")
    parser.add_argument("--smoke", action="store_true", help="a tiny file, two rounds: does it run?")
    arguments = parser.parse_args()
    span_bytes = 64 * MIB if arguments.smoke else int(arguments.span_gib * GIB) // (2 * MIB) * (2 * MIB)
    num_rounds = 2 if arguments.smoke else arguments.rounds
    with ExitStack() as resources:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="ratel.bench_io.")))
        try:
            fd = make_file(arguments.directory, span_bytes, resources)
        except EnvironmentFailure as failure:
            sys.exit(failure.message)
        work = Work(
            fd=fd,
            path=f"/proc/{os.getpid()}/fd/{fd}",
            span_bytes=span_bytes,
            request_bytes=DEFAULT_REQUEST_BYTES,
            depth=DEFAULT_DEPTH,
        )
        contestants = find_contestants(work, directory, resources)
        results = summarize(contestants, measure(contestants, num_rounds), span_bytes)
    print_table(results)
    print(
        json.dumps(
            {
                "benchmark": "io",
                "span_bytes": span_bytes,
                "request_bytes": DEFAULT_REQUEST_BYTES,
                "depth": DEFAULT_DEPTH,
                "num_rounds": num_rounds,
                "results": [asdict(result) for result in results],
            }
        )
    )


if __name__ == "__main__":
    main()
