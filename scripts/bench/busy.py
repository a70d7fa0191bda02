"""Does a run go on beside other work? The demo's steps on a quiet machine, and beside processes on every core.

Regime: the demo's model and data, its config with 12 steps, each run a process of its own. Contestants take turns: with
the rounds for which Ratel lets torch's idle threads spin (`ratel_cli/openmp.py`), and with those of libgomp. The figure
is the median step without the first two. The promise: beside one busy process a core, a step takes at most three times
as long as on the quiet machine; each of both then has half of it.

    python -m scripts.bench.busy [--rounds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

from ratel_cli.openmp import SPIN_ROUNDS
from scripts import make_demo
from scripts.bench.contestants import in_turns, print_promise

_AT_MOST = 3.0
_LIBGOMPS = "300000"
"""Rounds that libgomp has where nobody says a word."""
_CASES = ("quiet, ours", "quiet, libgomp's", "busy, ours", "busy, libgomp's")


def main() -> None:
    """Run the cases in turn, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {case: [] for case in _CASES}
    with tempfile.TemporaryDirectory(prefix="ratel-busy-") as directory:
        here = Path(directory)
        make_demo.main(here / "demo")
        for number, (_, case) in enumerate(in_turns(_CASES, arguments.rounds)):
            with _busy_cores() if case.startswith("busy") else nullcontext():
                found[case].append(_step_seconds(here, number, arguments.steps, is_ours=case.endswith("ours")))
            print(f"{case}: {found[case][-1]:.2f} s", file=sys.stderr, flush=True)
    seconds = {case: median(each) for case, each in found.items()}
    for case, each in seconds.items():
        print(f"{case:<18}{each:>7.2f} s{each / seconds['quiet, ours']:>7.2f} x")
    print_promise("beside busy cores", seconds["busy, ours"] / seconds["quiet, ours"], at_most=_AT_MOST)
    print(json.dumps({"benchmark": "busy", "arguments": vars(arguments), "step_seconds": found}))


def _step_seconds(here: Path, number: int, steps: int, *, is_ours: bool) -> float:
    """The median step of one run."""
    environment = {name: value for name, value in os.environ.items() if name not in (SPIN_ROUNDS, "OMP_WAIT_POLICY")}
    if not is_ours:
        environment[SPIN_ROUNDS] = _LIBGOMPS
    config = Path(__file__).parents[2] / "configs" / "demo.yaml"
    output = f"output-{number}"
    command = [sys.executable, "-m", "ratel_cli", "finetune", str(config), f"max_steps={steps}"]
    command += [f"base_model={here}/demo/base", f"datasets.0.path={here}/demo/topics.jsonl", f"output_dir={output}"]
    ended = subprocess.run(command, cwd=here, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        sys.exit(f"the demo ended with exit code {ended.returncode}: {ended.stderr}")
    lines = (here / output / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return median(float(json.loads(line)["step_seconds"]) for line in lines[2:])


@contextmanager
def _busy_cores() -> Iterator[None]:
    """A process for each core that does nothing but compute."""
    number = len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
