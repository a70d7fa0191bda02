"""What the overlap of the optimizer is worth: the same steps with each `optimizer_overlap` (Ratel section V-D).

Regime: a Llama shape with random weights, bf16; one process for each mode and round, in turn. With a low
`--host-memory-gib` nothing stays in memory between uses, so that the drive moves everything in every step.

    optimized    updates overlap with backward, and a group's reads and writes with the updates of other groups
    naive        updates overlap with backward, but a group is read, updated and written before the next one is
    separate     updates run after backward, as in ZeRO-Infinity

The ceiling is the step's own computing: `of compute` is the time spent computing divided by the step's time.
`overlapped` is the fraction of the time of drives and optimizer that overlaps with computing. All modes must give the
same weights, to the byte. The last line is JSON.

    python -m scripts.bench.overlap [--shape 0.35b|tiny] [--tokens N] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, replace
from typing import get_args

from ratel_cli.planning.profile.placement import Overlap
from scripts.bench.contestants import Measured, add_arguments, in_turns, run_process, task_of

MODES: tuple[Overlap, ...] = get_args(Overlap)


def main() -> None:
    """Parse the arguments, run the rounds, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser, shape="0.35b", tokens=512, micro_batches=1, steps=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", default=None, help="write a trace of the first optimized run to this file")
    arguments = parser.parse_args()
    measured: dict[Overlap, list[Measured]] = {mode: [] for mode in MODES}
    for number, mode in in_turns(MODES, arguments.rounds):
        is_traced = mode == "optimized" and number == 0
        task = task_of(arguments, "ratel-recompute", overlap=mode)
        measured[mode].append(run_process(replace(task, trace=arguments.trace if is_traced else None)))
    report(arguments, measured)


def report(arguments: argparse.Namespace, measured: dict[Overlap, list[Measured]]) -> None:
    """Print the table and the JSON."""
    print(f"{'mode':<12}{'s/step':>8}{'x optimized':>13}{'of compute':>12}{'overlapped':>12}")
    summary: dict[str, object] = {"benchmark": "overlap", "arguments": vars(arguments)}
    for mode, runs in measured.items():
        seconds = statistics.median(second for run in runs for second in run.step_seconds)
        pairs = zip(runs, measured["optimized"], strict=True)
        slower = statistics.median(run.seconds / best.seconds for run, best in pairs)
        computing = statistics.median(run.busy_seconds["compute"] / sum(run.step_seconds) for run in runs)
        overlapped = statistics.median(run.overlapped_fraction for run in runs)
        print(f"{mode:<12}{seconds:>8.2f}{slower:>13.2f}{computing:>12.2f}{overlapped:>12.2f}")
        summary[mode] = {
            "seconds": seconds,
            "times_optimized": slower,
            "of_compute": computing,
            "overlapped_fraction": overlapped,
            "runs": [asdict(run) for run in runs],
        }
    hashes = {run.weights_sha256 for runs in measured.values() for run in runs}
    assert len(hashes) == 1, "the modes must give the same weights"
    print(f"weights, masters and moments are the same in all runs: sha256 {hashes.pop()[:16]}...")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
