"""What an adapter in place of the whole model would gain. For `ratel plan` and `ratel init`.

The model with PEFT's modules is described once, on torch's meta device, and the description is cached as that of any
model. So nothing is drawn, and a plan of a model that was planned before imports nothing heavy.

Invariant: what is compared is planned for one machine, one step, and by costs of one kind.
"""

from __future__ import annotations

from dataclasses import replace

from ratel_cli.config.keys.schema import RunConfig, may_have_adapter
from ratel_cli.console import RunLog
from ratel_cli.planning.forecast.advice import Advice, adapter_advice
from ratel_cli.planning.forecast.forecast import Forecast, Forecaster
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.run.ask.plan_inputs import best_workload, with_space_tiers
from ratel_cli.run.inputs.model_description import ModelDescription, describe_if_possible
from ratel_cli.run.inputs.settings import decisions_of, workload_of


def with_adapter(config: RunConfig, log: RunLog) -> tuple[RunConfig, ModelDescription] | None:
    """The config with a LoRA adapter in place of the whole model, and its model; None if it can have none."""
    if not may_have_adapter(config):
        return None
    adapted = config.model_copy(update={"adapter": "lora"})
    description = describe_if_possible(adapted, log)
    return None if description is None else (adapted, description)


def advise_adapter(
    config: RunConfig, forecaster: Forecaster, forecast: Forecast, log: RunLog, *, is_here: bool
) -> Advice | None:
    """What an adapter would gain over `forecast`, the config's; None if it gains nothing or cannot be. `is_here`: it is
    planned for this machine, whose space for the export and a snapshot counts."""
    if not isinstance(forecaster, RatelForecaster):
        return None
    found = with_adapter(config, log)
    if found is None:
        return None
    adapted, description = found
    estimate = analytic_profile(description.spec, workload_of(adapted), traits=description.traits)
    other = RatelForecaster(
        spec=description.spec,
        profile=estimate,
        decisions=decisions_of(adapted, host_limit_bytes=0),
        process_bytes=forecaster.process_bytes,
        estimate=estimate,
    )
    estimated = forecast
    if forecaster.profile.source == "recorded" and forecaster.estimate is not None:
        estimated = replace(forecaster, profile=forecaster.estimate).forecast(forecast.setting)
    setting = replace(forecast.setting, chunk_bytes=estimated.setting.chunk_bytes)
    then = other.forecast(setting)
    if not (then.fits or setting.has_own_split):
        then = other.forecast(replace(setting, workload=best_workload(other, setting)))
    if is_here:
        then = with_space_tiers(then, adapted, other)
    now = replace(estimated, tiers=forecast.tiers)
    rate = forecast.prediction.tokens_per_second
    return adapter_advice(now, then, rank=config.lora_r, tokens_per_second=rate)
