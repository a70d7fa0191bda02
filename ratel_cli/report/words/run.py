"""The words of a run: the opening statement, the step lines, the line about a new plan, the summary.

Invariant: nothing is decided here. The functions only choose words and units for values that others computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.hardware.load import OtherLoad
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.report.words.plan import RESOURCE_NAMES, percent, share_words, step_time, wear_rows
from ratel_cli.report.words.status import epoch_words
from ratel_cli.schedule.rules import ADAMW
from ratel_cli.training.best import BestSoFar
from ratel_cli.training.facts import RunFacts
from ratel_cli.training.metrics import STEP_FIGURES, Figure, RunTotals, StepMetrics
from ratel_cli.units import (
    counted,
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_traffic,
    parameter_words,
)

_GAP = "  "
_STALL_COLUMNS = len("stall write 12 %")
"""The least columns of a stall in short. In a narrow line other parts do not come and go with its length then."""
LEAST_SHARE = 0.01
"""Stalls below this share of a step are not printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDrives:
    """Where the state of a run will be."""

    engine: str
    paths: Sequence[Path]
    taken_bytes: int = 0
    """The size of an earlier store of this run, whose space counts as available."""
    endurance_tb: float | None = None
    """What the drives are rated for; None if that is not known."""


def opening(
    spec: ModelSpec,
    plan: Plan,
    hardware: HardwareProfile,
    facts: RunFacts,
    drives: StoreDrives,
    *,
    dtype: str,
    loss_share: float | None = None,
    split: str,
    output_dir: Path,
) -> list[tuple[str, str]]:
    """Rows about what will be trained, where its state will be, and what that will cost.

    `loss_share` is the share of the tokens that carry loss; None if it is not known. `split`: the step's micro-batches
    in words.
    """
    gpu, num_steps, first_step = hardware.gpu, facts.num_steps, facts.first_step
    return [
        ("model", _model(spec, dtype)),
        ("data", _data(facts.num_samples, facts.num_tokens, loss_share)),
        ("step", f"{split}; {_steps(num_steps, first_step)}"),
        ("compute", f"{gpu.name}, {format_flops(gpu.flops_per_second)}/s; one block at a time"),
        *_gpu_memory(plan, hardware),
        ("memory", _memory(plan)),
        ("NVMe", _nvme(plan, hardware, drives)),
        ("predicted", _prediction(plan, num_steps, first_step, endurance_tb=drives.endurance_tb)),
        *wear_rows(plan),
        ("output", str(output_dir)),
    ]


def base_row(spec: ModelSpec, directory: Path, *, is_elsewhere: bool) -> tuple[str, str]:
    """The row about blocks that stay in the base model's files. `is_elsewhere`: on no drive of the store."""
    frozen = [block for block in spec.blocks if not block.is_trained]
    num_bytes = sum(block.compute_bytes for block in frozen if block.is_in_files)
    copied = sum(not block.is_in_files for block in frozen)
    words = f"{format_bytes(num_bytes)} stay in the files of {directory}"
    if copied:
        words += f"; {counted(copied, 'frozen block')} of {len(frozen)} are copied, as the files have them otherwise"
    if is_elsewhere:
        words += "; the prediction takes their drive to be as fast as one of storage.paths"
    return ("base", words)


def step_line(
    metrics: StepMetrics, num_steps: int, *, steps_per_epoch: int | None = None, width: int | None = None
) -> str:
    """One line for a step, of at most `width` characters: as much as fits there, the most important parts first.

    Without a width, as in a log that programs search: every part in every line, in few words. `steps_per_epoch`: None
    if that is not known.
    """
    epoch = epoch_words(metrics.step, num_steps, steps_per_epoch)
    parts = [
        (0, [f"step {metrics.step}/{num_steps}"]),
        *([(8, [epoch])] if epoch else []),
        *((figure.rank, [words]) for figure, words in figure_words(metrics)),
        (4, _stall(metrics)),
    ]
    if not metrics.applied:
        parts.append((2, ["skipped: gradients overflowed"]))
    if width is None:
        return _GAP.join(wordings[-2:][0] for _, wordings in parts).rstrip()
    return _fitted(parts, width)


def figure_words(metrics: StepMetrics) -> list[tuple[Figure, str]]:
    """The figures that a step has, in words, in the order of a line."""
    found = [(figure, figure.words(metrics)) for figure in STEP_FIGURES if figure.words is not None]
    return [(figure, words) for figure, words in found if words]


def evaluation_line(
    step: int,
    loss: float,
    accuracy: float | None = None,
    preferences: Mapping[str, float] | None = None,
    *,
    best_step: int | None = None,
) -> str:
    """One line about an evaluation on the held-out samples. `preferences`: figures of answers that are compared.
    `best_step`: of all so far; None if none is."""
    figures = preferences or {}
    share = accuracy if accuracy is not None else figures.get("rewards/accuracies")
    words = "" if share is None else f", accuracy {100 * share:.2f} %"
    if share is None and "rewards/margins" in figures:
        words = f", margin {figures['rewards/margins']:.4f}"
    best = "" if best_step is None else "; the best so far" if best_step == step else f"; step {best_step} is the best"
    return f"eval loss {loss:.4f}{words} after step {step}{best}"


def ended_early_line(best: BestSoFar, *, step: int, metric: str) -> str:
    """One line about a run that its evaluations have ended."""
    since = counted(best.num_without_gain, "evaluation")
    which = "" if best.step is None else f"; the best is that of step {best.step}"
    return f"ended early after step {step}: {since} without a better {metric}{which}"


def lost_best_line(best: int, saved: int | None) -> str:
    """A warning that the best step cannot be the run's result. `saved`: the best one that is saved."""
    instead = "no evaluated step is" if saved is None else f"step {saved} is the best that is"
    return f"step {best} has the best evaluation, but is not saved any more; {instead}"


def saved_line(step: int, dropped: Sequence[int]) -> str:
    """One line about a saved step, and the saved steps that it replaces."""
    return f"saved step {step}" + (f" in place of step {', '.join(map(str, dropped))}" if dropped else "")


def snapshot_line(step: int) -> str:
    """One line about a complete snapshot."""
    return f"copied step {step} to the snapshot"


def fitted(parts: Sequence[str], width: int) -> str:
    """The parts side by side, as many of the first as fit into `width` characters."""
    return _fitted([(rank, [part]) for rank, part in enumerate(parts)], width)


def _fitted(parts: Sequence[tuple[int, Sequence[str]]], width: int) -> str:
    """Parts side by side. Each has a rank and its wordings, the longest first.

    By rank, from 0, each part takes its longest wording that fits with those before; the first part always stays.
    """
    chosen: dict[int, str] = {}
    used = -len(_GAP)
    for rank, index in sorted((rank, index) for index, (rank, _) in enumerate(parts)):
        for words in parts[index][1]:
            if used + len(_GAP) + len(words) <= width or not rank:
                chosen[index] = words
                used += len(_GAP) + len(words)
                break
    return _GAP.join(chosen[index] for index in sorted(chosen)).rstrip()


def plan_line(plan: Plan, *, step: int) -> str:
    """One line about the plan that follows from `step`, which was recorded."""
    return f"plan updated from step {step}: {_placed(plan)}; {step_time(plan)}"


def adapted_line(
    plan: Plan,
    *,
    step: int,
    num_steps: int,
    is_changed: bool,
    seconds: float,
    predicted_seconds: float,
    other_load: OtherLoad | None = None,
) -> str:
    """One line about the plan after `step`, since the last `num_steps` steps took `seconds`. `other_load`: of these
    steps."""
    taken = f"steps take {format_seconds(seconds)} instead of {format_seconds(predicted_seconds)}"
    if other_load is not None:
        taken += f" ({other_load.words})"
    if not is_changed:
        return f"{taken}; the plan is kept; new estimate: {step_time(plan)}"
    return f"{taken}; new plan from the {num_steps} steps up to {step}: {_placed(plan)}; {step_time(plan)}"


def _placed(plan: Plan) -> str:
    """What a plan offloads, and what it recomputes."""
    offloaded = plan.offloaded
    places = [f"{format_bytes(offloaded.written_bytes)} on NVMe"] if offloaded.written_bytes else []
    if offloaded.gpu_bytes:
        places.append(f"{format_bytes(offloaded.gpu_bytes)} stay on the GPU")
    what = counted(len(plan.swapped), "operator") if plan.swapped else "only the inputs of layers"
    size = ", ".join([format_bytes(offloaded.total_bytes), *places])
    recomputed_bytes = plan.swappable_bytes - offloaded.total_bytes
    rest = f"{format_bytes(recomputed_bytes)} recomputed" if recomputed_bytes > 0 else "none recomputed"
    return f"{what} offloaded ({size}), {rest}"


def run_summary(totals: RunTotals, *, endurance_tb: float | None = None) -> list[tuple[str, str]]:
    """Rows about the mean step of a run: its time, and the time and share of each resource that was busy.

    One more about the drives if what they are rated for, `endurance_tb`, is known.
    """
    if not totals.num_steps:
        return []
    seconds = totals.seconds / totals.num_steps
    which = "without the first, which includes start-up" if totals.leaves_out_first else "which includes start-up"
    busy = [(resource, totals.busy_seconds[resource] / totals.num_steps) for resource in RESOURCES]
    rows = [
        ("step", seconds, f"{totals.tokens / totals.seconds:.0f} tokens/s"),
        *((RESOURCE_NAMES[resource], each, _traffic(totals, resource)) for resource, each in busy if each > 0),
        ("stalled", sum(totals.waited_seconds.values()) / totals.num_steps, _stalls(totals)),
    ]
    columns = [(name, format_seconds(each), share_words(each / seconds), fact) for name, each, fact in rows]
    width = max(len(duration) for _, duration, _, _ in columns)
    return [
        ("mean of", f"{counted(totals.num_steps, 'step')}, {which}"),
        *((name, f"{duration:>{width}}  {share:>5}  {fact}".rstrip()) for name, duration, share, fact in columns),
        *_slowest(totals),
        *_wear(totals, endurance_tb),
    ]


def _model(spec: ModelSpec, dtype: str) -> str:
    size = f"{parameter_words(spec.num_parameters, spec.num_trained)} in {counted(len(spec.segments), 'block')}"
    rules = dict.fromkeys(block.rule.title for block in spec.blocks if block.is_trained)
    is_adamw = list(rules) == [ADAMW.title]
    if any(block.rounds_stochastically for block in spec.blocks):
        moments = "moments in fp32" if is_adamw else f"by {' and '.join(rules)}"
        state = f"without fp32 master weights (stochastic rounding), {moments}"
    elif is_adamw:
        state = "master weights and moments in fp32"
    else:
        state = f"master weights in fp32, by {' and '.join(rules)}"
    frozen = ", linear layers quantised" if any(block.dtype == "uint8" for block in spec.blocks) else ""
    return f"{spec.name} ({spec.architecture}): {size}; computes in {dtype}{frozen}, {state}"


def _data(samples: int, data_tokens: int, loss_share: float | None) -> str:
    fact = f"{counted(samples, 'sample')}, {format_count(data_tokens)} tokens"
    return fact if loss_share is None else f"{fact}, {percent(loss_share)} of them with loss"


def _stall(metrics: StepMetrics) -> list[str]:
    """What could make the step faster: what stalled the compute thread or, if nothing did, what was busy longest.

    In several wordings, the longest first.
    """
    cause = max(RESOURCES, key=lambda resource: metrics.waited_seconds[resource])
    share = metrics.waited_seconds[cause] / metrics.step_seconds
    if share >= LEAST_SHARE:
        name = RESOURCE_NAMES[cause]
        short = name.removeprefix("NVMe ")
        whose = f", for rank {metrics.slowest_rank}" if cause == "network" and metrics.slowest_rank is not None else ""
        in_short = f"stall {short} {share_words(share)}".ljust(_STALL_COLUMNS)
        return [f"stalled {share_words(share)} on {name}{whose}", in_short, f"stall {share_words(share)}"]
    busy = metrics.busy_seconds[metrics.bottleneck] / metrics.step_seconds
    return [
        f"no stall, {RESOURCE_NAMES[metrics.bottleneck]} busy {share_words(busy)}",
        "no stall".ljust(_STALL_COLUMNS),
        "no stall",
    ]


def _stalls(totals: RunTotals) -> str:
    """The causes of stalls, the largest first."""
    shown = [
        f"{RESOURCE_NAMES[cause]} {share_words(share)}"
        for cause, share in totals.stalls().items()
        if share >= LEAST_SHARE
    ]
    return f"on {', '.join(shown)}" if shown else ""


def _traffic(totals: RunTotals, resource: Resource) -> str:
    """For reads and writes of NVMe: the bytes in a step, and the rate while the resource was busy."""
    num_bytes = totals.moved_bytes[resource]
    if not num_bytes:
        return ""
    bytes_per_second = num_bytes / totals.busy_seconds[resource]
    return f"{format_traffic(num_bytes / totals.num_steps)} at {format_rate(bytes_per_second)} while busy"


def _slowest(totals: RunTotals) -> list[tuple[str, str]]:
    """A row about the rank that the others waited for most often, if there are several."""
    if not totals.slowest:
        return []
    of_ranks = Counter[int]()
    for (rank, _), number in totals.slowest.items():
        of_ranks[rank] += number
    [(slowest, number)] = of_ranks.most_common(1)
    cause = max((each for each in totals.slowest if each[0] == slowest), key=totals.slowest.__getitem__)[1]
    steps = f"in {number} of {counted(totals.num_steps, 'step')}"
    return [("slowest", f"rank {slowest} {steps}; {RESOURCE_NAMES[cause]} was busy longest there")]


def _wear(totals: RunTotals, endurance_tb: float | None) -> list[tuple[str, str]]:
    if endurance_tb is None:
        return []
    share = percent(totals.all_written_bytes / 1e12 / endurance_tb)
    return [
        (
            "wear",
            f"{format_traffic(totals.all_written_bytes)} written by all steps, {share} of the drives' rated endurance",
        )
    ]


def _steps(num_steps: int, first_step: int) -> str:
    if first_step >= num_steps:
        return f"all {num_steps} steps are done"
    if first_step + 1 == num_steps:
        return f"step {num_steps}"
    return f"steps {first_step + 1} to {num_steps}"


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
        parts.append(f"{held} held {'until the step is complete' if plan.decisions.overwrites else 'for clipping'}")
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


def _nvme(plan: Plan, hardware: HardwareProfile, drives: StoreDrives) -> str:
    nvme = hardware.nvme
    available_bytes = nvme.free_bytes + drives.taken_bytes
    shortfall_bytes = plan.nvme_bytes - available_bytes
    need, available = format_bytes(plan.nvme_bytes), format_bytes(available_bytes)
    space = f"{need} of {available}"
    if shortfall_bytes > 0:
        space = f"needs {need}, {available} available (short by {format_bytes(shortfall_bytes)}, see storage.paths)"
    rates = f"{format_rate(nvme.read_bytes_per_second)} read, {format_rate(nvme.write_bytes_per_second)} written"
    return f"{space} in {', '.join(map(str, drives.paths))}; {drives.engine}, {rates}"


def _prediction(plan: Plan, num_steps: int, first_step: int, *, endurance_tb: float | None) -> str:
    num_steps_left = num_steps - first_step
    if not num_steps_left:
        return step_time(plan)
    seconds, written_bytes = plan.time.total * num_steps_left, plan.traffic.written_bytes * num_steps_left
    steps = counted(num_steps_left, "step")
    fact = f"{step_time(plan)}; {format_seconds(seconds)} and {format_traffic(written_bytes)} written for {steps}"
    if endurance_tb is not None:
        fact += f", {percent(written_bytes / 1e12 / endurance_tb)} of the drives' rated endurance"
    if plan.source == "analytic":
        fact += f"; estimated from shapes until step {first_step + 1} is recorded"
    return fact
