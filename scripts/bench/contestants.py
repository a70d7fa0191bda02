"""What the benchmarks of whole steps share: shapes, random batches, and the contestants, each in a process.

`bench.step` and `bench.overlap` call `run_process`, which starts `contestant_plain`, `_ratel` or `_zero`, so
that every measurement has its own peak memory; those print one line of JSON. Contestants:

    plain           PyTorch with activation checkpointing; bf16 weights, fp32 master and moments in memory; torch's
                    fused AdamW, one parameter at a time, so that no fp32 copy of all gradients is needed
    plain-kept      the same without checkpointing
    ratel           `engine.step` on a store in a temporary directory, as planned: within a limit on host memory if
                    one is given, activations swapped or recomputed as is fastest
    ratel-recompute the same, with no more offloaded than inputs of layers
    zero            DeepSpeed's ZeRO-Infinity: parameters and optimizer on NVMe, activations recomputed
    zero-optimizer  the same with the parameters in memory

Invariant: all contestants of a benchmark compute on the same tokens, in the same micro-batches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from transformers import LlamaConfig

from ratel_cli.data.packing import MicroBatch
from ratel_cli.planning.placement import Overlap

Contestant = Literal["plain", "plain-kept", "ratel", "ratel-recompute", "zero", "zero-optimizer"]
CONTESTANTS: tuple[Contestant, ...] = get_args(Contestant)
REQUIRED = tuple(name for name in CONTESTANTS if not name.startswith("zero"))
"""What they need is there wherever Ratel is."""

_MODEL = {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000}
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "narrow": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
    },
    "0.35b": {**_MODEL, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24},
    "1b": {
        **_MODEL,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    # Layers such as those of models with 7 billion parameters, and few of them: a GPU is busy with each.
    "wide": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "3b": {
        **_MODEL,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 36,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
    },
}
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one contestant is to do."""

    contestant: Contestant
    shape: str
    tokens: int
    """Of a micro-batch."""
    rows: int = 1
    """That share the tokens evenly."""
    micro_batches: int
    steps: int
    warm_up: int = 2
    """So many steps are not counted: the first reads what stays in memory, the second keeps activations first."""
    clip: bool = False
    overlap: Overlap = "optimized"
    in_place: bool = False
    """One slot in place of two: half the space."""
    host_memory_gib: float | None = None
    directory: str = field(default_factory=tempfile.gettempdir)
    trace: str | None = None
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    gpu_memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process of one contestant."""

    num_parameters: int
    step_seconds: list[float]
    """From decision to decision, of the steps counted; the last one's with what was left to write."""
    losses: list[float]
    peak_bytes: int
    gpu_peak_bytes: int = 0
    weights_sha256: str = ""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """Of all those steps together."""
    waited_seconds: dict[str, float] = field(default_factory=dict)
    hidden_fraction: float = 0.0
    """Of the time in which the drives or the optimizer worked, how much the compute thread computed in."""
    nvme_bytes: int = 0
    """Read and written by those steps."""
    predicted_nvme_bytes: int = 0
    mixed_bytes_per_second: float = 0.0
    """Of the drive in this process, before and after the steps, reading and writing at once."""
    predicted_seconds: float = 0.0
    placement: str = ""


def add_arguments(parser: argparse.ArgumentParser, *, shape: str, tokens: int, micro_batches: int, steps: int) -> None:
    """The options that `task_of` reads."""
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=micro_batches)
    parser.add_argument("--steps", type=int, default=steps, help="those that are not counted included")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--clip", action="store_true", help="clip the global gradient norm to 1")
    parser.add_argument("--in-place", action="store_true", help="one slot: half the space on the drive")
    parser.add_argument("--host-memory-gib", type=float, default=None, help="limit of `ratel`")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the store lies")


def task_of(arguments: argparse.Namespace, contestant: Contestant, *, overlap: Overlap = "optimized") -> Task:
    """One contestant's task from the command line."""
    return Task(
        contestant=contestant,
        shape=arguments.shape,
        tokens=arguments.tokens,
        micro_batches=arguments.micro_batches,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        clip=arguments.clip,
        overlap=overlap,
        in_place=arguments.in_place,
        host_memory_gib=arguments.host_memory_gib,
        directory=arguments.directory,
    )


def run_process(task: Task) -> Measured:
    """One contestant in a process of its own."""
    system = task.contestant.partition("-")[0]
    command = [sys.executable, "-m", f"scripts.contestant_{system}", json.dumps(asdict(task))]
    root = Path(__file__).parents[2]
    finished = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=root)
    if finished.returncode != 0:
        sys.exit(f"{task.contestant} ended with {finished.returncode}")
    return Measured(**json.loads(finished.stdout.splitlines()[-1]))


def run_as(contestant: Callable[[Task], Measured]) -> None:
    """Be the process of one contestant: the task is the argument, the last line printed is what was measured."""
    print(json.dumps(asdict(contestant(Task(**json.loads(sys.argv[1]))))))


def config_of(task: Task) -> LlamaConfig:
    """The shape, with room for the tokens."""
    return LlamaConfig.from_dict({**SHAPES[task.shape], "max_position_embeddings": max(64, task.tokens // task.rows)})


def batches_of(task: Task) -> Iterator[list[MicroBatch]]:
    """Random tokens, the same for all contestants; every position has a target."""
    generator, length = torch.Generator().manual_seed(7), task.tokens // task.rows
    for _ in range(task.steps):
        step = []
        for _ in range(task.micro_batches):
            ids = torch.randint(0, SHAPES[task.shape]["vocab_size"], (task.rows, length + 1), generator=generator)
            step.append(
                MicroBatch(
                    input_ids=ids[:, :-1].contiguous(),
                    targets=ids[:, 1:].contiguous(),
                    position_ids=torch.arange(length).expand(task.rows, -1).contiguous(),
                    sample_ids=(),
                    num_targets=task.tokens,
                    num_tokens=task.tokens,
                )
            )
        yield step
