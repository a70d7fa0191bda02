"""The tables of the report: predicted against measured, the swap set, memory, wear, machine, config.

Invariant: every text that comes from a file is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from math import isclose, isfinite
from statistics import median

from ratel_cli.planning.search.prediction import SwappedOperator
from ratel_cli.planning.search.recorded_plan import RecordedPlan
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.report.page.run_report import RunReport, planned_words
from ratel_cli.report.words.plan import CASES, benefit, percent
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import (
    counted,
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_token_rate,
    format_traffic,
)

_SHOWN_OPERATORS = 12
_PARTS = {
    "process": "process, before training",
    "hidden_states": "hidden states between layers",
    "activations": "offloaded activations",
    "resident": "resident weights and optimizer states",
    "block": "blocks that pass through",
    "working_set": "working set of one layer",
    "held_gradients": "held gradients",
    "device": "compute device",
}


def predicted_table(report: RunReport) -> str:
    """Each part of a step: what the plan predicts, what was measured, and the ratio. Empty without both.

    Every row has the median of the same steps against the same plan, so that the rows go together.
    """
    plan, steps = report.plan, report.planned_steps
    if plan is None or not steps:
        return ""
    step, forward, backward = plan.step_seconds, plan.forward_seconds, plan.backward_seconds
    if plan.unclipped_seconds is not None and not steps[-1].clipped:
        step, forward, backward = plan.unclipped_seconds, 0.0, 0.0  # these are known of a step that is clipped
    longest = max(step, _median(steps, lambda each: each.step_seconds), 1e-9)
    rows = [
        _time_row("step", step, _median(steps, lambda each: each.step_seconds), longest),
        _time_row("forward", forward, _median(steps, lambda each: each.forward_seconds), longest),
        _time_row("head and backward", backward, _median(steps, lambda each: each.backward_seconds), longest),
    ]
    busy: tuple[tuple[str, Resource], ...] = (
        ("compute busy", "compute"),
        ("upload busy", "up"),
        ("download busy", "down"),
        ("optimizer busy", "optimizer"),
    )
    for name, resource in busy:
        measured = _busy(steps, resource)
        if plan.busy_seconds[resource] or measured:
            rows.append(_time_row(name, plan.busy_seconds[resource], measured, longest))
    rows.append(_nvme_row(plan, steps))
    rows.append(_byte_row("read from NVMe", plan.read_bytes, _moved(steps, "nvme read")))
    rows.append(_byte_row("written to NVMe", plan.written_bytes, _moved(steps, "nvme write")))
    predicted_head, measured_head = (
        f'<th><span class="key"><i class="{kind}"></i>{name}</span></th>'
        for kind, name in (("second", "predicted"), ("line", "measured"))
    )
    head = f"<th>part of a step</th>{predicted_head}{measured_head}<th>ratio</th><th class='bars'></th>"
    return _table(head, rows, kind="compare") + f'<p class="note">{escape(_comparison(plan, steps))}</p>'


def _comparison(plan: RecordedPlan, steps: Sequence[StepMetrics]) -> str:
    """What the table holds against what, in words."""
    kind = ""
    if plan.unclipped_seconds is not None:
        kind = " that were clipped" if steps[-1].clipped else " that were not clipped"
    note = f"Measured: the median of {planned_words(steps)}{kind}. Predicted: the plan that the run ended with. "
    if not any(isclose(each, steps[-1].predicted_seconds) for each in (plan.step_seconds, plan.unclipped_seconds or 0)):
        note += "It was made from these steps, which were predicted otherwise. "
    return f"{note}Resources overlap, so their times add up to more than the step."


def swap_table(plan: RecordedPlan) -> str:
    """What is offloaded, the greatest benefit first, under its title; empty where only inputs of layers are."""
    if not plan.swapped:
        return ""
    head = "<th>operator</th><th>in</th><th>offloaded</th><th>saves</th><th>benefit</th>"
    rows = [_swap_row(each) for each in plan.swapped]
    shown = "<h3>What is offloaded for backward, the greatest benefit first</h3>"
    shown += _table(head, rows[:_SHOWN_OPERATORS], kind="operators")
    if len(rows) > _SHOWN_OPERATORS:
        rest = f"<summary>{counted(len(rows) - _SHOWN_OPERATORS, 'more operator')}</summary>"
        shown += f"<details>{rest}{_table(head, rows[_SHOWN_OPERATORS:])}</details>"
    return shown


def plan_facts(plan: RecordedPlan) -> list[tuple[str, str]]:
    """Rows about the plan that the run ended with."""
    recomputed = plan.swappable_bytes - plan.swapped_bytes
    placed = f"{format_bytes(plan.swapped_bytes)} of {format_bytes(plan.swappable_bytes)} activations offloaded"
    if plan.swapped_to_nvme_bytes:
        placed += f", {format_bytes(plan.swapped_to_nvme_bytes)} of it to NVMe"
    placed += f"; {format_bytes(recomputed)} recomputed" if recomputed > 0 else "; none recomputed"
    number, weights, states = plan.num_blocks, len(plan.resident_weights), len(plan.resident_states)
    step = f"{format_seconds(plan.step_seconds)} per step"
    if plan.unclipped_seconds is not None:
        step += f" with clipping, {format_seconds(plan.unclipped_seconds)} without"
    workload = plan.workload
    batch = counted(workload.num_micro_batches, "micro-batch", "micro-batches")
    return [
        ("model", f"{plan.model_name}: {format_count(plan.num_parameters)} parameters in {counted(number, 'block')}"),
        ("step", f"{batch} of {workload.micro_batch_size} x {workload.sequence_len} tokens"),
        ("predicted", f"{step}; {format_token_rate(plan.tokens_per_second)}"),
        ("activations", f"{placed}; {CASES.get(plan.case, '')}"),
        ("resident", f"weights of {weights}, optimizer states of {states} blocks"),
        *plan.rows,
    ]


def memory_table(report: RunReport) -> str:
    """Host memory at the peak by purpose, against the limit; and GPU memory and NVMe. Empty without a plan."""
    plan = report.plan
    if plan is None:
        return ""
    limit = max(plan.host_limit_bytes, 1)
    rows = [
        _memory_row(_PARTS.get(name, name), size, limit) for name, size in plan.host.items() if size and name != "total"
    ]
    rows.append(_memory_row("RAM as predicted, at the peak", plan.host_bytes, limit, kind="total"))
    if report.steps:
        peak = max(each.host_peak_bytes for each in report.steps)
        rows.append(_memory_row("RAM as measured, at the peak", peak, limit, kind="total"))
    rows.append(_memory_row("limit of RAM", plan.host_limit_bytes, limit, kind="total"))
    gpu_peak = max((each.gpu_peak_bytes for each in report.steps), default=0)
    if gpu_peak and report.gpu_limit_bytes:
        gpu_limit = report.gpu_limit_bytes
        rows.append(_memory_row("GPU memory as predicted", plan.gpu_bytes, gpu_limit, kind="total"))
        rows.append(_memory_row("GPU memory as measured", gpu_peak, gpu_limit, kind="total"))
    head = "<th>purpose</th><th>bytes</th><th>of limit</th><th class='bars'></th>"
    note = "Purposes reach their most at different moments of a step, so they add up to more than the peak."
    return _table(head, rows, kind="memory") + f'<p class="note">{note}</p>'


def wear_facts(report: RunReport) -> list[tuple[str, str]]:
    """Rows about what is written to the drives; none without steps and plan."""
    facts = []
    steps, plan, status = report.steps, report.plan, report.status
    if steps:
        words = f"{format_traffic(report.written_bytes)} written in {counted(len(steps), 'step')}"
        facts.append(("steps so far", words))
    if plan is not None:
        facts.append(("a step", f"{format_traffic(plan.written_bytes)} predicted"))
        if status.num_steps is not None:
            written = plan.written_bytes * status.num_steps
            words = f"{format_traffic(written)} predicted"
            if report.endurance_tb:
                words += f": {percent(written / 1e12 / report.endurance_tb)} of the drives' rated endurance"
            facts.append((f"all {status.num_steps} steps", words))
        facts.append(("on NVMe", f"{format_bytes(plan.nvme_bytes)} for model states and what is spilled"))
    if report.max_tb_written is not None:
        facts.append(("limit", f"storage.max_tb_written: {format_traffic(report.max_tb_written * 1e12)}"))
    return facts


def machine_facts(report: RunReport) -> list[tuple[str, str]]:
    """Rows about the machine and the software; none if neither is known."""
    facts, hardware = [], report.hardware
    if hardware is not None:
        gpu, nvme, host = hardware.gpu, hardware.nvme, hardware.host
        facts.append(("compute", f"{gpu.name}, {format_flops(gpu.flops_per_second)}/s"))
        if hardware.link is not None:
            up, down = hardware.link.to_gpu_bytes_per_second, hardware.link.from_gpu_bytes_per_second
            facts.append(("link", f"{format_rate(up)} up, {format_rate(down)} down"))
        rates = f"{format_rate(nvme.read_bytes_per_second)} read, {format_rate(nvme.write_bytes_per_second)} written"
        facts.append(("drives", f"{counted(nvme.num_devices, 'drive')}, {rates}"))
        facts.append(("host", f"{counted(host.num_cores, 'core')}, {format_bytes(host.memory_bytes)} of RAM"))
    if report.facts is not None:
        facts.append(("software", report.facts.software))
        resumed = report.facts.first_step
        when = ("started", "") if not resumed else ("last resumed", f", after step {resumed}")
        facts.append((when[0], report.facts.started + when[1]))
        data = f"{counted(report.facts.num_samples, 'sample')}, {format_count(report.facts.num_tokens)} tokens"
        facts.append(("data", data))
    return facts


def facts_list(facts: Sequence[tuple[str, str]]) -> str:
    """Rows of a name and a fact."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts)
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def _time_row(name: str, predicted: float, measured: float, longest: float) -> str:
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else ""
    bars = "".join(
        f'<i class="bar {kind}" style="width:{min(100, 100 * seconds / longest):.1f}%"></i>'
        for kind, seconds in (("second", predicted), ("line", measured))
    )
    cells = (*(format_seconds(seconds) if seconds else "-" for seconds in (predicted, measured)), ratio)
    return f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}<td class='bars'>{bars}</td></tr>"


def _nvme_row(plan: RecordedPlan, steps: Sequence[StepMetrics]) -> str:
    """The prediction counts both directions together, the measurement each: no ratio follows."""
    read, write = _busy(steps, "nvme read"), _busy(steps, "nvme write")
    measured = ", ".join(
        f"{format_seconds(seconds) if seconds else 'no'} {name}" for seconds, name in ((read, "read"), (write, "write"))
    )
    return (
        f"<tr><th>NVMe busy</th><td>{format_seconds(plan.busy_seconds['nvme'])}</td>"
        f"<td colspan='3' class='left'>{measured}</td></tr>"
    )


def _byte_row(name: str, predicted: int, measured: float) -> str:
    ratio = f"{measured / predicted:.2f}" if predicted else ""
    cells = (format_traffic(predicted), format_traffic(measured), ratio, "")
    return f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _swap_row(each: SwappedOperator) -> str:
    cells = (counted(each.blocks, "layer"), format_bytes(each.bytes), *benefit(each))
    return f"<tr><th>{_breakable(each.operator)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _breakable(name: str) -> str:
    """A name that a narrow page breaks after a dot, a slash, a dash or an underscore, and nowhere else."""
    return re.sub(r"([._/:-]+)", r"\1<wbr/>", escape(name))


def _memory_row(name: str, num_bytes: int, limit: int, *, kind: str = "") -> str:
    share = num_bytes / limit
    bar = f'<i class="bar line" style="width:{100 * min(share, 1):.1f}%"></i>'
    return (
        f"<tr class='{kind}'><th>{escape(name)}</th><td>{format_bytes(num_bytes)}</td>"
        f"<td>{100 * share:.0f} %</td><td class='bars'>{bar}</td></tr>"
    )


def _table(head: str, rows: Sequence[str], *, kind: str = "") -> str:
    body = "".join(rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _busy(steps: Sequence[StepMetrics], resource: Resource) -> float:
    return _median(steps, lambda each: each.busy_seconds[resource])


def _moved(steps: Sequence[StepMetrics], resource: Resource) -> float:
    return _median(steps, lambda each: each.moved_bytes[resource])


def _median(steps: Sequence[StepMetrics], value: Callable[[StepMetrics], float]) -> float:
    """The median of the values that are finite; 0 if there are none."""
    finite = [number for number in map(value, steps) if isfinite(number)]
    return median(finite) if finite else 0.0
