"""What clipping costs on a drive and a processor of known speeds: steps clipped never, always, or every other time.

Regime: a Llama shape with random weights, bf16, nothing resident; a drive that reads and writes at a given rate, and a
processor on which the backward of a block takes as long as the drive takes for its update, and a quarter more. So an
update is hidden by backward, but not by forward, which takes a third of that. A step is clipped if its loss is the mean
over its targets, and not if it is divided by a million: its norm is then far above the limit, or far below it. The
contestants take turns on one store, under one placement:

    eager       no limit: each block is updated as its gradient arrives
    deferred    every step is clipped, without speculating
    never       no step is clipped; the engine decides what it does, as for the next three
    always      every step is clipped
    half        every other step is clipped
    late        every other step is clipped, and that is noticed after backward, when all blocks have been updated

Promise: `never` takes at most 1.05 of `eager`, `always` of `deferred`, `half` of their mean, `late` of `deferred`. In
`late` speculation costs most: a clipped step updates every block twice. By its prediction the engine speculates there
only while the unclipped steps gain at least what the clipped ones lose, so deferring is the bound, and not the mean.
Times are of steps in the middle of a run, the mean of an even number of them; medians over the rounds. The last line is
JSON.

    python -m scripts.bench.clipping [--shape small|0.35b] [--megabytes-per-second N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from typing import Literal, get_args
from unittest.mock import patch

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer import speculation as speculation_module
from ratel_cli.engine.optimizer.settings import adamw_settings
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.build import EngineParts
from ratel_cli.engine.steps.following import EngineSettings
from ratel_cli.hardware.host import default_limit_bytes
from ratel_cli.io.queue import IoQueue
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.planning.search.clipping import SpeculationCosts, speculation_costs
from scripts.bench.contestants import SHAPES, Task, batches_of, in_turns, print_promise
from scripts.bench.ratel_run import RatelRun, Steps, open_run
from scripts.bench.throttled_queue import ThrottledQueue

Mode = Literal["eager", "deferred", "never", "always", "half", "late"]
MODES: tuple[Mode, ...] = get_args(Mode)
CLIPPED: Mapping[Mode, tuple[bool, ...]] = {
    "eager": (False,),
    "deferred": (True,),
    "never": (False,),
    "always": (True,),
    "half": (False, True),
    "late": (False, True),
}
"""Which steps are clipped, over and over."""
MOST = 0.05
"""The share of the time that clipping may cost."""
_LIMIT = 1e-3
_WARM_UP = 2
_SLACK = 1.25
_FORWARD_SHARE = 1 / 3
_PLACEMENT = Placement(prefetch_blocks=2, pending_updates=2)


class SlowDevice(HostDevice):
    """The CPU, on which computing a block takes a given time."""

    def __init__(self, timeline: Timeline, seconds: Mapping[tuple[int, str], float]) -> None:
        """`seconds`: by block and stage."""
        super().__init__(timeline)
        self._seconds = seconds

    def computing(self, label: SpanLabel) -> AbstractContextManager[None]:
        return self._computing(label)

    @contextmanager
    def _computing(self, label: SpanLabel) -> Iterator[None]:
        is_block = label.text.startswith(label.stage)  # not the work on its gradient
        due = time.perf_counter() + (self._seconds[label.block, label.stage] if is_block else 0.0)
        with super().computing(label):
            yield
            time.sleep(max(0.0, due - time.perf_counter()))


class ClippingBench:
    """One model, its store, and the two speeds."""

    def __init__(self, run: RatelRun, *, bytes_per_second: float) -> None:
        self._run = run
        backward = {block.index: _SLACK * block.record_bytes / bytes_per_second for block in run.model.spec.blocks}
        self._seconds = {(block, "backward"): seconds for block, seconds in backward.items()}
        self._seconds |= {(block, "forward"): _FORWARD_SHARE * seconds for block, seconds in backward.items()}

    def predict(self, batches: list[MicroBatch]) -> SpeculationCosts:
        """Record a step; what the plan says of speculating under the benchmark's placement."""
        recording, planner, estimate = StepRecording(), self._run.planner, self._run.estimate()
        with self.steps(None, None) as steps:
            step = steps.run(batches, recording=recording, settled=True)
        problem = planner.problem(planner.recorded(recording, step.times.spans, estimate=estimate), planner.decisions)
        costs = speculation_costs(problem, problem.evaluate(_PLACEMENT))
        if costs is None:
            sys.exit("this machine does not keep up with the drive: set a lower --megabytes-per-second")
        return costs

    def measure(self, mode: Mode, costs: SpeculationCosts, batches: list[list[MicroBatch]]) -> float:
        """The mean seconds of the steps after the warm-up."""
        pattern = islice(cycle(CLIPPED[mode]), len(batches))
        speculation = costs if mode != "deferred" else None
        # No step's norm can be steered to within the margin above the limit, so the margin goes to where the norm is.
        margin = patch.object(speculation_module, "_CERTAIN", math.inf) if mode == "late" else nullcontext()
        with margin, self.steps(None if mode == "eager" else _LIMIT, speculation) as steps:
            for number, (is_clipped, step) in enumerate(zip(pattern, batches, strict=True)):
                if number == _WARM_UP:
                    start = time.perf_counter()
                divisor = 1 if is_clipped else 10**6
                scaled = [replace(batch, num_targets=batch.num_targets * divisor) for batch in step]
                outcome = steps.run(scaled).outcome
                assert mode == "eager" or outcome.clipped == is_clipped
            return (time.perf_counter() - start) / (len(batches) - _WARM_UP)

    @contextmanager
    def steps(self, max_grad_norm: float | None, speculation: SpeculationCosts | None) -> Iterator[Steps]:
        """Steps of a new engine on the slow machine. The last one is settled at the end."""
        run, timeline = self._run, Timeline()
        config = run.context.config
        settings = EngineSettings(
            optimizer=adamw_settings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0),
            updates=UpdateSettings(
                max_grad_norm=max_grad_norm,
                speculation=speculation,
                holds_all=False,
                held_in_memory_bytes=None,
            ),
            placement=_PLACEMENT,
            seed=0,
        )
        with (
            EngineParts(
                run.model,
                run.store,
                queue=run.context.queue,
                pool=run.context.pool,
                device=SlowDevice(timeline, self._seconds),
                timeline=timeline,
                paths=config.storage.paths,
            ) as parts,
            parts.engine(settings) as engine,
        ):
            steps = Steps(engine, run.store, timeline)
            yield steps
            steps.settle()


def main() -> None:
    """Parse the arguments, run the rounds, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--megabytes-per-second", type=float, default=150.0, help="of the drive, in either direction")
    parser.add_argument("--steps", type=int, default=4, help="that count in each round; an even number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the store")
    arguments = parser.parse_args()
    assert arguments.steps % 2 == 0, "every other step is clipped"
    rate, num_steps = arguments.megabytes_per_second * 1e6, arguments.steps + _WARM_UP
    task = Task(
        contestant="ratel",
        shape=arguments.shape,
        tokens=arguments.tokens,
        micro_batches=1,
        steps=1 + arguments.rounds * num_steps,
        clip=True,
        directory=arguments.directory,
    )

    def throttled(queue: IoQueue) -> IoQueue:
        return ThrottledQueue(queue, read_bytes_per_second=rate, write_bytes_per_second=rate)

    seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    with open_run(task, limit_bytes=default_limit_bytes(), activations="recompute", throttled=throttled) as run:
        bench, (first, *others) = ClippingBench(run, bytes_per_second=rate), list(batches_of(task))
        costs = bench.predict(first)
        for number, mode in in_turns(MODES, arguments.rounds):
            spent = bench.measure(mode, costs, others[number * num_steps : (number + 1) * num_steps])
            seconds[mode].append(spent)
            print(f"round {number + 1}: {mode} {spent:.2f} s", flush=True)
    report(arguments, costs, seconds)


def report(arguments: argparse.Namespace, costs: SpeculationCosts, seconds: Mapping[Mode, list[float]]) -> None:
    """Print the table, what was promised, and the JSON."""
    both = [statistics.mean(pair) for pair in zip(seconds["eager"], seconds["deferred"], strict=True)]
    against = {"never": seconds["eager"], "always": seconds["deferred"], "half": both, "late": seconds["deferred"]}
    predicted = {"eager": costs.unclipped_seconds, "deferred": costs.deferred_seconds}
    print(f"{'contestant':<12}{'s/step':>8}{'predicted':>11}{'ratio':>8}")
    summary: dict[str, object] = {"benchmark": "clipping", "arguments": vars(arguments)}
    ratios = {}
    for mode in MODES:
        median = statistics.median(seconds[mode])
        row = f"{mode:<12}{median:>8.2f}"
        summary[mode] = values = {"seconds": seconds[mode], "median_seconds": median}
        if mode in predicted:
            row += f"{predicted[mode]:>11.2f}"
            values["predicted_seconds"] = predicted[mode]
        if mode in against:
            pairs = zip(seconds[mode], against[mode], strict=True)
            ratios[mode] = values["ratio"] = statistics.median(own / other for own, other in pairs)
            row += f"{'':>11}{ratios[mode]:>8.3f}"
        print(row)
    names = {"never": "eager", "always": "deferred", "half": "the mean of both", "late": "deferred"}
    for mode, ratio in ratios.items():
        print_promise(f"{mode} against {names[mode]}", ratio - 1, at_most=MOST)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
