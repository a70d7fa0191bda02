"""A starting config for a model, a dataset and this machine: what `ratel init` writes.

    1. the model is looked at: its config and its tokenizer, no weights
    2. the first rows of the data say of which type they are, and how long
    3. the plan says how many sequences make a step on this machine, and whether it fits
    4. where all weights do not fit, 3 is tried again with an adapter

Invariant: nothing is written but the description of a model in the user's cache. Of a hub model only the small files
are downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PretrainedConfig

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.yaml.yaml_marks import Plain
from ratel_cli.console import RunLog
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.data.text.tokenizer import Tokenizer
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.hardware.host import free_bytes, gpu_names
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.files import nearest_existing
from ratel_cli.model.files.denoiser_config import reject_denoiser
from ratel_cli.model.files.directory import find_weight_files, means_directory, resolve_base_model
from ratel_cli.model.files.kind import declared_task
from ratel_cli.model.files.skeleton import read_any_config, read_model_config
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.forecast.forecast import Forecast
from ratel_cli.planning.time.traffic import store_bytes
from ratel_cli.run.ask.adapter_advice import with_adapter
from ratel_cli.run.ask.plan_inputs import find_hardware, forecaster_of, setting_of, with_planned_split
from ratel_cli.run.inputs.filling import expected_filling
from ratel_cli.run.inputs.model_description import describe_model
from ratel_cli.run.inputs.process import silence_transformers
from ratel_cli.run.inputs.settings import num_slots
from ratel_cli.run.inputs.text_data import sources_of
from ratel_cli.run.inputs.tokenizer import read_tokenizer
from ratel_cli.run.start.starting_data import DataSketch, for_task, has_pairs, needs_template, sketch_data
from ratel_cli.run.start.starting_text import (
    DATA_PLACEHOLDER,
    MODEL_PLACEHOLDER,
    STEP_TOKENS,
    TEXT_LENGTH,
    StartingText,
)
from ratel_cli.sizes import STEP_KEYS, Filling
from ratel_cli.units import counted, format_bytes, format_count, format_seconds, format_token_rate

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "*.txt"]
_LEAST_LENGTH, _GREATEST_LENGTH = 512, 4096
_USUAL_RATES = {
    (None, False): (1e-5, "full fine-tuning: 5e-6 to 2e-5"),
    (None, True): (1e-6, "preference training of all weights: 5e-7 to 5e-6"),
    ("lora", False): (2e-4, "LoRA: 1e-4 to 5e-4"),
    ("lora", True): (1e-5, "preference training with LoRA: 5e-6 to 5e-5"),
}
"""By adapter, and whether answers are compared: a learning rate, and what it is usual for."""
_STEP_ROWS = 16
"""Rows of a step, where samples are not packed."""
_LEAST_STEPS = 20
"""Steps in an epoch, if the data has so much."""
_MANY_TOKENS = 10_000_000
"""An epoch with more tokens is enough by itself."""
_NEAR_BEST = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A starting config, and what was found out for it."""

    text: str
    rows: tuple[tuple[str, str], ...]
    """A name and a fact each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """How the model could be trained here."""

    text: StartingText
    rows: tuple[tuple[str, str], ...]
    forecast: Forecast | None
    """None: the model or this machine is not known well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    directory: Path
    config: PretrainedConfig
    tokenizer: Tokenizer
    spec: ModelSpec


def starting_config(text: StartingText, model: str | None, data: Sequence[str], output: Path, log: RunLog) -> Start:
    """A config to begin with, for the file `output`, from its first keys in `text`.

    Raises BadInput for a model or data that cannot be used. Without a model its place is a commented line.
    """
    silence_transformers()
    is_open = model is None and "base_model" not in text.given
    if is_open:
        text.choose("base_model", MODEL_PLACEHOLDER, "remove the #, and name a directory or a hub id")
    if not gpu_names():
        text.choose("dtype", "float32", "fastest on most CPUs; on a GPU remove this line (default: bfloat16)")
    directory, number = Path("outputs") / output.stem, 1
    while os.path.lexists(directory):
        number += 1
        directory = directory.with_name(f"{output.stem}-{number}")
    text.choose("output_dir", str(directory))
    has_data = bool(data) or "datasets" in text.given
    found = None if is_open else _look_at_model(text, log, has_data=has_data)
    sketches = [] if found is None or not has_data else _look_at_data(text, found, log)
    missing = f"not given; put it where {output} has {MODEL_PLACEHOLDER}" if is_open else text.config.base_model
    about = missing or ""
    if found is not None:
        about = f"{found.spec.architecture}: {format_count(found.spec.num_parameters)} parameters"
    rows = [("model", about)]
    rows += [("data", f"{sketch.described}; {_rows_words(sketch)}") for sketch in sketches]
    if not has_data:
        rows.append(("data", f"not given; replace {DATA_PLACEHOLDER} in {output}"))
    _choose_length(text, found, sketches)
    if "max_steps" not in text.given:
        num_tokens = sum(sketch.num_tokens for sketch in sketches)
        is_large = num_tokens > _MANY_TOKENS or not all(sketch.is_whole for sketch in sketches)
        comment = f"one of them has about {format_count(num_tokens)} tokens" if num_tokens else ""
        text.choose("num_epochs", 1 if is_large or text.config.rl is not None else 3, comment)
    chosen = _choose_run(text, found, sketches, log)
    rate, usual = _USUAL_RATES[chosen.text.config.adapter, chosen.text.config.rl is not None]
    chosen.text.choose("learning_rate", rate, f"usual for {usual}")
    rows += chosen.rows
    written = chosen.text.text()
    if is_open:
        written = written.replace(f"\nbase_model: {MODEL_PLACEHOLDER}", f"\n# base_model: {MODEL_PLACEHOLDER}", 1)
    return Start(text=written, rows=tuple(rows))


def _choose_run(text: StartingText, model: _Model | None, sketches: Sequence[DataSketch], log: RunLog) -> _Run:
    """The store and the step: of all weights or, where these do not fit, of an adapter."""
    whole = _run_of(text, model, sketches, log)
    if model is None or whole.forecast is None or whole.forecast.fits or "adapter" in text.given:
        return whole
    found = with_adapter(_local(text.config, model), log)
    if found is None:
        return whole
    short = ", ".join(f"{format_bytes(each.shortfall_bytes)} of {each.name}" for each in whole.forecast.shortfalls)
    why = f"full fine-tuning is short by {short}"
    other = text.copy()
    other.choose("adapter", "lora", f"{why}; remove this line to train all weights")
    adapted = _run_of(other, replace(model, spec=found[1].spec), sketches, log)
    if adapted.forecast is None or not adapted.forecast.fits:
        return whole
    return replace(adapted, rows=(("adapter", f"lora: {why}"), *adapted.rows))


def _run_of(text: StartingText, model: _Model | None, sketches: Sequence[DataSketch], log: RunLog) -> _Run:
    """The store and the step, as the text has chosen so far what is trained."""
    store, hardware = list[tuple[str, str]](), None
    if model is not None:
        size, paths = store_bytes(model.spec, num_slots=num_slots(text.config)), text.config.storage.paths
        free = format_bytes(free_bytes([nearest_existing(path) for path in paths]))
        store = [("store", f"{format_bytes(size)} in {', '.join(map(str, paths))}; {free} free")]
        try:
            hardware = find_hardware(text.config, None, log)
        except EnvironmentFailure as error:
            log.warn(f"this machine cannot be measured: {error.message}")
    forecast = _choose_step(text, model, sketches, hardware, log)
    return _Run(text=text, rows=(*store, ("plan", _plan_words(forecast))), forecast=forecast)


def _look_at_model(text: StartingText, log: RunLog, *, has_data: bool) -> _Model | None:
    """The model without its weights; None if it is on the hub and the hub cannot be reached. Chooses what it is trained
    for. Raises BadInput."""
    config = text.config
    assert config.base_model is not None
    is_local = os.path.isdir(config.base_model)
    try:
        directory = resolve_base_model(config.base_model, download=_download_small)
    except EnvironmentFailure as error:
        if means_directory(config.base_model):
            message = f"base_model: there is no directory {config.base_model}, and the hub cannot be reached"
            raise BadInput(message, "check the spelling") from error
        log.warn(f"{error.message}; the config is written without reading the model")
        return None
    reject_denoiser(directory)
    if is_local and not config.random_init:
        find_weight_files(directory)
    if has_data:
        # What the model learns: by the keys that are set, else by the data's columns and by what it was made for.
        made_for, sources = declared_task(read_any_config(directory)), sources_of(config, config.datasets)
        if config.rl is None and all(map(has_pairs, sources)):
            text.choose(
                "rl", "dpo", "the rows have chosen and rejected answers; ipo, orpo and simpo also train on them"
            )
            sources = sources_of(text.config, config.datasets)
        text.choose("datasets", [_written(for_task(each, made_for)) for each in sources])
        config = text.config
    spec = describe_model(config.model_copy(update={"base_model": str(directory)}), name=directory.name, log=log).spec
    model_config = read_model_config(directory, config.task)
    tokenizer = read_tokenizer(config, directory, model_config).for_rows(spec.vocab_size, log.notice)
    return _Model(directory=directory, config=model_config, tokenizer=tokenizer, spec=spec)


def _written(source: DatasetSource) -> Plain:
    """A dataset as it stands in a config, as far as it is chosen here."""
    more: dict[str, Plain] = {"labels": list(source.labels)} if source.labels else {}
    more |= {"media": source.media} if source.media == "ignore" else {}
    return {"path": source.path, "type": source.type, **more}


def _download_small(repository: str) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(repository, allow_patterns=_SMALL_FILES, ignore_patterns=["*/*"])


def _look_at_data(text: StartingText, model: _Model, log: RunLog) -> list[DataSketch]:
    """The datasets by their first rows. Chooses their types, and a chat template if they need one."""
    tokenizer, own = model.tokenizer, declared_task(model.config) == "classification"
    labels = tuple((model.config.id2label or {}).values()) if own else ()
    sources = sources_of(text.config, text.config.datasets, labels)
    if any(needs_template(source, tokenizer) for source in sources):
        text.choose("chat_template", "chatml", "the tokenizer has no chat template of its own")
        read = read_tokenizer(text.config, model.directory, model.config)
        tokenizer = read.for_rows(model.spec.vocab_size, log.notice)
    sketches = [sketch_data(source, tokenizer, notice=lambda line: None) for source in sources]
    chosen = [replace(each.source, labels=None if own else each.source.labels) for each in sketches]
    text.choose("datasets", list(map(_written, chosen)), "; ".join(sketch.described for sketch in sketches))
    return sketches


def _choose_length(text: StartingText, model: _Model | None, sketches: Sequence[DataSketch]) -> None:
    """The sequence length: that of the longest sample that was looked at, as a power of two, within bounds."""
    positions = None if model is None else getattr(model.config, "max_position_embeddings", None)
    most = min(_GREATEST_LENGTH, positions) if isinstance(positions, int) else _GREATEST_LENGTH
    if not sketches:
        text.choose("sequence_len", min(TEXT_LENGTH, most), "longer samples are truncated, plain texts are split")
        return
    if all(sketch.is_text for sketch in sketches):
        text.choose("sequence_len", min(TEXT_LENGTH, most), "longer texts are split")
        return
    lengths = [length for sketch in sketches if not sketch.is_text for length in sketch.lengths]
    chosen = min(most, max(_LEAST_LENGTH, 1 << (max(lengths) - 1).bit_length()))
    longer = sum(length > chosen for length in lengths)
    comment = f"of {len(lengths)} samples looked at, the longest has {max(lengths)} tokens"
    text.choose("sequence_len", chosen, comment + (f"; {longer} would be truncated" if longer else ""))


def _choose_step(
    text: StartingText,
    model: _Model | None,
    sketches: Sequence[DataSketch],
    hardware: HardwareProfile | None,
    log: RunLog,
) -> Forecast | None:
    """The tokens of a step: the fewest that are nearly as fast as more of them. Returns the plan."""
    config, length = text.config, text.config.sequence_len
    if text.given & {*STEP_KEYS}:
        return None if model is None or hardware is None else _forecast(config, model, hardware, log)
    if config.compares is not None or config.task in ("classification", "seq2seq") or not config.sample_packing:
        return _choose_rows(text, model, sketches, hardware, log)
    most = STEP_TOKENS // length
    if sketches:
        most = min(most, sum(sketch.num_tokens for sketch in sketches) // (length * _LEAST_STEPS))
    numbers = [1 << power for power in range(max(1, most).bit_length())]
    forecasts = {}
    if model is not None and hardware is not None:
        split = {"micro_batch_size": "auto", "gradient_accumulation_steps": "auto"}
        for number in numbers:
            step = config.model_copy(update={"tokens_per_step": number * length, **split})
            forecasts[number] = _forecast(step, model, hardware, log)
    rates = {number: each.prediction.tokens_per_second for number, each in forecasts.items() if each.fits}
    near_best = (number for number, rate in rates.items() if rate >= _NEAR_BEST * max(rates.values()))
    number = min(near_best, default=numbers[0] if forecasts else numbers[-1])
    forecast = forecasts.get(number)
    comment = counted(number, "sequence") + (", which the plan splits into micro-batches" if number > 1 else "")
    if forecast is not None and number > 1:
        workload = forecast.setting.workload
        comment += f", here {workload.num_micro_batches} of {workload.micro_batch_size}"
    text.choose("tokens_per_step", number * length, comment)
    return forecast


def _choose_rows(
    text: StartingText,
    model: _Model | None,
    sketches: Sequence[DataSketch],
    hardware: HardwareProfile | None,
    log: RunLog,
) -> Forecast | None:
    """The rows of a step where each sample has a row of its own, in micro-batches that fit. Returns the plan."""
    most = min(_STEP_ROWS, max(1, sum(sketch.num_rows for sketch in sketches) // _LEAST_STEPS))
    number = size = 1 << (most.bit_length() - 1)
    lengths = [each for sketch in sketches for each in sketch.lengths]
    while True:
        text.choose("micro_batch_size", size, "rows; each is padded to the longest of them")
        text.choose("gradient_accumulation_steps", number // size, f"{counted(number, 'row')} in a step")
        if model is None or hardware is None:
            return None
        filling = None
        if lengths:
            filling = expected_filling(lengths, micro_batch_size=size, sequence_len=text.config.sequence_len)
        forecast = _forecast(text.config, model, hardware, log, filling)
        if forecast.fits or size == 1:
            return forecast
        size //= 2


def _forecast(
    config: RunConfig, model: _Model, hardware: HardwareProfile, log: RunLog, filling: Filling | None = None
) -> Forecast:
    local = _local(config, model)
    split = with_planned_split(local, hardware, name=model.spec.name, log=log)
    setting = setting_of(split, hardware, filling=filling)
    return forecaster_of(split, hardware, name=model.spec.name, log=log).forecast(setting)


def _local(config: RunConfig, model: _Model) -> RunConfig:
    """The config with the directory in which the model was found."""
    return config.model_copy(update={"base_model": str(model.directory)})


def _plan_words(forecast: Forecast | None) -> str:
    if forecast is None:
        return "none: the model or this machine is not known well enough"
    if not forecast.fits:
        short = ", ".join(f"{each.name} by {format_bytes(each.shortfall_bytes)}" for each in forecast.shortfalls)
        return f"it does not fit: short of {short}; `ratel plan CONFIG` says what would help"
    prediction = forecast.prediction
    seconds = format_seconds(prediction.time.total)
    return (
        f"fits; {seconds} per step, {format_token_rate(prediction.tokens_per_second)}, mostly {prediction.bottleneck}"
    )


def _rows_words(sketch: DataSketch) -> str:
    rows = f"{sketch.num_rows} rows" if sketch.is_whole else f"more than {sketch.num_rows} rows"
    return f"{rows}, {sketch.lengths[0]} to {sketch.lengths[-1]} tokens each"
