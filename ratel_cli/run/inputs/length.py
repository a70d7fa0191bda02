"""The length of a run: its steps and their learning rates, also when it resumes with another length than it had.

A run that resumes may be longer or shorter than before. The steps that are done stay as they are. The steps that follow
have the learning rates that a run of the new length has there.

Invariants: a run with fewer steps than are done is rejected before anything is written. What is left of a step counts
as one, as in transformers, unless the run began with a version that counted otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ratel_cli.config.describe import changed_value
from ratel_cli.config.keys.key_groups import OF_RATES, OF_VOCABULARY
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config
from ratel_cli.errors import BadInput, RatelError
from ratel_cli.run.files.run_directory import CONFIG_NAME, as_recorded_by_run, run_directory
from ratel_cli.run.inputs.settings import DECIDES_THE_LENGTH
from ratel_cli.training.facts import read_facts
from ratel_cli.training.schedule import LearningRateSchedule, ScheduleOptions

DECIDES_THE_COUNT: Final = (
    "base_model", "datasets", "chat_template", "chat_template_jinja", "special_tokens", "eot_tokens", *OF_VOCABULARY,
    "tokenizer_use_mistral_common", "train_on_inputs", "sequence_len", "excess_length_strategy", "sample_packing",
    "attn_implementation", "val_set_size", "seed", *DECIDES_THE_LENGTH,
)  # fmt: skip
"""Keys that the number of steps follows from, together with the sequences of a step."""


def num_steps(config: RunConfig, steps_per_epoch: int, *, rounds_up: bool = True) -> int:
    """The steps of the whole run."""
    exact = config.num_epochs * steps_per_epoch
    return config.max_steps or (math.ceil(exact) if rounds_up else max(1, round(exact)))


def rounds_up(config: RunConfig) -> bool:
    """Whether the run that has begun in the output directory counts what is left of a step: see RunFacts."""
    facts = read_facts(run_directory(config.output_dir))
    return facts is None or facts.rounds_up


def known_steps(config: RunConfig) -> int | None:
    """The steps of the whole run, without a look at the data: by `max_steps`, or as the run itself counted them.

    None if the run has not begun, or if it began with other settings of data or length.
    """
    before, facts = _before(config), read_facts(run_directory(config.output_dir))
    if config.max_steps is not None or before is None or facts is None:
        return config.max_steps
    keys = set(DECIDES_THE_COUNT)
    is_same = before.model_dump(include=keys) == as_recorded_by_run(config).model_dump(include=keys)
    return facts.num_steps if is_same and before.sequences_per_step == config.sequences_per_step else None


def learning_rates(config: RunConfig, num_steps: int, *, rounds_up: bool = True) -> LearningRateSchedule:
    """The learning rates of a run of this many steps."""
    options = config.lr_scheduler_kwargs
    is_by_old_ratio = not rounds_up and not config.warmup_steps
    return LearningRateSchedule(
        scheduler=config.lr_scheduler,
        peak=config.learning_rate,
        group_peaks=group_rates(config),
        num_warmup_steps=int(config.warmup_ratio * num_steps)
        if is_by_old_ratio
        else config.num_warmup_steps(num_steps),
        num_steps=num_steps,
        options=ScheduleOptions(**options.model_dump()) if options else ScheduleOptions(),
    )


def group_rates(config: RunConfig) -> tuple[float, ...]:
    """Peak learning rates of the groups of model/values/rate_groups.py, from group 1 on; none if there are no
    groups."""
    if all(getattr(config, key) is None for key in OF_RATES):
        return ()
    ratio = 1.0 if config.loraplus_lr_ratio is None else config.loraplus_lr_ratio
    scale = 1.0 if config.embedding_lr_scale is None else config.embedding_lr_scale
    ends = config.learning_rate * scale if config.embedding_lr is None else config.embedding_lr
    return config.learning_rate * ratio, ends


def check_length(
    config: RunConfig, *, first_step: int, steps_per_epoch: int, rounds_up: bool, saved_steps: Sequence[int]
) -> str | None:
    """Check the length of a run that resumes after `first_step`, which has these saved steps.

    Returns what another length than before means, for the user; None if the length is the same. Raises BadInput if the
    run has done more steps than it would have now.
    """
    now, before = num_steps(config, steps_per_epoch, rounds_up=rounds_up), _before(config)
    changed = "" if before is None else _changes(before, config)
    if first_step > now:
        because = f": {changed}" if changed else ""
        raise BadInput(
            f"the run has done {first_step} steps, but would now end after step {now}{because}",
            _ways_back([step for step in saved_steps if step <= now]),
        )
    if before is None or not changed or num_steps(before, steps_per_epoch, rounds_up=rounds_up) == now:
        return None
    if first_step == now:
        return f"{changed}: the run now ends with step {now}, which is done"
    rate = learning_rates(config, now, rounds_up=rounds_up).at(first_step)
    return (
        f"{changed}: the run now ends with step {now}; from step {first_step + 1} on its learning rate is that of a "
        f"run of {now} steps ({rate:.2e} in step {first_step + 1})"
    )


def _ways_back(steps: Sequence[int]) -> str:
    """The hint for a run that should have fewer steps than are done. `steps` are those that it could go back to."""
    further = "set max_steps or num_epochs higher to train on"
    if not steps:
        return f"{further}, or start over with --resume no; no step is saved that is early enough to go back to"
    return (
        f"{further}; or go back to a saved step with --resume {steps[-1]}, which drops the later steps; or export it "
        f"with `ratel export CONFIG --step {steps[-1]} -o DIR`"
    )


def _before(config: RunConfig) -> RunConfig | None:
    """The config that the run was last started with; None if that is not known."""
    try:
        return load_config(run_directory(config.output_dir) / CONFIG_NAME).config
    except RatelError:
        return None


def _changes(before: RunConfig, config: RunConfig) -> str:
    """The keys of the length that differ, each with both values; empty if none does."""
    old, new = (each.model_dump(mode="json", include=set(DECIDES_THE_LENGTH)) for each in (before, config))
    return ", ".join(
        f"{key} was {changed_value(old[key])}, is now {changed_value(new[key])}"
        for key in DECIDES_THE_LENGTH
        if old[key] != new[key]
    )
