"""The learning rate schedules and their options, under the names of transformers.

Invariant: an option that the chosen schedule does not read is an error, as it is in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from ratel_cli.config.keys.base import Contradiction, Section
from ratel_cli.config.keys.sections import Number, Whole

SchedulerChoice = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]

_COSINE_WITH_MIN = ("num_cycles", "min_lr", "min_lr_rate")
_SCHEDULER_KEYS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": _COSINE_WITH_MIN,
    "cosine_warmup_with_min_lr": (*_COSINE_WITH_MIN, "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        "num_stable_steps",
        "num_decay_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""By schedule: the keys of `lr_scheduler_kwargs` that it reads."""


class SchedulerConfig(Section):
    """What else a learning rate schedule needs to know, under the names of transformers."""

    num_cycles: Number | None = Field(default=None, gt=0)
    """For the schedules with `cosine` and for `warmup_stable_decay`: periods of the cosine after the warm-up. Default:
    0.5, which falls from the peak to the end once; 1 for `cosine_with_restarts`."""
    min_lr: Number | None = Field(default=None, ge=0)
    """For `cosine_with_min_lr` and `cosine_warmup_with_min_lr`: the rate at the end. Set this or `min_lr_rate`."""
    min_lr_rate: float | None = Field(default=None, ge=0, le=1)
    """The same as a share of `learning_rate`."""
    warmup_lr_rate: float | None = Field(default=None, ge=0, le=1)
    """For `cosine_warmup_with_min_lr`: the rate of the first step, as a share of `learning_rate`. Default: one step of
    the warm-up."""
    lr_end: Number | None = Field(default=None, ge=0)
    """For `polynomial`: the rate at the end. Default: 1e-7."""
    power: Number | None = Field(default=None, gt=0)
    """For `polynomial`: the power of the steps that are left. Default: 1, a straight line."""
    timescale: Whole | None = Field(default=None, ge=1)
    """For `inverse_sqrt`: how slowly the rate falls, in steps. Default: the steps of the warm-up, or 10000 without
    one."""
    num_stable_steps: Whole | None = Field(default=None, ge=0)
    """For `warmup_stable_decay`: steps at the peak. Default: all that warm-up and decay leave."""
    num_decay_steps: Whole | None = Field(default=None, ge=0)
    """For `warmup_stable_decay`: steps of the decay. Required there."""
    warmup_type: Literal["linear", "cosine", "1-sqrt"] | None = None
    """For `warmup_stable_decay`: the shape of the warm-up. Default: linear."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = None
    """For `warmup_stable_decay`: the shape of the decay. Default: cosine."""
    min_lr_ratio: float | None = Field(default=None, ge=0, le=1)
    """For `warmup_stable_decay`: the rate before the warm-up and after the decay, as a share of `learning_rate`.
    Default: 0."""


def scheduler_contradictions(
    name: SchedulerChoice, options: SchedulerConfig, *, learning_rate: float
) -> list[Contradiction]:
    """What is wrong about the options of this schedule: keys that it does not read, needs, or cannot use."""
    keys = ("lr_scheduler_kwargs", "lr_scheduler")
    read = _SCHEDULER_KEYS[name]
    found = []
    for key, value in options:
        if value is not None and key not in read:
            known = ", ".join(f"`{each}`" for each in read) or "nothing"
            message = f"`lr_scheduler: {name}` does not use `lr_scheduler_kwargs.{key}`"
            found.append(Contradiction(keys=keys, message=message, hint=f"it uses {known}"))
    if "min_lr" in read and (options.min_lr is None) == (options.min_lr_rate is None):
        message = f"`lr_scheduler: {name}` needs `min_lr` or `min_lr_rate` in `lr_scheduler_kwargs`, and not both"
        found.append(Contradiction(keys=keys, message=message, hint="write `lr_scheduler_kwargs: {min_lr_rate: 0.1}`"))
    if name == "warmup_stable_decay" and options.num_decay_steps is None:
        message = f"`lr_scheduler: {name}` needs `num_decay_steps` in `lr_scheduler_kwargs`"
        found.append(Contradiction(keys=keys, message=message))
    least = options.min_lr if "min_lr" in read else (options.lr_end or 1e-7) if name == "polynomial" else None
    if least is not None and not learning_rate > least:
        message = f"`lr_scheduler: {name}` ends at {least:g}, which must be less than `learning_rate`"
        found.append(Contradiction(keys=(*keys, "learning_rate"), message=message))
    return found
