"""Ratel on a GPU, in one command of a few minutes: GPU memory, overlap, the planner, and the largest model that fits.

Regime: a Llama with layers of 4096 hidden units (`wide`), random weights and tokens, bf16, deterministic kernels;
limits on the GPU's memory imitate smaller cards; all states are in a store on a drive or in a directory in RAM. What
is measured, with its ceiling:

    step       Ratel under each limit next to plain PyTorch with everything in GPU memory (`plain` recomputes,
               `plain-resident` does not); the ceiling is `block`: one layer's forward and backward with nothing moved
    overlap    each `optimizer_overlap` under the first limit; the ceiling is `optimized`
    sweep      shares of the activations offloaded, measured and predicted; the ceiling is the best point measured
    largest    the deepest model of these layers, and of wider ones, that fits the limits with the space and RAM here
    cases      packed rows of a model with grouped keys and 152k words, adapters on bf16 and NF4, Muon, long rows, small
               micro-batches, little main memory (`gpu_cases`)

Plain PyTorch and Ratel compute on the same tokens. `block` is measured for `--yardstick` seconds: the ceiling is the
median, which is what the GPU sustains, and the best stands beside it. TFLOP/s count the model's own operations: three
times its forward. After `--minutes` nothing more is started; a line names each part that was left out. The last line is
JSON.

    python -m scripts.bench.gpu [--parts step sweep] [--directory DIR] [--limits 24 16] [--shape wide] [--minutes 7]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import get_args

from ratel_cli.config.keys.optimizers import OptimizerChoice
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.errors import DoesNotFit, EnvironmentFailure
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.quantised import QUANTISED_FORMS
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.papers.own_model import OwnModel
from ratel_cli.planning.forecast.forecast import Setting
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import ActivationPolicy, Overlap, Workload
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.run.train.planner import Planner
from ratel_cli.units import GIB, format_bytes
from scripts.bench.ceilings import block_rates
from scripts.bench.contestants import SHAPES, Contestant, Measured, Task, batches_of, model_config, run_process
from scripts.bench.findings import Report
from scripts.bench.gpu_cases import CASES, host_bytes_of, measure_case, store_directory
from scripts.bench.gpu_steps import GpuSteps, PatternSource, PlanPoint
from scripts.bench.ratel_run import RatelRun, open_run
from tests.simulated_gpu import install_if_asked

_SHARES = (0.0, 0.25, 0.5, 1.0)
_OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
_IN_THE_PAPER: dict[str, float] = {"optimized": 1.0, "naive": 1.22, "separate": 1.33}
"""Step times relative to the optimized order: 13B, micro-batch 64, RTX 4090, 12 SSDs (Ratel, section V-D)."""
_PARTS = ("step", "overlap", "sweep", "largest", "cases")
_WIDTHS = (1, 2, 3)
"""Multiples of the shape's width to try."""
_LEAST_WIDTH = 1024
"""Of a shape with which cases are more than tiny."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """Wall time after which nothing more is started."""

    start: float
    seconds: float

    def allows(self, what: str) -> bool:
        """True if there is time to start `what`; otherwise prints that it is left out."""
        if time.perf_counter() - self.start < self.seconds:
            return True
        print(f"left out, for lack of time: {what}", flush=True)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measures one plan after another while there is time."""

    steps: GpuSteps
    time_limit: TimeLimit
    num_steps: int
    gpu_memory_gib: float
    """The limit of plans that do not name one."""

    def measure(
        self,
        name: str,
        *,
        gpu_memory_gib: float | None = None,
        activations: ActivationPolicy = "auto",
        overlap: Overlap = "optimized",
    ) -> list[PlanPoint]:
        """One point; none if there is no time for it, or the plan does not fit."""
        if not self.time_limit.allows(name):
            return []
        limit = self.gpu_memory_gib if gpu_memory_gib is None else gpu_memory_gib
        try:
            plan = self.steps.plan(gpu_memory_gib=limit, activations=activations, overlap=overlap)
            return [self.steps.measure(name, plan, num_steps=self.num_steps)]
        except DoesNotFit as failure:
            print(f"{name}: {failure.message}; left out", flush=True)
            return []


def main() -> None:
    """Parse the arguments, measure part by part, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS[:4]), help="default: all but cases")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--layers", type=int, default=None, help="default: those of the shape")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--rows", type=int, default=8, help="rows that share the tokens")
    parser.add_argument("--samples", type=int, default=1, help="samples that are packed into a row")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank instead")
    parser.add_argument("--quantised", choices=QUANTISED_FORMS, default=None, help="the layers beside the adapter")
    parser.add_argument("--optimizer", choices=get_args(OptimizerChoice), default="adamw", help="for Ratel")
    parser.add_argument("--yardstick", type=float, default=10.0, help="seconds for which `block` is measured")
    parser.add_argument("--steps", type=int, default=2, help="steps of each plan that count")
    parser.add_argument("--limits", type=float, nargs="+", default=[24.0, 16.0], help="limits on GPU memory, in GiB")
    parser.add_argument("--host-memory-gib", type=float, default=None, help="default: what is free, less a margin")
    parser.add_argument("--directory", default=None, help="for the store; default: in RAM if it fits, else /tmp")
    parser.add_argument(
        "--device", choices=("cuda", "cpu", "auto"), default="cuda", help="cpu: only to see that it runs"
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="after this time nothing more is started")
    arguments = parser.parse_args()
    install_if_asked()
    time_limit = TimeLimit(start=time.perf_counter(), seconds=60 * arguments.minutes)
    try:
        compute_device(arguments.device)
    except EnvironmentFailure as failure:
        sys.exit(f"{failure.message}; {failure.hint}")
    task = _task(arguments)
    summary: dict[str, object] = {"benchmark": "gpu", "arguments": vars(arguments)}
    if set(arguments.parts) - {"cases"}:
        summary |= _measure(arguments, task, time_limit)
    if "cases" in arguments.parts:
        summary["cases"] = _measure_cases(arguments, time_limit)
    print(json.dumps({**summary, "seconds": time.perf_counter() - time_limit.start}, default=asdict))


def _measure(arguments: argparse.Namespace, task: Task, time_limit: TimeLimit) -> dict[str, object]:
    """All parts of one model."""
    parts = arguments.parts
    plain = _measure_plain(task, time_limit) if "step" in parts else {}
    host_bytes = host_bytes_of(task)
    by_limit, overlaps, sweep = list[PlanPoint](), list[PlanPoint](), list[PlanPoint]()
    with open_run(task, limit_bytes=host_bytes, activations="auto", source=PatternSource()) as run:
        _report_machine(run)
        steps = GpuSteps(run)
        planner, device = run.planner, run.context.device
        batch = next(batches_of(task))[0]
        block = block_rates(run.model, steps.profile, batch, device, seconds=arguments.yardstick)
        plans = Measurements(
            steps=steps, time_limit=time_limit, num_steps=arguments.steps, gpu_memory_gib=arguments.limits[0]
        )
        if "step" in parts:
            for limit in arguments.limits:
                by_limit += plans.measure(f"ratel, {limit:g} GiB", gpu_memory_gib=limit)
        if "overlap" in parts:
            overlaps += [point for overlap in _OVERLAPS for point in plans.measure(overlap, overlap=overlap)]
        if "sweep" in parts:
            sweep += plans.measure("planned")
            sweep += [point for share in _SHARES for point in plans.measure(f"{share:.0%}", activations=share)]
    _report_steps(plain, by_limit, block)
    _report_overlaps(overlaps)
    _report_sweep(sweep)
    largest = {}
    if "largest" in parts:
        largest = {str(limit): _largest(task, planner, limit, host_bytes) for limit in arguments.limits}
    for limit, (words, num_parameters) in largest.items():
        print(f"largest under {float(limit):g} GiB: {num_parameters / 1e9:.1f}B parameters ({words})")
    return {
        "hardware": planner.hardware.to_json(),
        "block_flops_per_second": block,
        "plain": plain,
        "steps": by_limit,
        "overlap": overlaps,
        "sweep": sweep,
        "largest": largest,
    }


def _measure_cases(arguments: argparse.Namespace, time_limit: TimeLimit) -> object:
    """The cases that are named, each by itself; what fails is said, and the next one begins."""
    left = time_limit.start + time_limit.seconds - time.perf_counter()
    report = Report(seconds=max(0.0, left), is_tiny=SHAPES[arguments.shape]["hidden_size"] < _LEAST_WIDTH)
    for name in arguments.cases:
        measure_case(report, CASES[name], directory=arguments.directory, device=arguments.device)
    print("\n" + "\n".join(report.findings.lines))
    for name, reason in {**report.findings.failures, **report.findings.left_out}.items():
        print(f"not measured: {name}: {reason}")
    return report.findings


def _task(arguments: argparse.Namespace) -> Task:
    task = Task(
        contestant="ratel",
        shape=arguments.shape,
        tokens=arguments.tokens,
        rows=arguments.rows,
        samples=arguments.samples,
        layers=arguments.layers,
        micro_batches=arguments.micro_batches,
        steps=4,
        warm_up=2,
        lora=arguments.lora,
        quantised=arguments.quantised,
        optimizer=arguments.optimizer,
        host_memory_gib=arguments.host_memory_gib,
        device=arguments.device,
        gpu_memory_gib=max(arguments.limits),
    )
    return replace(task, directory=arguments.directory or store_directory(task))


def _report_machine(run: RatelRun) -> None:
    hardware = run.planner.hardware
    gpu, nvme, link = hardware.gpu, hardware.nvme, hardware.link
    print(f"{gpu.name}: {gpu.flops_per_second / 1e12:.0f} TFLOP/s in large products, {format_bytes(gpu.memory_bytes)}")
    if link is not None:
        print(
            f"link: {link.to_gpu_bytes_per_second / 1e9:.1f} GB/s up, {link.from_gpu_bytes_per_second / 1e9:.1f} down, "
            f"{link.both_bytes_per_second / 1e9:.1f} both"
        )
    rate, num_cores = hardware.host.adam_parameters_per_second, hardware.host.num_cores
    print(
        f"store in {run.task.directory}: {nvme.read_bytes_per_second / 1e9:.1f} GB/s read, "
        f"{nvme.write_bytes_per_second / 1e9:.1f} written, {nvme.mixed_bytes_per_second / 1e9:.1f} both; AdamW "
        f"{rate / 1e9:.2f}B parameters/s on each of {num_cores} cores",
        flush=True,
    )


def _measure_plain(task: Task, time_limit: TimeLimit) -> dict[str, Measured]:
    """Plain PyTorch, in processes of its own, which free their GPU memory. What does not fit is left out."""
    names: tuple[Contestant, ...] = ("plain", "plain-resident")
    measured = {}
    for name in names:
        if time_limit.allows(name):
            try:
                measured[str(name)] = run_process(replace(task, contestant=name))
            except SystemExit as ended:
                print(f"{ended}; left out", flush=True)
    return measured


def _report_steps(plain: dict[str, Measured], points: Sequence[PlanPoint], block: dict[str, float]) -> None:
    ceiling = block["median"]
    print(f"\n{'step':<16}{'s/step':>8}{'TFLOP/s':>9}{'of block':>9}{'GPU GiB':>9}  busiest, most stalled on")
    print(f"{'block':<16}{'':>8}{ceiling / 1e12:>9.0f}{1:>9.2f}")
    print(f"{'block, best':<16}{'':>8}{block['best'] / 1e12:>9.0f}{block['best'] / ceiling:>9.2f}")
    for name, measured in plain.items():
        seconds = measured.seconds
        of_peak = f"{'':>18}"
        if points:
            flops_per_second = points[0].model_flops / seconds
            of_peak = f"{flops_per_second / 1e12:>9.0f}{flops_per_second / ceiling:>9.2f}"
        print(f"{name:<16}{seconds:>8.2f}{of_peak}{measured.gpu_peak_bytes / GIB:>9.1f}")
    for point in points:
        rate, share = point.flops_per_second / 1e12, point.flops_per_second / ceiling
        print(
            f"{point.name:<16}{median(point.seconds):>8.2f}{rate:>9.0f}{share:>9.2f}"
            f"{point.gpu_peak_bytes / GIB:>9.1f}  {_most(point.busy_seconds)}, {_most(point.waited_seconds)}"
        )


def _report_overlaps(points: Sequence[PlanPoint]) -> None:
    print(f"\n{'overlap':<16}{'s/step':>8}{'x first':>9}{'in paper':>10}{'computing':>11}")
    for point in points:
        seconds = median(point.seconds)
        times = seconds / median(points[0].seconds)
        of_step = point.busy_seconds["compute"] / seconds
        print(f"{point.name:<16}{seconds:>8.2f}{times:>9.2f}{_IN_THE_PAPER[point.name]:>10.2f}{of_step:>11.0%}")


def _report_sweep(points: Sequence[PlanPoint]) -> None:
    print(f"\n{'swapped':<16}{'GiB':>8}{'on NVMe':>9}{'resident':>10}{'predicted':>11}{'measured':>10}{'error':>8}")
    for point in points:
        seconds = median(point.seconds)
        print(
            f"{point.name:<16}{point.swapped_bytes / GIB:>8.1f}{point.spilled_bytes / GIB:>9.1f}"
            f"{point.gpu_resident_bytes / GIB:>10.1f}"
            f"{point.predicted_seconds:>11.2f}{seconds:>10.2f}{point.predicted_seconds / seconds - 1:>+8.0%}"
        )
    planned = [point for point in points if point.name == "planned"]
    if planned:
        over = median(planned[0].seconds) / min(median(point.seconds) for point in points) - 1
        print(f"planned point, slower than the best one measured: {over:.1%}")


def _largest(task: Task, planner: Planner, gpu_memory_gib: float, host_bytes: int) -> tuple[str, int]:
    """The largest model that fits, in words and parameters: of the shape's width, or of a multiple of it.

    With one slot, and one micro-batch of one row. ("none", 0) if none fits.
    """
    best = ("none", 0)
    workload = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=task.tokens // task.rows)
    for times in _WIDTHS:
        config = model_config(task)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            setattr(config, name, times * getattr(config, name))
        model = find_blocks(build_skeleton(config, dtype="bfloat16", attn_implementation="sdpa"), name="wide")
        forecaster = RatelForecaster(
            spec=model.spec,
            profile=analytic_profile(model.spec, workload, traits=measured_traits(model)),
            decisions=Decisions(
                holds_gradients=True,
                num_slots=1,
                host_limit_bytes=host_bytes,
                device_limit_bytes=int(gpu_memory_gib * GIB),
            ),
            process_bytes=planner.process_bytes,
        )
        setting = Setting(workload=workload, hardware=planner.hardware, host_limit_bytes=host_bytes)
        depth = OwnModel(forecaster).deepest(setting)
        if depth is not None and depth.num_parameters > best[1]:
            best = f"{depth.num_layers} layers of {config.hidden_size}", depth.num_parameters
    return best


def _most(seconds: dict[str, float]) -> str:
    name = max(seconds, key=lambda resource: seconds[resource])
    return f"{name} {seconds[name]:.2f} s"


if __name__ == "__main__":
    main()
