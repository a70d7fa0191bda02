"""Steps of Ratel on a GPU as users have them, each next to plain PyTorch on the same tokens where that trains the same.

Regime: layers of the shapes of Qwen3-8B and Llama-8B, as many as the store has space for, random weights and tokens,
bf16, deterministic kernels, the store in RAM or in the directory that is given. The ceiling is plain PyTorch with
activation checkpointing and everything in GPU memory.

Invariant: the two sides of a comparison compute on the same tokens, in the same micro-batches.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from ratel_cli.hardware.host import available_bytes, default_limit_bytes
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.planning.time.traffic import store_bytes
from ratel_cli.run.inputs.settings import num_slots, rules_in
from ratel_cli.units import GIB
from scripts.bench.contestants import SHAPES, Measured, Task, run_process
from scripts.bench.findings import Report
from scripts.bench.gpu_steps import GpuSteps, PatternSource, PlanPoint
from scripts.bench.ratel_run import RatelRun, open_run, run_config, trained_skeleton

_IN_MEMORY = Path("/dev/shm")
_SHARE_OF_SPACE = 0.45
"""Of what is free, what a store may take: the rest is for host memory and other programs."""
_NUM_STEPS = 2
"""Steps that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and how it is trained."""

    name: str
    shape: str
    layers: int
    """At most."""
    rows: int
    row_tokens: int
    micro_batches: int
    samples: tuple[int, ...] = (1,)
    """Samples in a row: each number is measured, on one store."""
    limit_gib: float = 24.0
    host_memory_gib: float | None = None
    has_plain: bool = False
    """Whether plain PyTorch is measured, too."""
    changes: dict[str, object] = field(default_factory=dict)
    """Of the task."""
    needs_seconds: float = 15.0


_CASES = (
    Case(
        name="packed", shape="qwen3-8b", layers=6, rows=4, row_tokens=4096, micro_batches=16, samples=(4, 1),
        has_plain=True, needs_seconds=40,
    ),
    Case(
        name="lora", shape="llama-8b", layers=4, rows=4, row_tokens=4096, micro_batches=4, samples=(4,),
        has_plain=True, changes={"lora": 16},
    ),
    Case(
        name="nf4", shape="llama-8b", layers=4, rows=4, row_tokens=4096, micro_batches=4, samples=(4,),
        changes={"lora": 16, "quantised": "nf4 double"},
    ),
    Case(
        name="muon", shape="wide", layers=2, rows=4, row_tokens=4096, micro_batches=4, changes={"optimizer": "muon"},
    ),
    Case(name="adamw", shape="wide", layers=2, rows=4, row_tokens=4096, micro_batches=4),
    Case(name="long", shape="wide", layers=2, rows=1, row_tokens=65536, micro_batches=2, samples=(1, 2)),
    Case(name="small", shape="wide", layers=2, rows=1, row_tokens=1024, micro_batches=32),
    Case(
        name="little memory", shape="wide", layers=4, rows=8, row_tokens=2048, micro_batches=8, host_memory_gib=12.0,
    ),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}


def measure_case(
    report: Report, case: Case, *, directory: str | None = None, device: Literal["cpu", "cuda", "auto"] = "auto"
) -> None:
    """Plain PyTorch and Ratel on the case's tokens, and a line about both for each number of samples in a row."""
    task = _task(case, is_tiny=report.is_tiny, device=device, directory=directory)
    prepared = report.measure(f"{case.name}: task", lambda: _fitting(task, directory))
    if prepared is None:
        return
    plain = dict[int, Measured]()
    if case.has_plain:
        for samples in case.samples[:1]:
            contestant = replace(prepared, contestant="plain", samples=samples, steps=1 + _NUM_STEPS, warm_up=1)
            found = report.measure(
                f"{case.name}: plain, {samples} samples a row", partial(run_process, contestant), needs_seconds=15
            )
            if found is not None:
                plain[samples] = found
    with _opened(report, case, prepared) as run:
        if run is None:
            return
        for samples in case.samples:
            name = f"{case.name}, {samples} samples a row"
            work = partial(_point, run, name, samples, case.limit_gib)
            point = report.measure(f"{name}: ratel", work, needs_seconds=case.needs_seconds / 2)
            if point is not None:
                if point.kernels is not None:
                    report.table(f"{name}: a step", point.kernels.text())
                report.line(_words(name, point, plain.get(samples), layers=prepared.layers))


@contextmanager
def _opened(report: Report, case: Case, task: Task) -> Iterator[RatelRun | None]:
    """The case's run on a new store; None if it cannot be opened."""
    opened = open_run(task, limit_bytes=host_bytes_of(task), activations="auto", source=PatternSource())
    run = report.measure_entry(f"{case.name}: store", opened, needs_seconds=case.needs_seconds)
    try:
        yield run
    finally:
        if run is not None:
            opened.__exit__(None, None, None)


def _point(run: RatelRun, name: str, samples: int, limit_gib: float) -> PlanPoint:
    steps = GpuSteps(run, samples=samples)
    return steps.measure(name, steps.plan(gpu_memory_gib=limit_gib), num_steps=_NUM_STEPS, has_kernels=True)


def _words(name: str, point: PlanPoint, plain: Measured | None, *, layers: int | None) -> str:
    seconds = median(point.seconds)
    waited, waited_seconds = point.most_waited
    words = (
        f"{name}: {layers} layers, {seconds:.2f} s, {point.tokens / seconds:.0f} tokens/s, "
        f"{point.flops_per_second / 1e12:.3g} TFLOP/s, computing {point.computing:.0%}, most stalled on {waited} "
        f"{waited_seconds:.2f} s, predicted {point.predicted_seconds / seconds - 1:+.0%}, GPU "
        f"{point.gpu_peak_bytes / GIB:.1f} of {point.planned_gpu_bytes / GIB:.1f} GiB"
    )
    if point.kernels is not None:
        words += f", no kernel in {1 - point.kernels.busy_seconds / point.kernels.span_seconds:.0%} of a step"
    if plain is None:
        return words
    return f"{words}; plain {plain.seconds:.2f} s, {plain.gpu_peak_bytes / GIB:.1f} GiB: {plain.seconds / seconds:.2f}"


def _task(case: Case, *, is_tiny: bool, device: Literal["cpu", "cuda", "auto"], directory: str | None) -> Task:
    shape, rows, row_tokens, micro_batches = case.shape, case.rows, case.row_tokens, case.micro_batches
    if is_tiny:
        shape, rows = ("tiny-qwen3" if shape.startswith("qwen3") else "tiny"), min(rows, 2)
        row_tokens, micro_batches = 16, 1
    task = Task(
        contestant="ratel",
        shape=shape,
        tokens=rows * row_tokens,
        rows=rows,
        samples=case.samples[0],
        layers=min(case.layers, SHAPES[shape]["num_hidden_layers"]),
        micro_batches=micro_batches,
        steps=1 + _NUM_STEPS,
        warm_up=1,
        host_memory_gib=3.0 if is_tiny else case.host_memory_gib,
        device=device,
        gpu_memory_gib=case.limit_gib,
        **case.changes,  # type: ignore[arg-type]
    )
    return replace(task, directory=directory) if directory is not None else task


def _fitting(task: Task, directory: str | None) -> Task:
    """The task with as many of its layers as the store has space for, and where that is."""
    assert task.layers is not None
    for layers in range(task.layers, 0, -1):
        fewer = replace(task, layers=layers)
        if directory is not None:
            return fewer
        if store_bytes_of(fewer) < _SHARE_OF_SPACE * _space_in_memory():
            return replace(fewer, directory=str(_IN_MEMORY))
    return replace(task, layers=1, directory=tempfile.gettempdir())


def _space_in_memory() -> int:
    return min(available_bytes(), shutil.disk_usage(_IN_MEMORY).free) if _IN_MEMORY.is_dir() else 0


def store_directory(task: Task) -> str:
    """In RAM if the store takes less than a third of what is free, else where temporary files go."""
    return str(_IN_MEMORY) if 3 * store_bytes_of(task) < _space_in_memory() else tempfile.gettempdir()


def host_bytes_of(task: Task) -> int:
    """The limit on main memory: the given one, or what is free next to a store in RAM."""
    if task.host_memory_gib is not None:
        return int(task.host_memory_gib * GIB)
    is_in_memory = Path(task.directory).resolve().is_relative_to(_IN_MEMORY)
    return default_limit_bytes() - (store_bytes_of(task) if is_in_memory else 0)


def store_bytes_of(task: Task) -> int:
    """Size of the task's store."""
    config = run_config(task, _IN_MEMORY, limit_bytes=GIB, activations="auto")
    spec = find_blocks(trained_skeleton(task), name="", rules=rules_in(config)).spec
    return store_bytes(spec, num_slots=num_slots(config))
