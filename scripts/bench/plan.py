"""Is the plan right? Measured steps against predicted ones, for more and more offloaded activations.

Regime: a Llama shape with random weights, bf16, on a drive that is throttled so that its bytes matter, and in so little
memory that offloaded activations have to go to the drive; one process for each batch size (scripts/bench/sweep.py).
Every point has a plan of its own, with the residency that is best for it. For the point "planned" the planner chooses
what to offload. The ceiling is the best point measured. The promises:

    planned point          at most 5 % slower than the best one measured
    predicted step time    within 15 % everywhere, within 10 % at the planned point

Points take turns over the rounds; medians of all their steps. The last line is JSON.

    python -m scripts.bench.plan [--shape small] [--tokens 256 384] [--picture FILE.svg] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from ratel_cli.units import MIB
from scripts.bench.contestants import SHAPES, print_promise
from scripts.bench.sweep import Sweep, SweepPoint

_BEST, _EVERYWHERE, _AT_PLAN = 0.05, 0.15, 0.10


def main() -> None:
    """Parse the arguments, run the sweeps, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 384], help="the batch sizes: tokens of a micro-batch"
    )
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--points", type=int, default=8, help="shares of the activations, besides the planned one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps that count, of each point in each round")
    parser.add_argument("--extra-mib", type=float, default=96, help="memory on top of the least that a step needs")
    parser.add_argument("--nvme-mb-per-second", type=float, default=250.0, help="rate of the drive in either direction")
    parser.add_argument("--picture", type=Path, default=None, help="SVG file to draw")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the store")
    arguments = parser.parse_args()
    sweeps = {tokens: _run_process(_sweep(arguments, tokens)) for tokens in arguments.tokens}
    summary: dict[str, object] = {
        "benchmark": "plan",
        "arguments": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
        },
    }
    for tokens, points in sweeps.items():
        print(f"{arguments.micro_batches} micro-batches of {tokens} tokens")
        report(points)
        summary[str(tokens)] = {**deviations(points), "points": [asdict(point) for point in points]}
    if arguments.picture is not None:
        draw(sweeps, arguments.picture, micro_batches=arguments.micro_batches)
    print(json.dumps(summary))


def report(points: Sequence[SweepPoint]) -> None:
    """Print a table, and whether each promise is met."""
    names = ("offloaded MiB", "on NVMe", "resident", "predicted s", "measured s", "error")
    print(f"{'':<8}" + "".join(f"{name:>13}" for name in names) + "  busiest")
    for point in sorted(points, key=lambda point: point.swapped_bytes):
        sizes = (point.swapped_bytes, point.spilled_bytes, point.resident_bytes)
        seconds = (point.predicted_seconds, median(point.seconds))
        print(
            f"{'planned' if point.is_planned else '':<8}"
            + "".join(f"{num_bytes / MIB:>13.0f}" for num_bytes in sizes)
            + "".join(f"{each:>13.3f}" for each in seconds)
            + f"{_error(point):>+13.1%}  {point.bottleneck}"
        )
    found = deviations(points)
    for name, limit, words in (
        ("planned_over_best", _BEST, "planned point, slower than the best one measured"),
        ("worst_error", _EVERYWHERE, "prediction, at its worst"),
        ("planned_error", _AT_PLAN, "prediction, at the planned point"),
    ):
        print_promise(words, found[name], at_most=limit)


def deviations(points: Sequence[SweepPoint]) -> dict[str, float]:
    """How far the planned point and the predictions are from the best measured ones."""
    [planned] = [point for point in points if point.is_planned]
    best_seconds = min(median(point.seconds) for point in points)
    return {
        "planned_over_best": median(planned.seconds) / best_seconds - 1,
        "worst_error": max(abs(_error(point)) for point in points),
        "planned_error": abs(_error(planned)),
    }


def draw(sweeps: Mapping[int, Sequence[SweepPoint]], path: Path, *, micro_batches: int) -> None:
    """Step time against bytes swapped, a panel for each batch size."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ratel"  # the same points give the same file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(sweeps), figsize=(5.5 * len(sweeps), 4), squeeze=False, layout="tight")
    for panel, (tokens, points) in zip(panels[0], sweeps.items(), strict=True):
        by_size = sorted(points, key=lambda point: point.swapped_bytes)
        sizes = [point.swapped_bytes / MIB for point in by_size]
        middle = [median(point.seconds) for point in by_size]
        spread = [
            [seconds - min(point.seconds) for point, seconds in zip(by_size, middle, strict=True)],
            [max(point.seconds) - seconds for point, seconds in zip(by_size, middle, strict=True)],
        ]
        panel.plot(sizes, [point.predicted_seconds for point in by_size], label="predicted")
        panel.errorbar(sizes, middle, yerr=spread, fmt="o", capsize=2, label="measured: median, least and most")
        [planned] = [point for point in points if point.is_planned]
        panel.axvline(planned.swapped_bytes / MIB, linestyle=":", color="gray", label="planned")
        panel.set(title=f"{micro_batches} micro-batches of {tokens} tokens", xlabel="offloaded, MiB", ylabel="step, s")
        panel.set_ylim(bottom=0)
        panel.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _sweep(arguments: argparse.Namespace, tokens: int) -> Sweep:
    return Sweep(
        shape=arguments.shape,
        tokens=tokens,
        micro_batches=arguments.micro_batches,
        shares=[number / (arguments.points - 1) for number in range(arguments.points)],
        rounds=arguments.rounds,
        steps=arguments.steps,
        available_bytes=int(arguments.extra_mib * MIB),
        nvme_bytes_per_second=1e6 * arguments.nvme_mb_per_second,
        directory=arguments.directory,
    )


def _run_process(sweep: Sweep) -> list[SweepPoint]:
    command = [sys.executable, "-m", "scripts.bench.sweep", json.dumps(asdict(sweep))]
    root = Path(__file__).parents[2]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    return [SweepPoint(**point) for point in json.loads(output.splitlines()[-1])]


def _error(point: SweepPoint) -> float:
    """The error of the prediction, relative to the measured time."""
    return point.predicted_seconds / median(point.seconds) - 1


if __name__ == "__main__":
    main()
