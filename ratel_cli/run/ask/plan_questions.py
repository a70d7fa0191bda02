"""The questions of `ratel plan`: other strategies (`--compare`), reading weights in place (`--direct`), the largest
model (`--largest`), prices (`--prices`), what is recomputed, offloaded or kept (`--rok`).

Each answer has lines for people and content for `--json`. docs/planning.md says what the questions mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ratel_cli.errors import BadInput
from ratel_cli.papers.own_model import OwnModel
from ratel_cli.papers.paper_forecast import PaperForecaster, tier_bytes
from ratel_cli.papers.prefix import Point
from ratel_cli.papers.ratel import largest, paper_models
from ratel_cli.papers.rivals import Outcome, compare, compare_in_memory, flash_neuron_parameters
from ratel_cli.papers.ssdtrain import rok_curve
from ratel_cli.planning.forecast.advice import with_drives
from ratel_cli.planning.forecast.forecast import Forecast, Forecaster
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.search.prediction import CostModel
from ratel_cli.report.page.rok import draw_rok, rok_content, rok_lines
from ratel_cli.report.words.direct import NO_LINK, direct_lines
from ratel_cli.report.words.plan import aligned
from ratel_cli.units import (
    counted,
    format_bytes,
    format_count,
    format_rate_number,
    format_seconds,
    format_token_rate,
)

_AskedModel = PaperForecaster | OwnModel
"""A model under either cost model."""
_DRIVE_COUNTS = (1, 2, 3, 6, 12)
"""The numbers of SSDs in the paper's servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Which questions the user asks."""

    compare: bool = False
    direct: bool = False
    largest: bool = False
    prices: bool = False
    rok: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one question."""

    key: str
    """In `--json`."""
    title: str
    lines: list[str]
    content: object
    draw: Callable[[Path], None] | None = None
    """Writes the answer as a picture, in place of the plan's curve."""


def reject_questions(questions: Questions, cost_model: CostModel) -> None:
    """Raise BadInput if anything is asked that is answered for one rank alone."""
    if cost_model == "paper":
        raise BadInput("argument '--ranks': `cost_model: paper` has one rank", "set cost_model: ratel")
    for name, is_asked in asdict(questions).items():
        if is_asked:
            raise BadInput(f"argument '--{name}': it is answered for one rank alone", "leave out --ranks")


def answers(questions: Questions, forecaster: Forecaster, forecast: Forecast) -> list[Answer]:
    """The answers to all questions that the user asks."""
    model = _asked_model(forecaster)
    asked: tuple[tuple[bool, Callable[[], Answer]], ...] = (
        (questions.compare, lambda: _compare(model, forecast)),
        (questions.direct, lambda: _direct(model, forecast)),
        (questions.largest, lambda: _largest(model, forecast)),
        (questions.prices, lambda: _prices(forecaster, forecast)),
        (questions.rok, lambda: _rok(model, forecast)),
    )
    return [answer() for is_asked, answer in asked if is_asked]


def _asked_model(forecaster: Forecaster) -> _AskedModel:
    """The forecaster's model as the papers' questions see it."""
    if isinstance(forecaster, PaperForecaster):
        return forecaster
    assert isinstance(forecaster, RatelForecaster)
    return OwnModel(forecaster)


def _compare(model: _AskedModel, forecast: Forecast) -> Answer:
    """Other strategies by the forecast's cost model, those that keep the model in memory, and the largest model of
    FlashNeuron.

    Ratel's own row is the plan, unless the equations find better: they split units and look at time alone, and the plan
    does neither.
    """
    ours, *others = compare(model.equations(forecast.setting))
    prediction = forecast.prediction
    planned = Point(
        swapped_bytes=prediction.offloaded.total_bytes,
        spilled_bytes=prediction.offloaded.written_bytes,
        recomputed_flops=prediction.flops_recomputed,
        seconds=prediction.time.total,
    )
    best = min(planned, ours.point, key=lambda point: point.seconds)
    outcomes = (replace(ours, point=best), *others, *compare_in_memory(model.in_memory(forecast.setting)))
    tokens = prediction.workload.tokens
    titles = ("strategy", "step", "tokens/s", "vs ratel", "offloaded", "on NVMe", "")
    rows = [titles, *(_strategy_row(outcome, best.seconds, tokens) for outcome in outcomes)]
    most = flash_neuron_parameters(forecast.setting.hardware.gpu.memory_bytes)
    return Answer(
        key="compare",
        title=f"other strategies, by the same equations ({prediction.cost_model})",
        lines=[
            *aligned(rows),
            "zero-offload and memferry keep states in RAM and activations on the GPU; the others keep states on NVMe",
            f"FlashNeuron, whose states stay on the GPU: {format_count(most)} parameters at most",
        ],
        content={
            "strategies": [_strategy_json(outcome, tokens) for outcome in outcomes],
            "flash_neuron_parameters": most,
        },
    )


def _strategy_row(outcome: Outcome, ours: float, tokens: int) -> tuple[str, ...]:
    if outcome.why_not is not None:
        return (outcome.strategy, "failed", "", "", "", "", outcome.why_not)
    point = outcome.point
    return (
        outcome.strategy,
        format_seconds(point.seconds),
        format_rate_number(tokens / point.seconds),
        f"{point.seconds / ours:.2f}",
        format_bytes(point.swapped_bytes),
        format_bytes(point.spilled_bytes),
        "",
    )


def _strategy_json(outcome: Outcome, tokens: int) -> dict[str, object]:
    if outcome.why_not is not None:
        return {"strategy": outcome.strategy, "why_not": outcome.why_not}
    point = asdict(outcome.point)
    seconds = outcome.point.seconds
    return {"strategy": outcome.strategy, "tokens_per_second": tokens / seconds, **point}


def _direct(model: _AskedModel, forecast: Forecast) -> Answer:
    """What a GPU would gain that reads weights in host memory, by the cost model's equations. With `cost_model: paper`
    all rows of a step are in one batch."""
    found = model.direct(forecast.setting)
    lines, content = ([NO_LINK], {"why_not": NO_LINK}) if found is None else (direct_lines(found), found.to_json())
    return Answer(key="direct", title="weights read in place, in host memory (MemFerry)", lines=lines, content=content)


def _largest(model: _AskedModel, forecast: Forecast) -> Answer:
    setting, workload = forecast.setting, forecast.setting.workload
    models = paper_models(batch_size=workload.micro_batch_size, sequence_len=workload.sequence_len)
    family = largest(models, tier_bytes(setting))
    deepest = model.deepest(setting)
    return Answer(
        key="largest",
        title="the largest model that can be trained here",
        lines=aligned(
            [
                ("of the papers' family, in their layout", family or "none"),
                (
                    "of this model's width",
                    "not even one layer"
                    if deepest is None
                    else f"{format_count(deepest.num_parameters)} parameters in {counted(deepest.num_layers, 'layer')}",
                ),
            ]
        ),
        content={"family": family, "depth": None if deepest is None else asdict(deepest)},
    )


def _prices(forecaster: Forecaster, forecast: Forecast) -> Answer:
    """Plans for the machine with one GPU and other numbers of its drives; each has its share of the rates of all."""
    machine = forecast.setting.hardware
    prices = machine.prices
    if prices is None:
        raise BadInput(
            "argument '--prices': the prices of this machine's parts are not known",
            "name a hardware file that has them under `prices`, such as configs/hardware/paper-4090-12ssd.yaml, with "
            "--hardware FILE; `ratel profile -o FILE` writes one for this machine",
        )
    rows = [("SSDs", "price", "tokens/s", "per $1000")]
    content: list[dict[str, object]] = []
    for count in _DRIVE_COUNTS:
        each = forecaster.forecast(replace(forecast.setting, hardware=with_drives(machine, count)))
        dollars = prices.dollars(num_ssds=count)
        if not each.fits:
            rows.append((str(count), f"${dollars}", "", "does not fit"))
            content.append({"num_ssds": count, "dollars": dollars, "fits": False})
            continue
        tokens_per_second = each.prediction.tokens_per_second
        bought = 1000 * tokens_per_second / dollars
        rows.append((str(count), f"${dollars}", format_rate_number(tokens_per_second), format_token_rate(bought)))
        content.append(
            {
                "num_ssds": count,
                "dollars": dollars,
                "fits": True,
                "tokens_per_second": tokens_per_second,
                "tokens_per_second_per_thousand_dollars": bought,
            }
        )
    return Answer(
        key="prices",
        title=f"price and speed with one {machine.gpu.name}, by the prices of the hardware file",
        lines=aligned(rows),
        content=content,
    )


def _rok(model: _AskedModel, forecast: Forecast) -> Answer:
    """What recomputing, offloading and keeping of activations take and give (SSDTrain): the plan is one point."""
    points = rok_curve(model.with_activations, forecast)
    return Answer(
        key="rok",
        title="recompute, offload or keep: where activations are at their peak, and how fast a step is",
        lines=rok_lines(points),
        content=rok_content(points),
        draw=lambda path: draw_rok(points, forecast.prediction.model_name, path),
    )
