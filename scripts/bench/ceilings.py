"""Ceilings that the benchmarks measure in the same run: the drive's rate, and the rate of one layer's computing.

Invariant: a ceiling moves or computes what a step does, with nothing else at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.units import MIB

_GROUP_BYTES = 24 * MIB
"""Bytes of one transfer: the states of a group of the optimizer."""
_NUM_IN_FLIGHT = 3


def mixed_bytes_per_second(
    paths: Sequence[Path], queue: IoQueue, pool: BufferPool, *, num_bytes: int = 1 << 30
) -> float:
    """The drive's rate when it reads and writes `num_bytes` each at once, in pieces as large as the optimizer's.

    Reads and writes count together.
    """
    num_bytes = max(1, num_bytes // _GROUP_BYTES) * _GROUP_BYTES
    with ExitStack() as resources:
        scratch = resources.enter_context(Scratch(paths, 2 * num_bytes, queue))
        leases = [resources.enter_context(pool.lease(_GROUP_BYTES, "measuring")) for _ in range(2 * _NUM_IN_FLIGHT)]
        for offset in range(0, 2 * num_bytes, _GROUP_BYTES):
            scratch.write(offset, leases[0].memory).wait()
        start = time.perf_counter()
        tickets: deque[Ticket] = deque()
        for number, offset in enumerate(range(0, num_bytes, _GROUP_BYTES)):
            if len(tickets) == 2 * _NUM_IN_FLIGHT:
                tickets.popleft().wait()
                tickets.popleft().wait()
            read, write = leases[2 * (number % _NUM_IN_FLIGHT)], leases[2 * (number % _NUM_IN_FLIGHT) + 1]
            tickets += [scratch.read(offset, read.memory), scratch.write(num_bytes + offset, write.memory)]
        join(tickets).wait()
        return 2 * num_bytes / (time.perf_counter() - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """How long the same work took, again and again: what a GPU can do at its best, and what it does all the time."""

    best_seconds: float
    median_seconds: float
    last_seconds: float
    """Median of the last third, when the GPU is warm."""
    number: int

    def rates(self, amount: float) -> dict[str, float]:
        """What each means for work of this amount: per second."""
        return {
            "best": amount / self.best_seconds,
            "median": amount / self.median_seconds,
            "last third": amount / self.last_seconds,
        }


def sustained(work: Callable[[], object], device: torch.device, *, seconds: float) -> Sustained:
    """Run `work` repeatedly for `seconds`, at least once, after one warm-up run. The GPU has ended each run before the
    next one begins."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    timed()
    times = [timed()]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(timed())
    return Sustained(
        best_seconds=min(times),
        median_seconds=median(times),
        last_seconds=median(times[-max(1, len(times) // 3) :]),
        number=len(times),
    )


def block_rates(
    model: DecoderModel, profile: ModelProfile, batch: MicroBatch, device: torch.device, *, seconds: float
) -> dict[str, float]:
    """The rates of one layer's forward and backward, with all activations resident and nothing moved: the best, and
    what it sustains.

    Counts three times the operations of a forward, as for a whole step.
    """
    model.move_to(device)
    with torch.no_grad(), bound(model, 0, device):
        embedded = model.begin(batch.to(device))
    leaf = embedded.hidden.detach().requires_grad_()
    with bound(model, 1, device) as parameters:
        trained = [each for each in parameters if each.requires_grad]

        def work() -> None:
            output = model.layer_runner.run_layer(0, leaf, embedded.calls[0])[0]
            with torch.autograd.set_multithreading_enabled(False):  # as the engine does
                torch.autograd.grad(output, (leaf, *trained), torch.ones_like(output))

        found = sustained(work, device, seconds=seconds)
    return found.rates(3 * profile.profiles[profile.layers[0]].flops_forward)


@contextmanager
def bound(model: DecoderModel, index: int, device: torch.device) -> Iterator[tuple[torch.nn.Parameter, ...]]:
    """A segment with random weights."""
    segment = model.spec.segments[index]
    try:
        yield tuple(
            parameter for block in segment.bound for parameter in model.bind(block, _random_values(block, device))
        )
    finally:
        model.release(segment)


def _random_values(block: BlockSpec, device: torch.device) -> torch.Tensor:
    if block.dtype == "uint8":  # the bytes of quantised matrices, whose scales must be numbers
        return torch.ones(block.num_elements, dtype=torch.uint8, device=device)
    return torch.empty(block.num_elements, dtype=DTYPES[block.dtype], device=device).normal_(std=0.02)
