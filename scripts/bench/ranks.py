"""Two ranks with one thread each, against one rank with two: what gathers and exchanges cost where nothing is gained.

Regime: a Llama shape with random weights, fp32 or bf16, on this machine, by `ratel finetune --ranks 1` and `--ranks 2`.
A step has the same two micro-batches in both. The contestants take turns, each with a new store. Seconds are medians
over a run's steps but the first two and the last.

    ratio     tokens per second of two ranks to those of one; what was promised: 0.85 with steps of at least 3 s
    hidden    of the time in which the network works, what lies under computing in the trace of two ranks
    waited    of a step, how long computing waited for the network

The last line is JSON.

    python -m scripts.bench.ranks [--layers N] [--hidden N] [--tokens N] [--steps N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LEAST_RATIO, LEAST_SECONDS = 0.85, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Medians of one run."""

    step_seconds: float
    waited_seconds: float
    """For the network."""
    hidden: float
    """The share of the network's time in which the same rank computed; 1 for one rank, which uses none."""


def main() -> None:
    """Parse the arguments, let both take turns, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch; each of two ranks has one")
    parser.add_argument("--steps", type=int, default=7, help="of a run, at least four")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for models and stores")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        config = prepare(Path(directory), arguments)
        measured: dict[int, list[Ran]] = {1: [], 2: []}
        for number in range(arguments.rounds):
            for size in (1, 2) if number % 2 == 0 else (2, 1):
                measured[size].append(run(config, size))
                print(f"round {number + 1}, {size}: {measured[size][-1]}", flush=True)
    report(arguments, measured)


def prepare(directory: Path, arguments: argparse.Namespace) -> Path:
    """Save a model and rows of tokens. Returns the config."""
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=arguments.tokens,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(shape).save_pretrained(directory / "base")
    draw = torch.Generator().manual_seed(2)
    rows = torch.randint(2048, (4 * arguments.steps, arguments.tokens), generator=draw).tolist()
    (directory / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    content = {
        "base_model": str(directory / "base"),
        "datasets": [{"path": str(directory / "rows.jsonl"), "type": "tokens"}],
        "sequence_len": arguments.tokens,
        "micro_batch_size": 1,
        "max_steps": arguments.steps,
        "dtype": arguments.dtype,
        "trace": True,
        "device": "cpu",
        "output_dir": str(directory / "run"),
    }
    config = directory / "run.yaml"
    config.write_text(json.dumps(content))
    return config


def run(config: Path, size: int) -> Ran:
    """Train with `size` ranks, two threads in all and two micro-batches in each step."""
    output = config.parent / "run"
    for path in config.parent.glob("run*"):
        if path != config:
            shutil.rmtree(path)
    command = [sys.executable, "-m", "ratel_cli", "finetune", str(config), "--ranks", str(size)]
    command.append(f"gradient_accumulation_steps={2 // size}")
    environment = {**os.environ, "OMP_NUM_THREADS": str(2 // size)}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()][2:-1]
    return Ran(
        step_seconds=statistics.median(line["step_seconds"] for line in lines),
        waited_seconds=statistics.median(line["waited_seconds"]["network"] for line in lines),
        hidden=hidden_share(output / "run" / "trace.json"),
    )


def hidden_share(trace: Path) -> float:
    """The share of the time of the slices of the network that lies within slices of computing."""
    events = json.loads(trace.read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [(tracks[event["tid"]], event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"]
    computing = [(start, end) for track, start, end in slices if track == "compute"]
    network = [(start, end) for track, start, end in slices if track == "network"]
    hidden = sum(max(0.0, min(end, last) - max(start, first)) for first, last in network for start, end in computing)
    return hidden / sum(end - start for start, end in network) if network else 1.0


def report(arguments: argparse.Namespace, measured: dict[int, list[Ran]]) -> None:
    """Print the ratio, what was promised, and the JSON."""
    ratios = [one.step_seconds / two.step_seconds for one, two in zip(*measured.values(), strict=True)]
    ratio, seconds = statistics.median(ratios), statistics.median(each.step_seconds for each in measured[1])
    waited = statistics.median(each.waited_seconds / each.step_seconds for each in measured[2])
    hidden = statistics.median(each.hidden for each in measured[2])
    print(f"two ranks to one: {ratio:.2f} ({', '.join(f'{each:.2f}' for each in ratios)}), promised {LEAST_RATIO}")
    print(f"steps of {seconds:.2f} s, to be at least {LEAST_SECONDS}; computing waited for the network {waited:.1%}")
    print(f"{hidden:.0%} of the time of the network lies under computing")
    content = {"ratio": ratio, "ratios": ratios, "step_seconds": seconds, "waited": waited, "hidden": hidden}
    print(json.dumps({"benchmark": "ranks", "arguments": vars(arguments), **content}))


if __name__ == "__main__":
    main()
