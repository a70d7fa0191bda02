"""The question `ratel plan --direct`: what a GPU would gain that reads weights in host memory (MemFerry).

By Ratel's equations it is about the config's model as it is trained; with `cost_model: paper` about the papers' GPT of
its `model_shape`, with all rows of a step in one batch, by MemFerry's equations.
"""

from __future__ import annotations

from ratel_cli.planning.direct.forecast import DirectForecast, direct_forecast
from ratel_cli.planning.forecast.forecast import Forecast, Forecaster
from ratel_cli.planning.forecast.paper_forecast import PaperForecaster
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.report.words.direct import NO_LINK, direct_lines
from ratel_cli.run.ask.answer import Answer


def direct_answer(forecaster: Forecaster, forecast: Forecast) -> Answer:
    """What a GPU would gain that reads weights in host memory."""
    found = _forecast(forecaster, forecast)
    lines, content = ([NO_LINK], {"why_not": NO_LINK}) if found is None else (direct_lines(found), found.to_json())
    return Answer(key="direct", title="weights read in place, in host memory (MemFerry)", lines=lines, content=content)


def _forecast(forecaster: Forecaster, forecast: Forecast) -> DirectForecast | None:
    hardware, workload = forecast.setting.hardware, forecast.prediction.workload
    if isinstance(forecaster, PaperForecaster):
        spec, profile, step = forecaster.as_spec(forecast.setting)
        return direct_forecast(spec, profile, step, hardware, is_paper=True)
    assert isinstance(forecaster, RatelForecaster)
    profile = forecaster.profile.of_tokens(workload.micro_batch_tokens)
    return direct_forecast(forecaster.spec, profile, workload, hardware, is_paper=False)
