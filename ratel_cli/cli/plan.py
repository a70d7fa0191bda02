"""`ratel plan CONFIG|MODEL`: will it fit, how long does it take and why, and what would help.

No weights are read, and only a machine that nothing is known about is measured. Nothing is written but the picture that
`--plot` asks for and the description of a model in the user's cache. The forecast goes to stdout, everything else to
stderr.

Invariants: a run that does not fit is shown whole, and the command then ends with exit code 3; a picture replaces no
file unless the user insists.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.cli.arguments import check_option
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.parts import Parts
from ratel_cli.console import RunLog
from ratel_cli.errors import DoesNotFit
from ratel_cli.planning.forecast.advice import Advice, advise, best_first
from ratel_cli.planning.forecast.forecast import Forecast, Forecaster, Setting
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.search.split import SplitRate
from ratel_cli.report.page.plot import check_picture, draw_picture, terminal_curve
from ratel_cli.report.words.plan import advice_lines, forecast_rows, swap_lines
from ratel_cli.run.ask.adapter_advice import advise_adapter
from ratel_cli.run.ask.plan_inputs import (
    Cluster,
    find_hardware,
    forecaster_of,
    on_same_drives,
    setting_of,
    wear_warning,
    with_planned_split,
    with_space_tiers,
)
from ratel_cli.run.ask.plan_questions import Questions, answers, reject_questions
from ratel_cli.run.files.hardware_file import described
from ratel_cli.run.files.new_file import reject_existing
from ratel_cli.run.files.run_directory import stores_on_machine
from ratel_cli.run.inputs.filling import assumes_full_rows, known_filling
from ratel_cli.run.inputs.of_ranks import reject_unsupported
from ratel_cli.run.inputs.settings import as_recorded, warn_of_host_limit, warn_of_learning_rate
from ratel_cli.run.start.planned_config import config_to_plan
from ratel_cli.units import format_bytes

_OF_FULL_ROWS = "; of full rows, each of whose tokens counts"


def run(
    named: Path,
    overrides: list[str],
    hardware_path: Path | None,
    parts: Parts | None,
    picture: Path | None,
    questions: Questions,
    cluster: Cluster,
    *,
    as_json: bool,
    overwrite: bool,
) -> None:
    """Show the forecast. Raises RatelError; DoesNotFit only after everything was shown."""
    check_option("--overwrite", overwrite, only_with="--plot FILE", is_met=picture is not None)
    log = RunLog()
    described_here = None if parts is None else described(parts.machine())
    planned = config_to_plan(named, overrides, log)
    config = planned.config
    if picture is not None:
        check_picture(picture)
        reject_existing(picture, overwrite=overwrite)
    if cluster.num_ranks > 1:
        reject_questions(questions, config.cost_model)
        reject_unsupported(config, cluster.num_ranks)
    is_here = hardware_path is None and parts is None
    stores = list[Sequence[Path]]()
    if is_here and planned.path is not None:
        stores = on_same_drives(stores_on_machine(planned.path, overrides, cluster.on_machine))
    hardware = cluster.of_machines(described_here or find_hardware(config, hardware_path, log, stores=stores))
    step_keys = config.step_keys
    config = config.of_rank(cluster.num_ranks)
    layout = cluster.layout(on_drives=len(stores) or cluster.on_machine)
    if is_here:
        warn_of_host_limit(config, log)
        config = as_recorded(config)
    config = with_planned_split(config, hardware, name=planned.name, log=log, layout=layout)
    forecaster = forecaster_of(config, hardware, name=planned.name, log=log)
    filling = known_filling(config)
    setting = setting_of(config, hardware, step_keys=step_keys, layout=layout, filling=filling)
    forecast = forecaster.forecast(setting)
    if is_here:
        forecast = with_space_tiers(forecast, config, forecaster)
    _warn(config, forecaster, setting, log)
    adapter = advise_adapter(config, forecaster, forecast, log, is_here=is_here)
    advices = best_first([*_advices(forecaster, forecast), *([] if adapter is None else [adapter])])
    of_full_rows = forecast if filling is None else forecaster.forecast(setting.of_full_rows)
    answered = answers(questions, forecaster, of_full_rows)
    if as_json:
        helps = [
            {
                "change": each.change,
                "tokens_per_second": each.tokens_per_second,
                "gain": each.gain,
                "unclipped_gain": each.unclipped_gain,
                "times_less_written": each.times_less_written,
            }
            for each in advices
        ]
        content = {**forecast.to_json(), "advice": helps, **{answer.key: answer.content for answer in answered}}
        sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
    else:
        _show(forecast, advices, config if planned.path is not None else config.model_copy(update={"datasets": ()}))
        for answer in answered:
            _block(RunLog(sys.stdout), answer.title + ("" if filling is None else _OF_FULL_ROWS), answer.lines)
    if picture is not None:
        draw = next((answer.draw for answer in answered if answer.draw is not None), None)
        if draw is None:
            draw_picture(forecast.prediction, picture)
        else:
            draw(picture)
        log.say(f"wrote {picture}")
    _check(forecast, advices)


def _warn(config: RunConfig, forecaster: Forecaster, setting: Setting, log: RunLog) -> None:
    """Warn of what a run of this config would do, though it can be done."""
    if isinstance(forecaster, RatelForecaster) and config.model_shape is None:
        warn_of_learning_rate(config, forecaster.spec, log)
    wear = wear_warning(config, forecaster, setting)
    if wear is not None:
        log.warn(wear)


def _advices(forecaster: Forecaster, forecast: Forecast) -> tuple[Advice, ...]:
    """Advice for a run that fits; for one that does not, only the same batch in micro-batches that do."""

    def rate(setting: Setting) -> SplitRate:
        return forecast.split_rate if setting == forecast.setting else forecaster.rate(setting)

    return advise(forecast.setting, rate, chunk_bytes=forecaster.chunk_bytes(forecast.setting))


def _show(forecast: Forecast, advices: tuple[Advice, ...], config: RunConfig) -> None:
    page = RunLog(sys.stdout)
    has_data, assumes_full = bool(config.datasets), assumes_full_rows(config)
    page.facts(forecast_rows(forecast, dtype=config.dtype, has_data=has_data, assumes_full_rows=assumes_full))
    for line in swap_lines(forecast.prediction):
        page.say(f"  {line}")
    _block(page, "curve", terminal_curve(forecast.prediction))
    if forecast.fits:
        _block(page, "what would help", advice_lines(advices))
    elif advices:
        _block(page, "what would fit", advice_lines(advices))


def _block(page: RunLog, title: str, lines: list[str]) -> None:
    if lines:
        page.say(f"\n{title}")
        for line in lines:
            page.say(f"  {line}".rstrip())


def _check(forecast: Forecast, advices: tuple[Advice, ...]) -> None:
    if forecast.fits:
        return
    remedies = [*(f"set {advice.change}" for advice in advices), *(tier.remedy for tier in forecast.shortfalls)]
    named = [f"{tier.name} is short by {format_bytes(tier.shortfall_bytes)}" for tier in forecast.shortfalls]
    raise DoesNotFit(
        f"the run does not fit: {', '.join(named)}",
        "; ".join(remedies),
        shortfall_bytes=sum(tier.shortfall_bytes for tier in forecast.shortfalls),
    )
