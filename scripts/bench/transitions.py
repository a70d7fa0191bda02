"""What the steps cost that are not like the others: the recorded one, the one after it, and the last.

Regime: a Llama shape with random weights, bf16, clipping at 1; all memory that is free, so that weights and states stay
in it. The run is that of `ratel finetune`: the first step is recorded and fills the memory, another engine follows the
plan that it gives, and the last step is settled at once. Each round is a process of its own, with a new store.

    first    the recorded step; the ceiling is the paper's: 2.2 times a later one
    second   the first one under the new plan; it reads what the new plan keeps and the recording did not
    middle   the median of the others
    last     its update overlaps with no further forward

Ratios are to the middle of the same round; medians over the rounds. The first step is also the one that takes memory
from the system for the first time. A virtual machine may give that at less than a drive's speed, so each round begins
with a measurement of it. `--host-memory-gib` makes it small. The last line is JSON.

    python -m scripts.bench.transitions [--shape 0.35b|tiny] [--tokens N] [--rounds N] [--host-memory-gib N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict

from ratel_cli.io.buffers import BufferPool
from ratel_cli.sizes import HUGE_PAGE_BYTES
from ratel_cli.units import GIB
from scripts.bench.contestants import SHAPES, Measured, Task, run_process

FIRST_AT_MOST, SECOND_AT_MOST = 2.2, 1.3
_TOUCHED_BYTES = GIB


def main() -> None:
    """Parse the arguments, run the rounds, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.35b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=7, help="of a round, at least four")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-memory-gib", type=float, help="default: what is free, less a margin")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the store")
    arguments = parser.parse_args()
    assert arguments.steps >= 4, "a step in the middle is neither of the first two nor the last"
    task = Task(
        contestant="ratel",
        shape=arguments.shape,
        tokens=arguments.tokens,
        micro_batches=1,
        steps=arguments.steps,
        clip=True,
        host_memory_gib=arguments.host_memory_gib,
        directory=arguments.directory,
    )
    measured: list[Measured] = []
    rates: list[float] = []
    for number in range(arguments.rounds):
        rates.append(first_touch_bytes_per_second())
        measured.append(run_process(task))
        print(f"round {number + 1}: {' '.join(f'{each:.2f}' for each in measured[-1].all_seconds)} s", flush=True)
    report(arguments, measured, rates)


def first_touch_bytes_per_second() -> float:
    """The rate at which the system gives memory that no process had before, or that it took back."""
    with BufferPool(None) as pool, pool.lease(_TOUCHED_BYTES, "first touch") as lease:
        page = bytes(HUGE_PAGE_BYTES)
        start = time.perf_counter()
        for offset in range(0, _TOUCHED_BYTES, HUGE_PAGE_BYTES):
            lease.memory[offset : offset + HUGE_PAGE_BYTES] = page
        return _TOUCHED_BYTES / (time.perf_counter() - start)


def report(arguments: argparse.Namespace, measured: list[Measured], rates: list[float]) -> None:
    """Print the table, what was promised, and the JSON."""
    middles = [statistics.median(run.all_seconds[2:-1]) for run in measured]
    rows = {
        "first": [run.all_seconds[0] for run in measured],
        "second": [run.all_seconds[1] for run in measured],
        "middle": middles,
        "last": [run.all_seconds[-1] for run in measured],
    }
    summary: dict[str, object] = {"benchmark": "transitions", "arguments": vars(arguments)}
    print(f"{'step':<10}{'seconds':>9}{'x middle':>10}")
    ratios = {}
    for name, seconds in rows.items():
        ratios[name] = statistics.median(each / middle for each, middle in zip(seconds, middles, strict=True))
        print(f"{name:<10}{statistics.median(seconds):>9.2f}{ratios[name]:>10.2f}")
        summary[name] = {"seconds": seconds, "times_middle": ratios[name]}
    rate, taken = statistics.median(rates), statistics.median(run.peak_bytes for run in measured)
    summary["first_touch_bytes_per_second"] = rates
    print(f"memory: given for the first time at {rate / 1e9:.2f} GB/s; all that a run takes, in {taken / rate:.1f} s")
    for name, most in (("first", FIRST_AT_MOST), ("second", SECOND_AT_MOST)):
        verdict = "met" if ratios[name] <= most else "MISSED"
        print(f"{name}: {ratios[name]:.2f} times a step in the middle, at most {most}: {verdict}")
    print(json.dumps({**summary, "runs": [asdict(run) for run in measured]}))


if __name__ == "__main__":
    main()
