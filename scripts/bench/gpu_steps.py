"""Steps of one model on a GPU under many plans, from one store: what `bench.gpu` measures.

Regime: a Llama shape with weights of no meaning and random tokens, bf16, deterministic kernels; the store on the drive
or in the RAM directory that is given. One step is recorded; every plan after it is made from that. So that the link and
the GPU are what is measured, main memory keeps what it has room for, as in any run.

Invariant: a plan's steps count from its second on, from decision to decision; the last one's time includes what was
left to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import median

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.engine.telemetry import RESOURCES, Resource
from ratel_cli.hardware.budget import best_seconds
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.placement import ActivationPolicy, Overlap
from ratel_cli.planning.plan import Plan
from ratel_cli.run.plan import Planner
from ratel_cli.units import GIB
from scripts.bench.contestants import batches_of
from scripts.bench.ratel_run import RatelRun


class PatternSource:
    """Numbers such as initialisers draw, at the speed of a copy; norms are ones."""

    def __init__(self) -> None:
        self._values = 0.02 * torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a parameter, flattened."""
        if "norm" in name:
            return torch.ones(stop - start)
        # Each parameter begins elsewhere, so that no two are alike.
        first = (start + 7919 * len(name) + sum(map(ord, name))) % len(self._values)
        turns = -(-(first + stop - start) // len(self._values))
        return self._values.repeat(turns)[first : first + stop - start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One plan, as predicted and as measured."""

    name: str
    seconds: list[float]
    predicted_seconds: float
    predicted_bottleneck: str
    model_flops: int
    """Of a step: three times the forward's."""
    gpu_limit_bytes: int | None
    gpu_peak_bytes: int
    """Allocated by torch; the context comes on top."""
    planned_gpu_bytes: int
    """With the context."""
    swapped_bytes: int
    spilled_bytes: int
    kept_bytes: int
    """Of activations, on the GPU."""
    kept_layers: int
    """Whose weights stay there too."""
    resident_blocks: tuple[int, int]
    """Whose weights and whose states stay in main memory."""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """Of a step."""
    waited_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def flops_per_second(self) -> float:
        return self.model_flops / median(self.seconds)


class GpuSteps:
    """Measures plans one after another. Belongs to an open run."""

    def __init__(self, run: RatelRun) -> None:
        self._run = run
        self._batches = cycle(batches_of(run.task))
        _, self.profile = run.record(next(self._batches))

    def plan(
        self,
        *,
        gpu_memory_gib: float | None = None,
        activations: ActivationPolicy = "auto",
        overlap: Overlap = "optimized",
    ) -> Plan:
        """The plan with these wishes. Raises DoesNotFit."""
        return self._planner(gpu_memory_gib, activations, overlap).plan(self.profile)

    def measure(self, name: str, plan: Plan, *, num_steps: int) -> Point:
        """So many steps of a plan, after one more that warms up."""
        on_gpu = self._run.device.type == "cuda"
        with self._run.under(plan) as steps:
            steps.run(next(self._batches))
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self._run.device)
            done = [
                steps.run(batches, settled=number == num_steps - 1)
                for number, batches in enumerate(islice(self._batches, num_steps))
            ]
        busy = dict.fromkeys(RESOURCES, 0.0)
        waited = dict.fromkeys(RESOURCES, 0.0)
        for step in done:
            for resource in RESOURCES:
                busy[resource] += step.times.busy[resource] / len(done)
                waited[resource] += step.times.waited[resource] / len(done)
        return Point(
            name=name,
            seconds=[step.seconds for step in done],
            predicted_seconds=plan.time.total,
            predicted_bottleneck=plan.time.bottleneck,
            model_flops=3 * plan.flops_forward,
            gpu_limit_bytes=plan.decisions.device_limit_bytes,
            gpu_peak_bytes=torch.cuda.max_memory_allocated(self._run.device) if on_gpu else 0,
            planned_gpu_bytes=plan.memory.device,
            swapped_bytes=plan.offloaded.total_bytes,
            spilled_bytes=plan.offloaded.written_bytes,
            kept_bytes=plan.offloaded.gpu_bytes,
            kept_layers=len(plan.placement.gpu_weights),
            resident_blocks=(len(plan.placement.resident_weights), len(plan.placement.resident_states)),
            busy_seconds=_named(busy),
            waited_seconds=_named(waited),
        )

    def _planner(self, gpu_memory_gib: float | None, activations: ActivationPolicy, overlap: Overlap) -> Planner:
        planner = self._run.planner
        limit_bytes = planner.decisions.device_limit_bytes
        if gpu_memory_gib is not None and limit_bytes is not None:
            limit_bytes = min(limit_bytes, int(gpu_memory_gib * GIB))
        decisions = replace(planner.decisions, device_limit_bytes=limit_bytes, activations=activations, overlap=overlap)
        return replace(planner, decisions=decisions)


def block_flops_per_second(run: RatelRun, profile: ModelProfile, batch: MicroBatch, *, seconds: float) -> float:
    """One layer's forward and backward with all activations kept and nothing moved: the ceiling for a step.

    Three times its forward's operations, as a step's are counted.
    """
    model, device = run.model, run.device
    model.place(device)
    with torch.no_grad(), _bound(model, 0, device):
        embedded = model.layer_runner.embed(batch.input_ids.to(device), batch.position_ids.to(device))
    leaf = embedded.hidden.detach().requires_grad_()
    with _bound(model, 1, device) as parameters:

        def work() -> None:
            output = model.layer_runner.run_layer(0, leaf, embedded.calls[0])
            torch.autograd.grad(output, (leaf, *parameters), torch.ones_like(output))
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        best = best_seconds(work, seconds)
    return 3 * profile.profiles[profile.layers[0]].flops_forward / best


@contextmanager
def _bound(model: DecoderModel, index: int, device: torch.device) -> Iterator[tuple[torch.nn.Parameter, ...]]:
    """A block with weights of no meaning."""
    block = model.spec.blocks[index]
    weights = torch.empty(block.num_elements, dtype=torch.bfloat16, device=device)
    try:
        yield model.bind(block, weights.normal_(std=0.02))
    finally:
        model.release(block)


def _named(values: dict[Resource, float]) -> dict[str, float]:
    return {str(resource): seconds for resource, seconds in values.items()}
