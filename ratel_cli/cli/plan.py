"""`ratel plan CONFIG`: will it fit, how long does it take and why, and what would help.

Nothing is measured, no weights are read, and nothing is written but the picture that `--plot` asks for and the
description of a model in the user's cache. The forecast goes to stdout, everything else to stderr.

Invariant: a run that does not fit is shown whole, and the command then ends with exit code 3.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.errors import DoesNotFit
from ratel_cli.planning.forecast.advice import Advice, advise, best_split
from ratel_cli.planning.forecast.forecast import Forecast, Forecaster, Setting
from ratel_cli.report.plan import advice_lines, forecast_rows, swap_lines
from ratel_cli.report.plot import check_picture, draw_picture, terminal_curve
from ratel_cli.run.plan_inputs import find_hardware, forecaster_of, setting_of, snapshot_tiers
from ratel_cli.run.plan_questions import Questions, answers
from ratel_cli.run.run_directory import read_config
from ratel_cli.units import format_bytes


def run(
    config_path: Path,
    overrides: list[str],
    hardware_path: Path | None,
    picture: Path | None,
    questions: Questions,
    *,
    as_json: bool,
) -> None:
    """Show the forecast. Raises RatelError; DoesNotFit only after everything was shown."""
    log = RunLog()
    config = read_config(config_path, log, overrides)
    if picture is not None:
        check_picture(picture)
    hardware = find_hardware(config, hardware_path, log)
    forecaster = forecaster_of(config, hardware, name=config_path.stem, log=log)
    setting = setting_of(config, hardware)
    forecast = forecaster.forecast(setting)
    if hardware_path is None:
        snapshot = snapshot_tiers(config, forecaster, nvme_bytes=forecast.prediction.nvme_bytes)
        forecast = replace(forecast, tiers=(*forecast.tiers, *snapshot))
    advices = _advices(forecaster, forecast)
    answered = answers(questions, forecaster, forecast)
    if as_json:
        helps = [
            {"change": each.change, "tokens_per_second": each.tokens_per_second, "gain": each.gain} for each in advices
        ]
        content = {**forecast.to_json(), "advice": helps, **{answer.key: answer.content for answer in answered}}
        sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
    else:
        _show(forecast, advices, dtype=config.dtype)
        for answer in answered:
            _block(RunLog(sys.stdout), answer.title, answer.lines)
    if picture is not None:
        draw_picture(forecast.prediction, picture)
        log.say(f"wrote {picture}")
    _check(forecast, advices)


def _advices(forecaster: Forecaster, forecast: Forecast) -> tuple[Advice, ...]:
    """Advice for a run that fits; for one that does not, only the same batch in micro-batches that do."""

    def tokens_per_second(setting: Setting) -> float | None:
        each = forecast if setting is forecast.setting else forecaster.forecast(setting)
        return each.prediction.tokens_per_second if each.fits else None

    if forecast.fits:
        return advise(forecast.setting, tokens_per_second)
    split = best_split(forecast.setting, tokens_per_second)
    return () if split is None else (split,)


def _show(forecast: Forecast, advices: tuple[Advice, ...], *, dtype: str) -> None:
    page = RunLog(sys.stdout)
    page.facts(forecast_rows(forecast, dtype=dtype))
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
            page.say(f"  {line}")


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
