"""The out-of-core optimizer alone: states from NVMe, through AdamW, and back.

Regime: a store of bf16 records (12 B per parameter), all gradients in memory, no compute thread; one update of
every block. Two ceilings, measured in the same rounds, in turn with the contestants:

    NVMe     the bytes that the update reads and writes, through the same queue, both directions at once
    AdamW    the kernel on the same number of parameters, in memory

`of ceiling` is the larger of the two times divided by the contestant's time; the goal is 0.91 (1 / 1.10) for
`optimized`. `one group` has one group in flight each way. `naive` is the order of Ratel's Fig. 3a. Times are medians
over rounds; a fraction compares times of one round. The last line is JSON.

    python -m scripts.bench.optimizer [--parameters N] [--rounds N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.optimizer.group_update import GroupUpdater
from ratel_cli.engine.optimizer.groups import BlockUpdate, GroupWork
from ratel_cli.engine.optimizer.pipeline import GroupOrder, UpdatePipeline
from ratel_cli.engine.optimizer.settings import UpdateNumbers, adamw_settings
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.planning.profile.placement import GroupShape
from ratel_cli.planning.search.choose import shape_for
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from ratel_cli.sizes import GROUP_ELEMENTS
from ratel_cli.store.layout import Geometry
from ratel_cli.store.store import Store
from scripts.bench.ceilings import mixed_bytes_per_second
from scripts.bench.ratel_run import NO_IDENTITY, progress_at

RECORD_BYTES = 12
BYTES_PER_PARAMETER = 2 * RECORD_BYTES
PIPELINES: dict[str, tuple[GroupOrder, GroupShape]] = {
    "optimized": ("optimized", shape_for(1)),
    "one group": ("optimized", GroupShape()),
    "naive": ("naive", GroupShape()),
}
NUM_BLOCKS = 4


class OptimizerBench:
    """A store of equal blocks, and the updates that are timed on it."""

    def __init__(self, directory: Path, resources: ExitStack, num_parameters: int) -> None:
        self.pool = resources.enter_context(BufferPool(None))
        self.queue = resources.enter_context(open_queue("auto", notice=lambda text: print(text, file=sys.stderr)))
        self.directory = directory
        self.blocks = [_block(index, num_parameters // NUM_BLOCKS) for index in range(NUM_BLOCKS)]
        self.num_parameters = sum(block.num_elements for block in self.blocks)
        geometry = Geometry(blocks=tuple(block.stored for block in self.blocks), num_slots=2, shares=(1,))
        self.store = resources.enter_context(
            Store.create([directory], geometry, identity=NO_IDENTITY, queue=self.queue)
        )
        self.store.commit_import(progress_at(0))
        self._adamw = GroupUpdater(adamw_settings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01), seed=0)
        self._pipelines = {
            name: resources.enter_context(UpdatePipeline(self._work(), order=order, groups=groups))
            for name, (order, groups) in PIPELINES.items()
        }

    def optimizer(self, name: str) -> float:
        """Seconds of one update of all blocks, until the last byte is written."""
        gradients = [self._gradient(block) for block in self.blocks]
        step = self.store.progress.step + 1
        self.store.begin_step()
        start = time.perf_counter()
        for gradient in gradients:
            adamw = UpdateNumbers(number=step, learning_rate=1e-5, gradient_scale=1.0)
            self._pipelines[name].submit(BlockUpdate(gradient=gradient, weights=None, numbers=adamw))
        self._pipelines[name].wait_unfinished(at_most=0)
        seconds = time.perf_counter() - start
        self.store.commit(progress_at(step))
        return seconds

    def nvme(self) -> float:
        """Seconds that the drive needs for the same bytes, without the optimizer."""
        num_bytes = self.num_parameters * RECORD_BYTES
        rate = mixed_bytes_per_second([self.directory], self.queue, self.pool, num_bytes=min(num_bytes, 2 << 30))
        return 2 * num_bytes / rate

    def adamw(self) -> float:
        """Seconds of the same update when all states are in memory."""
        block = _block(0, min(GROUP_ELEMENTS, self.num_parameters))
        gradient = self._gradient(block)
        leases = {
            each.name: self.pool.lease(each.num_bytes(block.num_elements), "bench") for each in block.record.fields
        }
        memories = {name: lease.memory for name, lease in leases.items()}
        for memory in memories.values():
            memory[:] = bytes(len(memory))
        update = UpdateNumbers(number=1, learning_rate=1e-5, gradient_scale=1.0)
        self._adamw.update(memories, gradient, update, values=gradient.memory, start=0, stop=block.num_elements)
        num_updates = max(1, self.num_parameters // block.num_elements)
        start = time.perf_counter()
        for _ in range(num_updates):
            self._adamw.update(memories, gradient, update, values=gradient.memory, start=0, stop=block.num_elements)
        seconds = time.perf_counter() - start
        memories.clear()
        for lease in leases.values():
            lease.release()
        gradient.release()
        return seconds

    def _gradient(self, block: BlockSpec) -> BlockGradient:
        total = gradient_sum(block, self.pool, HostDevice(Timeline()), single=True)
        total.add([torch.full(block.parameters[0].shape, 1e-3, dtype=torch.bfloat16)])
        return total.finish()

    def _work(self) -> GroupWork:
        return GroupWork(self._adamw, self.store, self.pool, timeline=Timeline())


def main() -> None:
    """Parse the arguments, run the rounds, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the store")
    arguments = parser.parse_args()
    with ExitStack() as resources:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        bench = OptimizerBench(directory, resources, arguments.parameters)
        timed: dict[str, Callable[[], float]] = {
            "NVMe": bench.nvme,
            "AdamW": bench.adamw,
            **{name: partial(bench.optimizer, name) for name in PIPELINES},
        }
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        names = list(timed)
        for number in range(arguments.rounds + 1):
            for turn in range(len(names)):
                name = names[(turn + number) % len(names)]
                spent = timed[name]()
                if number:
                    seconds[name].append(spent)
        report(bench.num_parameters, seconds)


def report(num_parameters: int, seconds: dict[str, list[float]]) -> None:
    """Print the table and the JSON."""
    ceilings = [max(pair) for pair in zip(seconds["NVMe"], seconds["AdamW"], strict=True)]
    print(f"{'contestant':<12}{'seconds':>9}{'ns/param':>10}{'GB/s':>7}{'of ceiling':>12}")
    summary: dict[str, object] = {"benchmark": "optimizer", "num_parameters": num_parameters}
    for name, spent in seconds.items():
        median = statistics.median(spent)
        fraction = statistics.median(ceiling / own for ceiling, own in zip(ceilings, spent, strict=True))
        rate = num_parameters * BYTES_PER_PARAMETER / median / 1e9
        print(f"{name:<12}{median:>9.3f}{1e9 * median / num_parameters:>10.2f}{rate:>7.2f}{fraction:>12.3f}")
        summary[name] = {"seconds": spent, "median_seconds": median, "of_ceiling": fraction}
    print(json.dumps(summary))


def _block(index: int, num_elements: int) -> BlockSpec:
    return lay_out_block(
        dtype="bfloat16", index=index, name=f"block {index}", parameters=[("w", (num_elements,), True)]
    )


if __name__ == "__main__":
    main()
