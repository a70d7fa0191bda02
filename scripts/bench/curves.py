"""The loss curves of the demo with each optimizer, next to AdamW's.

Regime: `configs/demo.yaml` as it is, run by `ratel finetune` once for each optimizer, with the learning rate that suits
it: those that take AdamW's have AdamW's. What is compared is the mean loss of each ten steps, which the demo prints,
and the loss of each step: how far it is from AdamW's, as a share of that. With 8-bit moments it is the same algorithm,
and its curve should be AdamW's; the other rules are there to see that they learn. `shaken` is AdamW with an epsilon of
1.1e-8 for 1e-8: how far two curves come apart for next to nothing, where the demo has learnt its rows by heart.
The demo computes in fp32; `bfloat16`, `stochastic` and `both` do not, and the last two have no fp32 master: AdamW with
moments in fp32, and in 8 bit.

Promise: no mean of ten steps is more than 1 % from AdamW's with `adamw_8bit`. The last line is JSON.

    python -m scripts.bench.curves [--optimizers NAME ...] [--steps N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts import make_demo
from scripts.bench.contestants import print_promise

ROOT = Path(__file__).parents[2]
CONTESTANTS = {
    "adamw": ("optimizer=adamw",),
    "shaken": ("optimizer=adamw", "adam_epsilon=1.1e-8"),
    "adamw_8bit": ("optimizer=adamw_8bit",),
    "bfloat16": ("dtype=bfloat16",),
    "stochastic": ("dtype=bfloat16", "bf16_master=stochastic"),
    "both": ("dtype=bfloat16", "optimizer=adamw_8bit", "bf16_master=stochastic"),
    "muon": ("optimizer=muon",),
    "lion": ("optimizer=lion", "learning_rate=1e-4"),
    "sgd": ("optimizer=sgd", "learning_rate=0.1"),
}
"""What each changes about the demo's config."""
WINDOW = 10
"""Steps whose mean loss is one point of a curve."""
PROMISED = 0.01


def main() -> None:
    """Run the demo with each optimizer, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--optimizers", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--steps", type=int, help="of a run; default: the demo's")
    parser.add_argument("--directory", type=Path, help="directory for the demo's files; default: a temporary one")
    arguments = parser.parse_args()
    chosen = dict.fromkeys(("adamw", *arguments.optimizers))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        make_demo.main(Path(directory) / "demo")
        curves = {name: curve(Path(directory), name, arguments.steps) for name in chosen}
    report(curves)


def curve(directory: Path, optimizer: str, num_steps: int | None) -> list[float]:
    """The loss of each step of the demo with this optimizer."""
    changes = [*CONTESTANTS[optimizer], f"output_dir={optimizer}"]
    changes += [] if num_steps is None else [f"max_steps={num_steps}"]
    command = [sys.executable, "-m", "ratel_cli", "finetune", str(ROOT / "configs" / "demo.yaml"), *changes]
    ended = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        sys.exit(f"{optimizer}: {ended.stderr}")
    lines = (directory / optimizer / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def report(curves: dict[str, list[float]]) -> None:
    """Print the means of each window, how far they are from AdamW's, and the promise."""
    means = {name: windows(losses) for name, losses in curves.items()}
    print(f"{'steps':>9}" + "".join(f"{name:>12}" for name in curves))
    for number, _ in enumerate(means["adamw"]):
        last = min((number + 1) * WINDOW, len(curves["adamw"]))
        row = "".join(f"{of_name[number]:>12.4f}" for of_name in means.values())
        print(f"{number * WINDOW + 1:>4}-{last:<4}{row}")
    found = dict[str, dict[str, object]]()
    for name, losses in curves.items():
        of_windows, of_steps = differences(means[name], means["adamw"]), differences(losses, curves["adamw"])
        found[name] = {
            "losses": losses,
            "most_of_windows": max(of_windows),
            "most_of_steps": max(of_steps),
            "mean_of_steps": statistics.mean(of_steps),
        }
        print(
            f"{name}: from AdamW's at most {max(of_windows):.2%} in the mean of {WINDOW} steps; of a step "
            f"{statistics.mean(of_steps):.2%} in the mean, {max(of_steps):.2%} at most"
        )
    if "adamw_8bit" in found:
        print_promise("adamw_8bit from AdamW", max(differences(means["adamw_8bit"], means["adamw"])), at_most=PROMISED)
    print(json.dumps({"benchmark": "curves", "curves": found}))


def windows(losses: Sequence[float]) -> list[float]:
    """The mean of each window."""
    return [statistics.mean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def differences(losses: Sequence[float], wanted: Sequence[float]) -> list[float]:
    """How far each is from the wanted one, as a share of it."""
    return [abs(loss - other) / other for loss, other in zip(losses, wanted, strict=True)]


if __name__ == "__main__":
    main()
