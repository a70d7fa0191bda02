"""The cost of checksums and durable commits: steps with both next to steps with neither.

Regime: a Llama shape with random weights and tokens, bf16; one process with two stores on the same drive and an engine
on each. They take turns of a few steps, under the same plan, and move the same records. As in training, a step is
committed during the next step's forward; the first step of a turn has nothing to commit, and is not counted:

    durable    as training does: a checksum of each chunk, written and read; fdatasync and a manifest for every commit
    bare       no checksums, and commits that wait for nothing to become durable: a crash may lose the store

The ceiling is `bare` in the same run. Two promises:

    step time    durable at most 2 % above bare: median over the ratios of steps in the same place of a round
    bytes        at most 1 % more written by a step

The last line is JSON.

    python -m scripts.bench.durability [--shape 0.35b|1b|tiny] [--tokens N] [--micro-batches N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.hardware.host import default_limit_bytes
from ratel_cli.planning.search.plan import Plan
from ratel_cli.sizes import CHUNK_ELEMENTS
from ratel_cli.store.barrier import Barrier
from ratel_cli.units import GIB
from scripts.bench.contestants import add_arguments, batches_of, in_turns, print_promise, task_of
from scripts.bench.ratel_run import RatelRun, Steps, open_run

_TIME, _BYTES = 0.02, 0.01


class BareBarrier(Barrier):
    """A barrier that writes, but does not wait until anything is durable."""

    def sync(self, fd: int) -> None:  # noqa: ARG002 - as Barrier has it
        return

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        os.pwritev(fd, [page], offset)


@dataclass(slots=True)
class Side:
    """One of the two stores, its engine, and what was measured of it."""

    run: RatelRun
    steps: Steps
    seconds: list[float] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)

    def turn(self, steps: Sequence[list[MicroBatch]]) -> None:
        """Run some steps. Afterwards the drive is idle, for the other store's turn."""
        queue = self.run.context.queue
        before = queue.written_bytes
        for number, batches in enumerate(steps):
            step = self.steps.run(batches)
            if number:
                self.seconds.append(step.seconds)
        self.steps.settle()
        self.written_bytes.append(queue.written_bytes - before)


def main() -> None:
    """Parse the arguments, run the steps, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser, shape="0.35b", tokens=512, micro_batches=4, steps=21)
    parser.add_argument("--turn", type=int, default=4, help="steps of a turn, including the one that is not counted")
    arguments = parser.parse_args()
    task = task_of(arguments, "ratel")
    limit_bytes = int((arguments.host_memory_gib or 0) * GIB) or default_limit_bytes() // 2
    with ExitStack() as resources:
        runs = {
            name: resources.enter_context(
                open_run(
                    task, limit_bytes=limit_bytes, activations="auto", chunk_elements=chunk_elements, barrier=barrier
                )
            )
            for name, chunk_elements, barrier in (("durable", CHUNK_ELEMENTS, None), ("bare", 0, BareBarrier()))
        }
        batches = list(batches_of(task))
        plan = _plan(runs["durable"], batches[0])
        sides = {name: Side(run, resources.enter_context(run.under(plan))) for name, run in runs.items()}
        turns = [batches[first : first + arguments.turn] for first in range(1, len(batches), arguments.turn)]
        for number, side in in_turns(list(sides.values()), len(turns)):
            side.turn(turns[number])
    report(arguments, sides["durable"], sides["bare"])


def report(arguments: argparse.Namespace, durable: Side, bare: Side) -> None:
    """Print the table, the promises and the JSON."""
    print(f"{'':<10}{'s/step':>9}{'MB in a turn':>14}")
    for name, side in (("durable", durable), ("bare", bare)):
        print(f"{name:<10}{median(side.seconds):>9.3f}{median(side.written_bytes) / 1e6:>14.2f}")
    costs = {
        "time": _excess(durable.seconds, bare.seconds),
        "bytes": _excess(durable.written_bytes, bare.written_bytes),
    }
    for name, limit in (("time", _TIME), ("bytes", _BYTES)):
        print_promise(f"{name} for durability and checksums", costs[name], at_most=limit)
    summary = {
        "benchmark": "durability",
        "arguments": vars(arguments),
        **{f"{name}_excess": excess for name, excess in costs.items()},
        "durable_seconds": durable.seconds,
        "bare_seconds": bare.seconds,
    }
    print(json.dumps(summary))


def _plan(run: RatelRun, batches: list[MicroBatch]) -> Plan:
    _, profile = run.record(batches)
    return run.planner.plan(profile)


def _excess(mine: Sequence[float], others: Sequence[float]) -> float:
    return median(a / b for a, b in zip(mine, others, strict=True)) - 1


if __name__ == "__main__":
    main()
