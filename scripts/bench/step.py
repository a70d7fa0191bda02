"""A whole training step of Ratel, with all state on a drive, next to plain PyTorch in memory, and DeepSpeed.

Regime: a Llama shape with random weights, random tokens, the same micro-batches; one process for each contestant
and round, in turn. `scripts/bench/contestants.py` describes the contestants. Those of DeepSpeed take part where they
are named, and need DeepSpeed to be installed. There are three ceilings, and a rival:

    compute     plain PyTorch in the same round: what a step costs when nothing has to be moved; `ratel` against
                `plain` and `plain-resident`, `ratel-recompute` against `plain`. Speed is plain's time / Ratel's
    NVMe        the bytes that a step moves, at the drive's mixed rate, which the same process measures
    processor   the time of the processor that a step takes, spread evenly over all cores
    DeepSpeed   ZeRO-Infinity with all state on the same drive (`zero`), or all but the parameters (`zero-optimizer`)

Times are medians over the steps of all rounds; a speed compares the medians of one round. The shape `narrow` computes
very little, so the difference of its times is what Python costs. The last line is JSON.

    python -m scripts.bench.step [--shape 0.35b|1b|3b|narrow|tiny] [--contestants ratel plain ...] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict

from ratel_cli.units import GIB
from scripts.bench.contestants import (
    CONTESTANTS,
    REQUIRED,
    SHAPES,
    Contestant,
    Measured,
    add_arguments,
    in_turns,
    run_process,
    task_of,
)

_AGAINST: tuple[tuple[Contestant, Contestant], ...] = (
    ("ratel", "plain"),
    ("ratel-recompute", "plain"),
    ("ratel", "plain-resident"),
    ("ratel", "zero"),
    ("ratel", "zero-optimizer"),
)


def main() -> None:
    """Parse the arguments, run the rounds, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser, shape="0.35b", tokens=1024, micro_batches=4, steps=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(REQUIRED))
    arguments = parser.parse_args()
    measured: dict[Contestant, list[Measured]] = {name: [] for name in arguments.contestants}
    for number, name in in_turns(arguments.contestants, arguments.rounds):
        measured[name].append(run_process(task_of(arguments, name)))
        print(f"round {number + 1}: {name} {measured[name][-1].seconds:.2f} s", flush=True)
    report(arguments, measured)


def report(arguments: argparse.Namespace, measured: dict[Contestant, list[Measured]]) -> None:
    """Print the table, the comparisons and the JSON."""
    print(
        f"{'contestant':<16}{'s/step':>8}{'peak GiB':>10}{'B/param':>9}{'floor s':>9}{'x floor':>9}{'overlapped':>12}"
        f"{'idle s':>9}{'cores s':>9}"
    )
    summary: dict[str, object] = {"benchmark": "step", "arguments": vars(arguments)}
    for name, runs in measured.items():
        seconds = statistics.median(second for run in runs for second in run.step_seconds)
        peak_bytes = statistics.median(run.peak_bytes for run in runs)
        row = f"{name:<16}{seconds:>8.2f}{peak_bytes / GIB:>10.2f}"
        values: dict[str, object] = {"seconds": seconds, "peak_bytes": peak_bytes}
        if runs[0].nvme_bytes:
            floors = [nvme_floor(run) for run in runs]
            per_parameter = runs[-1].nvme_bytes / runs[-1].num_parameters / len(runs[-1].step_seconds)
            over = statistics.median(run.seconds / floor for run, floor in zip(runs, floors, strict=True))
            overlapped = statistics.median(run.overlapped_fraction for run in runs)
            row += f"{per_parameter:>9.2f}{statistics.median(floors):>9.2f}{over:>9.2f}{overlapped:>12.2f}"
            cores_seconds = statistics.median(map(processor_floor, runs))
            idle_seconds = statistics.median(run.drive_idle_seconds / len(run.step_seconds) for run in runs)
            row += f"{idle_seconds:>9.2f}{cores_seconds:>9.2f}"
            values |= {
                "nvme_bytes_per_parameter": per_parameter,
                "nvme_floor_seconds": statistics.median(floors),
                "times_floor": over,
                "drive_idle_seconds": idle_seconds,
                "processor_floor_seconds": cores_seconds,
                "overlapped_fraction": overlapped,
                "moved_of_predicted": runs[-1].nvme_bytes / runs[-1].predicted_nvme_bytes,
                "placement": runs[-1].placement,
            }
        print(row)
        summary[name] = {**values, "runs": [asdict(run) for run in runs]}
    for name, other in _AGAINST:
        if name in measured and other in measured:
            pairs = list(zip(measured[name], measured[other], strict=True))
            speed = statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)
            memory = statistics.median(ours.peak_bytes / theirs.peak_bytes for ours, theirs in pairs)
            print(f"{name} against {other}: {speed:.2f} of the speed, {memory:.2f} of the memory")
            overhead = statistics.median(ours.seconds - theirs.seconds for ours, theirs in pairs)
            per_layer = 1e3 * overhead / SHAPES[arguments.shape]["num_hidden_layers"] / arguments.micro_batches
            print(f"{name} - {other}: {per_layer:.2f} ms per layer and micro-batch")
            summary[f"{name}/{other}"] = {"speed": speed, "memory": memory, "milliseconds_per_layer": per_layer}
    for name in measured:
        if measured[name][-1].placement:
            print(f"{name}: {measured[name][-1].placement}")
    print(json.dumps(summary))


def nvme_floor(run: Measured) -> float:
    """Seconds that the drive needs for the bytes of a step, at its mixed rate."""
    return run.nvme_bytes / len(run.step_seconds) / run.mixed_bytes_per_second


def processor_floor(run: Measured) -> float:
    """Seconds that all cores need for the work of a step, if none of them ever waits."""
    return run.processor_seconds / len(run.step_seconds) / run.num_cores


if __name__ == "__main__":
    main()
