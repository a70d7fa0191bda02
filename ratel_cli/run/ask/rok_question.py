"""The question `ratel plan --rok`: what recomputing, offloading and keeping of activations take and give (SSDTrain)."""

from __future__ import annotations

from ratel_cli.planning.forecast.forecast import Forecast, Forecaster
from ratel_cli.planning.forecast.rok import rok_curve
from ratel_cli.report.page.rok import draw_rok, rok_content, rok_lines
from ratel_cli.run.ask.answer import Answer


def rok_answer(forecaster: Forecaster, forecast: Forecast) -> Answer:
    """The curve of the config's setting, the plan among its points."""
    points = rok_curve(forecaster, forecast)
    return Answer(
        key="rok",
        title="recompute, offload or keep: where activations are at their peak, and how fast a step is",
        lines=rok_lines(points),
        content=rok_content(points),
        draw=lambda path: draw_rok(points, forecast.prediction.model_name, path),
    )
