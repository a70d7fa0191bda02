"""The words of a run: the opening statement, the step lines, the line about a new plan, the summary.

Invariant: nothing is decided here. The functions only choose words and units for values that others computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.plan import Plan
from ratel_cli.planning.step_time import RESOURCES, Resource
from ratel_cli.report.plan import RESOURCE_NAMES, step_time
from ratel_cli.training.metrics import RunTotals, StepMetrics
from ratel_cli.units import counted, format_bytes, format_count, format_seconds

_LEAST_SHARE = 0.01
"""Stalls below this share of a step are not printed."""


def opening(
    spec: ModelSpec,
    plan: Plan,
    hardware: HardwareProfile,
    *,
    dtype: str,
    samples: int,
    data_tokens: int,
    num_steps: int,
    first_step: int,
    engine: str,
    paths: Sequence[Path],
    output_dir: Path,
    taken_bytes: int = 0,
) -> list[tuple[str, str]]:
    """Rows about what will be trained, where its state will be, and what that will cost.

    `taken_bytes` is the size of an earlier store of this run, whose space counts as available.
    """
    gpu = hardware.gpu
    return [
        ("model", _model(spec, dtype)),
        ("data", f"{counted(samples, 'sample')}, {format_count(data_tokens)} tokens"),
        ("step", _step(plan, num_steps, first_step)),
        ("compute", f"{gpu.name}, {gpu.flops_per_second / 1e12:.3g} TFLOP/s; one block at a time"),
        *_gpu_memory(plan, hardware),
        ("memory", _memory(plan)),
        ("NVMe", _nvme(plan, hardware, engine=engine, paths=paths, taken_bytes=taken_bytes)),
        ("predicted", _prediction(plan, num_steps - first_step)),
        ("output", str(output_dir)),
    ]


def step_line(metrics: StepMetrics, num_steps: int) -> str:
    """One line for a step. It ends with what stalled the step."""
    parts = [
        f"step {metrics.step}/{num_steps}",
        f"loss {metrics.loss:.4f}",
        f"lr {metrics.learning_rate:.2e}",
        f"norm {metrics.grad_norm:.3f}{' clipped' if metrics.clipped else ''}",
        f"{metrics.tokens_per_second:.0f} tokens/s",
        format_seconds(metrics.step_seconds),
    ]
    if metrics.eval_loss is not None:
        parts.append(f"eval loss {metrics.eval_loss:.4f}")
    if not metrics.applied:
        parts.append("skipped: gradients overflowed, loss scale halved")
    parts.append(_stall(metrics))
    return "  ".join(parts)


def plan_line(plan: Plan) -> str:
    """One line about a plan that follows from a recorded step: what it offloads, and how long a step will take."""
    offloaded = plan.offloaded
    places = [f"{format_bytes(offloaded.written_bytes)} on NVMe"] if offloaded.written_bytes else []
    if offloaded.gpu_bytes:
        places.append(f"{format_bytes(offloaded.gpu_bytes)} stay on the GPU")
    what = counted(len(plan.swapped), "operator") if plan.swapped else "only the inputs of layers"
    size = ", ".join([format_bytes(offloaded.total_bytes), *places])
    recomputed_bytes = plan.swappable_bytes - offloaded.total_bytes
    rest = f"{format_bytes(recomputed_bytes)} recomputed" if recomputed_bytes > 0 else "none recomputed"
    return f"plan updated from step 1: {what} offloaded ({size}), {rest}; {step_time(plan)}"


def run_summary(totals: RunTotals) -> list[tuple[str, str]]:
    """Rows about the mean step of a run: its time, and the time and share of each resource that was busy."""
    if not totals.num_steps:
        return []
    seconds = totals.seconds / totals.num_steps
    which = "without the first (warm-up)" if totals.leaves_out_first else "the warm-up"
    busy = [(resource, totals.busy_seconds[resource] / totals.num_steps) for resource in RESOURCES]
    rows = [
        ("step", seconds, f"{totals.tokens / totals.seconds:.0f} tokens/s"),
        *((RESOURCE_NAMES[resource], each, _traffic(totals, resource)) for resource, each in busy if each > 0),
        ("stalled", sum(totals.waited_seconds.values()) / totals.num_steps, _stalls(totals)),
    ]
    columns = [(name, format_seconds(each), _percent(each / seconds), fact) for name, each, fact in rows]
    width = max(len(duration) for _, duration, _, _ in columns)
    return [
        ("mean of", f"{counted(totals.num_steps, 'step')}, {which}"),
        *((name, f"{duration:>{width}}  {share:>5}  {fact}".rstrip()) for name, duration, share, fact in columns),
    ]


def _model(spec: ModelSpec, dtype: str) -> str:
    size = f"{format_count(spec.num_parameters)} parameters in {counted(len(spec.blocks), 'block')}"
    return f"{spec.name} ({spec.architecture}): {size}; computes in {dtype}, master weights and moments in fp32"


def _stall(metrics: StepMetrics) -> str:
    """What could make the step faster: what stalled the compute thread or, if nothing did, what was busy longest."""
    cause = max(RESOURCES, key=lambda resource: metrics.waited_seconds[resource])
    share = metrics.waited_seconds[cause] / metrics.step_seconds
    if share >= _LEAST_SHARE:
        return f"stalled {_percent(share)} on {RESOURCE_NAMES[cause]}"
    busy = metrics.busy_seconds[metrics.bottleneck] / metrics.step_seconds
    return f"no stall, {RESOURCE_NAMES[metrics.bottleneck]} busy {_percent(busy)}"


def _stalls(totals: RunTotals) -> str:
    """The causes of stalls, the largest first."""
    shares = [(seconds / totals.seconds, cause) for cause, seconds in totals.waited_seconds.items()]
    shown = [
        f"{RESOURCE_NAMES[cause]} {_percent(share)}"
        for share, cause in sorted(shares, reverse=True)
        if share >= _LEAST_SHARE
    ]
    return f"on {', '.join(shown)}" if shown else ""


def _traffic(totals: RunTotals, resource: Resource) -> str:
    """For reads and writes of NVMe: the bytes in a step, and the rate while the resource was busy."""
    num_bytes = {"nvme read": totals.nvme_read_bytes, "nvme write": totals.nvme_written_bytes}.get(resource, 0)
    if not num_bytes:
        return ""
    bytes_per_second = num_bytes / totals.busy_seconds[resource]
    return f"{num_bytes / totals.num_steps / 1e9:.3g} GB at {bytes_per_second / 1e9:.3g} GB/s while busy"


def _percent(share: float) -> str:
    # A transfer counts in the step in which it ends. One that began earlier may make that step look overfull.
    return f"{min(share, 1.0) * 100:.0f} %"


def _step(plan: Plan, num_steps: int, first_step: int) -> str:
    workload = plan.workload
    which = f"steps {first_step + 1} to {num_steps}" if first_step < num_steps else f"all {num_steps} steps are done"
    micro_batches = counted(workload.num_micro_batches, "micro-batch", "micro-batches")
    size = f"{workload.micro_batch_size} x {workload.sequence_len}"
    return f"{micro_batches} of {size} = {workload.tokens} tokens; {which}"


def _gpu_memory(plan: Plan, hardware: HardwareProfile) -> list[tuple[str, str]]:
    """A row if there is a GPU."""
    limit_bytes = plan.decisions.device_limit_bytes
    if hardware.link is None or limit_bytes is None:
        return []
    return [("GPU memory", f"{format_bytes(plan.memory.device)} of {format_bytes(limit_bytes)}")]


def _memory(plan: Plan) -> str:
    parts = [
        f"{format_bytes(plan.memory.total)} of {format_bytes(plan.decisions.host_limit_bytes)} RAM",
        *_resident(plan),
    ]
    if plan.decisions.holds_gradients:
        held = f"{format_bytes(plan.memory.held_gradients)} of gradients"
        if plan.spilled_bytes:
            held += f" and {format_bytes(plan.spilled_bytes)} more on NVMe"
        parts.append(f"{held} held {'until the step is complete' if plan.decisions.in_place else 'for clipping'}")
    return "; ".join(parts)


def _resident(plan: Plan) -> list[str]:
    """What stays in memory between steps, because there is space for it."""
    num_blocks, placement = plan.num_blocks, plan.placement
    counts = (("weights", len(placement.resident_weights)), ("optimizer states", len(placement.resident_states)))
    whole = [what for what, count in counts if count == num_blocks]
    parts = [f"{what} ({count} of {num_blocks} blocks)" for what, count in counts if 0 < count < num_blocks]
    if whole:
        parts = [f"all {' and '.join(whole)}", *parts]
    return [f"{', '.join(parts)} resident"] if parts else []


def _nvme(plan: Plan, hardware: HardwareProfile, *, engine: str, paths: Sequence[Path], taken_bytes: int) -> str:
    nvme = hardware.nvme
    available_bytes = nvme.free_bytes + taken_bytes
    shortfall_bytes = plan.nvme_bytes - available_bytes
    need, available = format_bytes(plan.nvme_bytes), format_bytes(available_bytes)
    space = f"{need} of {available}"
    if shortfall_bytes > 0:
        space = f"needs {need}, {available} available (short by {format_bytes(shortfall_bytes)}, see storage.paths)"
    rates = f"{nvme.read_bytes_per_second / 1e9:.2g} GB/s read, {nvme.write_bytes_per_second / 1e9:.2g} GB/s written"
    return f"{space} in {', '.join(map(str, paths))}; {engine}, {rates}"


def _prediction(plan: Plan, num_steps_left: int) -> str:
    seconds, written_bytes = plan.time.total * num_steps_left, plan.traffic.written_bytes * num_steps_left
    steps = counted(num_steps_left, "step")
    fact = f"{step_time(plan)}; {format_seconds(seconds)} and {written_bytes / 1e12:.3g} TB written for {steps}"
    return f"{fact}; estimated from shapes until step 1 is recorded" if plan.source == "analytic" else fact
