"""The model card of a run's step: what the config and the records of the run say about it.

Invariant: a step has the same card in the run's own export and in `ratel export`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ratel_cli.config.keys.key_groups import OF_ADAPTER, OF_QUANTISATION
from ratel_cli.config.keys.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.text.rows import is_hub_id
from ratel_cli.errors import first_line
from ratel_cli.model.export.card import Card, DataSource, LossRow
from ratel_cli.report.page.curves import can_draw_curves, draw_curves
from ratel_cli.run.files.origin import read_origin
from ratel_cli.run.files.run_directory import METRICS_NAME, run_directory
from ratel_cli.run.inputs.base import hub_id
from ratel_cli.run.inputs.settings import (
    CHOOSES_BITS,
    CHOOSES_PARAMETERS,
    DECIDES_THE_BITS,
    OF_TEXT,
    as_recorded,
)
from ratel_cli.store.store import Store
from ratel_cli.training.history import finite_mean, read_history
from ratel_cli.training.metrics import StepMetrics

_SETTINGS = (*CHOOSES_PARAMETERS, *CHOOSES_BITS, *DECIDES_THE_BITS)
_MAX_ROWS = 20
_LEAST_STEPS_DRAWN = 10
"""The table shows fewer steps as well as a picture does."""


def card_of(config: RunConfig, store: Store, *, step: int, log: RunLog) -> Card:
    """The card of a step of the config's run. A picture that cannot be drawn is left out, with a notice."""
    try:
        steps = read_history(run_directory(config.output_dir) / METRICS_NAME).up_to(step).steps
    except OSError:
        steps = ()
    origin = read_origin(config)
    return Card(
        name=(config.hub_model_id or os.path.abspath(config.output_dir)).rsplit("/", 1)[-1],
        repository=config.hub_model_id,
        base_model=hub_id(config),
        is_random=config.random_init,
        origin=None if origin is None else f"step {origin.step} of the run {Path(origin.run).name}",
        datasets=tuple(map(_source, config.datasets)),
        test_datasets=tuple(map(_source, config.test_datasets)),
        settings=_settings(as_recorded(config)),
        losses=tuple(_losses(steps)),
        software=store.identity.software,
        picture=_picture(steps, Path(os.path.abspath(config.output_dir)).name, log),
        task=config.task,
        is_adapter=config.adapter is not None,
    )


def _source(dataset: DatasetConfig) -> DataSource:
    """A dataset by its name: where a local file is says nothing to a reader, and may be private."""
    is_on_hub = is_hub_id(dataset.path)
    details = []
    if is_on_hub:
        details += [dataset.name] if dataset.name else []
        details += [f"split {dataset.split}"]
    if dataset.max_samples is not None:
        details.append(f"first {dataset.max_samples} samples")
    if dataset.weight != 1:
        details.append(f"weight {dataset.weight:g}")
    name = dataset.path if is_on_hub else os.path.basename(os.path.abspath(dataset.path))
    return DataSource(name=name, is_on_hub=is_on_hub, details=tuple(details))


def _settings(config: RunConfig) -> dict[str, object]:
    """The keys that decide the result and count in this run, as they can be written in a config."""
    values = config.model_dump(mode="json", include={"num_epochs", "max_steps", *_SETTINGS})
    kwargs = values.get("lr_scheduler_kwargs")
    if isinstance(kwargs, dict):
        values["lr_scheduler_kwargs"] = {key: value for key, value in kwargs.items() if value is not None}
    ordered = ("max_steps" if config.max_steps else "num_epochs", *_SETTINGS)
    left_out = (
        *(OF_TEXT if config.task == "denoising" else ()),
        *(("adapter", *OF_ADAPTER, *OF_QUANTISATION) if config.adapter is None else ()),
        *(("bnb_4bit_use_double_quant",) if not config.load_in_4bit else ()),
        *(("mlm_probability",) if config.task != "masked_lm" else ()),
        *(key for key in OF_ADAPTER if values[key] is False and not RunConfig.model_fields[key].default),
    )
    left_out += tuple(
        key
        for key in CHOOSES_BITS
        if getattr(config, key) == RunConfig.model_fields[key].default and (key != "rl_beta" or config.rl is None)
    )
    return {key: values[key] for key in ordered if values[key] not in (None, []) and key not in left_out}


def _losses(steps: Sequence[StepMetrics]) -> Iterator[LossRow]:
    """One row for each evaluation, or else for each step; `_MAX_ROWS` of them at equal distances if there are more.

    The last step always has a row.
    """
    ends = [place for place, step in enumerate(steps) if step.shown_eval_loss is not None] or list(range(len(steps)))
    if steps and ends[-1] != len(steps) - 1:
        ends.append(len(steps) - 1)
    num_rows, start = min(len(ends), _MAX_ROWS), 0
    for number in range(1, num_rows + 1):
        end = ends[number * len(ends) // num_rows - 1]
        yield LossRow(
            step=steps[end].step,
            loss=finite_mean(step.loss for step in steps[start : end + 1]),
            eval_loss=steps[end].shown_eval_loss,
        )
        start = end + 1


def _picture(steps: Sequence[StepMetrics], name: str, log: RunLog) -> bytes | None:
    if len(steps) < _LEAST_STEPS_DRAWN or not can_draw_curves():
        return None
    try:
        return draw_curves(steps, name=name)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with matplotlib, the export does without a picture
        log.notice(f"the model card has no picture: matplotlib failed: {first_line(error)}")
        return None
