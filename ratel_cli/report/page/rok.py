"""The recompute-offload-keep curve of `ratel plan --rok`: rows for people, JSON and a picture.

Imports of plotting libraries are inside the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from ratel_cli.papers.ssdtrain import RokPoint, RokStrategy
from ratel_cli.report.page.plot import save_picture
from ratel_cli.report.words.plan import aligned, percent
from ratel_cli.units import byte_unit, format_bytes, format_rate_number

_NAMES: dict[RokStrategy, str] = {
    "recompute": "recompute all",
    "mix": "",
    "planned": "as planned",
    "offload": "offload all",
    "keep": "keep all in memory",
}


def rok_lines(points: Sequence[RokPoint]) -> list[str]:
    """One line for each point, the smallest share first."""
    return aligned([("", "swapped", "on GPU", "in RAM", "on NVMe", "tokens/s", ""), *map(_row, points)])


def rok_content(points: Sequence[RokPoint]) -> list[dict[str, object]]:
    """One mapping for each point, by the names of its fields."""
    return [asdict(point) for point in points]


def draw_rok(points: Sequence[RokPoint], model_name: str, path: Path) -> None:
    """Write the curve as a picture: tokens/s against activations in the memory of GPU and host. Raises
    EnvironmentFailure if it cannot be written."""
    import_module("matplotlib").use("Agg")
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    unit, unit_bytes = byte_unit(max(each.memory_bytes for each in points))
    mixed = [each for each in points if each.strategy != "keep"]
    axes.plot(*_coordinates(mixed, unit_bytes), marker=".", label="share swapped, the rest recomputed")
    markers: dict[RokStrategy, str] = {"recompute": "v", "planned": "x", "offload": "^", "keep": "s"}
    for each in (each for each in points if each.strategy in markers):
        label = _NAMES[each.strategy] + (" (does not fit)" if each.shortfall_bytes else "")
        axes.plot(*_coordinates([each], unit_bytes), markers[each.strategy], markersize=10, label=label)
    axes.set(title=model_name, xlabel=f"activations in memory at their peak, {unit}", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    save_picture(figure, path)


def _row(point: RokPoint) -> tuple[str, ...]:
    return (
        _NAMES[point.strategy],
        percent(point.swap_coefficient) if point.swap_coefficient else "0 %",
        format_bytes(point.gpu_bytes),
        format_bytes(point.host_bytes),
        format_bytes(point.nvme_bytes),
        format_rate_number(point.tokens_per_second),
        f"does not fit: short by {format_bytes(point.shortfall_bytes)}" if point.shortfall_bytes else "",
    )


def _coordinates(points: Sequence[RokPoint], unit_bytes: int) -> tuple[list[float], list[float]]:
    return [each.memory_bytes / unit_bytes for each in points], [each.tokens_per_second for each in points]
