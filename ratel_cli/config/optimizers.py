"""The optimizers and their options, under the names of transformers.

Invariant: an option that the chosen optimizer does not read is an error.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ratel_cli.config.sections import Contradiction, Section

OptimizerChoice = Literal["adamw", "adamw_8bit", "lion", "sgd"]


class OptimizerConfig(Section):
    """What else an optimizer needs to know, under the names of torch. In one line, as other trainers write it:
    `momentum=0.9,nesterov=true`."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """For `sgd`: the share of the sum of gradients that is left after a step. 0: there is no sum, and no state."""
    nesterov: bool = False
    """For `sgd` with momentum: Nesterov's momentum, as in torch."""


def optimizer_contradictions(name: OptimizerChoice, options: OptimizerConfig) -> list[Contradiction]:
    """What is wrong about the options of this optimizer: keys that it does not read, or cannot use."""
    keys = ("optim_args", "optimizer")
    set_keys = [key for key, value in options if value]
    if name != "sgd":
        return [
            Contradiction(
                keys=keys,
                message=f"`optimizer: {name}` does not use `optim_args.{key}`",
                hint="remove it; `adam_beta1` and `adam_beta2` are keys of their own",
            )
            for key in set_keys
        ]
    if options.nesterov and not options.momentum:
        return [Contradiction(keys=keys, message="`optim_args.nesterov` needs `optim_args.momentum`, which is 0")]
    return []
