"""The out-of-core optimizer alone over many simulated drives: are all of them busy all the time?

Regime: no machine here has twelve drives, so they are simulated (`scripts/bench/simulated_drives.py`), each with a rate
and a latency; the store, the queue's requests, the optimizer thread and AdamW are Ratel's own. Everything is a part of
its size on a real machine (`--scale`): stripes, requests, groups. The rates are lower by much more, so that a small
machine can follow: what is measured is whether each drive has the next request in its queue when one ends.

The ceiling is the sum of the drives' rates: `of ceiling` is the time that all bytes take at that rate, divided by the
time taken; the goal is 0.90 for the groups that a plan chooses for this number of drives. `one group` has groups of the
size for one drive, one in flight; `large, one` has the chosen size, and one in flight. Contestants take turns; the
times are medians. The last line is JSON.

    python -m scripts.bench.many_drives [--drives N] [--rate-mb N] [--latency-ms N] [--scale N] [--groups N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.optimizer.group_update import GroupUpdater
from ratel_cli.engine.optimizer.groups import BlockUpdate, GroupWork
from ratel_cli.engine.optimizer.pipeline import UpdatePipeline
from ratel_cli.engine.optimizer.settings import UpdateNumbers, adamw_settings
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import DEFAULT_REQUEST_BYTES, depth_for
from ratel_cli.planning.profile.placement import GroupShape
from ratel_cli.planning.search.choose import shape_for
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from ratel_cli.sizes import BLOCK_ALIGNMENT, GROUP_ELEMENTS, STRIPE_BYTES
from ratel_cli.store.layout import Geometry
from ratel_cli.store.store import Store
from scripts.bench.ratel_run import NO_IDENTITY, progress_at
from scripts.bench.simulated_drives import DriveKind, SimulatedDrives


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """The drives of one run of the benchmark, and the part of their real size that everything has."""

    count: int
    kind: DriveKind
    scale: int
    """Stripes, requests and groups are smaller by this factor."""

    @property
    def bytes_per_second(self) -> float:
        """The sum of the drives' rates."""
        return self.count * self.kind.bytes_per_second

    def shape(self, *, elements: int, in_flight: int) -> GroupShape:
        """Groups of a real size, scaled."""
        return GroupShape(elements=max(BLOCK_ALIGNMENT, elements // self.scale), in_flight=in_flight)

    def contestants(self) -> dict[str, GroupShape]:
        """By name: the groups that are compared."""
        chosen = shape_for(self.count)
        return {
            "one group": self.shape(elements=GROUP_ELEMENTS, in_flight=1),
            "large, one": self.shape(elements=chosen.elements, in_flight=1),
            "chosen": self.shape(elements=chosen.elements, in_flight=chosen.in_flight),
        }


class ManyDrives:
    """A store of one block over simulated drives, and updates of it."""

    def __init__(self, directory: Path, resources: ExitStack, drives: Drives, *, num_elements: int) -> None:
        self._drives = drives
        self._pool = resources.enter_context(BufferPool(None))
        self.queue = resources.enter_context(
            SimulatedDrives(
                drives.kind, request_bytes=DEFAULT_REQUEST_BYTES // drives.scale, depth=depth_for(drives.count)
            )
        )
        self._block: BlockSpec = lay_out_block(
            dtype="bfloat16", index=0, name="block", parameters=[("w", (num_elements,), True)]
        )
        geometry = Geometry(
            blocks=(self._block.stored,),
            num_slots=2,
            shares=(1,) * drives.count,
            stripe_bytes=STRIPE_BYTES // drives.scale,
            chunk_elements=max(BLOCK_ALIGNMENT, (1 << 18) // drives.scale),
        )
        paths = [directory / f"drive{number}" for number in range(drives.count)]
        self._store = resources.enter_context(Store.create(paths, geometry, identity=NO_IDENTITY, queue=self.queue))
        self._store.commit_import(progress_at(0))
        settings = adamw_settings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01)
        self._adamw = resources.enter_context(GroupUpdater(settings, seed=0))

    def update(self, groups: GroupShape) -> float:
        """The share of the drives' summed rate that one update of all parameters reaches."""
        total = gradient_sum(self._block, self._pool, HostDevice(Timeline()), single=True)
        total.add([torch.full(self._block.parameters[0].shape, 1e-3, dtype=torch.bfloat16)])
        gradient = total.finish()
        step = self._store.progress.step + 1
        self._store.begin_step()
        work = GroupWork(self._adamw, self._store, self._pool, timeline=Timeline())
        before = self.queue.read_bytes + self.queue.written_bytes
        with UpdatePipeline(work, groups=groups) as pipeline:
            start = time.perf_counter()
            adamw = UpdateNumbers(number=step, learning_rate=1e-5, gradient_scale=1.0)
            pipeline.submit(BlockUpdate(gradient=gradient, weights=None, numbers=adamw))
            pipeline.wait_unfinished(at_most=0)
            seconds = time.perf_counter() - start
        moved_bytes = self.queue.read_bytes + self.queue.written_bytes - before
        self._store.commit(progress_at(step))
        return moved_bytes / self._drives.bytes_per_second / seconds


def measure(directory: Path, drives: Drives, *, num_groups: int, rounds: int) -> dict[str, list[float]]:
    """By contestant: the share of the ceiling in each round. The model has `num_groups` groups of the chosen size."""
    contestants = drives.contestants()
    shares: dict[str, list[float]] = {name: [] for name in contestants}
    with ExitStack() as resources:
        bench = ManyDrives(directory, resources, drives, num_elements=num_groups * contestants["chosen"].elements)
        for _ in range(rounds):
            for name, groups in contestants.items():
                shares[name].append(bench.update(groups))
    return shares


def main() -> None:
    """Parse the arguments, run the rounds, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--drives", type=int, default=12)
    parser.add_argument("--rate-mb", type=float, default=8.0, help="MB/s of one drive, reads and writes together")
    parser.add_argument("--latency-ms", type=float, default=4.0)
    parser.add_argument("--scale", type=int, default=64, help="stripes, requests and groups are smaller by this")
    parser.add_argument("--groups", type=int, default=48, help="groups of the chosen size that are updated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the store")
    arguments = parser.parse_args()
    drives = Drives(
        count=arguments.drives,
        kind=DriveKind(bytes_per_second=arguments.rate_mb * 1e6, latency_seconds=arguments.latency_ms / 1e3),
        scale=arguments.scale,
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        shares = measure(Path(directory), drives, num_groups=arguments.groups, rounds=arguments.rounds)
    print(
        f"{drives.count} drives, {drives.bytes_per_second / 1e6:.0f} MB/s together, 1/{drives.scale} of the real size"
    )
    print(f"{'contestant':<12}{'elements':>10}{'in flight':>10}{'of ceiling':>12}")
    for name, groups in drives.contestants().items():
        share = statistics.median(shares[name])
        print(f"{name:<12}{groups.elements:>10}{groups.in_flight:>10}{share:>12.3f}")
    print(json.dumps({"benchmark": "many_drives", "arguments": vars(arguments), "of_ceiling": shares}))


if __name__ == "__main__":
    main()
