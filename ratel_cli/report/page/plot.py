"""The curve of a prediction, step time against bytes offloaded: in the terminal, or as a picture.

Imports of plotting libraries are inside the functions: 0.15 s for the terminal, far more for pictures.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Protocol

from ratel_cli.commands import install_extras
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.planning.search.prediction import Prediction
from ratel_cli.units import byte_unit, format_bytes

_SUFFIXES = (".svg", ".png")
_COLUMNS, _ROWS = 78, 16


class SavedFigure(Protocol):
    """What is used of a figure of matplotlib when it is done."""

    def savefig(self, fname: Path) -> None:
        """Write it. Raises OSError."""


def terminal_curve(prediction: Prediction) -> list[str]:
    """The lines of a plot in the terminal; none if the curve has only one point."""
    if len(prediction.curve) < 2:
        return []
    figure = import_module("plotext").figure
    figure.clear()
    figure.plot_size(_COLUMNS, _ROWS)
    curve = figure.signal(*_coordinates(prediction), marker="braille")
    curve.lines()
    figure.draw(curve)
    figure.draw(figure.signal(*_chosen(prediction), marker="X"))
    chosen = f"X: {format_bytes(prediction.offloaded.total_bytes)}, as planned"
    figure.label(f"seconds per step against {byte_unit(prediction.swappable_bytes)[0]} offloaded; {chosen}", "x")
    text: str = figure.build().string(colorless=True)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn at `path`. Raises BadInput, or EnvironmentFailure without matplotlib."""
    if path.suffix not in _SUFFIXES:
        raise BadInput(f"argument '--plot {path}': must end in .svg or .png")
    # Not by methods of Path: they raise for names that are too long.
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise BadInput(f"argument '--plot {path}': cannot be written there", "name a file in a directory that exists")
    try:
        import_module("matplotlib")
    except ModuleNotFoundError as exc:
        raise EnvironmentFailure("--plot needs matplotlib", install_extras("plot")) from exc


def draw_picture(prediction: Prediction, path: Path) -> None:
    """Write the curve as a picture. Raises EnvironmentFailure if it cannot be written."""
    import_module("matplotlib").use("Agg")
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_coordinates(prediction), marker=".", label="predicted")
    axes.plot(*_chosen(prediction), "x", markersize=10, label="planned")
    axes.set(
        title=prediction.model_name,
        xlabel=f"offloaded, {byte_unit(prediction.swappable_bytes)[0]}",
        ylabel="seconds per step",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    save_picture(figure, path)


def save_picture(figure: SavedFigure, path: Path) -> None:
    """Write a figure of matplotlib. Raises EnvironmentFailure if it cannot be written."""
    try:
        figure.savefig(path)
    except OSError as exc:
        raise EnvironmentFailure(f"{path}: cannot be written: {exc.strerror}") from exc


def _coordinates(prediction: Prediction) -> tuple[list[float], list[float]]:
    _, unit_bytes = byte_unit(prediction.swappable_bytes)
    return [num_bytes / unit_bytes for num_bytes, _ in prediction.curve], [seconds for _, seconds in prediction.curve]


def _chosen(prediction: Prediction) -> tuple[list[float], list[float]]:
    _, unit_bytes = byte_unit(prediction.swappable_bytes)
    return [prediction.offloaded.total_bytes / unit_bytes], [prediction.time.total]
