"""The rows of `ratel plan --direct`: each kind of parameter, the step with and without the plan, and what that gains.

Invariant: nothing is computed here except how a number reads.
"""

from __future__ import annotations

import math

from ratel_cli.papers.memferry import DirectTime
from ratel_cli.papers.memferry_costs import TILE_TOKENS
from ratel_cli.papers.memferry_forecast import DirectForecast, UseGroup
from ratel_cli.report.words.plan import aligned, percent
from ratel_cli.units import counted, format_bytes, format_seconds

WORTH_HAVING = 0.005
"""The share of a step below which a gain is called none: no prediction is that exact."""
_SHOWN, _SHOWN_SECONDS = 1e-5, 5e-6
NO_LINK = "the CPU computes: nothing is uploaded, so there is nothing to read in place"


def direct_lines(forecast: DirectForecast) -> list[str]:
    """All lines of the answer."""
    groups = [
        ("parameter", "", "weights", "upload", "forward", "in place", "backward", "in place", "mode"),
        *(_group_row(group) for group in forecast.groups),
    ]
    times = [
        ("step of MemFerry", "forward", "backward", "in all", "weights on the GPU"),
        _time_row("everything uploaded", forecast.plan.uploaded, format_bytes(forecast.uploaded_bytes)),
        _time_row("as planned", forecast.plan.time, format_bytes(forecast.kept_bytes)),
        _time_row("by its Algorithm 1", forecast.printed, ""),
    ]
    gradients = [
        ("gradients kept on the GPU", "bytes", "added to backward"),
        *(
            (f"at most {percent(each.reserve_factor)}", format_bytes(each.kept_bytes), _seconds(each.added_seconds))
            for each in forecast.gradients
        ),
    ]
    return [*aligned(groups), "", *aligned(times), "", *_findings(forecast), "", *aligned(gradients)]


def _group_row(group: UseGroup) -> tuple[str, ...]:
    layer = group.layer
    seconds = (layer.upload, layer.forward, layer.direct_forward, layer.backward, layer.direct_backward)
    modes = ", ".join(mode if count == group.count else f"{mode} in {count}" for mode, count in group.modes.items())
    count = f"x {group.count}" if group.count > 1 else ""
    return (group.layer.name, count, format_bytes(group.weight_bytes), *map(_seconds, seconds), modes)


def _time_row(name: str, time: DirectTime, kept: str) -> tuple[str, ...]:
    return (name, _seconds(time.forward), _seconds(time.backward), _seconds(time.total), kept)


def _findings(forecast: DirectForecast) -> list[str]:
    """What reading in place gains, why it gains no more, and whether such a step would fit."""
    gain, times = forecast.plan.gain, math.ceil(forecast.num_tokens / TILE_TOKENS)
    if gain < WORTH_HAVING:
        share = f" ({percent(gain)})" if gain >= _SHOWN else ""
        lines = [f"Reading in place gains nothing here{share}: {_reason(forecast.num_tokens, times)}."]
    else:
        number = sum(count for group in forecast.groups for mode, count in group.modes.items() if mode != "GFGB")
        lines = [f"Reading {counted(number, 'parameter')} in place saves {percent(gain)} of the step."]
    if forecast.is_paper:
        lines.append("By MemFerry's equations: what is read in place takes no time of the link from uploads.")
    if forecast.kept_bytes > forecast.gpu_bytes:
        kept, have = format_bytes(forecast.kept_bytes), format_bytes(forecast.gpu_bytes)
        lines.append(f"The step would not fit: {kept} of weights stay on the GPU until backward, and it has {have}.")
    return lines


def _reason(num_tokens: int, times: int) -> str:
    if times == 1:
        return "it moves as much over the link as uploads do"
    once = f"once for every {TILE_TOKENS}"
    return f"a product of {num_tokens} tokens reads a matrix {times} times, {once}, and an upload moves it once"


def _seconds(seconds: float) -> str:
    """A time in a table; 0 for what would read as 0.00 ms."""
    return format_seconds(seconds) if seconds >= _SHOWN_SECONDS else "0"
