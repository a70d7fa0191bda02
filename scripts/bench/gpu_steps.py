"""Steps of one model on a GPU under many plans, on one store: the measurements of `bench.gpu`.

Regime: a Llama shape with random weights and tokens, bf16, deterministic kernels; the store in the directory that is
given, on a drive or in RAM. One step is recorded, and every plan follows from its profile. Main memory holds as much as
it can, as in any run, so that the link and the GPU decide the time.

Invariant: the first step of a plan does not count. The others count from decision to decision, and the last one
includes what was left to write.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import median

import torch

from ratel_cli.hardware.gpu import num_alloc_retries
from ratel_cli.planning.profile.placement import ActivationPolicy, Overlap
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.units import GIB
from scripts.bench.contestants import batches_of
from scripts.bench.kernels import KernelTable, kernels_of
from scripts.bench.ratel_run import RatelRun, Steps


class PatternSource:
    """Weights like those of an initialiser, at the speed of a copy. Norms are ones."""

    def __init__(self) -> None:
        self._values = 0.02 * torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` of a parameter, flattened."""
        if "norm" in name:
            return torch.ones(stop - start)
        # Each parameter starts at another place, so that no two are alike.
        first = (start + 7919 * len(name) + sum(map(ord, name))) % len(self._values)
        turns = -(-(first + stop - start) // len(self._values))
        return self._values.repeat(turns)[first : first + stop - start]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """One plan on a GPU, as predicted and as measured."""

    name: str
    seconds: list[float]
    predicted_seconds: float
    predicted_bottleneck: str
    model_flops: int
    """Operations of a step: three times the forward's."""
    tokens: int
    """Of a step."""
    gpu_limit_bytes: int | None
    gpu_peak_bytes: int
    """Peak of what torch allocated, without the CUDA context."""
    planned_gpu_bytes: int
    """Planned peak, with the CUDA context."""
    swapped_bytes: int
    spilled_bytes: int
    gpu_resident_bytes: int
    """Bytes of activations that stay on the GPU."""
    gpu_resident_layers: int
    """Number of layers whose weights stay on the GPU too."""
    resident_blocks: tuple[int, int]
    """Number of blocks whose weights, and whose optimizer states, stay in main memory."""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of one step, by resource."""
    waited_seconds: dict[str, float] = field(default_factory=dict)

    kernels: KernelTable | None = None
    """Of one more step, if that was asked for."""
    num_alloc_retries: int = 0
    """How often in the steps that count torch found no memory in one piece."""

    @property
    def flops_per_second(self) -> float:
        return self.model_flops / median(self.seconds)

    @property
    def computing(self) -> float:
        """The share of a step in which the GPU computes."""
        return self.busy_seconds.get("compute", 0.0) / median(self.seconds)

    @property
    def most_waited(self) -> tuple[str, float]:
        """For what the GPU waits longest, and for how long."""
        return max(self.waited_seconds.items(), key=lambda each: each[1], default=("nothing", 0.0))


class GpuSteps:
    """Measures one plan after another in an open run."""

    def __init__(self, run: RatelRun, *, samples: int | None = None) -> None:
        """`samples`: samples in each row; None takes those of the run's task."""
        self._run = run
        task = run.task if samples is None else replace(run.task, samples=samples)
        self._batches = cycle(batches_of(task))
        _, self.profile = run.record(next(self._batches))

    def plan(
        self,
        *,
        gpu_memory_gib: float | None = None,
        activations: ActivationPolicy = "auto",
        overlap: Overlap = "optimized",
    ) -> Plan:
        """The plan with these settings. Raises DoesNotFit."""
        planner = self._run.planner
        limit_bytes = planner.decisions.device_limit_bytes
        if gpu_memory_gib is not None and limit_bytes is not None:
            limit_bytes = min(limit_bytes, int(gpu_memory_gib * GIB))
        decisions = replace(planner.decisions, device_limit_bytes=limit_bytes, activations=activations, overlap=overlap)
        return replace(planner, decisions=decisions).plan(self.profile)

    def measure(self, name: str, plan: Plan, *, num_steps: int, has_kernels: bool = False) -> PlanPoint:
        """Run `num_steps` steps of a plan, after one more that warms up. `has_kernels`: and then another one whose
        kernels are noted."""
        device = self._run.context.device
        on_gpu = device.type != "cpu"
        with self._run.under(plan) as steps:
            steps.run(next(self._batches))
            retries = num_alloc_retries() or 0
            if on_gpu:
                torch.accelerator.reset_peak_memory_stats(device)
            done = [
                steps.run(batches, settled=number == num_steps - 1)
                for number, batches in enumerate(islice(self._batches, num_steps))
            ]
            peak_bytes = torch.accelerator.max_memory_allocated(device) if on_gpu else 0
            kernels = self._kernels(steps) if has_kernels else None
        busy = dict.fromkeys(RESOURCES, 0.0)
        waited = dict.fromkeys(RESOURCES, 0.0)
        for step in done:
            for resource in RESOURCES:
                busy[resource] += step.times.busy[resource] / len(done)
                waited[resource] += step.times.stalled[resource] / len(done)
        return PlanPoint(
            name=name,
            seconds=[step.seconds for step in done],
            predicted_seconds=plan.time.total,
            predicted_bottleneck=plan.time.bottleneck,
            model_flops=plan.flops_model,
            tokens=self._run.task.tokens * self._run.task.micro_batches,
            gpu_limit_bytes=plan.decisions.device_limit_bytes,
            gpu_peak_bytes=peak_bytes,
            planned_gpu_bytes=plan.memory.device,
            swapped_bytes=plan.offloaded.total_bytes,
            spilled_bytes=plan.offloaded.written_bytes,
            gpu_resident_bytes=plan.offloaded.gpu_bytes,
            gpu_resident_layers=len(plan.placement.gpu_weights),
            resident_blocks=(len(plan.placement.resident_weights), len(plan.placement.resident_states)),
            busy_seconds=_named(busy),
            waited_seconds=_named(waited),
            kernels=kernels,
            num_alloc_retries=(num_alloc_retries() or 0) - retries,
        )

    def _kernels(self, steps: Steps) -> KernelTable | None:
        """None where the profiler sees none."""
        batches = next(self._batches)
        try:
            return kernels_of(lambda: steps.run(batches, settled=True), self._run.context.device)
        except RuntimeError as error:
            print(f"no kernels of a step: {error}", flush=True)
            return None


def _named(values: dict[Resource, float]) -> dict[str, float]:
    return {str(resource): seconds for resource, seconds in values.items()}
