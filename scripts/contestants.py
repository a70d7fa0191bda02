"""What the benchmarks of whole steps share: shapes, random batches, Ratel and plain PyTorch, each in a process.

`bench_step` and `bench_overlap` call `run_process`, which starts this module again as one contestant, so
that every measurement has its own peak memory; the module prints one line of JSON. Contestants:

    plain           PyTorch with activation checkpointing; bf16 weights, fp32 master and moments in memory; torch's
                    fused AdamW, one parameter at a time, so that no fp32 copy of all gradients is needed
    plain-kept      the same without checkpointing
    ratel           `engine.step` on a store in a temporary directory, within a limit on host memory,
                    activations recomputed
    ratel-kept      the same with what memory is free, as a run without limits has it

Invariant: all contestants of a benchmark compute on the same tokens, in the same micro-batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ratel_cli.engine.adamw import AdamWSettings
from ratel_cli.engine.opening import open_engine
from ratel_cli.engine.telemetry import RESOURCES, Span, Timeline
from ratel_cli.engine.trace import TraceFile
from ratel_cli.engine.update import UpdateSettings
from ratel_cli.hardware.host import default_limit_bytes, peak_resident_bytes, resident_bytes, return_freed_memory
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.blocks import find_blocks
from ratel_cli.model.initialise import RandomSource
from ratel_cli.model.load import import_weights
from ratel_cli.model.skeleton import build_skeleton
from ratel_cli.model.spec import ModelSpec
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.queue import IoQueue, open_queue
from ratel_cli.movement.records import record_layout
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.store import Progress, Store, StoreIdentity
from ratel_cli.movement.tickets import Ticket, join
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.placement import Overlap
from ratel_cli.planning.plan import Decisions, Plan, make_plan
from ratel_cli.planning.traffic import StateBytes
from ratel_cli.units import GIB, MIB

Contestant = Literal["plain", "plain-kept", "ratel", "ratel-kept"]
CONTESTANTS: tuple[Contestant, ...] = get_args(Contestant)

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
    "0.35b": {**_MODEL, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24},
    "1b": {
        **_MODEL,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
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
_GROUP_BYTES = 24 * MIB
_NUM_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one contestant is to do."""

    contestant: Contestant
    shape: str
    tokens: int
    """Of a micro-batch."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process of one contestant."""

    num_parameters: int
    step_seconds: list[float]
    """From decision to decision, of the steps counted; the last one's with what was left to write."""
    losses: list[float]
    peak_bytes: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Random tokens [1, tokens]; every position has a target."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    num_targets: int


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
    command = [sys.executable, "-m", "scripts.contestants", json.dumps(asdict(task))]
    root = Path(__file__).parents[1]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    return Measured(**json.loads(output.splitlines()[-1]))


def run_plain(task: Task) -> Measured:
    """All in memory: 16 bytes per parameter and the activations."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(_config(task))
    torch.set_default_dtype(torch.float32)
    model.train()
    if task.contestant == "plain":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizers = [torch.optim.AdamW([master], lr=LEARNING_RATE, fused=True, weight_decay=0.0) for master in masters]
    seconds, losses = [], []
    for batches in _batches(task):
        start = time.perf_counter()
        losses.append(_plain_gradients(model, batches))
        if task.clip:
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
        num_parameters=sum(parameter.numel() for parameter in parameters),
        step_seconds=seconds[task.warm_up :],
        losses=losses,
        peak_bytes=peak_resident_bytes(),
    )


def run_ratel(task: Task) -> Measured:
    """All state in a store that is deleted afterwards."""
    return_freed_memory()
    model = find_blocks(build_skeleton(_config(task), dtype="bfloat16", attn_implementation="sdpa"), name="bench")
    timeline, device = Timeline(), torch.device("cpu")
    with ExitStack() as resources:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=task.directory)))
        queue = resources.enter_context(open_queue("auto", notice=lambda text: print(text, file=sys.stderr)))
        limit_bytes = default_limit_bytes() if task.host_memory_gib is None else int(task.host_memory_gib * GIB)
        pool = resources.enter_context(BufferPool(limit_bytes))
        plan = _plan(
            task, model.spec, measure([directory], queue, pool, dtype=torch.bfloat16, device=device), limit_bytes
        )
        store = resources.enter_context(
            Store.create(
                [directory],
                identity=StoreIdentity(model_hash="", config_hash="", data_hash="", seed=0, software=""),
                layout=record_layout("bfloat16"),
                block_elements=[block.num_elements for block in model.spec.blocks],
                num_slots=plan.decisions.num_slots,
                in_place=plan.decisions.in_place,
                queue=queue,
            )
        )
        import_weights(model.spec, RandomSource(model.skeleton, 0), store, pool, progress=lambda count: None)
        store.commit_import(_progress(0))
        pool.trim()
        rates = [mixed_rate([directory], queue, pool)]
        scratch = None
        if plan.spilled_bytes:
            scratch = resources.enter_context(Scratch([directory], plan.spilled_bytes, queue))
        engine = resources.enter_context(
            open_engine(
                model,
                store,
                pool,
                adamw=AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0),
                updates=UpdateSettings(
                    gradient_dtype=torch.bfloat16,
                    max_grad_norm=1.0 if task.clip else None,
                    hold=plan.decisions.in_place,
                    held_in_memory_bytes=plan.held_in_memory_bytes,
                    overlap=task.overlap,
                ),
                placement=plan.placement,
                seed=0,
                device=device,
                timeline=timeline,
                scratch=scratch,
            )
        )
        trace = None
        if task.trace is not None:
            trace = resources.enter_context(TraceFile(Path(task.trace), warn=lambda text: print(text, file=sys.stderr)))
        seconds, losses, spans = [], [], list[Span]()
        busy, waited = dict.fromkeys(RESOURCES, 0.0), dict.fromkeys(RESOURCES, 0.0)
        moved_bytes = 0
        for step, batches in enumerate(_batches(task)):
            if step == task.warm_up:
                if engine.is_unsettled:
                    engine.settle()
                    store.commit(_progress(step))
                moved_bytes = queue.read_bytes + queue.written_bytes
            start = time.perf_counter()
            outcome = engine.run(
                batches,
                step=step,
                update=step + 1,
                learning_rate=LEARNING_RATE,
                commit_previous=lambda step=step: store.commit(_progress(step)),  # type: ignore[misc]
            )
            assert outcome.applied
            losses.append(outcome.loss)
            if step == task.steps - 1:
                engine.settle()
                store.commit(_progress(step + 1))
            seconds.append(time.perf_counter() - start)
            times = timeline.take()
            if trace is not None:
                trace.write_step(step + 1, times.spans, start=start, end=time.perf_counter())
            if step >= task.warm_up:
                spans += times.spans
                for resource in RESOURCES:
                    busy[resource] += times.busy[resource]
                    waited[resource] += times.waited[resource]
        moved_bytes = queue.read_bytes + queue.written_bytes - moved_bytes
        weights_sha256 = _hash(store, pool)
        rates.append(mixed_rate([directory], queue, pool))
        return Measured(
            num_parameters=model.spec.num_parameters,
            step_seconds=seconds[task.warm_up :],
            losses=losses,
            peak_bytes=peak_resident_bytes(),
            weights_sha256=weights_sha256,
            busy_seconds={str(resource): spent for resource, spent in busy.items()},
            waited_seconds={str(resource): spent for resource, spent in waited.items()},
            hidden_fraction=hidden_fraction(spans),
            nvme_bytes=moved_bytes,
            predicted_nvme_bytes=(plan.traffic.read_bytes + plan.traffic.written_bytes) * (task.steps - task.warm_up),
            mixed_bytes_per_second=sum(rates) / len(rates),
            predicted_seconds=plan.time.total,
            placement=_words(plan),
        )


def mixed_rate(paths: Sequence[Path], queue: IoQueue, pool: BufferPool, *, num_bytes: int = 1 << 30) -> float:
    """Bytes per second of both directions together, as much read as written, in pieces as large as the optimizer's."""
    num_bytes = max(1, num_bytes // _GROUP_BYTES) * _GROUP_BYTES
    with ExitStack() as resources:
        scratch = resources.enter_context(Scratch(paths, 2 * num_bytes, queue))
        leases = [resources.enter_context(pool.lease(_GROUP_BYTES, "measuring")) for _ in range(2 * _NUM_IN_FLIGHT)]
        for offset in range(0, 2 * num_bytes, _GROUP_BYTES):
            scratch.write(offset, leases[0].memory).wait()
        start = time.perf_counter()
        tickets: deque[Ticket] = deque()
        for number, offset in enumerate(range(0, num_bytes, _GROUP_BYTES)):
            if len(tickets) == 2 * _NUM_IN_FLIGHT:
                tickets.popleft().wait()
                tickets.popleft().wait()
            read, write = leases[2 * (number % _NUM_IN_FLIGHT)], leases[2 * (number % _NUM_IN_FLIGHT) + 1]
            tickets += [scratch.read(offset, read.memory), scratch.write(num_bytes + offset, write.memory)]
        join(tickets).wait()
        return 2 * num_bytes / (time.perf_counter() - start)


def hidden_fraction(spans: Sequence[Span]) -> float:
    """Of the time in which drives or optimizer worked, the fraction in which the compute thread computed."""
    edges: list[tuple[float, int, int]] = []
    for span in spans:
        which = 0 if span.resource == "compute" else 1
        edges += [(span.start, 1, which), (span.end, -1, which)]
    counts, worked, hidden, last = [0, 0], 0.0, 0.0, 0.0
    for moment, change, which in sorted(edges):
        if counts[1]:
            worked += moment - last
            hidden += moment - last if counts[0] else 0.0
        counts[which] += change
        last = moment
    return hidden / worked if worked else 1.0


def _plan(task: Task, spec: ModelSpec, hardware: HardwareProfile, limit_bytes: int) -> Plan:
    decisions = Decisions(
        holds_gradients=task.clip or task.in_place,
        num_slots=1 if task.in_place else 2,
        host_limit_bytes=limit_bytes,
        activations="recompute" if task.contestant == "ratel" else "auto",
        overlap=task.overlap,
    )
    workload = Workload(micro_batch_size=1, num_micro_batches=task.micro_batches, sequence_len=task.tokens)
    return make_plan(
        spec,
        StateBytes(compute=2, record=12, gradient=2),
        workload,
        decisions,
        hardware,
        process_bytes=resident_bytes(),
    )


def _words(plan: Plan) -> str:
    placement = plan.placement
    return (
        f"{placement.prefetch_blocks} blocks ahead, {placement.pending_updates} updates pending; of "
        f"{plan.num_blocks} blocks {len(placement.resident_weights)} weights and {len(placement.resident_states)} "
        f"states resident, {len(placement.deferred)} deferred; "
        f"{placement.activation_bytes / GIB:.2f} GiB of activations"
    )


def _config(task: Task) -> LlamaConfig:
    return LlamaConfig.from_dict({**SHAPES[task.shape], "max_position_embeddings": max(64, task.tokens)})


def _batches(task: Task) -> Iterator[list[Batch]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(task.steps):
        step = []
        for _ in range(task.micro_batches):
            ids = torch.randint(0, SHAPES[task.shape]["vocab_size"], (1, task.tokens + 1), generator=generator)
            step.append(
                Batch(
                    input_ids=ids[:, :-1].contiguous(),
                    targets=ids[:, 1:].contiguous(),
                    position_ids=torch.arange(task.tokens).unsqueeze(0),
                    num_targets=task.tokens,
                )
            )
        yield step


def _plain_gradients(model: LlamaForCausalLM, batches: Sequence[Batch]) -> float:
    total, num_targets = 0.0, sum(batch.num_targets for batch in batches)
    for batch in batches:
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0].float(), batch.targets[0], reduction="sum") / num_targets
        loss.backward()
        total += float(loss.detach())
    return total


def _hash(store: Store, pool: BufferPool) -> str:
    """Of every byte of the current generation."""
    digest = hashlib.sha256()
    for block, num_elements in enumerate(store.block_elements):
        for each in store.layout.fields:
            with pool.lease(num_elements * each.bytes_per_element, "hashing") as lease:
                store.read(block, each.name, 0, num_elements, lease.memory).wait()
                digest.update(lease.memory)
        pool.trim()
    return digest.hexdigest()


def _progress(step: int) -> Progress:
    return Progress(step=step, updates=step, loss_scale=1.0, good_steps=0, tokens=0)


if __name__ == "__main__":
    given = Task(**json.loads(sys.argv[1]))
    print(json.dumps(asdict((run_plain if given.contestant.startswith("plain") else run_ratel)(given))))
