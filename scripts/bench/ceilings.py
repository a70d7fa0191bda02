"""Ceilings that the benchmarks measure in the same run: the drive's rate, and the rate of one layer's computing.

Invariant: a ceiling moves or computes what a step does, with nothing else at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.hardware.budget import best_seconds
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.tickets import Ticket, join
from ratel_cli.model.decoder import DecoderModel
from ratel_cli.planning.model_profile import ModelProfile
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


def block_flops_per_second(
    model: DecoderModel, profile: ModelProfile, batch: MicroBatch, device: torch.device, *, seconds: float
) -> float:
    """The rate of one layer's forward and backward, with all activations resident and nothing moved.

    Counts three times the operations of a forward, as for a whole step.
    """
    model.place(device)
    with torch.no_grad(), _bound(model, 0, device):
        embedded = model.begin(batch.to(device))
    leaf = embedded.hidden.detach().requires_grad_()
    with _bound(model, 1, device) as parameters:

        def work() -> None:
            output = model.layer_runner.run_layer(0, leaf, embedded.calls[0])[0]
            with torch.autograd.set_multithreading_enabled(False):  # as the engine does
                torch.autograd.grad(output, (leaf, *parameters), torch.ones_like(output))
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

        best = best_seconds(work, seconds)
    return 3 * profile.profiles[profile.layers[0]].flops_forward / best


@contextmanager
def _bound(model: DecoderModel, index: int, device: torch.device) -> Iterator[tuple[torch.nn.Parameter, ...]]:
    """A segment with random weights."""
    segment = model.spec.segments[index]
    try:
        yield tuple(
            parameter
            for block in segment.bound
            for parameter in model.bind(
                block, torch.empty(block.num_elements, dtype=torch.bfloat16, device=device).normal_(std=0.02)
            )
        )
    finally:
        model.release(segment)
