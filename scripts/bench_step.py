"""A whole training step: Ratel, with all state on disk, beside plain PyTorch with all of it in memory.

Regime: a Llama shape with random weights, random tokens, bf16, the same micro-batches; one process for
each contestant and round, in turn, so that each has its own peak memory. A step of

    plain   PyTorch with activation checkpointing; bf16 weights, fp32 master and moments in memory; torch's
            fused AdamW, one parameter at a time, so that no fp32 copy of all gradients is needed
    ratel   `engine.step` on a store in a temporary directory

The ceiling is plain PyTorch of the same run: what the step costs where nothing has to be moved.
Ratios are ratel / plain, of the medians over rounds; NVMe bytes come from the queue's own counters and
are compared with `planning.traffic`. The last line is JSON.

    python scripts/bench_step.py [--shape 1b|0.35b|tiny] [--clip] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ratel_cli.engine.adamw import AdamWSettings, OutOfCoreAdamW
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import StepClock
from ratel_cli.engine.update import UpdateSettings
from ratel_cli.hardware.host import peak_resident_bytes, resident_bytes, return_freed_memory
from ratel_cli.model.blocks import find_blocks
from ratel_cli.model.initialise import RandomSource
from ratel_cli.model.load import import_weights
from ratel_cli.model.skeleton import build_skeleton
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.queue import open_queue
from ratel_cli.movement.records import record_layout
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.store import Progress, Store, StoreIdentity
from ratel_cli.planning.capacity import Workload, host_memory
from ratel_cli.planning.traffic import StateBytes, step_traffic
from ratel_cli.units import GIB

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "0.35b": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}
CONTESTANTS = ("plain", "ratel")
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Random tokens [1, tokens]; every position has a target."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    num_targets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process of one contestant."""

    contestant: str
    num_parameters: int
    step_seconds: tuple[float, ...]
    """Of the steps after the first."""
    losses: tuple[float, ...]
    peak_bytes: int
    nvme_read_bytes: int
    nvme_written_bytes: int
    predicted_read_bytes: int
    predicted_written_bytes: int
    seconds_by_cause: dict[str, float]


def main() -> None:
    """Parse arguments; run the rounds, or be one contestant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clip", action="store_true", help="clip the global gradient norm to 1")
    parser.add_argument("--host-memory-gib", type=float, default=None, help="ratel's limit; default: none")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the store lies")
    parser.add_argument("--only", choices=CONTESTANTS, default=None)
    parser.add_argument("--contestant", choices=CONTESTANTS, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        run = run_plain if arguments.contestant == "plain" else run_ratel
        print(json.dumps(asdict(run(arguments))))
        return
    contestants = (arguments.only,) if arguments.only else CONTESTANTS
    measured: dict[str, list[Measured]] = {name: [] for name in contestants}
    for round_number in range(arguments.rounds):
        for name in contestants if round_number % 2 == 0 else reversed(contestants):
            measured[name].append(run_process(name))
    report(arguments.shape, measured)


def run_process(contestant: str) -> Measured:
    """This script again, as one contestant, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--contestant", contestant]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values = json.loads(output.splitlines()[-1])
    return Measured(**{**values, "step_seconds": tuple(values["step_seconds"]), "losses": tuple(values["losses"])})


def report(shape: str, measured: dict[str, list[Measured]]) -> None:
    """A table, and the JSON."""
    summary: dict[str, object] = {"shape": shape}
    rows = {}
    for name, runs in measured.items():
        seconds = statistics.median(second for run in runs for second in run.step_seconds)
        rows[name] = (seconds, statistics.median(run.peak_bytes for run in runs))
        last = runs[-1]
        per_parameter = (last.nvme_read_bytes + last.nvme_written_bytes) / last.num_parameters
        print(
            f"{name:6} {seconds:8.2f} s/step  peak {rows[name][1] / GIB:6.2f} GiB  "
            f"NVMe {per_parameter:5.2f} B per parameter  loss {last.losses[-1]:.4f}"
        )
        summary[name] = {
            "runs": [asdict(run) for run in runs],
            "median_seconds": seconds,
            "nvme_bytes_per_parameter": per_parameter,
        }
    if len(rows) == len(CONTESTANTS):
        time_ratio = rows["ratel"][0] / rows["plain"][0]
        memory_ratio = rows["ratel"][1] / rows["plain"][1]
        print(f"ratel / plain: {time_ratio:.2f} of the time, {memory_ratio:.2f} of the memory")
        summary |= {"time_ratio": time_ratio, "memory_ratio": memory_ratio}
    print(json.dumps(summary))


def config_of(arguments: argparse.Namespace) -> LlamaConfig:
    """The shape, with room for the tokens."""
    return LlamaConfig.from_dict({**SHAPES[arguments.shape], "max_position_embeddings": max(64, arguments.tokens)})


def batches_of(arguments: argparse.Namespace) -> Iterator[list[Batch]]:
    """The same for both contestants."""
    generator = torch.Generator().manual_seed(7)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    for _ in range(arguments.steps):
        step = []
        for _ in range(arguments.micro_batches):
            ids = torch.randint(0, vocab_size, (1, arguments.tokens + 1), generator=generator)
            step.append(
                Batch(
                    input_ids=ids[:, :-1].contiguous(),
                    targets=ids[:, 1:].contiguous(),
                    position_ids=torch.arange(arguments.tokens).unsqueeze(0),
                    num_targets=arguments.tokens,
                )
            )
        yield step


def run_plain(arguments: argparse.Namespace) -> Measured:
    """All in memory: 16 bytes per parameter and the activations of one layer at a time."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config_of(arguments))
    torch.set_default_dtype(torch.float32)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizers = [torch.optim.AdamW([master], lr=LEARNING_RATE, fused=True, weight_decay=0.0) for master in masters]
    seconds, losses = [], []
    for batches in batches_of(arguments):
        start = time.perf_counter()
        losses.append(_plain_gradients(model, batches))
        if arguments.clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        with torch.no_grad():
            for parameter, master, optimizer in zip(parameters, masters, optimizers, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
                parameter.grad = None
                optimizer.step()
                master.grad = None
                parameter.copy_(master)
        seconds.append(time.perf_counter() - start)
    return Measured(
        contestant="plain",
        num_parameters=sum(parameter.numel() for parameter in parameters),
        step_seconds=tuple(seconds[1:]),
        losses=tuple(losses),
        peak_bytes=peak_resident_bytes(),
        nvme_read_bytes=0,
        nvme_written_bytes=0,
        predicted_read_bytes=0,
        predicted_written_bytes=0,
        seconds_by_cause={},
    )


def _plain_gradients(model: LlamaForCausalLM, batches: Sequence[Batch]) -> float:
    total, num_targets = 0.0, sum(batch.num_targets for batch in batches)
    for batch in batches:
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0].float(), batch.targets[0], reduction="sum") / num_targets
        loss.backward()
        total += float(loss.detach())
    return total


def run_ratel(arguments: argparse.Namespace) -> Measured:
    """All state in a store that is deleted afterwards."""
    return_freed_memory()
    clock = StepClock()
    model = find_blocks(
        build_skeleton(config_of(arguments), dtype="bfloat16", attn_implementation="sdpa"), name="bench"
    )
    with ExitStack() as resources:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        queue = resources.enter_context(open_queue("auto", notice=lambda text: print(text, file=sys.stderr)))
        pool = resources.enter_context(BufferPool(None))
        store = resources.enter_context(
            Store.create(
                [directory],
                identity=StoreIdentity(model_hash="", config_hash="", data_hash="", seed=0, software=""),
                layout=record_layout("bfloat16"),
                block_elements=[block.num_elements for block in model.spec.blocks],
                num_slots=2,
                queue=queue,
            )
        )
        import_weights(model.spec, RandomSource(model.skeleton, 0), store, pool, progress=lambda count: None)
        store.commit_import(_progress(0))
        pool.trim()
        state = StateBytes(compute=2, record=12, gradient=2)
        spilled_blocks, held_bytes, scratch = 0, None, None
        if arguments.clip and arguments.host_memory_gib is not None:
            memory, spilled_blocks = host_memory(
                model.spec,
                state,
                Workload(micro_batch_size=1, num_micro_batches=arguments.micro_batches, sequence_len=arguments.tokens),
                holds_gradients=True,
                process_bytes=resident_bytes(),
                limit_bytes=int(arguments.host_memory_gib * GIB),
            )
        if spilled_blocks:
            held_bytes = memory.held_gradients
            spilled = sum(block.num_elements for block in model.spec.blocks[:spilled_blocks]) * state.gradient
            scratch = resources.enter_context(Scratch([directory], spilled, queue))
        engine = StepEngine(
            model,
            store,
            pool,
            OutOfCoreAdamW(
                AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0), store, pool, clock=clock
            ),
            UpdateSettings(
                gradient_dtype=torch.bfloat16,
                max_grad_norm=1.0 if arguments.clip else None,
                hold=False,
                held_in_memory_bytes=held_bytes,
            ),
            seed=0,
            device=torch.device("cpu"),
            clock=clock,
            scratch=scratch,
        )
        seconds, losses = [], []
        read_bytes = written_bytes = 0
        for step, batches in enumerate(batches_of(arguments)):
            read_bytes, written_bytes = queue.read_bytes, queue.written_bytes
            clock.take()
            start = time.perf_counter()
            outcome = engine.run(batches, step=step, update=step + 1, learning_rate=LEARNING_RATE)
            assert outcome.applied
            store.commit(_progress(step + 1))
            seconds.append(time.perf_counter() - start)
            losses.append(outcome.loss)
            read_bytes, written_bytes = queue.read_bytes - read_bytes, queue.written_bytes - written_bytes
        traffic = step_traffic(model.spec, state, holds_gradients=arguments.clip, spilled_blocks=spilled_blocks)
        return Measured(
            contestant="ratel",
            num_parameters=model.spec.num_parameters,
            step_seconds=tuple(seconds[1:]),
            losses=tuple(losses),
            peak_bytes=peak_resident_bytes(),
            nvme_read_bytes=read_bytes,
            nvme_written_bytes=written_bytes,
            predicted_read_bytes=traffic.read_bytes,
            predicted_written_bytes=traffic.written_bytes,
            seconds_by_cause={str(cause): spent for cause, spent in clock.take().items()},
        )


def _progress(step: int) -> Progress:
    return Progress(step=step, updates=step, loss_scale=1.0, good_steps=0, tokens=0)


if __name__ == "__main__":
    main()
