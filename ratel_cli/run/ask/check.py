"""The content of `ratel check`: everything that is wrong about a config, its model, its data and this machine, at once.

    1. a config without errors is run dry: phases 1 and 2 of `run/train/finetune.py`
    2. of a config with errors, the inputs that it names rightly are read, as in phase 1 of a run
    3. what the machine lacks is looked for where these did not come to it: memory and space each on its own

Invariants: a config passes exactly if its dry run does. Nothing is written but temporary files, the user's
cache and, of what a config names on the hub, the hub's cache. Nothing heavy is imported before there is something to
read with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from io import StringIO
from pathlib import Path

from ratel_cli.commands import with_run_named
from ratel_cli.config.keys.key_groups import OF_ADAPTER, OF_QUANTISATION, OF_RATES, OF_VOCABULARY
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import Reading
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, DoesNotFit, EnvironmentFailure, ErrorList, NotEnoughSpace, RatelError
from ratel_cli.report.words.check import CheckReport, ReportedError
from ratel_cli.run.files.run_directory import as_of_run, config_file, with_own_store
from ratel_cli.run.train.first_checks import check_can_train, check_first
from ratel_cli.run.train.start import Resume

_DECIDES_ABOUT_ROWS = frozenset(
    {
        "base_model", "datasets", "test_datasets", "streaming", "max_steps", "chat_template", "chat_template_jinja",
        "special_tokens", "eot_tokens", *OF_VOCABULARY, "tokenizer_use_mistral_common", "train_on_inputs",
        "sequence_len", "excess_length_strategy", "val_set_size", "rl",
    }
)  # fmt: skip
"""Keys that decide which rows can be used."""
_DECIDES_ABOUT_TYPES = frozenset({"datasets", "test_datasets", "streaming", "rl"})
"""Keys that decide what a row is, whatever the tokenizer is."""
_DECIDES_ABOUT_MACHINE = frozenset(
    {
        "base_model", "random_init", "unfrozen_parameters", "frozen_parameters", "adapter", *OF_ADAPTER, *OF_RATES,
        *OF_QUANTISATION, *OF_VOCABULARY, "model_shape", "sequence_len",
        "micro_batch_size", "gradient_accumulation_steps", "tokens_per_step", "max_grad_norm", "dtype",
        "gradient_dtype", "attn_implementation", "head_chunk",
        "activations", "optimizer_overlap", "device", "storage", "limits", "output_dir",
    }
)  # fmt: skip
"""Keys that decide how much memory and space a run takes."""


def config_errors(reading: Reading) -> tuple[ReportedError, ...]:
    """What is wrong with the config itself, as it is reported."""
    return tuple(
        ReportedError(place=str(each.where), key=reading.key_at(each.where), message=each.message, hint=each.hint)
        for each in reading.findings
    )


def check_run(reading: Reading, *, path: Path, overrides: Sequence[str]) -> CheckReport:
    """Check what a config says, read with `overrides`. `path` is its file, or the output directory of its run.

    Raises RatelError for what is neither in the input nor a lack of the machine.
    """
    log = _CheckLog()
    for text in reading.notices:
        log.notice(text)
    config, is_right = reading.config, not reading.findings
    found: list[RatelError] = []
    if config is not None and is_right:
        found = _errors_of(lambda: _run_dry(_of_its_run(config, path, overrides), reading, log))
    elif config is not None:
        found = _errors_of(lambda: _read_rest(config, reading, log))
    if config is not None and (found or not is_right) and not reading.doubtful & _DECIDES_ABOUT_MACHINE:
        lacks = _errors_of(lambda: _find_lacks(_of_its_run(config, path, overrides), found))
        reported = {each.key for each in found}  # where nothing can be written, for one, space does not matter
        found += [each for each in lacks if each.key not in reported]
    found = [each for each in found if each.key[:1] not in {(key,) for key in reading.left_out}]
    exit_code = min((each.exit_code for each in found), default=0) if is_right else BadInput.exit_code
    return CheckReport(
        errors=_in_order_of_the_file(reading, found),
        exit_code=exit_code,
        notices=tuple(log.notices),
        rows=tuple(log.rows),
    )


def _of_its_run(config: RunConfig, path: Path, overrides: Sequence[str]) -> RunConfig:
    return with_own_store(config) if config_file(path) == path else as_of_run(config, path, overrides)


def _run_dry(config: RunConfig, reading: Reading, log: RunLog) -> None:
    """What `ratel finetune --dry-run` checks. Raises RatelError."""
    check_can_train(config, log.notice)
    errors = ErrorList()
    check_first(config, errors)
    if errors:  # nothing is measured for a run that cannot begin
        _read_rest(config, reading, log)
    from ratel_cli.run.train.finetune import run_finetune

    errors.attempt((), lambda: run_finetune(config, log, start=Resume(), dry_run=True))
    errors.raise_all()


def _read_rest(config: RunConfig, reading: Reading, log: RunLog) -> None:
    """Read the inputs of a config that is not wholly right. Raises BadInput, EnvironmentFailure."""
    errors = ErrorList()
    check_first(config, errors)
    if reading.left_out >= {"base_model", "datasets"} and not config.test_datasets:
        errors.raise_all()
        return
    from ratel_cli.run.inputs.base_kinds import find_data
    from ratel_cli.run.inputs.inputs import read_inputs, read_model
    from ratel_cli.run.inputs.process import prepare_process

    prepare_process()
    with ExitStack() as resources:
        if reading.doubtful & _DECIDES_ABOUT_ROWS:
            read_model(config, resources, log, errors)
            knows_types = not reading.doubtful & _DECIDES_ABOUT_TYPES
            find_data(config, errors, log, reads_rows=True, knows_types=knows_types)
        else:
            errors.attempt((), lambda: read_inputs(config, resources, log, dry_run=True))
    errors.raise_all()


def _find_lacks(config: RunConfig, found: Sequence[RatelError]) -> None:
    """Look for what the machine lacks that a dry run with the errors `found` did not come to.

    Raises EnvironmentFailure.
    """
    does_not_fit = any(isinstance(each, DoesNotFit) for each in found)
    if any(
        isinstance(each, NotEnoughSpace) or (isinstance(each, EnvironmentFailure) and not (each.key or does_not_fit))
        for each in found
    ):
        return  # it came to all of it
    if config.base_model is None:
        return
    from ratel_cli.model.export.export_weights import ExportFiles
    from ratel_cli.run.ask.machine_check import check_machine
    from ratel_cli.run.inputs.inputs import read_model

    errors = ErrorList()
    with ExitStack() as resources:
        model = read_model(config, resources, RunLog(StringIO()), ErrorList())
        if model.base is None or model.device is None:
            return
        base = model.base
        layout = base.layout(config) if model.weights is None else model.weights[1]
        size = ExportFiles(layout, base.sidecars(config)).num_bytes
        check = partial(
            check_machine, config, base.model, model.device, errors, export_bytes=size, with_memory=not does_not_fit
        )
        errors.attempt(("storage",), check)
    errors.raise_all()


def _errors_of(work: Callable[[], None]) -> list[RatelError]:
    try:
        work()
    except (BadInput, EnvironmentFailure) as error:
        return [error, *error.others]
    return []


def _in_order_of_the_file(reading: Reading, found: Sequence[RatelError]) -> tuple[ReportedError, ...]:
    """The findings and the errors as what is reported. What is nowhere in the file comes last."""
    placed = list(zip([each.where for each in reading.findings], config_errors(reading), strict=True))
    nowhere = []
    for error in found:
        where, key = reading.place_of(error.key), ".".join(map(str, error.key)) or None
        place = None if where is None else str(where)
        hint = None if error.hint is None else with_run_named(error.hint)
        each = ReportedError(place=place, key=key, message=error.message, hint=hint)
        if where is None:
            nowhere.append(each)
        else:
            placed.append((where, each))
    return (*(each for _, each in sorted(placed, key=lambda pair: pair[0])), *nowhere)


class _CheckLog(RunLog):
    """Keeps the rows of the opening statement instead of printing them, and what else a run says."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, str]] = []
        self.notices: list[str] = []

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Keep the rows."""
        self.rows.extend(rows)

    def notice(self, text: str) -> None:
        """Keep and print a notice."""
        self.notices.append(with_run_named(text))
        super().notice(text)

    def warn(self, text: str) -> None:
        """Keep and print a warning."""
        self.notices.append(with_run_named(text))
        super().warn(text)
