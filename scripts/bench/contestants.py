"""What the benchmarks of whole steps share: shapes, random batches, and the contestants, each in a process of its own.

`run_process` starts `contestant_plain`, `contestant_ratel` or `contestant_zero`, so that every measurement has its own
peak memory. The process prints what it measured as one line of JSON. Contestants:

    plain           PyTorch with activation checkpointing; bf16 weights, fp32 master and moments in memory; torch's
                    fused AdamW, one parameter at a time, so that no fp32 copy of all gradients is needed
    plain-resident  the same without checkpointing
    ratel           Ratel on a store in a temporary directory, as planned: within a limit on host memory if one is
                    given, activations offloaded or recomputed, whichever is faster
    ratel-recompute the same, with nothing offloaded but the inputs of layers
    zero            DeepSpeed's ZeRO-Infinity: parameters and optimizer on NVMe, activations recomputed
    zero-optimizer  the same with the parameters in memory

With `--lora` all train an adapter on all linear layers: `plain` is PEFT's get_peft_model, updated by torch's AdamW.
With `--dtype float32` all compute in fp32, which is faster on a processor without instructions for bf16. DeepSpeed's
contestants take part in neither.

Invariant: all contestants of a benchmark compute on the same tokens, in the same micro-batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar, get_args

import torch
from transformers import AutoConfig, PretrainedConfig

from ratel_cli.config.keys.optimizers import OptimizerChoice
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.planning.profile.placement import Overlap
from ratel_cli.planning.time.wear import WearPolicy
from ratel_cli.run.ask.bench import SIZES, llama_shape
from ratel_cli.sizes import IGNORED_TARGET, DtypeName, QuantisedForm
from tests.simulated_gpu import install_if_asked

Name = TypeVar("Name")
Contestant = Literal["plain", "plain-resident", "ratel", "ratel-recompute", "zero", "zero-optimizer"]
CONTESTANTS: tuple[Contestant, ...] = get_args(Contestant)
REQUIRED = tuple(name for name in CONTESTANTS if not name.startswith("zero"))
"""The contestants that need nothing beyond what Ratel needs."""


SHAPES: dict[str, dict[str, int]] = {
    **{name: shape for name, (shape, _) in SIZES.items()},  # tiny, small, 1b
    "narrow": llama_shape(64, 128, layers=24, heads=4, kv_heads=2, vocab=512),
    "0.35b": llama_shape(1024, 2816, layers=24, heads=16, kv_heads=16, vocab=32000),
    # The layers of a model with 7 billion parameters, but few of them: large enough to keep a GPU busy.
    "wide": llama_shape(4096, 11008, layers=6, heads=32, kv_heads=32, vocab=32000),
    "3b": llama_shape(2560, 6912, layers=36, heads=20, kv_heads=20, vocab=32000),
    "llama-8b": llama_shape(4096, 14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "qwen3-8b": llama_shape(4096, 12288, layers=36, heads=32, kv_heads=8, vocab=151936, head_dim=128),
    "tiny-qwen3": llama_shape(64, 128, layers=2, heads=4, kv_heads=2, vocab=512, head_dim=16),
}
_MODEL_TYPES = {"qwen3-8b": "qwen3", "tiny-qwen3": "qwen3"}
"""Of shapes that are no Llamas."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one contestant does."""

    contestant: Contestant
    shape: str
    tokens: int
    """Tokens of a micro-batch."""
    rows: int = 1
    """Rows that share the tokens evenly."""
    samples: int = 1
    """Samples that are packed into a row, of different lengths."""
    layers: int | None = None
    """How many layers the model has; None: as many as its shape."""
    micro_batches: int
    steps: int
    warm_up: int = 2
    """Steps that are not counted: the first reads what stays in memory, the second is the first to offload."""
    clip: bool = False
    lora: int = 0
    """The rank of an adapter that is trained instead of the weights, by PEFT; 0: the weights are."""
    quantised: QuantisedForm | None = None
    """How the linear layers beside the adapter are quantised, for `ratel`."""
    optimizer: OptimizerChoice = "adamw"
    """For `ratel`."""
    dtype: DtypeName = "bfloat16"
    """Of weights, activations and gradients."""
    wear: WearPolicy = "balanced"
    overlap: Overlap = "optimized"
    in_place: bool = False
    """The store has one slot, not two, and takes half the space."""
    host_memory_gib: float | None = None
    directory: str = field(default_factory=tempfile.gettempdir)
    trace: str | None = None
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    gpu_memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process of one contestant measured."""

    num_parameters: int
    step_seconds: list[float]
    """Seconds of each counted step, from one decision to the next; the last step includes the remaining writes."""
    losses: list[float]
    peak_bytes: int
    gpu_peak_bytes: int = 0
    weights_sha256: str = ""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds in all counted steps, by resource."""
    waited_seconds: dict[str, float] = field(default_factory=dict)
    all_seconds: list[float] = field(default_factory=list)
    """Of every step of Ratel's, those included that do not count."""
    overlapped_fraction: float = 0.0
    """Fraction of the time of drives and optimizer in which the compute thread was computing."""
    drive_idle_seconds: float = 0.0
    """In all counted steps: neither a read nor a write was in flight."""
    nvme_bytes: int = 0
    """Bytes read and written by the steps that count."""
    predicted_nvme_bytes: int = 0
    mixed_bytes_per_second: float = 0.0
    """Rate of the drive, reading and writing at once, measured by this process before and after the steps."""
    predicted_seconds: float = 0.0
    processor_seconds: float = 0.0
    """Time of the processor in the steps that count, on all cores: all threads, the kernel's work for them included."""
    num_cores: int = 1
    placement: str = ""

    @property
    def seconds(self) -> float:
        """Median over the steps that count."""
        return median(self.step_seconds)


def add_arguments(parser: argparse.ArgumentParser, *, shape: str, tokens: int, micro_batches: int, steps: int) -> None:
    """Add the options that `task_of` reads, with these defaults."""
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=micro_batches)
    parser.add_argument("--steps", type=int, default=steps, help="of a process, including those that are not counted")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--clip", action="store_true", help="clip the global gradient norm to 1")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank instead")
    parser.add_argument(
        "--dtype", choices=get_args(DtypeName), default="bfloat16", help="for a processor that is slow in bf16: float32"
    )
    parser.add_argument("--wear", choices=get_args(WearPolicy), default="balanced", help="`storage.wear`, for `ratel`")
    parser.add_argument("--in-place", action="store_true", help="one slot: half the space on the drive")
    parser.add_argument(
        "--host-memory-gib", type=float, default=None, help="for `ratel`; default: what is free, less a margin"
    )
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the store")


def task_of(arguments: argparse.Namespace, contestant: Contestant, *, overlap: Overlap = "optimized") -> Task:
    """The task of one contestant, from the command line."""
    return Task(
        contestant=contestant,
        shape=arguments.shape,
        tokens=arguments.tokens,
        micro_batches=arguments.micro_batches,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        clip=arguments.clip,
        lora=arguments.lora,
        dtype=arguments.dtype,
        wear=arguments.wear,
        overlap=overlap,
        in_place=arguments.in_place,
        host_memory_gib=arguments.host_memory_gib,
        directory=arguments.directory,
    )


def in_turns(names: Sequence[Name], num_rounds: int) -> Iterator[tuple[int, Name]]:
    """Each round's number with each name in turn, every second round backwards, so that drift cancels."""
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


def print_promise(words: str, measured: float, *, at_most: float) -> None:
    """One line: what was promised, what was measured, and whether the promise is met."""
    print(f"{words}: {measured:+.2%}, at most {at_most:.0%}: {'met' if measured <= at_most else 'MISSED'}")


def run_process(task: Task) -> Measured:
    """Run one contestant in a process of its own. Exits if that fails."""
    system = task.contestant.partition("-")[0]
    command = [sys.executable, "-m", f"scripts.bench.contestant_{system}", json.dumps(asdict(task))]
    root = Path(__file__).parents[2]
    finished = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=root)
    if finished.returncode != 0:
        sys.exit(f"{task.contestant} failed with exit code {finished.returncode}")
    return Measured(**json.loads(finished.stdout.splitlines()[-1]))


def run_as(contestant: Callable[[Task], Measured]) -> None:
    """The main program of a contestant: its argument is the task as JSON, its last line is what it measured as JSON."""
    install_if_asked()
    print(json.dumps(asdict(contestant(Task(**json.loads(sys.argv[1]))))))


def model_config(task: Task) -> PretrainedConfig:
    """The config of the task's model."""
    return config_of(task.shape, row_tokens=task.tokens // task.rows, layers=task.layers)


def config_of(shape: str, *, row_tokens: int, layers: int | None = None, words: int | None = None) -> PretrainedConfig:
    """A shape's config, with positions for all tokens of a row. `layers`, `words`: None takes those of the shape."""
    keys = {**SHAPES[shape], "max_position_embeddings": max(64, row_tokens)}
    keys["num_hidden_layers"] = layers or keys["num_hidden_layers"]
    keys["vocab_size"] = words or keys["vocab_size"]
    config: PretrainedConfig = AutoConfig.for_model(_MODEL_TYPES.get(shape, "llama"), **keys)
    return config


def batches_of(task: Task) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step: random tokens, the same for all contestants. Every position has a target but the
    last one of a sample that another one follows in its row."""
    generator, vocab_size = torch.Generator().manual_seed(7), SHAPES[task.shape]["vocab_size"]
    for _ in range(task.steps):
        yield [_micro_batch(task, vocab_size, generator) for _ in range(task.micro_batches)]


def _micro_batch(task: Task, vocab_size: int, generator: torch.Generator) -> MicroBatch:
    length = task.tokens // task.rows
    ids = torch.randint(0, vocab_size, (task.rows, length + 1), generator=generator)
    targets, positions = ids[:, 1:].clone(), position_ids(task.rows, length, task.samples)
    ends = positions[:, 1:] == 0
    targets[:, :-1][ends] = IGNORED_TARGET
    return MicroBatch(
        input_ids=ids[:, :-1].contiguous(),
        targets=targets,
        position_ids=positions,
        sample_ids=(),
        num_targets=task.tokens - int(ends.sum()),
        num_tokens=task.tokens,
    )


def position_ids(rows: int, length: int, samples: int) -> torch.Tensor:
    """Those of packed rows, int64 `[rows, length]`. The samples of a row are as 1 to 2 to 3, and so on; no two rows
    begin with the same one."""
    found = torch.empty(rows, length, dtype=torch.int64)
    for row in range(rows):
        parts = [1 + (row + number) % samples for number in range(samples)]
        edges = [length * sum(parts[:number]) // sum(parts) for number in range(samples + 1)]
        for start, stop in itertools.pairwise(edges):
            found[row, start:stop] = torch.arange(stop - start)
    return found
