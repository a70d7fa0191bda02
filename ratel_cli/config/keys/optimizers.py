"""The optimizers and their options, under the names of transformers.

Invariant: an option that the chosen optimizer does not read is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import Field

from ratel_cli.config.keys.base import Contradiction, Section

OptimizerChoice = Literal["adamw", "adamw_8bit", "lion", "sgd", "muon"]
_OPTIONS: Final[Mapping[str, Mapping[str, object]]] = {
    "sgd": {"momentum": 0.0, "nesterov": False},
    "muon": {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"},
}
"""What the optimizers read, with the defaults."""


class OptimizerConfig(Section):
    """What else an optimizer needs to know, under the names of torch. In one line, as other trainers write it:
    `momentum=0.9,nesterov=true`."""

    momentum: float | None = Field(default=None, ge=0, lt=1)
    """For `sgd`: the share of the sum of gradients that is left after a step. 0: there is no sum, and no state. For
    `muon`: the share of the mean of gradients that is left. Default: 0, or 0.95 with `muon`."""
    nesterov: bool | None = None
    """For `sgd` with momentum, and `muon`: Nesterov's momentum, as in torch. Default: false, or true with `muon`."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = None
    """For `muon`: how a matrix's shape changes its learning rate. `match_rms_adamw`: a step is as large as one of AdamW
    with the same rate, which all other parameters have. `original`: a rate of its own, some 0.02, as in Muon's first
    paper. Default: `match_rms_adamw`."""


def resolved_options(name: OptimizerChoice, options: OptimizerConfig | None) -> dict[str, object]:
    """What the optimizer computes with: its options, with its defaults for what is not set."""
    given = {} if options is None else {key: value for key, value in options if value is not None}
    return {key: given.get(key, default) for key, default in _OPTIONS.get(name, {}).items()}


def has_default_options(name: OptimizerChoice, options: OptimizerConfig | None) -> bool:
    """Whether these are the optimizer's defaults, written out or not."""
    return resolved_options(name, options) == _OPTIONS.get(name, {})


def optimizer_contradictions(name: OptimizerChoice, options: OptimizerConfig) -> list[Contradiction]:
    """What is wrong about the options of this optimizer: keys that it does not read, or cannot use."""
    keys = ("optim_args", "optimizer")
    found = [
        Contradiction(
            keys=keys,
            message=f"`optimizer: {name}` does not use `optim_args.{key}`",
            hint="remove it; `adam_beta1` and `adam_beta2` are keys of their own",
        )
        for key, value in options
        if value is not None and key not in _OPTIONS.get(name, ())
    ]
    if name == "sgd" and options.nesterov and not options.momentum:
        found.append(Contradiction(keys=keys, message="`optim_args.nesterov` needs `optim_args.momentum`, which is 0"))
    return found
