"""The ablation: the optimizer optimized, naive, and separate (Ratel section V-D), on the same steps.

Regime: a Llama shape with random weights, bf16; one process for each mode and round, in turn. Nothing is kept
in memory between uses beyond what the modes need (`--host-memory-gib`), so that the drive has all its work.

    optimized    each gradient is updated beneath backward, reads and writes around each group
    naive        beneath backward too, but read, update and write of a group one after another
    separate     after backward, as ZeRO-Infinity does

The ceiling is the step's own computing: `of compute` is the time spent computing divided by the step's. `hidden` is
the fraction of the time of drives and optimizer that lies under computing. The weights must be the same to
the byte. The last line is JSON.

    python -m scripts.bench.overlap [--shape 0.35b|tiny] [--tokens N] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, replace
from typing import get_args

from ratel_cli.planning.placement import Overlap
from scripts.bench.contestants import Measured, add_arguments, run_process, task_of

MODES: tuple[Overlap, ...] = get_args(Overlap)


def main() -> None:
    """Parse arguments; run the rounds; report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser, shape="0.35b", tokens=512, micro_batches=1, steps=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", default=None, help="draw the first optimized run into this file")
    arguments = parser.parse_args()
    measured: dict[Overlap, list[Measured]] = {mode: [] for mode in MODES}
    for number in range(arguments.rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            is_drawn = mode == "optimized" and number == 0
            task = replace(
                task_of(arguments, "ratel-recompute", overlap=mode), trace=arguments.trace if is_drawn else None
            )
            measured[mode].append(run_process(task))
    report(arguments, measured)


def report(arguments: argparse.Namespace, measured: dict[Overlap, list[Measured]]) -> None:
    """A table, and the JSON."""
    print(f"{'mode':<12}{'s/step':>8}{'x optimized':>13}{'of compute':>12}{'hidden':>8}")
    summary: dict[str, object] = {"benchmark": "overlap", "arguments": vars(arguments)}
    for mode, runs in measured.items():
        seconds = statistics.median(second for run in runs for second in run.step_seconds)
        slower = statistics.median(
            _seconds(run) / _seconds(best) for run, best in zip(runs, measured["optimized"], strict=True)
        )
        computing = statistics.median(run.busy_seconds["compute"] / sum(run.step_seconds) for run in runs)
        hidden = statistics.median(run.hidden_fraction for run in runs)
        print(f"{mode:<12}{seconds:>8.2f}{slower:>13.2f}{computing:>12.2f}{hidden:>8.2f}")
        summary[mode] = {
            "seconds": seconds,
            "times_optimized": slower,
            "of_compute": computing,
            "hidden_fraction": hidden,
            "runs": [asdict(run) for run in runs],
        }
    hashes = {run.weights_sha256 for runs in measured.values() for run in runs}
    assert len(hashes) == 1, "the modes must give the same weights"
    print(f"weights, masters and moments are the same in all runs: sha256 {hashes.pop()[:16]}...")
    print(json.dumps(summary))


def _seconds(run: Measured) -> float:
    return statistics.median(run.step_seconds)


if __name__ == "__main__":
    main()
