"""Is a run's time known before it begins? What `ratel finetune` predicts, and what its steps take.

Regime: a Llama shape with random weights, bf16, 4 micro-batches of 2 rows, two samples in each row. Each run is the
program in a process of its own, with a new store and no earlier measurement of machine or model. The ceiling is the
median step, without the first two (memory is touched for the first time) and the last (it is committed at once). The
promises, of each run:

    first     the prediction before step 1, within 20 %
    second    the prediction after step 1, within 10 %

They hold on a machine on which nobody else works; what others took of it is in the table. Cases take turns over the
rounds. The last line is JSON.

    python -m scripts.bench.predictions [--cases 0.35b:512 0.35b:2048 0.35b:4096 1b:512] [--rounds 3] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import yaml
from transformers import LlamaConfig

from ratel_cli.hardware.load import LoadMeter
from scripts.bench.contestants import SHAPES, in_turns, print_promise

CASES = ("0.35b:512", "0.35b:2048", "0.35b:4096", "1b:512")
_ROWS, _MICRO_BATCHES = 2, 4
_FIRST_AT_MOST, _SECOND_AT_MOST = 0.20, 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What one run predicted, and what its steps took."""

    case: str
    """The shape, and the tokens of a micro-batch."""
    first_seconds: float
    """Predicted before step 1."""
    second_seconds: float
    """Predicted after step 1, for the second."""
    last_seconds: float
    """Predicted for the last step."""
    step_seconds: tuple[float, ...]
    """Of all steps."""
    other_cores: float
    """What others took of the machine while it ran."""

    @property
    def seconds(self) -> float:
        """The median step in the middle of the run."""
        return median(self.step_seconds[2:-1])

    def error(self, predicted_seconds: float) -> float:
        """How far a prediction is from what steps took, as a share of that; negative if it is too short."""
        return predicted_seconds / self.seconds - 1


def main() -> None:
    """Parse the arguments, run the cases in turn, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="SHAPE:TOKENS, tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each run, at least four")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the stores")
    arguments = parser.parse_args()
    assert arguments.steps >= 4, "a step in the middle is neither of the first two nor the last"
    runs = [run(case, arguments) for _, case in in_turns(arguments.cases, arguments.rounds)]
    report(runs, arguments)


def run(case: str, arguments: argparse.Namespace) -> Predicted:
    """One run of the program, whose files are gone afterwards."""
    shape, tokens = case.split(":")
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="ratel-predictions-") as directory:
        here = Path(directory)
        config = _write_inputs(here, shape, row_tokens=int(tokens) // _ROWS, steps=arguments.steps)
        meter = LoadMeter()
        finished = subprocess.run(
            [sys.executable, "-m", "ratel_cli", "finetune", str(config)],
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(here / "cache")},
        )
        if finished.returncode != 0:
            sys.exit(f"{case} failed with exit code {finished.returncode}: {finished.stderr}")
        load = meter.other_load()
        lines = [json.loads(line) for line in (here / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    predicted = [line["predicted_seconds"] for line in lines]
    found = Predicted(
        case=case,
        first_seconds=predicted[0],
        second_seconds=predicted[1],
        last_seconds=predicted[-1],
        step_seconds=tuple(line["step_seconds"] for line in lines),
        other_cores=0.0 if load is None else load.cores,
    )
    print(f"{case}: {found.seconds:.2f} s, predicted {found.first_seconds:.2f} s at first", file=sys.stderr)
    return found


def report(runs: Sequence[Predicted], arguments: argparse.Namespace) -> None:
    """Print a row for each run, whether each promise is met, and the JSON."""
    print(f"{'case':<14}{'first s':>9}{'second s':>9}{'last s':>9}{'step s':>9}{'first':>8}{'second':>8}{'others':>8}")
    for each in sorted(runs, key=lambda each: arguments.cases.index(each.case)):
        times = (each.first_seconds, each.second_seconds, each.last_seconds, each.seconds)
        errors = (each.error(each.first_seconds), each.error(each.second_seconds))
        print(
            f"{each.case:<14}{''.join(f'{seconds:>9.2f}' for seconds in times)}"
            f"{''.join(f'{error:>+8.1%}' for error in errors)}{each.other_cores:>8.1f}"
        )
    first = max(abs(each.error(each.first_seconds)) for each in runs)
    second = max(abs(each.error(each.second_seconds)) for each in runs)
    print_promise("before step 1, the largest error", first, at_most=_FIRST_AT_MOST)
    print_promise("after step 1, the largest error", second, at_most=_SECOND_AT_MOST)
    summary = {
        "benchmark": "predictions",
        "arguments": vars(arguments),
        "first": first,
        "second": second,
        "runs": [{**asdict(each), "seconds": each.seconds} for each in runs],
    }
    print(json.dumps(summary))


def _write_inputs(directory: Path, shape: str, *, row_tokens: int, steps: int) -> Path:
    """The model's config, rows of random tokens, and the config of the run, whose path is returned."""
    model = directory / "model"
    shape_of_rows = {**SHAPES[shape], "max_position_embeddings": max(2048, row_tokens)}
    LlamaConfig.from_dict(shape_of_rows).save_pretrained(model)
    draw, vocabulary = random.Random(0), SHAPES[shape]["vocab_size"]
    with (directory / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(2 * _ROWS * _MICRO_BATCHES * steps):
            ids = [draw.randrange(vocabulary) for _ in range(row_tokens // 2)]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    config = directory / "run.yaml"
    settings = {
        "base_model": str(model),
        "random_init": True,
        "datasets": [{"path": str(directory / "rows.jsonl"), "type": "tokens"}],
        "sequence_len": row_tokens,
        "micro_batch_size": _ROWS,
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "max_steps": steps,
        "dtype": "bfloat16",
        "output_dir": str(directory / "out"),
        "storage": {"paths": [str(directory / "store")]},
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return config


if __name__ == "__main__":
    main()
