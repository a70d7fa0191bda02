"""The rows of `ratel plan`: what is needed, how long a step takes and why, what is offloaded, and what would help.

Invariant: nothing is computed here except how a number reads, and nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.forecast.advice import Advice
from ratel_cli.planning.forecast.forecast import Forecast, Tier
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.horizontal import HorizontalPlan
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.search.prediction import Prediction, SwappedOperator
from ratel_cli.planning.time.step_time import StageTime
from ratel_cli.planning.time.traffic import Traffic
from ratel_cli.units import (
    GIB,
    KIB,
    counted,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    format_token_rate,
    format_traffic,
    parameter_words,
)

RESOURCE_NAMES: Mapping[str, str] = {
    "compute": "compute",
    "up": "upload",
    "down": "download",
    "nvme": "NVMe",
    "nvme read": "NVMe read",
    "nvme write": "NVMe write",
    "optimizer": "optimizer",
    "network": "network",
    "memory": "memory",
}
"""How a person reads the names of resources."""
CASES = {
    1: "offloading more would only cost time",
    2: "all that saves computing is offloaded",
    3: "offloading more or less would cost time",
}

_MOST_PERCENT = 2.0
"""The largest share of more wear that is said in percent; beyond it, bytes say more."""


def forecast_rows(
    forecast: Forecast, *, dtype: str, has_data: bool, assumes_full_rows: bool = False
) -> list[tuple[str, str]]:
    """The table, from the model to what is offloaded: a name and a fact for each row.

    `has_data`: the config names data, from which the number of steps follows. `assumes_full_rows`: rows may be shorter.
    """
    prediction, hardware = forecast.prediction, forecast.setting.hardware
    gpu, nvme, number = hardware.gpu, hardware.nvme, prediction.num_ranks
    drives = counted(nvme.num_devices, "drive")
    rates = f"{format_rate(nvme.read_bytes_per_second)} read, {format_rate(nvme.write_bytes_per_second)} written"
    parameters = parameter_words(prediction.num_parameters, prediction.num_trained)
    parameters += f" in {counted(prediction.num_blocks, 'block')}"
    split = split_words(prediction.workload, is_planned=not forecast.setting.has_own_split, num_ranks=number)
    seconds = forecast.reference_seconds
    reference = [] if seconds is None else [reference_row(forecast.setting.num_steps or 0, seconds)]
    return [
        ("model", f"{prediction.model_name}: {parameters}, computing in {dtype}"),
        ("step", f"{split}, assuming full rows" if assumes_full_rows else split),
        *_ranks(forecast),
        ("machine", f"{gpu.name}, {format_flops(gpu.flops_per_second)}/s; {drives}, {rates}"),
        ("estimate", _estimate(prediction)),
        *((tier.name, _tier(tier)) for tier in forecast.tiers),
        ("fits", _verdict(forecast)),
        ("forward", _stage(prediction.time.forward)),
        ("backward", _stage(prediction.time.backward)),
        ("predicted", _predicted(prediction)),
        ("run", _run(forecast, has_data=has_data)),
        *reference,
        *wear_rows(prediction),
        ("offloaded", _offloaded(prediction)),
    ]


def reference_row(num_steps: int, seconds: float) -> tuple[str, str]:
    """A row about the reference model, whose log-probabilities of the answers of these steps come before step 1."""
    steps = counted(num_steps, "step")
    return "reference", f"log-probabilities of {steps}, computed before step 1: {format_seconds(seconds)} at most"


def _ranks(forecast: Forecast) -> list[tuple[str, str]]:
    """Rows about several ranks; none about one."""
    prediction, setting = forecast.prediction, forecast.setting
    if prediction.num_ranks == 1:
        return []
    here = f"{prediction.num_ranks}, up to {setting.layout.on_machine} on a machine"
    network, moved = setting.share.network, prediction.network.total
    sent = f"each rank sends {format_traffic(moved.sent_bytes)} per step and receives as much"
    return [
        ("ranks", f"{here}; RAM, NVMe and times are per rank, rates are of all ranks"),
        ("network", sent if network is None else f"{sent}, at {format_rate(network.bytes_per_second)}"),
    ]


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """The rows that follow from a plan alone: what a step is, what it takes, and what is offloaded."""
    return [
        ("step", split_words(plan.workload, is_planned=False)),
        ("RAM", format_bytes(plan.memory.total)),
        ("forward", _stage(plan.time.forward)),
        ("backward", _stage(plan.time.backward)),
        ("predicted", _predicted(plan)),
        ("NVMe", traffic_words(plan.traffic)),
        *wear_rows(plan),
        ("offloaded", _offloaded(plan)),
    ]


def horizontal_rows(plan: HorizontalPlan, spec: ModelSpec) -> list[tuple[str, str]]:
    """The rows of a hooked module's plan."""
    blocks, memory, placement = spec.layers, plan.memory, plan.placement
    largest = max((block.own_bytes for block in blocks), default=0)
    ahead = counted(placement.prefetch_blocks, "block")
    rows = [
        (
            "module",
            f"{spec.name}: {parameter_words(spec.num_parameters, spec.num_trained)} in {counted(len(blocks), 'block')}",
        ),
        ("blocks", f"the largest has {format_bytes(largest)} of weights; {ahead} read ahead"),
        ("outside", f"{format_bytes(spec.embedding.own_bytes)} of weights stay in memory"),
        ("RAM", f"{format_bytes(memory.total)}, without the activations that autograd saves"),
        ("NVMe", f"{traffic_words(plan.traffic)}, of one forward and one backward; another round reads weights again"),
    ]
    if plan.sum_bytes:
        rows.append(("sums", f"{format_bytes(plan.sum_bytes)} of RAM for gradients of several rounds"))
    if plan.spilled_bytes:
        rows.append(("gradients", f"{format_bytes(plan.spilled_bytes)} wait on NVMe until the norm is known"))
    return rows


def traffic_words(traffic: Traffic) -> str:
    """What a step moves."""
    read, written = format_traffic(traffic.read_bytes), format_traffic(traffic.written_bytes)
    return f"{read} read and {written} written per step"


def swap_lines(prediction: Prediction) -> list[str]:
    """One line for each operator, the greatest benefit first; none where only inputs are offloaded."""
    rows = [
        (
            each.operator,
            counted(each.blocks, "layer"),
            format_bytes(each.bytes),
            *benefit(each),
        )
        for each in prediction.swapped
    ]
    return aligned([("operator", "in", "offloaded", "saves", "benefit"), *rows]) if rows else []


def advice_lines(advices: Sequence[Advice]) -> list[str]:
    """What would help, and by how much."""
    if not advices:
        return ["none of these gains more than 1 %: one more SSD, twice the RAM, a larger batch, other micro-batches"]
    return aligned(
        [
            (f"+{advice.gain:.0%}" if advice.gain else "", format_token_rate(advice.tokens_per_second), advice.change)
            for advice in advices
        ]
    )


def benefit(swapped: SwappedOperator) -> tuple[str, str]:
    """What swapping saves, in all and by the byte: time if it was measured, else FLOPs."""
    if swapped.seconds is None:
        return format_flops(swapped.flops), f"{swapped.benefit:.0f} FLOP/B"
    per_gib = swapped.seconds / max(1, swapped.bytes) * GIB
    # Seconds have at most three digits before the point; tiny activations are worth more per byte.
    by_byte = f"{format_seconds(per_gib)}/GiB" if per_gib < 99.5 else f"{format_seconds(per_gib / KIB)}/MiB"
    return format_seconds(swapped.seconds), by_byte


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart: the first and the last to the left, numbers between them to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _estimate(prediction: Prediction) -> str:
    if prediction.cost_model == "paper":
        return "analytic, by the paper's equations: 14 bytes per parameter, 34 b s h of activations"
    if prediction.source == "recorded":
        return "from a recorded step of this model on this machine"
    return "analytic, from shapes alone; `ratel profile CONFIG` on that machine, or a run's first step, measures costs"


def _tier(tier: Tier) -> str:
    fact = f"needs {format_bytes(tier.need_bytes)}, {format_bytes(tier.have_bytes)} available"
    return f"{fact} (short by {format_bytes(tier.shortfall_bytes)}); {tier.remedy}" if tier.shortfall_bytes else fact


def _verdict(forecast: Forecast) -> str:
    if forecast.fits:
        return "yes"
    named = ", ".join(tier.name for tier in forecast.shortfalls)
    return f"no: not enough {named}; the prediction is for a machine with enough"


def _stage(stage: StageTime) -> str:
    """The stage's time, and how long each resource is busy, the busiest first."""
    busy = {
        "compute": stage.compute,
        "up": stage.up,
        "down": stage.down,
        "nvme": stage.nvme,
        "optimizer": stage.optimizer,
        "network": stage.network,
        "memory": stage.memory,
    }
    ordered = sorted(busy.items(), key=lambda item: -item[1])
    shown = [f"{RESOURCE_NAMES[name]} {format_seconds(each)}" for name, each in ordered if each]
    return f"{format_seconds(stage.total)}: {', '.join(shown)}"


def split_words(workload: Workload, *, is_planned: bool, num_ranks: int = 1) -> str:
    """The split of a step into micro-batches; `is_planned`: the plan, not the user, chose it."""
    micro_batches = counted(workload.num_micro_batches, "micro-batch", "micro-batches")
    size = f"{workload.micro_batch_size} x {workload.sequence_len}"
    words = f"{micro_batches} of {size} = {workload.tokens} tokens"
    if workload.filling is not None:
        padded = f"{workload.data_tokens:.0f} on average in this data, {workload.computed_tokens:.0f} with padding"
        words = f"{micro_batches} of at most {size} = {workload.tokens} tokens; {padded}"
    words += ", split by the plan" if is_planned else ""
    return words if num_ranks == 1 else f"{words}, in each of {num_ranks} ranks"


def step_time(prediction: Prediction) -> str:
    """A step's predicted time, clipped and unclipped if they differ, and the resource that is busy longest."""
    fact = f"{format_seconds(prediction.time.total)} per step"
    if prediction.unclipped_seconds is not None:
        fact += f" with clipping, {format_seconds(prediction.unclipped_seconds)} without"
    return f"{fact}, mostly {RESOURCE_NAMES[prediction.bottleneck]}"


def wear_rows(prediction: Prediction) -> list[tuple[str, str]]:
    """A row about what is written to save time; none where that would be nothing but the state."""
    trade = prediction.wear
    if trade is None:
        return []
    facts, forced_bytes = [], trade.save_written_bytes - trade.state_written_bytes
    would_gain = trade.ignore_seconds < trade.seconds and trade.ignore_written_bytes > trade.written_bytes
    if forced_bytes:
        facts.append(f"{format_bytes(forced_bytes)} of activations and gradients are written because RAM is too small")
    if trade.written_bytes > trade.save_written_bytes:
        gain, more = _trade(
            trade.save_seconds, trade.save_written_bytes, seconds=trade.seconds, written_bytes=trade.written_bytes
        )
        facts.append(f"writes {more} per step than with storage.wear: save, and is {gain} faster")
    elif not forced_bytes and would_gain:
        facts.append("nothing is written but the model's state")
    if would_gain:
        gain, more = _trade(
            trade.seconds, trade.written_bytes, seconds=trade.ignore_seconds, written_bytes=trade.ignore_written_bytes
        )
        facts.append(f"storage.wear: ignore would write {more} per step, and be {gain} faster")
    return [("wear", "; ".join(facts))] if facts else []


def share_words(share: float) -> str:
    """A share of a step. A transfer counts in the step in which it ends, so one step may look overfull."""
    return f"{100 * min(share, 1.0):.0f} %"


def percent(share: float) -> str:
    """A share that may be very small, as percent with two digits."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _trade(from_seconds: float, from_bytes: int, *, seconds: float, written_bytes: int) -> tuple[str, str]:
    """How much faster a step gets, and how much more it writes: next to an adapter's state, in bytes."""
    more = written_bytes / from_bytes - 1
    amount = percent(more) if more <= _MOST_PERCENT else format_bytes(written_bytes - from_bytes)
    return percent(from_seconds / seconds - 1), f"{amount} more"


def _predicted(prediction: Prediction) -> str:
    padding = "" if prediction.workload.filling is None else ", padding not counted"
    fact = (
        f"{step_time(prediction)}; "
        f"{format_token_rate(prediction.tokens_per_second)}{padding}; "
        f"{format_flops(prediction.tflops_model * 1e12)}/s of the model, "
        f"{format_flops(prediction.tflops_hardware * 1e12)}/s with recomputation"
    )
    tokens, tflops = prediction.unclipped_tokens_per_second, prediction.unclipped_tflops_model
    if tokens is None or tflops is None:
        return fact
    return f"{fact}; without clipping: {format_token_rate(tokens)}, {format_flops(tflops * 1e12)}/s of the model"


def _run(forecast: Forecast, *, has_data: bool) -> str:
    written = f"{format_traffic(forecast.prediction.traffic.written_bytes)} written per step"
    if forecast.run_seconds is None or forecast.run_tb_written is None:
        by_data = "; `ratel check CONFIG` reads the data and predicts the whole run"
        return written + (by_data if has_data else "; add max_steps=N to predict the whole run")
    steps = counted(forecast.setting.num_steps or 0, "step")
    fact = f"{steps}: {format_seconds(forecast.run_seconds)}, {format_traffic(forecast.run_tb_written * 1e12)} written"
    if forecast.endurance_share is not None:
        fact += f", {percent(forecast.endurance_share)} of the drives' rated endurance"
    if forecast.drive_seconds is not None:
        fact += f", which lasts for {_life(forecast.drive_seconds)} of such steps"
    return fact


def _life(seconds: float) -> str:
    """Years, or days if they are few."""
    days = seconds / 86400
    return f"{days / 365.25:.1f} years" if days >= 365 else f"{days:.0f} days"


def _offloaded(prediction: Prediction) -> str:
    """What is offloaded, layers' inputs included."""
    offloaded = prediction.offloaded
    fact = f"{format_bytes(offloaded.total_bytes)} of {format_bytes(prediction.swappable_bytes)} activations"
    if offloaded.written_bytes:
        fact += f", {format_bytes(offloaded.written_bytes)} of it on NVMe"
    if offloaded.gpu_bytes:
        fact += f", {format_bytes(offloaded.gpu_bytes)} of it stays on the GPU"
    return (
        f"{fact}; {format_bytes(prediction.inter_block_bytes)} are layers' inputs, which are always offloaded; "
        f"{CASES[prediction.case]} (case {prediction.case})"
    )
