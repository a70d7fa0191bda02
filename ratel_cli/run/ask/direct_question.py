"""The question `ratel plan --direct`: what a GPU would gain that reads weights in host memory (MemFerry).

By Ratel's equations it is about the config's model as it is trained; with `cost_model: paper` about the papers' GPT of
its `model_shape`, with all rows of a step in one batch, by MemFerry's equations.
"""

from __future__ import annotations

from ratel_cli.model.spec import LayerTraits
from ratel_cli.planning.analytic import analytic_profile, spec_from_shape
from ratel_cli.planning.direct.forecast import DirectForecast, direct_forecast
from ratel_cli.planning.forecast.forecast import Forecast, Forecaster
from ratel_cli.planning.forecast.paper_forecast import PaperForecaster
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.papers.paper import PaperShape
from ratel_cli.planning.placement import Workload
from ratel_cli.report.direct import NO_LINK, direct_lines
from ratel_cli.run.ask.answer import Answer


def direct_answer(forecaster: Forecaster, forecast: Forecast) -> Answer:
    """What a GPU would gain that reads weights in host memory."""
    found = _forecast(forecaster, forecast)
    lines, content = ([NO_LINK], {"why_not": NO_LINK}) if found is None else (direct_lines(found), found.to_json())
    return Answer(key="direct", title="weights read in place, in host memory (MemFerry)", lines=lines, content=content)


def _forecast(forecaster: Forecaster, forecast: Forecast) -> DirectForecast | None:
    hardware, workload = forecast.setting.hardware, forecast.prediction.workload
    if isinstance(forecaster, PaperForecaster):
        return _of_shape(forecaster.equations(forecast.setting).shape, forecast)
    assert isinstance(forecaster, RatelForecaster)
    profile = forecaster.profile.of_tokens(workload.micro_batch_tokens)
    return direct_forecast(forecaster.spec, profile, workload, hardware, is_paper=False)


def _of_shape(shape: PaperShape, forecast: Forecast) -> DirectForecast | None:
    spec = spec_from_shape(
        name=forecast.prediction.model_name,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
    )
    step = Workload(micro_batch_size=shape.batch_size, num_micro_batches=1, sequence_len=shape.sequence_len)
    traits = LayerTraits(num_heads=shape.num_heads, head_dim=shape.hidden_size // shape.num_heads)
    profile = analytic_profile(spec, step, traits=traits)
    return direct_forecast(spec, profile, step, forecast.setting.hardware, is_paper=True)
