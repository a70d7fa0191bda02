"""The words of a run: the opening statement, the step line, the summary.

`run.finetune` prints what these functions return. Invariant: nothing is computed here but how it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.engine.telemetry import RESOURCES, Resource
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.plan import Plan
from ratel_cli.training.metrics import RunTotals, StepMetrics
from ratel_cli.units import format_bytes, format_count, format_seconds


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
    """What will be trained, where the bytes will live, what it will cost. `taken_bytes`: the store has them already."""
    gpu = hardware.gpu
    return [
        (
            "model",
            _words(
                f"{spec.name} ({spec.architecture}): {format_count(spec.num_parameters)} parameters",
                f"in {len(spec.blocks)} blocks, computing in {dtype}, master weights and moments in fp32",
            ),
        ),
        ("data", f"{_counted(samples, 'sample')}, {format_count(data_tokens)} tokens"),
        ("step", _step(plan, num_steps, first_step)),
        ("compute", f"{gpu.name}, {gpu.flops_per_second / 1e12:.3g} TFLOP/s; one block at a time"),
        *_gpu_memory(plan, hardware),
        ("memory", _memory(plan)),
        ("NVMe", _nvme(plan, hardware, engine=engine, paths=paths, taken_bytes=taken_bytes)),
        ("predicted", _prediction(plan, num_steps - first_step)),
        ("output", str(output_dir)),
    ]


def step_line(metrics: StepMetrics, num_steps: int) -> str:
    """One line per step; it ends with what the step waited for."""
    parts = [
        f"step {metrics.step}/{num_steps}",
        f"loss {metrics.loss:.4f}",
        f"lr {metrics.learning_rate:.2e}",
        f"norm {metrics.grad_norm:.3f}",
        f"{metrics.tokens_per_second:.0f} tokens/s",
        format_seconds(metrics.step_seconds),
    ]
    if metrics.eval_loss is not None:
        parts.append(f"eval loss {metrics.eval_loss:.4f}")
    if not metrics.applied:
        parts.append("not applied: gradients overflowed, the loss scale is halved")
    parts.append(_wait(metrics))
    return "  ".join(parts)


def run_summary(totals: RunTotals) -> list[tuple[str, str]]:
    """The mean step of a run, one row for each resource that had work: how long, which share of the step."""
    if not totals.num_steps:
        return []
    seconds = totals.seconds / totals.num_steps
    which = "without the first, which warms up" if totals.leaves_out_first else "which warms up"
    busy = [(resource, totals.busy_seconds[resource] / totals.num_steps) for resource in RESOURCES]
    waited = sum(totals.waited_seconds.values()) / totals.num_steps
    rows = [
        ("step", seconds, f"{totals.tokens / totals.seconds:.0f} tokens/s"),
        *((resource, each, _traffic(totals, resource)) for resource, each in busy if each > 0),
        ("waited", waited, _waits(totals)),
    ]
    columns = [(name, format_seconds(each), _percent(each / seconds), fact) for name, each, fact in rows]
    width = max(len(duration) for _, duration, _, _ in columns)
    return [
        ("mean of", f"{_counted(totals.num_steps, 'step')}, {which}"),
        *((name, f"{duration:>{width}}  {share:>5}  {fact}".rstrip()) for name, duration, share, fact in columns),
    ]


def _wait(metrics: StepMetrics) -> str:
    """What could be faster: what the compute thread stood still for or, if nothing, what had most to do."""
    cause = max(RESOURCES, key=lambda resource: metrics.waited_seconds[resource])
    share = metrics.waited_seconds[cause] / metrics.step_seconds
    if share >= 0.01:
        return f"waited {_percent(share)} for {cause}"
    busy = metrics.busy_seconds[metrics.bottleneck] / metrics.step_seconds
    return f"waited for nothing, {metrics.bottleneck} busy {_percent(busy)}"


def _waits(totals: RunTotals) -> str:
    """The causes, most of it first."""
    shares = [(seconds / totals.seconds, cause) for cause, seconds in totals.waited_seconds.items()]
    told = [f"{cause} {_percent(share)}" for share, cause in sorted(shares, reverse=True) if share >= 0.01]
    return "for " + (", ".join(told) or "nothing")


def _traffic(totals: RunTotals, resource: Resource) -> str:
    """What went over the wires to NVMe in a step, and how fast while there was something to do."""
    num_bytes = {"nvme read": totals.nvme_read_bytes, "nvme write": totals.nvme_written_bytes}.get(resource, 0)
    if not num_bytes:
        return ""
    bytes_per_second = num_bytes / totals.busy_seconds[resource]
    return f"{num_bytes / totals.num_steps / 1e9:.3g} GB at {bytes_per_second / 1e9:.3g} GB/s while busy"


def _percent(share: float) -> str:
    # A transfer counts in the step in which it ends: one that began before may make that step look overfull.
    return f"{min(share, 1.0) * 100:.0f} %"


def _step(plan: Plan, num_steps: int, first_step: int) -> str:
    workload = plan.workload
    which = f"steps {first_step + 1} to {num_steps}" if first_step < num_steps else f"all {num_steps} steps are done"
    return _words(
        _counted(workload.num_micro_batches, "micro-batch", "micro-batches"),
        f"of {workload.micro_batch_size} x {workload.sequence_len} = {workload.tokens} tokens; {which}",
    )


def _gpu_memory(plan: Plan, hardware: HardwareProfile) -> list[tuple[str, str]]:
    """Where there is a GPU, what the run takes of it."""
    limit_bytes = plan.decisions.device_limit_bytes
    if hardware.link is None or limit_bytes is None:
        return []
    return [("GPU memory", f"need {format_bytes(plan.memory.device)}, have {format_bytes(limit_bytes)}")]


def _memory(plan: Plan) -> str:
    fact = f"need {format_bytes(plan.memory.total)} of RAM, have {format_bytes(plan.decisions.host_limit_bytes)}"
    if plan.decisions.holds_gradients:
        fact += f"; gradients wait for the norm: {format_bytes(plan.memory.held_gradients)} of them in RAM"
    if plan.spilled_bytes:
        fact += f", {format_bytes(plan.spilled_bytes)} on NVMe"
    return fact + _stays(plan)


def _stays(plan: Plan) -> str:
    """What spare memory is used for."""
    placement = plan.placement
    counts = (("weights", len(placement.resident_weights)), ("states", len(placement.resident_states)))
    kept = [f"{what} of {count}" for what, count in counts if count]
    return f"; {' and '.join(kept)} of {plan.num_blocks} blocks stay in RAM" if kept else ""


def swap_line(plan: Plan) -> str:
    """What becomes of activations, and what a step is expected to take: said when a plan follows a recorded step."""
    offloaded = plan.offloaded
    put = f"{format_bytes(offloaded.total_bytes)} of {format_bytes(plan.swappable_bytes)} of activations are offloaded"
    if offloaded.written_bytes:
        put += f", {format_bytes(offloaded.written_bytes)} of them on NVMe"
    if offloaded.gpu_bytes:
        put += f", {format_bytes(offloaded.gpu_bytes)} kept on the GPU"
    operators = len(plan.swapped)
    what = _counted(operators, "operator", "operators") if operators else "layers' inputs alone"
    prediction = f"{format_seconds(plan.time.total)} a step, most of it {plan.time.bottleneck}"
    return f"planned from step 1: {put} ({what}); {prediction}"


def _nvme(plan: Plan, hardware: HardwareProfile, *, engine: str, paths: Sequence[Path], taken_bytes: int) -> str:
    nvme = hardware.nvme
    have_bytes = nvme.free_bytes + taken_bytes
    shortfall_bytes = plan.nvme_bytes - have_bytes
    too_few = f": {format_bytes(shortfall_bytes)} too few, see storage.paths" if shortfall_bytes > 0 else ""
    return _words(
        f"need {format_bytes(plan.nvme_bytes)} in {', '.join(map(str, paths))},",
        f"have {format_bytes(have_bytes)}{too_few}",
        f"({engine}, {nvme.read_bytes_per_second / 1e9:.2g} GB/s read,",
        f"{nvme.write_bytes_per_second / 1e9:.2g} GB/s written)",
    )


def _prediction(plan: Plan, num_steps_left: int) -> str:
    seconds, written_bytes = plan.time.total, plan.traffic.written_bytes
    estimated = "by its shapes, until step 1 is recorded: " if plan.profile_source == "analytic" else ""
    return _words(
        f"{estimated}{format_seconds(seconds)} a step, most of it {plan.time.bottleneck};",
        f"{format_seconds(seconds * num_steps_left)} and {written_bytes * num_steps_left / 1e12:.3g} TB written",
        "for the run",
    )


def _counted(count: int, singular: str, plural: str | None = None) -> str:
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def _words(*parts: str) -> str:
    return " ".join(parts)
